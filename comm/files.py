"""Files that appear under their name whole and on the disk, or not at all; and how much room there is for them."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SPARE_FRACTION = 0.05  # of a disk, which is left to others
MAX_SPARE = 10 << 30  # bytes that are left to others at most
UNFINISHED_SUFFIX = ".new"  # behind the name of a file that is being written
Room = Callable[[Path], int]  # a folder's disk -> bytes that may still be taken


class DiskFull(OSError):
    """A file does not fit on its disk; the text says for how many bytes."""


def room(folder: Path) -> int:
    """Bytes that the run may still take on the disk of `folder`."""
    disk = shutil.disk_usage(folder)
    return disk.free - min(int(SPARE_FRACTION * disk.total), MAX_SPARE)


@contextmanager
def atomic_write(path: Path, size: int, room: Room = room, mode: int = 0o600) -> Iterator[int]:
    """Open a descriptor to write `size` bytes to. The file appears as `path`, on the disk, when the context is
    left; if that is by an exception, or the process ends, `path` stays what it was. `mode`: who may use the file,
    within the process's umask. Raises `DiskFull` before anything is written."""
    if (have := room(path.parent)) < size:
        raise DiskFull(f"{path.name} takes {size / 1e6:,.1f} MB, the disk has {max(have, 0) / 1e6:,.1f} MB for it")
    new = path.with_name(path.name + UNFINISHED_SUFFIX)
    file = os.open(new, os.O_CREAT | os.O_TRUNC | os.O_RDWR, mode)
    try:
        try:
            os.posix_fallocate(file, 0, size)
            yield file
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(new, path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Force to the disk what was written to a file, or renamed in a folder or removed from it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, on the disk before this returns."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def clear_unfinished(folder: Path) -> None:
    """Remove the files that a killed process had not finished."""
    for new in folder.glob(f"*{UNFINISHED_SUFFIX}"):
        new.unlink(missing_ok=True)


def write_all(file: int, buffers: "list[memoryview]", at: int) -> int:
    """Write the buffers one after the other from offset `at` on; returns the offset behind the last one."""
    for buffer in buffers:
        while buffer:
            written = os.pwrite(file, buffer, at)
            at, buffer = at + written, buffer[written:]
    return at
