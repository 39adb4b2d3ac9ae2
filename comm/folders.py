"""Folders that appear under their name whole and on the disk, or not at all, like the files of
`atoll.comm.files`."""

import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from atoll.comm.files import UNFINISHED_SUFFIX, DiskFull, Room, publish, room, sync

EXCHANGE = 2  # renameat2's RENAME_EXCHANGE: two names change places at once
HERE = -100  # AT_FDCWD: a relative path is the process's


@contextmanager
def atomic_folder(path: Path, size: int, room: Room = room) -> Iterator[Path]:
    """A new folder to write about `size` bytes to. It is `path` when the context is left, in the place of a folder
    that was there; if it is left by an exception, or the process ends, `path` is what it was. What writers of
    `path` that were killed left behind is removed. Raises `DiskFull` before anything is written, if `size` is more
    than `room` says."""
    clear_abandoned(path.parent, escape(path.name))
    if (have := room(path.parent)) < size:
        raise DiskFull(f"{path.name} takes {size / 1e6:,.1f} MB, the disk has {max(have, 0) / 1e6:,.1f} MB for it")
    new, lock = _create(path)
    try:
        try:
            yield new
            _sync_all(new)
            _publish(new, path)
        finally:
            os.close(lock)  # only now: what is not locked is of a dead one
    finally:
        shutil.rmtree(new, ignore_errors=True)  # after a success: what `path` was before


def remove_folder(path: Path) -> None:
    """Remove a folder so that, whenever the process ends, it is there whole or not under its name (what is left
    then is `clear_abandoned`'s). Raises `OSError`."""
    going = path.with_name(f"{path.name}.{os.urandom(4).hex()}{UNFINISHED_SUFFIX}")
    os.rename(path, going)
    shutil.rmtree(going)


def clear_abandoned(folder: Path, names: str) -> None:
    """Remove from a folder what was left of folders, whose names are the glob `names`, when their writers or
    removers were killed."""
    for abandoned in folder.glob(f"{names}.{'[0-9a-f]' * 8}{UNFINISHED_SUFFIX}"):
        _remove_abandoned(abandoned)


def _create(path: Path) -> tuple[Path, int]:
    """A new folder beside `path`, and its descriptor, locked while it is open."""
    while True:
        new = path.with_name(f"{path.name}.{os.urandom(4).hex()}{UNFINISHED_SUFFIX}")
        new.mkdir()
        lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # another is about to remove it, or the share has no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if new.exists():
            return new, lock
        os.close(lock)


def _remove_abandoned(new: Path) -> None:
    """Remove an unfinished folder if no process has it open; where folders cannot be locked, it stays."""
    with suppress(OSError):
        lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(new)
        finally:
            os.close(lock)


def _sync_all(folder: Path) -> None:
    """Have on the disk whatever is in the folder."""
    for inside in folder.rglob("*"):
        sync(inside)
    sync(folder)


def _publish(new: Path, path: Path) -> None:
    """Give the folder its name; a folder that had it is then `new`."""
    if not path.is_dir() or not any(path.iterdir()):
        publish(new, path)
        return
    if not _exchange(new, path):  # this system cannot: for a moment there is neither
        old = path.with_name(f"{path.name}.{os.urandom(4).hex()}{UNFINISHED_SUFFIX}")
        os.rename(path, old)
        publish(new, path)
        os.rename(old, new)
    with suppress(OSError):  # a share may not know what that is
        sync(path.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change places at once; false where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(renameat2(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) == 0)
