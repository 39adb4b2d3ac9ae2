"""Snapshots of the outer state on disk: anchor and momentum as a safetensors file, with digests.

They are written while the node works. Each chunk is copied at one moment, so none is torn; where the next round
was applied meanwhile, later chunks are of that one, and the sealed log brings the others forward: a snapshot from
`first` to `last` stands for a state if the log has the rounds after `first` up to `last`.

    u64 length | JSON header | anchor, fp32 | momentum, fp32        (huggingface.co/docs/safetensors)

The header names each parameter twice, `anchor.NAME` and `momentum.NAME`, with its shape; parameters lie in the
order of the flat vector. Its metadata, all text:

    format               FORMAT
    run_id               32 hexadecimal digits
    tokens               committed by the run after round `first`
    chunk_elements       of each chunk but a fragment's last
    fragment_elements    of each fragment, separated by spaces; absent if the model is one
    chunk_table          of each chunk its round and digest, 16 and 32 hexadecimal digits
    chunk_table_digest   hexadecimal
"""

import json
import math
import os
import re
import struct
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.comm.chunks import Chunks
from atoll.comm.digest import DIGEST_SIZE, digest
from atoll.comm.files import Room, atomic_write, room, sync_data, write_all
from atoll.node.checkpoint.policy import reach

FORMAT = "atoll snapshot 2"
PREFIX, SUFFIX = "snapshot-", ".safetensors"
MAX_HEADER_SIZE = 100 << 20  # bytes of a header; the library's limit, too
SYNC_INTERVAL = 64 << 20  # bytes that are written before the disk must have them: the last fsync is then short
MAX_DIMENSIONS = 64  # of a tensor
# What reading a header can raise that is not one, however it was made.
HEADER_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
    struct.error,
)
TABLE_ENTRY_DIGITS = 16 + 2 * DIGEST_SIZE  # hexadecimal digits of a chunk
TensorShapes = Sequence[
    tuple[str, tuple[int, ...]]
]  # (name, shape) of each parameter, as the flat vector has them
F32 = NDArray[np.float32]


class TornSnapshot(Exception):
    """A snapshot was not taken; the text says why."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A finished snapshot, whose header was read or written."""

    path: Path
    tokens: int  # committed by the run after round `first`
    at: tuple[int, ...]  # round of each chunk
    digests: tuple[bytes, ...]
    start: int  # byte at which the anchor begins
    size: int  # bytes

    @property
    def first(self) -> int:
        """The oldest round of a chunk."""
        return min(self.at)

    @property
    def last(self) -> int:
        """The newest round of a chunk."""
        return max(self.at)

    def reach(self, rounds: Container[int]) -> int:
        """The newest round whose state the snapshot and the sealed bytes of `rounds` bring back; -1: none."""
        return reach(self.first, self.last, rounds)

    def chunk(self, c: int, chunks: Chunks) -> bytes | None:
        """Anchor, then momentum of chunk `c`, fp32; None if they are not what was written."""
        span = chunks.span(c)
        size = 4 * (span.stop - span.start)
        try:
            with open(self.path, "rb") as file:
                anchor = os.pread(file.fileno(), size, self.start + 4 * span.start)
                momentum = os.pread(file.fileno(), size, self.start + 4 * (chunks.numel + span.start))
        except OSError:
            return None
        both = anchor + momentum
        return both if digest(both) == self.digests[c] else None


def snapshot_size(run: bytes, layout: TensorShapes, chunks: Chunks) -> int:
    """Bytes of a snapshot."""
    return len(_header(run, layout, chunks, 1 << 40, [(0, bytes(DIGEST_SIZE))] * chunks.count)) + 8 * chunks.numel


def write(
    folder: Path,
    run: bytes,
    layout: TensorShapes,
    chunks: Chunks,
    tokens: int,
    copy: Callable[[int], tuple[int, F32, bytes]],
    room: Room = room,
) -> Snapshot:
    """Write a snapshot to `folder`; `copy(c)` gives the round, anchor and momentum, and digest of a chunk at this
    moment. Blocks for as long as the disk takes. Raises `OSError`, or what `copy` raises; then nothing is left of
    it."""
    blank = _header(run, layout, chunks, tokens, [(0, bytes(DIGEST_SIZE))] * chunks.count)
    start, size = len(blank), len(blank) + 8 * chunks.numel
    entries: list[tuple[int, bytes]] = []
    path = folder / f"{PREFIX}{copy(0)[0]:012d}{SUFFIX}"
    unsynced = 0
    with atomic_write(path, size, room) as file:
        for c in range(chunks.count):
            round_, both, chunk_digest = copy(c)
            begin, half = chunks.span(c).start, both.size // 2
            write_all(file, [both[:half].data.cast("B")], start + 4 * begin)
            write_all(file, [both[half:].data.cast("B")], start + 4 * (chunks.numel + begin))
            entries.append((round_, chunk_digest))
            unsynced += both.nbytes
            if unsynced >= SYNC_INTERVAL:
                sync_data(file)
                unsynced = 0
        write_all(file, [memoryview(_header(run, layout, chunks, tokens, entries))], 0)
    return Snapshot(path, tokens, tuple(r for r, _ in entries), tuple(d for _, d in entries), start, size)


def find(folder: Path, run: bytes, layout: TensorShapes, chunks: Chunks) -> list[Snapshot]:
    """The snapshots of this run and model in `folder`, the newest first."""
    found = (read(path, run, layout, chunks) for path in folder.glob(f"{PREFIX}*{SUFFIX}"))
    return sorted((s for s in found if s is not None), key=lambda s: s.first, reverse=True)


def read(path: Path, run: bytes, layout: TensorShapes, chunks: Chunks) -> Snapshot | None:
    """The snapshot in the file `path`; None: it is of another run, model or format, or its header is damaged."""
    try:
        size, text = _read_header(path)
        metadata = json.loads(text)["__metadata__"]
        table, tokens = str(metadata["chunk_table"]), int(metadata["tokens"])
        if (
            len(table) != TABLE_ENTRY_DIGITS * chunks.count
            or digest(table.encode()).hex() != metadata["chunk_table_digest"]
        ):
            return None
        rows = [table[i : i + TABLE_ENTRY_DIGITS] for i in range(0, len(table), TABLE_ENTRY_DIGITS)]
        entries = [(int(row[:16], 16), bytes.fromhex(row[16:])) for row in rows]
    except HEADER_ERRORS:
        return None
    start = 8 + len(text)
    if _header(run, layout, chunks, tokens, entries)[8:] != text or size != start + 8 * chunks.numel:
        return None  # another run's, another model's
    return Snapshot(path, tokens, tuple(r for r, _ in entries), tuple(d for _, d in entries), start, size)


def unreadable(folder: Path, found: Sequence[Snapshot]) -> list[Path]:
    """The files in `folder` that have a snapshot's name, and are not among those found."""
    return sorted(set(folder.glob(f"{PREFIX}*{SUFFIX}")) - {s.path for s in found})


class OtherFormat(ValueError):
    """A file is of a format that another version of Atoll writes; the text names both."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"it is of the format {found[:40]!r}, and this version of atoll reads {expected!r}")


def other_format(path: Path) -> OtherFormat | None:
    """The error of a file that is a snapshot of another version of Atoll's; None: it is not, or no snapshot."""
    try:
        _, text = _read_header(path)
        found = str(json.loads(text)["__metadata__"]["format"])
    except HEADER_ERRORS:
        return None
    ours = found == FORMAT or not re.fullmatch(r"atoll snapshot \d+", found)
    return None if ours else OtherFormat(found, FORMAT)


def describe(path: Path) -> tuple[bytes, TensorShapes, Chunks] | None:
    """Run, layout and chunks that a file says it has, for those who do not know them; None: it is none."""
    try:
        _, text = _read_header(path)
        header = json.loads(text)
        metadata = header["__metadata__"]
        anchor = [(name, entry) for name, entry in header.items() if name.startswith("anchor.")]
        layout = tuple((name.removeprefix("anchor."), tuple(map(int, e["shape"]))) for name, e in anchor)
        if any(len(shape) > MAX_DIMENSIONS for _, shape in layout):
            return None  # their product alone could take hours
        fragments = tuple(map(int, metadata.get("fragment_elements", "").split()))
        chunks = Chunks(sum(math.prod(shape) for _, shape in layout), int(metadata["chunk_elements"]), fragments)
        return bytes.fromhex(metadata["run_id"]), layout, chunks
    except HEADER_ERRORS:
        return None


def remove(paths: Iterable[Path]) -> None:
    """Remove files as far as that is possible."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _header(
    run: bytes, layout: TensorShapes, chunks: Chunks, tokens: int, entries: list[tuple[int, bytes]]
) -> bytes:
    """A snapshot's first bytes up to the anchor: as many for any rounds and digests."""
    table = "".join(f"{round_:016x}{chunk_digest.hex()}" for round_, chunk_digest in entries)
    metadata = {
        "format": FORMAT,
        "run_id": run.hex(),
        "tokens": str(tokens),
        "chunk_elements": str(chunks.chunk),
        "chunk_table": table,
        "chunk_table_digest": digest(table.encode()).hex(),
    }
    if chunks.fragments:
        metadata["fragment_elements"] = " ".join(map(str, chunks.fragments))
    return safetensors_header(
        metadata, [(f"{v}.{name}", shape) for v in ("anchor", "momentum") for name, shape in layout]
    )


def safetensors_header(
    metadata: dict[str, str], tensors: TensorShapes, dtype: str = "F32", element_size: int = 4
) -> bytes:
    """The beginning of a safetensors file whose tensors, of one number type, follow one another: the header's
    length and text, padded to eight bytes. `dtype`: the type's name there; `element_size`: its bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, shape in tensors:
        end = at + element_size * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _read_header(path: Path) -> tuple[int, bytes]:
    """Bytes of the file, and its header's text. Raises `OSError`, `ValueError` or `struct.error`."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(MAX_HEADER_SIZE, size):
            raise ValueError(f"a header of {length} bytes")
        return size, file.read(length)
