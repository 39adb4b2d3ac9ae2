"""Safetensors files that came from elsewhere, read from their beginning to their end. Nothing is trusted: the
numbers of a header are checked before memory is taken for what they announce.

    u64 length | JSON header | tensors        (huggingface.co/docs/safetensors)

`atoll.node.checkpoint.initial_state` reads them, at any place that fsspec knows.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.node.checkpoint.snapshots import HEADER_ERRORS, MAX_DIMENSIONS, MAX_HEADER_SIZE

READ_SIZE = 8 << 20  # bytes that are read at once
ELEMENT_SIZES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of an element
F32 = NDArray[np.float32]


class Unusable(Exception):
    """A file is not what it should be; the text says why."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A header's entry of one tensor."""

    kind: str  # of `ELEMENT_SIZES`
    shape: tuple[int, ...]
    start: int  # bytes, from the header's end
    end: int

    @property
    def element_size(self) -> int:
        """Bytes of an element."""
        return ELEMENT_SIZES[self.kind]


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A safetensors file whose header was read and found right."""

    path: str
    size: int  # bytes
    head: bytes  # length and header
    tensors: dict[str, TensorEntry]

    @classmethod
    def opened(cls, fs: Any, path: str) -> "WeightsFile":
        """Read the header of a file of an fsspec file system. Raises `Unusable`, and what the file system does."""
        size = int(fs.size(path))
        with fs.open(path, "rb", block_size=READ_SIZE) as file:
            begin = _exactly(file, 8)
            (length,) = struct.unpack("<Q", begin)
            if not 2 <= length <= min(MAX_HEADER_SIZE, size - 8):
                raise Unusable(f"{path} is no safetensors file: its header would have {length} bytes")
            text = _exactly(file, length)
        return cls(path, size, begin + text, tensors_of(path, text, size - 8 - length))

    def elements(self, fs: Any, seen: Callable[[bytes], object]) -> Iterator[tuple[str, F32]]:
        """The elements of all tensors in their order in the file, as fp32, a stretch of one tensor at a time.
        `seen` is told each stretch of bytes."""
        with fs.open(self.path, "rb", block_size=READ_SIZE) as file:
            file.seek(len(self.head))
            for name, entry in self.in_order():
                left = entry.end - entry.start
                while left:
                    data = _exactly(file, min(left, READ_SIZE))
                    seen(data)
                    left -= len(data)
                    yield name, as_fp32(data, entry.kind)

    def in_order(self) -> list[tuple[str, TensorEntry]]:
        """Names and entries as they lie in the file."""
        return sorted(self.tensors.items(), key=lambda item: item[1].start)


def shard_names(text: bytes) -> list[str]:
    """The files that a model.safetensors.index.json names, each once, in order. Raises `Unusable`."""
    try:
        names = sorted(set(json.loads(text)["weight_map"].values()))
    except HEADER_ERRORS:
        raise Unusable("it does not say which tensor is in which file") from None
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*\.safetensors", name):
            raise Unusable(f"it names {name!r:.100}, which is no safetensors file beside it")
    return names


def tensors_of(path: str, text: bytes, size: int) -> dict[str, TensorEntry]:
    """A header's tensors, which fill the `size` bytes behind it without a gap. Raises `Unusable`."""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {
            str(name): TensorEntry(
                str(entry["dtype"]),
                tuple(int(n) for n in entry["shape"]),
                int(entry["data_offsets"][0]),
                int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
        }
        if any(len(entry.shape) > MAX_DIMENSIONS for entry in tensors.values()):
            raise ValueError("their product alone could take hours")
    except HEADER_ERRORS:
        raise Unusable(f"{path} is no safetensors file: its header is damaged") from None
    at = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.kind not in ELEMENT_SIZES:
            raise Unusable(f"{name} is of {entry.kind}: {', '.join(ELEMENT_SIZES)} can be read")
        length = ELEMENT_SIZES[entry.kind] * math.prod(entry.shape)
        if min(entry.shape, default=0) < 0 or entry.start != at or entry.end - entry.start != length:
            raise Unusable(f"{path} is no safetensors file: {name} is not where its header says")
        at = entry.end
    if at != size:
        raise Unusable(f"{path} has {size} bytes of tensors, its header says {at}")
    return tensors


def as_fp32(data: bytes, kind: str) -> F32:
    """Little-endian elements of a safetensors kind (`ELEMENT_SIZES`) as fp32."""
    match kind:
        case "F32":
            return np.frombuffer(data, "<f4")
        case "F16":
            return np.frombuffer(data, "<f2").astype(np.float32)
        case _:  # bf16: the upper half of an fp32
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def _exactly(file: Any, size: int) -> bytes:
    data = bytes(file.read(size))
    if len(data) != size:
        raise Unusable("it ends too early")
    return data
