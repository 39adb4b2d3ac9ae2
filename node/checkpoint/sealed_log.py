"""The sealed bytes of committed rounds on disk: one file a round; peers are served, and a state replayed, from it.

    magic 8 | run 16 | round u64 | chunks u32 | (bytes u32, digest 16) a chunk | digest of all that, 16 | chunks

Little-endian. `run` keeps the files of two runs apart. What does not match its digest counts as absent. All calls
block: they are made in threads, by one that writes and any number that read.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from atoll.comm.byte_view import Octets, view
from atoll.comm.chunks import Chunks
from atoll.comm.digest import DIGEST_SIZE, digest
from atoll.comm.files import Room, atomic_write, clear_unfinished, room, write_all
from atoll.comm.fragment_schedule import FragmentSchedule

MAGIC = b"atollsl1"
_HEAD = struct.Struct("<8s16sQI")
_CHUNK = struct.Struct(f"<I{DIGEST_SIZE}s")
PREFIX = "sealed-"


@dataclass(frozen=True, slots=True)
class _Index:
    """Where the chunks of a file lie."""

    path: Path
    size: int  # bytes of the file
    offsets: tuple[int, ...]  # of each chunk, and behind the last
    digests: tuple[bytes, ...]


class SealedLog:
    """The sealed rounds of one run in a folder."""

    def __init__(self, folder: Path, run: bytes, chunks: Chunks, room: Room = room) -> None:
        """Look at what `folder` has; nothing is changed there. `run`: 16 bytes; `chunks` of the state, of which a
        round has those of its fragment."""
        self._folder, self._run, self._chunks, self._room = folder, run, chunks, room
        found = (self._open(path) for path in sorted(folder.glob(f"{PREFIX}*[0-9]")))  # an unfinished one is none
        self._rounds = {round_: index for round_, index in found if index is not None}

    def clear(self) -> list[Path]:
        """Remove what is of no use to this run: unfinished files, which every kill may leave; files of another run
        and damaged ones, which are returned. Raises `OSError`."""
        clear_unfinished(self._folder)
        ours = {index.path for index in self._rounds.values()}
        foreign = [path for path in self._folder.glob(f"{PREFIX}*") if path not in ours]
        for path in foreign:
            path.unlink(missing_ok=True)
        return foreign

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds that can be read, ascending."""
        return tuple(sorted(self._rounds))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(index.size for index in list(self._rounds.values()))

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of each round's file."""
        return {round_: index.size for round_, index in list(self._rounds.items())}

    def __contains__(self, round_: int) -> bool:
        return round_ in self._rounds

    def write(self, round_: int, payloads: Sequence[Octets], digests: Sequence[bytes]) -> None:
        """Write the sealed bytes of a round and their digests, one of each for every chunk of its fragment; they
        are on the disk when it returns. Raises `OSError`; then there is nothing of the round."""
        buffers = [view(payload) for payload in payloads]
        table = b"".join(_CHUNK.pack(len(b), d) for b, d in zip(buffers, digests, strict=True))
        head = _HEAD.pack(MAGIC, self._run, round_, len(buffers)) + table
        head += digest(head)
        path, size = self.path(round_), len(head) + sum(map(len, buffers))
        with atomic_write(path, size, self._room) as file:
            write_all(file, [memoryview(head), *buffers], 0)
        self._rounds[round_] = _index(path, size, len(head), [len(b) for b in buffers], digests)

    def path(self, round_: int) -> Path:
        """The file of a round, whether it is there or not."""
        return self._folder / f"{PREFIX}{round_:012d}"

    def read(self, round_: int, chunk: int) -> bytes | None:
        """The sealed bytes of the round's chunk, counted within its fragment; None: they are not here, or not what
        was written."""
        index = self._rounds.get(round_)
        if index is None or not 0 <= chunk < len(index.digests):
            return None
        start, end = index.offsets[chunk : chunk + 2]
        try:
            with open(index.path, "rb") as file:
                data = os.pread(file.fileno(), end - start, start)
        except OSError:
            return None
        return data if digest(data) == index.digests[chunk] else None

    def drop(self, round_: int) -> None:
        """Forget a round and remove its file. Raises `OSError`; the round does not count all the same."""
        if (index := self._rounds.pop(round_, None)) is not None:
            index.path.unlink(missing_ok=True)

    def _open(self, path: Path) -> tuple[int, _Index | None]:
        """A file of this run and its round; None if it is not, or is damaged."""
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                head = file.read(_HEAD.size)
                magic, run, round_, chunks = _HEAD.unpack(head)
                expected = self._chunks.fragment_range(
                    FragmentSchedule(self._chunks.fragment_count).fragment(round_)
                )
                if (magic, run, chunks) != (MAGIC, self._run, len(expected)):
                    return 0, None
                table, table_digest = file.read(chunks * _CHUNK.size), file.read(DIGEST_SIZE)
        except (OSError, struct.error):
            return 0, None
        if digest(head + table) != table_digest:
            return 0, None
        entries = list(_CHUNK.iter_unpack(table))
        index = _index(
            path, size, len(head + table + table_digest), [e[0] for e in entries], [e[1] for e in entries]
        )
        return round_, index if index.offsets[-1] == size else None


def _index(path: Path, size: int, start: int, sizes: Sequence[int], digests: Sequence[bytes]) -> _Index:
    return _Index(path, size, tuple(accumulate(sizes, initial=start)), tuple(digests))
