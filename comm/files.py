"""Files that appear under their name whole and on the disk, or not at all; and how much room there is for them."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
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
    file is `path` when the context is left; if it is left by an exception, or the process ends, nothing is. Of
    several that write a path at the same time the last to leave has its file there. What writers of `path` that
    were killed left behind is removed. `mode`: who may use the file, within the process's umask. Raises `DiskFull`
    before anything is written, if `size` is more than `room` says."""
    for new in path.parent.glob(f"{escape(path.name)}.{'[0-9a-f]' * 8}{UNFINISHED_SUFFIX}"):
        _remove_abandoned(new)
    if size is not None and (have := room(path.parent)) < size:
        raise DiskFull(f"{path.name} takes {size / 1e6:,.1f} MB, the disk has {max(have, 0) / 1e6:,.1f} MB for it")
    new, file = _create(path, mode)
    try:
        try:
            if size is not None:
                reserve(file, size)
            yield file
            os.fsync(file)
            publish(new, path)
        finally:
            os.close(file)  # only now: what is not locked is of a dead one
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def _create(path: Path, mode: int) -> tuple[Path, int]:
    """A new file beside `path`, and its descriptor, locked while it is open: nobody takes it for an abandoned
    one."""
    while True:
        new = path.with_name(f"{path.name}.{os.urandom(4).hex()}{UNFINISHED_SUFFIX}")
        file = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)
        try:
            with suppress(BlockingIOError):  # another is about to remove it
                _lock(file)
                if new.exists():  # else another did, before it was locked
                    return new, file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _remove_abandoned(new: Path) -> None:
    """Remove an unfinished file if no process has it open."""
    with suppress(OSError):
        file = os.open(new, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)  # some shares lock only what can be written
        try:
            if _lock(file):
                new.unlink()
        finally:
            os.close(file)


def _lock(file: int) -> bool:
    """Lock the file for this descriptor. Returns False where files cannot be locked; raises `BlockingIOError` if
    another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


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


def sync_data(file: int) -> None:
    """Have on the disk what was written to an open file."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(file)
    else:  # macOS
        os.fsync(file)


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


def reserve(file: int, size: int) -> None:
    """Have room on the disk, or in memory, for the first `size` bytes of an empty file; they are zeros. Raises
    `OSError` now, where writing to a mapped file would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    zeros = memoryview(bytes(1 << 20))  # macOS has no such call
    for at in range(0, size, len(zeros)):
        write_all(file, [zeros[: size - at]], at)


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    size = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            size += file.lstat().st_size if not file.is_dir() else 0
    return size


def write_all(file: int, buffers: "list[memoryview]", at: int) -> int:
    """Write buffers one after the other from offset `at` on; returns the offset behind the last one."""
    for buffer in buffers:
        while buffer:
            written = os.pwrite(file, buffer, at)
            at, buffer = at + written, buffer[written:]
    return at
