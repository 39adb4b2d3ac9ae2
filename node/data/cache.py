"""Blocks on this machine's disk, by their digest: bounded, shared by processes, and never believed unchecked.

    FOLDER/size          bytes that the blocks take at most, decimal; whoever changes a block holds a lock on it
    FOLDER/3f/3f9a...    a block, under its digest; its time of modification is when it was last asked for
    FOLDER/claims/3f     locked by whoever fetches a block whose digest begins so

`size` grows before a block is written and shrinks after one is removed: a process that is killed in between leaves
it too large, never too small, and what is on the disk is never more than the bound. When a block does not fit,
those that nobody asked for the longest go until `FILL_SHARE` of the bound is left, and `size` is counted anew.
Nothing is flushed to the disk: a block that a failing power has torn has another digest, and is fetched again.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from atoll.comm.digest import digest
from atoll.comm.files import UNFINISHED_SUFFIX, Room, room

FILL_SHARE = 0.9  # of the bound that is filled after some have gone: they go by the tenth, not one by one
PAGE_BYTES = 4096  # that a file takes on the disk a multiple of


class _CachedFile(NamedTuple):
    """A file of the cache, as the disk has it."""

    used: int  # ns, when it was last asked for
    path: Path
    size: int  # bytes on the disk


class BlockCache:
    """A folder of blocks that takes up to `limit` bytes. Its trouble, such as a full disk, costs nothing but that
    blocks are not kept."""

    def __init__(self, folder: Path, limit: int, room: Room = room) -> None:
        """`limit`: bytes; 0: nothing is kept."""
        self._folder, self.limit, self._room = folder, limit, room
        self.trouble = ""  # why blocks are not kept, in words for people; empty: they are

    def read(self, key: bytes) -> bytes | None:
        """The block with this digest; None: it is not here. It counts as asked for now."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            if digest(data) == key:
                os.utime(path)
                return data
        except OSError:
            return None
        self._remove(path)
        return None

    def holds(self, key: bytes) -> bool:
        """Whether the block seems to be here; it counts as asked for now."""
        try:
            os.utime(self._path(key))
        except OSError:
            return False
        return True

    def write(self, key: bytes, data: bytes) -> None:
        """Keep a block under its digest, as far as bound and disk allow."""
        size = _on_disk(len(data))
        if size > self.limit:
            return
        try:
            self._path(key).parent.mkdir(parents=True, exist_ok=True)
            with self._locked() as state:
                self._write(key, data, size, state)
            self.trouble = ""
        except OSError as error:
            self.trouble = f"cannot keep data on the disk: {error.strerror or error}; it is fetched anew"

    @contextmanager
    def claimed(self, key: bytes) -> Iterator[None]:
        """Wait for whoever fetches the block just now, on this machine, to be through with it; in the context it
        is this thread's task."""
        lock = None
        if self.limit:
            with suppress(OSError):
                claims = self._folder / "claims"
                claims.mkdir(parents=True, exist_ok=True)
                lock = os.open(claims / key.hex()[:2], os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)

    def _write(self, key: bytes, data: bytes, size: int, state: int) -> None:
        path = self._path(key)
        if path.exists():
            return
        total = self._total(state)
        if total is None or total + size > self.limit:
            total = self._make_room(size)
        if (have := self._room(self._folder)) < size:
            raise OSError(0, f"the disk has {max(have, 0) / 1e6:,.1f} MB left for it")
        _set_total(state, total + size)
        new = path.with_name(path.name + UNFINISHED_SUFFIX)
        try:
            new.write_bytes(data)
            new.rename(path)
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise

    def _make_room(self, size: int) -> int:
        """Remove what was not asked for the longest, and what a killed process did not finish; return the bytes
        that the others take."""
        files = sorted(self._files())
        total = sum(file.size for file in files)
        target = min(FILL_SHARE * self.limit, self.limit - size)
        for file in files:
            if total <= target and not file.path.name.endswith(UNFINISHED_SUFFIX):
                continue
            file.path.unlink(missing_ok=True)
            total -= file.size
        return total

    def _files(self) -> Iterator[_CachedFile]:
        for folder in self._folder.glob("[0-9a-f][0-9a-f]"):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        found = entry.stat()
                        yield _CachedFile(found.st_mtime_ns, Path(entry.path), _on_disk(found.st_size))

    def _remove(self, path: Path) -> None:
        with suppress(OSError), self._locked() as state:
            size = _on_disk(path.stat().st_size)
            path.unlink()
            if (total := self._total(state)) is not None:
                _set_total(state, total - size)

    def _total(self, state: int) -> int | None:
        """The bytes that the blocks take at most; None: nobody has counted them."""
        text = os.pread(state, 32, 0)
        return int(text) if text.isdigit() else None

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The open file `size`, while no other thread or process has it."""
        state = os.open(self._folder / "size", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(state, fcntl.LOCK_EX)
            yield state
        finally:
            os.close(state)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / name


def _set_total(state: int, total: int) -> None:
    """Write the count: shorter than what any system tears."""
    text = b"%020d" % total
    os.pwrite(state, text, 0)


def _on_disk(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
