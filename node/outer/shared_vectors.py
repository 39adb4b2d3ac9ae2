"""The flat vectors that daemon and trainer share: memory-mapped fp32 files.

They live in /dev/shm where it has room, else in the state directory (a container's default /dev/shm has 64 MB).
What a daemon that was killed has left, the next one in its state directory takes over, if it is of the same run
and model: which chunks are of use, the outer state has noted beside them.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from atoll.comm.errors import ResourceError

SHM = Path("/dev/shm")
NAMES = ("anchor", "momentum", "local")
OWNER = "owner"  # a file with the state directory, and whose they are besides


@dataclass(frozen=True)
class SharedVectors:
    """Three vectors of `numel` fp32; `close` removes their files."""

    folder: Path
    lock: int  # held while this daemon lives, so that another can tell what is left behind
    anchor: NDArray[np.float32]  # (numel,) the shared parameters; written by the daemon, read by the trainer
    momentum: NDArray[np.float32]  # (numel,) of the outer optimizer; the daemon's own
    local: NDArray[np.float32]  # (numel,) the trainer's parameters at the end of its inner steps

    @classmethod
    def create(cls, numel: int, state_dir: Path, shm: Path = SHM, whose: str = "") -> Self:
        """Allocate zeroed vectors, or take over those that an earlier daemon left for `whose`, if that is not
        empty; raise `ResourceError` if they fit nowhere."""
        if whose and (left := cls._left(numel, state_dir, shm, whose)) is not None:
            return left
        need = numel * 4 * len(NAMES)
        for parent in (shm, state_dir / "vectors"):
            try:
                parent.mkdir(parents=True, exist_ok=True)
                if shutil.disk_usage(parent).free < need * 1.05:
                    continue
                return cls._fresh(numel, parent, _owner(state_dir, whose) if whose else "")
            except OSError:
                continue
        raise ResourceError(
            f"no room for the outer state: it takes {need / 1e9:.2f} GB in {shm} or {state_dir}; free some space"
        )

    @classmethod
    def _fresh(cls, numel: int, parent: Path, owner: str) -> Self:
        """Raises `OSError`; then nothing is left of it: in shared memory that would be memory."""
        with ExitStack() as undo:
            folder = Path(tempfile.mkdtemp(prefix="atoll-", dir=parent))
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made = cls(folder, lock, *(_allocate(folder / f"{name}.f32", numel) for name in NAMES))
            if owner:
                (folder / OWNER).write_text(owner)
            undo.pop_all()
        return made

    @classmethod
    def _left(cls, numel: int, state_dir: Path, shm: Path, whose: str) -> Self | None:
        """What a dead daemon left; what is of no use of it goes."""
        found = None
        for folder in _folders(state_dir, shm):
            if not _is_of(folder, state_dir) or (lock := _claim(folder / "lock")) is None:
                continue
            paths = [folder / f"{name}.f32" for name in NAMES]
            whole = all(path.is_file() and path.stat().st_size == 4 * numel for path in paths)
            if found is None and whole and (folder / OWNER).read_text() == _owner(state_dir, whose):
                found = cls(folder, lock, *(_map(path, numel) for path in paths))
            else:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
        return found

    def notes(self, name: str, count: int) -> NDArray[np.int64]:
        """So many zeros, or what was noted in them by an earlier daemon: they live as long as the vectors."""
        path = self.folder / f"{name}.i64"
        if not path.is_file() or path.stat().st_size != 8 * count:
            path.write_bytes(bytes(8 * count))
        return np.memmap(path, dtype=np.int64, mode="r+", shape=(count,))

    def path(self, name: str) -> str:
        return str(self.folder / f"{name}.f32")

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


def clear_stale(state_dir: Path, shm: Path = SHM) -> None:
    """Remove vectors of daemons that died without removing theirs, but those that `create` may take over."""
    for folder in _folders(state_dir, shm):
        if not _is_of(folder, state_dir) and (lock := _claim(folder / "lock")) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _folders(state_dir: Path, shm: Path) -> list[Path]:
    return [lock.parent for lock in (*shm.glob("atoll-*/lock"), *state_dir.glob("vectors/atoll-*/lock"))]


def _claim(lock: Path) -> int | None:
    """The lock's descriptor; None: its daemon lives, or it is gone."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None


def _owner(state_dir: Path, whose: str) -> str:
    return f"{state_dir.resolve()}\n{whose}\n"


def _is_of(folder: Path, state_dir: Path) -> bool:
    try:
        return (folder / OWNER).read_text().startswith(_owner(state_dir, "").rstrip("\n") + "\n")
    except (OSError, UnicodeDecodeError):  # anybody may put a folder into /dev/shm
        return False


def _allocate(path: Path, numel: int) -> NDArray[np.float32]:
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, numel * 4)  # now, not as a bus error in the middle of a round
    return _map(path, numel)


def _map(path: Path, numel: int) -> NDArray[np.float32]:
    return np.memmap(path, dtype=np.float32, mode="r+", shape=(numel,))
