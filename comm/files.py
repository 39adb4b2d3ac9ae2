"""Files that appear under their name whole and on the disk, or not at all; and how much room there is for them."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SPARE_FRACTION = 0.05  # of a disk is left to others...
MAX_SPARE = 10 << 30  # bytes: ...but no more than this
UNFINISHED_SUFFIX = ".new"  # behind the name of a file that is being written
NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}  # of a share that does not know what that is
Room = Callable[[Path], int]


class DiskFull(OSError):
    """A file does not fit on its disk; the text says for how many bytes."""


def room(folder: Path) -> int:
    """Bytes that the run may still take on the disk of `folder`."""
    disk = shutil.disk_usage(folder)
    return disk.free - min(int(SPARE_FRACTION * disk.total), MAX_SPARE)


@contextmanager
def atomic_write(path: Path, size: int | None, room: Room = room, mode: int = 0o600) -> Iterator[int]:
    """A descriptor of an empty file to write `size` bytes to; None: as many as come, and none are reserved. The
    file is `path` when the context is left; if it is left by an exception, or the process ends, nothing is.
    `mode`: who may use the file, within the process's umask. One process at a time writes a path. Raises
    `DiskFull` before anything is written, if `size` is more than `room` says."""
    if size is not None and (have := room(path.parent)) < size:
        raise DiskFull(f"{path.name} takes {size / 1e6:,.1f} MB, the disk has {max(have, 0) / 1e6:,.1f} MB for it")
    new = path.with_name(path.name + UNFINISHED_SUFFIX)
    new.unlink(missing_ok=True)  # of a process that was killed; its mode may be another
    file = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)
    try:
        try:
            if size is not None:
                os.posix_fallocate(file, 0, size)
            yield file
            os.fsync(file)
        finally:
            os.close(file)
        publish(new, path)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def publish(new: Path, path: Path) -> None:
    """Give a file or folder that is on the disk under the name `new` its own name, in the same folder, at once and
    for good."""
    os.replace(new, path)
    try:
        sync(path.parent)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise


def sync(path: Path) -> None:
    """Have on the disk what was written to a file; of a folder, what was renamed in it, or removed from it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing; they are on the disk, as what will be in it."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def clear_unfinished(folder: Path) -> None:
    """Remove the files that a killed process had not finished."""
    for new in folder.glob(f"*{UNFINISHED_SUFFIX}"):
        new.unlink(missing_ok=True)


def write_all(file: int, buffers: "list[memoryview]", at: int) -> int:
    """Write buffers one after the other from offset `at` on; returns the offset behind the last one."""
    for buffer in buffers:
        while buffer:
            written = os.pwrite(file, buffer, at)
            at, buffer = at + written, buffer[written:]
    return at
