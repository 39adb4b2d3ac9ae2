"""Reads the run's training text: a window of tokens for every sample index of the run.

A source promises the same window for the same index on every node that holds the same files, and no
window twice within an epoch. Files are listed in sorted order; every `val_every`-th is validation, and where
there are too few files for that, the last part of the text is. `check_source` is the daemon's quick look
before it starts a trainer; `open_source` is the trainer's. Neither imports torch.
"""

import hashlib
import json
import math
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from atoll.comm.config.run import DataKind, RunConfig
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.extras import demand
from atoll.comm.files import atomic_write
from atoll.node.config import NodeConfig
from atoll.node.data.samples import Array, Sample, Source, one_document

TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
TOKENIZER_BLOCK = 1 << 20  # characters that go through the tokenizer at once
FEISTEL_ROUNDS = 4  # of the Feistel network


class Tokens(Protocol):
    """One long sequence of token ids."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Array:
        """Tokens [start, stop), (stop - start,) int64. Raises `ResourceError` if a file cannot be read."""


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


class CachedTokens:
    """Token ids in a memory-mapped file."""

    def __init__(self, file: Path, dtype: np.dtype[Any]) -> None:
        empty = file.stat().st_size == 0  # which no system maps
        self._ids: NDArray[Any] = np.empty(0, dtype) if empty else np.memmap(file, dtype, "r")

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, start: int, stop: int) -> Array:
        return np.asarray(self._ids[start:stop], np.int64)


@dataclass(frozen=True)
class Windows:
    """Tokens [start, stop) cut into windows of seq_len + 1 that share only their end token."""

    tokens: Tokens
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


def permuted(index: int, count: int, key: str) -> int:
    """The image of `index` under a bijection of range(count) that depends on `key`.

    A Feistel network over the next even number of bits, applied until it lands below `count` (cycle walking,
    Black & Rogaway 2002): a random-looking order without an array of `count` elements.
    """
    if count == 1:
        return 0
    half = (max(2, (count - 1).bit_length()) + 1) // 2
    mask = (1 << half) - 1
    keys = np.frombuffer(
        hashlib.blake2b(key.encode(), digest_size=8 * FEISTEL_ROUNDS).digest(), np.uint64
    ).tolist()
    while True:
        left, right = index >> half, index & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        index = left << half | right
        if index < count:
            return index


def _mix(value: int) -> int:
    """splitmix64's finaliser: every bit of the value moves every bit of the result."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def check_source(run: RunConfig, node: NodeConfig) -> None:
    """Raise the `AtollError` that `open_source` would, as far as it shows without reading the text."""
    files = files_of(run, node)
    if run.data.kind is DataKind.TEXT:
        load_tokenizer(run)
        return
    byte_source(run, node, files)


def open_source(
    run: RunConfig, node: NodeConfig, cache: Path, progress: Callable[[float], None] = lambda share: None
) -> Source:
    """The run's data on this node; raise an `AtollError` that says what is missing and what to do. `progress` is
    called again and again while text is tokenised, with the share that is done, 0 to 1."""
    files = files_of(run, node)
    if run.data.kind is DataKind.TEXT:
        return text_source(run, node, files, cache, progress)
    return byte_source(run, node, files)


def byte_source(run: RunConfig, node: NodeConfig, files: Sequence[Path]) -> Source:
    """Samples whose tokens are the files' bytes. Raises `ResourceError` if the text is too short."""
    train, validation = split_files(files, run.data.val_every)
    return source_of(run, node, FileTokens(train), FileTokens(validation))


def text_source(
    run: RunConfig, node: NodeConfig, files: Sequence[Path], cache: Path, progress: Callable[[float], None]
) -> Source:
    """Samples of the files' text in the run's tokens, which the folder `cache` keeps; training text is tokenised
    first, and `progress` called for it and for the validation text. Raises `AtollError`."""
    train, validation = split_files(files, run.data.val_every)
    tokens = [tokenise_files(run, part, cache, progress) for part in (train, validation)]
    return source_of(run, node, *tokens)


def source_of(run: RunConfig, node: NodeConfig, train: Tokens, validation: Tokens) -> Source:
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
        case DataKind.TEXT:
            files = list_files(data_folder(run, node), TEXT_SUFFIXES, set())
            hint = f"put {', '.join(TEXT_SUFFIXES)} files there"
        case DataKind.SCRIPT:
            raise ConfigError(
                "the run's samples are those of each node's own script, data.kind=script: join it with one, "
                "`atoll node join URL -- python train.py`, which takes its batches from a dataset of its own, "
                "run.batches(dataset)"
            )
        case _:
            assert_never(run.data.kind)
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


def load_tokenizer(run: RunConfig) -> Any:
    """The run's tokenizer; refused if it can produce ids that the model has no embedding for."""
    demand("a run whose data.kind is text", "tokenizers")
    from tokenizers import Tokenizer

    path = Path(run.data.tokenizer).expanduser()
    if not path.is_file():
        raise ConfigError(f"data.tokenizer={path}: there is no such file; put the run's tokenizer.json there")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"data.tokenizer={path} is not a tokenizer.json: {error}") from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= run.model.vocab_size:
        raise ConfigError(
            f"data.tokenizer={path} has token ids up to {largest}, and model.vocab_size is "
            f"{run.model.vocab_size}: the run needs model.vocab_size={largest + 1} or more, "
            "or this node the run's own tokenizer"
        )
    return tokenizer


def tokenise_files(
    run: RunConfig, files: Sequence[Path], cache: Path, progress: Callable[[float], None]
) -> Tokens:
    """The files' token ids, from the cache if these contents went through this tokenizer before."""
    tokenizer = load_tokenizer(run)
    dtype = np.dtype(np.uint16 if run.model.vocab_size <= 1 << 16 else np.uint32)
    target = cache / f"{content_key(run, files)}.{dtype.name}"
    try:
        if not target.exists():
            cache.mkdir(parents=True, exist_ok=True)
            write_ids(target, tokenizer, files, dtype, progress)
        return CachedTokens(target, dtype)
    except OSError as error:
        raise ResourceError(f"cannot keep tokenised text in {target}: {error.strerror or error}") from error


def content_key(run: RunConfig, files: Sequence[Path]) -> str:
    """A digest, hexadecimal, of the tokenizer and the contents of the files in this order."""
    digest = hashlib.blake2b(digest_size=16)
    for file in (Path(run.data.tokenizer).expanduser(), *files):
        digest.update(f"{file.suffix}:{file.stat().st_size}:".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def write_ids(
    target: Path, tokenizer: Any, files: Sequence[Path], dtype: np.dtype[Any], progress: Callable[[float], None]
) -> None:
    """Tokenise into a file of bare ids that appears whole or not at all. `progress` is called with the share of
    the text that is done: about, as a character counts for a byte."""
    done, size = 0, max(sum(file.stat().st_size for file in files), 1)
    with atomic_write(target, None) as descriptor, open(descriptor, "wb", closefd=False) as stream:
        for file in files:
            for text in texts(file):
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                stream.write(np.array(ids, dtype).tobytes())
                done += len(text)
                progress(min(done / size, 1.0))


def texts(file: Path) -> Iterator[str]:
    """The file's text in pieces of about `TOKENIZER_BLOCK` characters that end with a line."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        if file.suffix == ".jsonl":
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield json_text(file, number, line)
            return
        while lines := stream.readlines(TOKENIZER_BLOCK):
            yield "".join(lines)


def json_text(file: Path, number: int, line: str) -> str:
    """The "text" of one line of a .jsonl file. Raises `ConfigError` if it has none."""
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ConfigError(f'{file} line {number} is not an object with a string "text": correct or remove it')
    return text
