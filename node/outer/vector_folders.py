"""The folders in which daemons keep their flat vectors, and what becomes of those that a killed one has left.

Each has a lock, which its daemon holds while it lives, and says whose it is: by the state directory. The next
daemon there takes it over (`SharedVectors.create`), so one that starts elsewhere on the machine leaves it alone
(`clear_stale`) as long as that may be: while the state directory has a session, for `KEPT_SECONDS` since its
daemon was at work, and only the newest of a state directory. What a living node needs in memory goes before
(`make_room`, `clear_others`). Folders of other users, and such as no daemon makes, are left alone.
"""

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from atoll.comm.files import size_of
from atoll.node.state_files import SESSION

SHM = Path("/dev/shm")
PREFIX = "atoll-"
LOCK_FILE = "lock"  # touched while its daemon works
OWNER_FILE = "owner"  # has the state directory and the owner that `SharedVectors.create` was called with
COPIES = "copies"  # a folder in memory, the trainer's
CONTENT = (LOCK_FILE, OWNER_FILE, COPIES, "*.f32", "*.i64")  # all that a daemon puts into such a folder
KEPT_SECONDS = 7 * 86400.0  # for which vectors wait for a daemon of their state directory


@dataclass(frozen=True, slots=True)
class VectorFolder:
    """A folder of vectors, as it is found."""

    path: Path
    state_dir: Path | None  # its daemon's; None: nobody is to take it over
    at_work: float  # seconds since 1970, when its daemon was at work last
    has_session: bool  # its state directory has: the node may come back
    size: int  # bytes


def stale(found: Sequence[VectorFolder], now: float) -> list[VectorFolder]:
    """Those that nobody will take over, if their daemons are dead. `now`: seconds since 1970."""
    newest: dict[Path, float] = {}
    for each in found:
        if each.state_dir is not None:
            newest[each.state_dir] = max(each.at_work, newest.get(each.state_dir, each.at_work))
    return [
        each
        for each in found
        if each.state_dir is None
        or not each.has_session
        or each.at_work < newest[each.state_dir]
        or abs(now - each.at_work) >= KEPT_SECONDS  # of a clock that was ahead, too
    ]


def for_room(dead: Sequence[VectorFolder], lacking: int) -> list[VectorFolder]:
    """Those of them that have waited longest, until they have so many bytes together; none where all have not."""
    chosen = list[VectorFolder]()
    for each in sorted(dead, key=lambda folder: folder.at_work):
        if lacking <= 0:
            break
        chosen.append(each)
        lacking -= each.size
    return chosen if lacking <= 0 else []


def clear_stale(state_dir: Path, shm: Path = SHM) -> None:
    """Remove what dead daemons left and nobody will take over. What is of this state directory, and waits for
    `SharedVectors.create`, stays."""
    for each in stale(_others(state_dir, shm), time.time()):
        _clear(each.path)


def make_room(need: int, state_dir: Path, shm: Path) -> None:
    """Have `need` bytes free in shared memory, if that can be had by removing what dead daemons of other state
    directories left."""
    if (lacking := need - shutil.disk_usage(shm).free) > 0:
        _clear_dead(state_dir, shm, lacking)


def clear_others(state_dir: Path, shm: Path = SHM) -> int:
    """Remove all that dead daemons of other state directories left in memory; return its size in bytes."""
    return _clear_dead(state_dir, shm, None)


def own_folders(state_dir: Path, shm: Path = SHM) -> list[Path]:
    """The folders of vectors of this state directory's daemons, the living one's included."""
    return [folder for folder in folders(state_dir, shm) if belongs_to(folder, state_dir)]


def bytes_in_memory(state_dir: Path, shm: Path = SHM) -> int:
    """Bytes of memory that this state directory's vectors take."""
    return sum(size_of(folder) for folder in own_folders(state_dir, shm) if folder.parent == shm)


def clear_own(state_dir: Path, shm: Path = SHM) -> int:
    """Remove what dead daemons of this state directory left, also what may be taken over; return its size in
    bytes."""
    return sum(_clear(folder) for folder in own_folders(state_dir, shm))


def folders(state_dir: Path, shm: Path) -> list[Path]:
    """All folders of vectors of this user's: in shared memory, and in the state directory."""
    locks = (*shm.glob(f"{PREFIX}*/{LOCK_FILE}"), *state_dir.glob(f"vectors/{PREFIX}*/{LOCK_FILE}"))
    return [lock.parent for lock in locks if _is_a_daemons(lock.parent)]


def belongs_to(folder: Path, state_dir: Path) -> bool:
    """Whether it is of a daemon of this state directory."""
    return _state_dir_of(folder) == str(state_dir.resolve())


def owner_text(state_dir: Path, owner: str) -> str:
    """What the owner file of a folder says."""
    return f"{state_dir.resolve()}\n{owner}\n"


def claim(folder: Path) -> int | None:
    """The descriptor of its lock; None: its daemon lives, or it is gone."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None


def remove(folder: Path) -> None:
    """Remove the folder, owner and lock last: by them the next start finds what a trainer that has outlived its
    daemon still writes there."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in (OWNER_FILE, LOCK_FILE):
                path.unlink(missing_ok=True)
        if {path.name for path in folder.iterdir()} <= {OWNER_FILE, LOCK_FILE}:
            shutil.rmtree(folder, ignore_errors=True)


def _others(state_dir: Path, shm: Path) -> list[VectorFolder]:
    """Folders that are not of this state directory's daemons."""
    return list(_looked_at(folder for folder in folders(state_dir, shm) if not belongs_to(folder, state_dir)))


def _looked_at(paths: Iterator[Path]) -> Iterator[VectorFolder]:
    for path in paths:
        with suppress(OSError):  # it goes meanwhile
            name = _state_dir_of(path)
            state_dir = Path(name) if name else None
            session = state_dir is not None and (state_dir / SESSION).is_file()
            yield VectorFolder(path, state_dir, (path / LOCK_FILE).stat().st_mtime, session, size_of(path))


def _clear_dead(state_dir: Path, shm: Path, lacking: int | None) -> int:
    """Remove dead daemons' folders of other state directories: for so many bytes, or all."""
    claimed = {each: lock for each in _others(state_dir, shm) if (lock := claim(each.path)) is not None}
    try:
        chosen = list(claimed) if lacking is None else for_room(list(claimed), lacking)
        for each in chosen:
            remove(each.path)
        return sum(each.size for each in chosen)
    finally:
        for lock in claimed.values():
            os.close(lock)


def _clear(folder: Path) -> int:
    """Remove a folder unless its daemon lives; return its size in bytes."""
    if (lock := claim(folder)) is None:
        return 0
    try:
        size = size_of(folder)
        remove(folder)
        return size
    finally:
        os.close(lock)


def _state_dir_of(folder: Path) -> str:
    """The state directory that the folder says it is of; empty: none."""
    try:
        return (folder / OWNER_FILE).read_text().removesuffix("\n").rpartition("\n")[0]
    except (OSError, UnicodeDecodeError):
        return ""


def _is_a_daemons(folder: Path) -> bool:
    """Whether this user's daemons may have made it: anybody may put a folder into shared memory."""
    try:
        about = folder.lstat()
        names = os.listdir(folder)
    except OSError:
        return False
    ours = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
    return ours and all(any(fnmatch(name, part) for part in CONTENT) for name in names)
