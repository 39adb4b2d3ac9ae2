"""Files that appear under their name whole and on the disk, or not at all; and how much room there is for them."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SPARE = 0.05  # of a disk is left to others...
MOST_SPARE = 10 << 30  # bytes: ...but no more than this
NEW = ".new"  # behind the name of a file that is being written
Room = Callable[[Path], int]


class DiskFull(OSError):
    """There is no room for a file; the text says for how many bytes."""


def room(folder: Path) -> int:
    """Bytes that the run may still take on the disk of `folder`."""
    disk = shutil.disk_usage(folder)
    return disk.free - min(int(SPARE * disk.total), MOST_SPARE)


@contextmanager
def atomic_write(path: Path, size: int, room: Room = room, mode: int = 0o600) -> Iterator[int]:
    """A descriptor to write `size` bytes to. They are `path` when the context is left; if it is left by an
    exception, or the process ends, nothing is. `mode`: who may use the file, within the process's umask. Raises
    `DiskFull` before anything is written."""
    if (have := room(path.parent)) < size:
        raise DiskFull(f"{path.name} takes {size / 1e6:,.1f} MB, the disk has {max(have, 0) / 1e6:,.1f} MB for it")
    new = path.with_name(path.name + NEW)
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
    """What was written to a file is on the disk; of a folder, what was renamed in it, or removed from it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """It and those above it are on the disk, as what will be in it."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def clear_unfinished(folder: Path) -> None:
    """Remove what a process that was killed had not finished."""
    for new in folder.glob(f"*{NEW}"):
        new.unlink(missing_ok=True)


def write_all(file: int, buffers: "list[memoryview]", at: int) -> int:
    """Write them one after the other; returns the offset behind the last one."""
    for buffer in buffers:
        while buffer:
            written = os.pwrite(file, buffer, at)
            at, buffer = at + written, buffer[written:]
    return at
