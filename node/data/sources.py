"""Sources of `atoll data build`: the files and Hugging Face data sets that its SOURCE arguments name.

    file, folder or glob     .txt .md .py: a document each; .jsonl: one a line; .parquet: one a row;
                             all but .parquet also as .gz and .zst
    datasets:PATH[:SPLIT]    what `datasets.load_dataset` knows, streamed; also :split= :name= :data_files=
                             :data_dir= :revision=, such as datasets:json:data_files=/corpus/a.json

The order is that of the arguments, files of a folder or glob sorted by name: the same sources are the same
documents in the same order. Names that go into the manifest do not tell where on this machine a folder lies.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError
from atoll.comm.terminal import plural

HUB_PREFIX = "datasets:"
HUB_KEYS = ("split", "name", "data_files", "data_dir", "revision")
COMPRESSED = (".gz", ".zst")


class Kind(StrEnum):
    """The way in which documents lie in a file."""

    TEXT = "text"  # one, the whole of it
    LINES = "lines"  # one a line, as JSON
    TABLE = "table"  # one a row of a Parquet table


KIND_OF = {
    ".txt": Kind.TEXT,
    ".md": Kind.TEXT,
    ".py": Kind.TEXT,
    ".jsonl": Kind.LINES,
    ".parquet": Kind.TABLE,
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of documents. `name` is what people are told; `size` is in bytes, as it lies on the disk."""

    path: str
    name: str
    size: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class HubSource:
    """A data set that the package `datasets` reads, record after record."""

    path: str
    split: str = "train"
    name: str = ""
    data_files: str = ""
    data_dir: str = ""
    revision: str = ""

    @property
    def label(self) -> str:
        """The name that people are told; of a folder here, not where it lies."""
        path = os.path.expanduser(self.path)
        return HUB_PREFIX + (os.path.basename(os.path.abspath(path)) if os.path.exists(path) else self.path)


Source = SourceFile | HubSource


def find_sources(
    arguments: Sequence[str], records_only: bool = False, left_out: Counter[str] | None = None
) -> list[Source]:
    """The sources that the arguments name, in order. `records_only`: no plain text; `left_out` counts the files of
    folders and globs that are not read, by their suffixes. Raises `ConfigError` for an argument that names
    nothing, or a file that is not read."""
    found, others = list[Source](), Counter[str]() if left_out is None else left_out
    for argument in arguments:
        found += _of_argument(argument, records_only, others)
    return found


def left_out_files(suffixes: Counter[str]) -> str:
    """A sentence of the files that are not read; empty: there are none."""
    if not (total := suffixes.total()):
        return ""
    kinds = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in suffixes.most_common())
    return f"{total:,} {plural('file', total)} left out: {kinds}"


def _of_argument(argument: str, records_only: bool, left_out: Counter[str]) -> Sequence[Source]:
    if argument.startswith(HUB_PREFIX):
        return [parse_hub(argument)]
    if "://" in argument:
        raise ConfigError(
            f"{argument} is a URL: fetch it first, or read it as {HUB_PREFIX}json:data_files={argument}"
        )
    path = os.path.expanduser(argument)
    if os.path.isfile(path):
        file = _source_file(path, os.path.basename(path), records_only)
        if file is None:
            raise ConfigError(_unreadable(path, records_only))
        return [file]
    if not os.path.exists(path) and not glob.has_magic(path):
        raise ConfigError(f"{argument}: there is no such file or folder")
    paths = _below(path) if os.path.isdir(path) else _of_glob(path)
    found = list[SourceFile]()
    for at, name in paths:
        if (source := _source_file(at, name, records_only)) is not None:
            found.append(source)
        else:
            left_out[suffix_of(at)] += 1
    if not found:
        there = "holds" if os.path.isdir(path) else "names"
        raise ConfigError(f"{argument} {there} no file to read: give {_suffixes(records_only)}")
    return found


def _below(folder: str) -> Iterator[tuple[str, str]]:
    """The files of a folder and its folders, hidden ones left out, in order: where each is, and what people are
    told."""
    root, paths = os.path.abspath(folder), list[str]()
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    for path in sorted(paths, key=lambda path: path.split(os.sep)):
        name = os.path.join(os.path.basename(root), os.path.relpath(path, root))
        if os.path.isfile(path):
            yield path, name


def _of_glob(pattern: str) -> Iterator[tuple[str, str]]:
    """The files that a pattern names, likewise."""
    root = Path(pattern)
    while glob.has_magic(str(root)):
        root = root.parent
    base = os.path.abspath(root)
    for path in sorted(glob.glob(pattern, recursive=True), key=lambda path: path.split(os.sep)):
        name = os.path.join(os.path.basename(base), os.path.relpath(os.path.abspath(path), base))
        if os.path.isfile(path):
            yield path, name


def _source_file(path: str, name: str, records_only: bool) -> SourceFile | None:
    """The file as a source; None if it is none of those that are read."""
    kind = KIND_OF.get(suffix_of(path))
    compressed = path.endswith(COMPRESSED)
    if kind is None or (kind is Kind.TABLE and compressed) or (kind is Kind.TEXT and records_only):
        return None
    return SourceFile(path, name, os.path.getsize(path), kind)


def suffix_of(path: str) -> str:
    """The suffix of a file's name without that of its compression: .jsonl of a.jsonl.gz."""
    for compression in COMPRESSED:
        path = path.removesuffix(compression)
    return os.path.splitext(path)[1].lower()


def _suffixes(records_only: bool) -> str:
    names = [suffix for suffix, kind in KIND_OF.items() if kind is not Kind.TEXT or not records_only]
    return f"{', '.join(names[:-1])} or {names[-1]} files (all but .parquet also as .gz or .zst)"


def _unreadable(path: str, records_only: bool) -> str:
    if records_only and KIND_OF.get(suffix_of(path)) is Kind.TEXT:
        return f"{path} is plain text, and --chat wants conversations: give {_suffixes(records_only)}"
    return f"{path} is not a file that is read here: give {_suffixes(records_only)}"


def parse_hub(argument: str) -> HubSource:
    """The data set that `datasets:PATH[:SPLIT][:key=value ...]` names. Raises `ConfigError`."""
    path, *settings = re.split(r":(?=[a-z_]+=)", argument.removeprefix(HUB_PREFIX))
    given = dict(setting.split("=", 1) for setting in settings)
    if unknown := sorted(given.keys() - set(HUB_KEYS)):
        raise ConfigError(
            f"{argument}: there is no {unknown[0]}=; there are {', '.join(f'{k}=' for k in HUB_KEYS)}"
        )
    if match := re.fullmatch(r"(.+):([\w.]+)", path):
        path, given["split"] = match[1], given.get("split", match[2])
    if not path:
        raise ConfigError(f"{argument} names no data set: write {HUB_PREFIX}NAME_OR_PATH[:SPLIT]")
    return HubSource(path, **given)


def listing_digest(sources: Sequence[Source]) -> str:
    """A digest, hexadecimal, of the sources' names and sizes in their order: what a build that goes on
    compares."""
    lines = (f"{s.name}\0{s.size}" if isinstance(s, SourceFile) else repr(s) for s in sources)
    return digest("\n".join(lines).encode()).hex()


def describe(arguments: Sequence[str], sources: Sequence[Source]) -> tuple[str, ...]:
    """The arguments as the manifest names them, last parts of paths only, and how much there was of all."""
    names = [
        parse_hub(argument).label
        if argument.startswith(HUB_PREFIX)
        else os.path.basename(os.path.abspath(argument))
        for argument in arguments
    ]
    files = [source for source in sources if isinstance(source, SourceFile)]
    return (*names, f"{len(files)} {plural('file', len(files))} of {sum(file.size for file in files)} bytes")


def name_of(source: Source) -> str:
    """A name for a data set that begins with this source, wherever it lies: its file's or folder's."""
    if isinstance(source, HubSource):
        return source.label.removeprefix(HUB_PREFIX)
    return source.name.split(os.sep)[0].split(".")[0] or "data"
