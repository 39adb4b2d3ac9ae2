"""The weights of an export as safetensors files: their number type, which tensors are in which file, their bytes.

    model.safetensors                      what fits in one file
    model-00001-of-00003.safetensors ...   else tensors in the order of the flat vector, as many a file as fit, and
    model.safetensors.index.json           the file of each tensor (huggingface.co/docs/safetensors)

Each file holds one interval of the flat vector, so that a chunk goes from the disk to its place in a file or two:
of a model of any size no more than a chunk is in memory.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.comm.digest import DIGEST_SIZE, root
from atoll.comm.errors import ConfigError
from atoll.comm.files import write_all
from atoll.node.checkpoint.saved_run import SavedRun, replay_state
from atoll.node.checkpoint.snapshots import HEADER_ERRORS, MAX_HEADER_SIZE, TensorShapes, safetensors_header

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_FILES = 500  # open at once, and more than anybody wants to fetch
BF16_NAN = np.uint16(0x7FC0)


class WeightDtype(StrEnum):
    """The number types of exported weights."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return 4 if self is WeightDtype.FP32 else 2

    @property
    def tag(self) -> str:
        """The name in a safetensors header."""
        return "F32" if self is WeightDtype.FP32 else "BF16"

    @property
    def torch_name(self) -> str:
        """The name in a `config.json`."""
        return "float32" if self is WeightDtype.FP32 else "bfloat16"


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of weights: its tensors and the interval of the flat vector that they are."""

    name: str
    tensors: TensorShapes
    start: int  # elements
    stop: int


@dataclass(frozen=True, slots=True)
class StateFacts:
    """The facts about a state that every file of weights states in its header, as text."""

    run: str
    run_id: str  # hexadecimal
    round: int
    tokens: int
    tokens_round: int  # after which so many tokens were committed
    state_digest: str = "0" * 2 * DIGEST_SIZE  # hexadecimal, as the round's commit record has it

    def texts(self) -> dict[str, str]:
        """The facts by name."""
        return {name: str(value) for name, value in asdict(self).items()}


def state_facts(saved: SavedRun, round_: int) -> StateFacts:
    """The facts of a round's state, but for the digest, which is known when the state was read."""
    newest = next(s for s in saved.snapshots if s.first <= round_)
    return StateFacts(saved.manifest.run.name, saved.run_id, round_, newest.tokens, newest.first)


def split_into_files(tensors: TensorShapes, dtype: WeightDtype, limit: int, stem: str) -> tuple[WeightFile, ...]:
    """Assign the tensors, in the order of the flat vector, to files of at most `limit` bytes of weights; a tensor
    that is larger has a file of its own. Raises `ConfigError` for more than `MAX_FILES`."""
    groups, room = list[list[tuple[str, tuple[int, ...]]]](), -1
    for name, shape in tensors:
        size = dtype.size * math.prod(shape)
        if size > room:
            groups.append([])
            room = limit
        room -= size
        groups[-1].append((name, shape))
    if (count := len(groups)) > MAX_FILES:
        raise ConfigError(
            f"the weights would be {count} files of {limit / 1e6:,.1f} MB at most: give a --shard-size that makes "
            f"{MAX_FILES} or fewer"
        )
    found, start = list[WeightFile](), 0
    for number, group in enumerate(groups, 1):
        name = f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}" if count > 1 else stem + SUFFIX
        stop = start + sum(math.prod(shape) for _, shape in group)
        found.append(WeightFile(name, tuple(group), start, stop))
        start = stop
    return tuple(found)


def index_of(files: Sequence[WeightFile], dtype: WeightDtype) -> bytes:
    """The index of weights in several files."""
    n_params = sum(file.stop - file.start for file in files)
    names = {name: file.name for file in files for name, _ in file.tensors}
    metadata = {"total_parameters": n_params, "total_size": dtype.size * n_params}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(names.items()))}, indent=2).encode() + b"\n"


def file_size(file: WeightFile, dtype: WeightDtype, facts: StateFacts) -> int:
    """Bytes of a file."""
    return len(_header(file, dtype, facts)) + dtype.size * (file.stop - file.start)


def write_weights(
    saved: SavedRun, files: Sequence[WeightFile], dtype: WeightDtype, facts: StateFacts, opened: Mapping[str, int]
) -> StateFacts:
    """Write the state of the round that `facts` names into files, whose descriptors `opened` has by name; returns
    the facts with the state's digest. Raises `StateMissing`, `OSError`."""
    begins = {file.name: len(_header(file, dtype, facts)) for file in files}
    digests = []
    for span, anchor, _, chunk_digest in replay_state(saved, facts.round):
        for file, start, stop in _overlaps(files, span):
            data = anchor[start - span.start : stop - span.start]
            place = begins[file.name] + dtype.size * (start - file.start)
            write_all(opened[file.name], [_encoded(data, dtype)], place)
        digests.append(chunk_digest)
    facts = replace(facts, state_digest=root(digests).hex())
    for file in files:
        write_all(opened[file.name], [memoryview(_header(file, dtype, facts))], 0)
    return facts


def read_facts(path: Path) -> dict[str, str]:
    """The facts that a file of weights states; empty: it cannot be read, or is none."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            text = file.read(length) if length <= MAX_HEADER_SIZE else b""
        return {str(name): str(value) for name, value in json.loads(text)["__metadata__"].items()}
    except HEADER_ERRORS:
        return {}


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bf16 of each element, ties to even; of what is beyond the largest, infinity; of
    every NaN, the same one. (n,) fp32 -> (n,) uint16."""
    bits = x.view(np.uint32)
    nearest = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), BF16_NAN, nearest)


def _encoded(data: NDArray[np.float32], dtype: WeightDtype) -> memoryview:
    return (data if dtype is WeightDtype.FP32 else to_bf16(data).astype("<u2", copy=False)).data.cast("B")


def _overlaps(files: Sequence[WeightFile], span: slice) -> Iterator[tuple[WeightFile, int, int]]:
    """The files that have elements of the interval `span`, and which."""
    for file in files:
        start, stop = max(file.start, span.start), min(file.stop, span.stop)
        if start < stop:
            yield file, start, stop


def _header(file: WeightFile, dtype: WeightDtype, facts: StateFacts) -> bytes:
    return safetensors_header({"format": "pt", **facts.texts()}, file.tensors, dtype.tag, dtype.size)
