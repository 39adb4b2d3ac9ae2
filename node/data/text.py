"""The bytes of text files as a run's samples: the Python standard library's, or those of a folder of the
volunteer's.

`open_files` promises the same window for the same index on every node that holds the same files, and no window
twice within an epoch. Files are listed in sorted order; every `val_every`-th is validation, and where there are
too few files for that, the last part of the text is.
"""

import math
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.comm.config.data import DataKind
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.config import NodeConfig
from atoll.node.data.order import permuted
from atoll.node.data.samples import Array, Sample, Source, one_document

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


class FileTokens:
    """The bytes of some files, end to end; opened when read, so a folder may be larger than memory."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._ends = np.cumsum([file.stat().st_size for file in files], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> Array:
        """The bytes [start, stop) of the files, end to end, as tokens: (stop - start,) int64. Raises
        `ResourceError` if a file cannot be read."""
        parts, at = [], start
        while at < stop:
            number = int(np.searchsorted(self._ends, at, side="right"))
            end = int(self._ends[number])
            begin = end - self._size(number)
            parts.append(read_bytes(self._files[number], at - begin, min(stop, end) - at))
            at = min(stop, end)
        return np.frombuffer(b"".join(parts), np.uint8).astype(np.int64)

    def _size(self, number: int) -> int:
        return int(self._ends[number] - (self._ends[number - 1] if number else 0))


@dataclass(frozen=True)
class Windows:
    """Tokens [start, stop) cut into windows of seq_len + 1 that share only their end token."""

    tokens: FileTokens
    start: int
    stop: int
    seq_len: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start - 1) // self.seq_len

    def __getitem__(self, number: int) -> Array:
        first = self.start + number * self.seq_len
        return self.tokens.read(first, first + self.seq_len + 1)


class ShuffledWindows:
    """The `Source` over two sets of windows: each epoch goes through all of them in an order of its own."""

    def __init__(self, train: Windows, validation: Windows, seed: int) -> None:
        self._train, self._validation, self._seed = train, validation, seed

    def train(self, index: int) -> Sample:
        epoch, position = divmod(index, len(self._train))
        number = permuted(position, len(self._train), f"{self._seed}:train:{epoch}")
        return one_document(self._train[number])

    def validation(self, index: int) -> Sample:
        count = len(self._validation)
        return one_document(self._validation[permuted(index % count, count, f"{self._seed}:validation")])

    def expect(self, indices: Iterator[int]) -> None:
        """Do nothing: the files are here."""


def open_files(run: RunConfig, node: NodeConfig) -> Source:
    """Samples whose tokens are the bytes of files on this node. Raises an `AtollError` that says what is missing
    and what to do."""
    train, validation = split_files(files_of(run, node), run.data.val_every)
    return source_of(run, node, FileTokens(train), FileTokens(validation))


def source_of(run: RunConfig, node: NodeConfig, train: FileTokens, validation: FileTokens) -> Source:
    """Windows over the training and the validation tokens, shuffled. Where the latter are too few, the last
    1/val_every of the training text is for validation. Raises `ResourceError` if either is too short for one
    sample."""
    length, seq_len = len(train), run.model.seq_len
    windows = Windows(train, 0, length, seq_len), Windows(validation, 0, len(validation), seq_len)
    if not len(windows[1]):
        cut = length - max(math.ceil(length / run.data.val_every), min(seq_len + 1, length // 2))
        windows = Windows(train, 0, cut, seq_len), Windows(train, cut, length, seq_len)
    for purpose, part in zip(("training", "validation"), windows, strict=True):
        if not len(part):
            raise ResourceError(
                f"{data_location(run, node)} has {part.stop - part.start} tokens for {purpose}, and one sample of "
                f"model.seq_len={seq_len} needs {seq_len + 1}: put more text there"
            )
    return ShuffledWindows(*windows, run.seed)


def split_files(files: Sequence[Path], val_every: int) -> tuple[list[Path], list[Path]]:
    """Training and validation files; the latter may be none."""
    validation = list(files[val_every - 1 :: val_every])
    held_out = set(validation)
    return [file for file in files if file not in held_out], validation


def data_location(run: RunConfig, node: NodeConfig) -> str:
    """The folder of the run's text on this node, for a sentence."""
    return library_folder() if run.data.kind is DataKind.STDLIB else node.data


def library_folder() -> str:
    """The folder of this Python's own library."""
    return sysconfig.get_path("stdlib")


def files_of(run: RunConfig, node: NodeConfig) -> list[Path]:
    """The run's files on this node, sorted by path; never none."""
    match run.data.kind:
        case DataKind.STDLIB:
            files = list_files(Path(library_folder()), (".py",), NOT_LIBRARY)
            hint = "this Python lacks its library's source; use a Python that has it, or data.kind=bytes"
        case DataKind.BYTES:
            files = list_files(data_folder(run, node), ("",), set())
            hint = "put text files there"
        case _:
            raise AssertionError(f"data.kind={run.data.kind} is not of files")
    if not files:
        raise ResourceError(f"{data_location(run, node)} holds no file to train on: {hint}")
    return files


def data_folder(run: RunConfig, node: NodeConfig) -> Path:
    """The folder that the node's config names. Raises `ConfigError` if there is none."""
    if not node.data:
        raise ConfigError(
            f"this run trains on your own text, data.kind={run.data.kind}: give its folder, data=FOLDER"
        )
    folder = Path(node.data).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"data={node.data}: there is no such folder; give the one that holds your text files")
    return folder


def list_files(folder: Path, suffixes: tuple[str, ...], skip: set[str]) -> list[Path]:
    """Regular, non-hidden files below `folder`; folders named in `skip` are not entered."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        found += [Path(parent, n) for n in names if n.endswith(suffixes) and not n.startswith(".")]
    return sorted(file for file in found if file.is_file())


def read_bytes(file: Path, start: int, count: int) -> bytes:
    """`count` bytes of the file from byte `start` on. Raises `ResourceError` if it has fewer."""
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            data = stream.read(count)
    except OSError as error:
        raise ResourceError(f"cannot read the training text {file}: {error.strerror}") from error
    if len(data) < count:
        raise ResourceError(f"{file} became shorter while the node was training on it: restart the node")
    return data
