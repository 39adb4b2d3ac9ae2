"""The flat vectors that daemon and trainer share: memory-mapped fp32 files.

They live in /dev/shm where it has room, else in the state directory (a container's default /dev/shm has 64 MB).
Where they are in memory, there is a folder beside them for what the trainer keeps there (`copies`), which goes
and is taken over with them.
What a daemon that was killed has left, the next one in its state directory takes over, if it is of the same run
and model: which chunks are of use, the outer state has in `counters` beside them.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from atoll.comm.errors import ResourceError

SHM = Path("/dev/shm")
VECTOR_NAMES = ("anchor", "momentum", "local")
LOCK_FILE = "lock"
OWNER_FILE = "owner"  # has the state directory and the owner that `create` was called with
SPARE_SPACE = 1.05  # free space, by what the vectors take, that a file system must have


@dataclass(frozen=True)
class SharedVectors:
    """Three vectors of `numel` fp32; `close` removes their files."""

    folder: Path
    lock: int  # held while this daemon lives, so that another can tell what is left behind
    anchor: NDArray[np.float32]  # (numel,) the shared parameters; written by the daemon, read by the trainer
    momentum: NDArray[np.float32]  # (numel,) of the outer optimizer; the daemon's own
    local: NDArray[np.float32]  # (numel,) the trainer's parameters at the end of its inner steps
    in_memory: bool = False  # the folder is

    @classmethod
    def create(cls, numel: int, state_dir: Path, shm: Path = SHM, owner: str = "") -> Self:
        """Allocate zeroed vectors, or take over those that an earlier daemon left for the same `owner`, if that is
        not empty: it tells run and model from others. Raises `ResourceError` if they fit nowhere."""
        if owner and (inherited := cls._take_over(numel, state_dir, shm, owner)) is not None:
            return inherited
        need = numel * 4 * len(VECTOR_NAMES)
        for parent in (shm, state_dir / "vectors"):
            try:
                parent.mkdir(parents=True, exist_ok=True)
                if shutil.disk_usage(parent).free < need * SPARE_SPACE:
                    continue
                owner_text = _owner_text(state_dir, owner) if owner else ""
                return cls._allocate_in(parent, numel, owner_text, in_memory=parent == shm)
            except OSError:
                continue
        raise ResourceError(
            f"no room for the outer state: it takes {need / 1e9:.2f} GB in {shm} or {state_dir}; free some space"
        )

    @classmethod
    def _allocate_in(cls, parent: Path, numel: int, owner_text: str, in_memory: bool) -> Self:
        """Raises `OSError`; then nothing is left of it: in shared memory that would be memory."""
        with ExitStack() as undo:
            folder = Path(tempfile.mkdtemp(prefix="atoll-", dir=parent))
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            lock = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR)
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            anchor, momentum, local = (_allocate(folder / f"{name}.f32", numel) for name in VECTOR_NAMES)
            made = cls(folder, lock, anchor, momentum, local, in_memory)
            if owner_text:
                (folder / OWNER_FILE).write_text(owner_text)
            undo.pop_all()
        return made

    @classmethod
    def _take_over(cls, numel: int, state_dir: Path, shm: Path, owner: str) -> Self | None:
        """Vectors that a dead daemon left; those that are of no use are removed."""
        found = None
        for folder in _folders(state_dir, shm):
            if not _belongs_to(folder, state_dir) or (lock := _claim(folder / LOCK_FILE)) is None:
                continue
            paths = [folder / f"{name}.f32" for name in VECTOR_NAMES]
            whole = all(path.is_file() and path.stat().st_size == 4 * numel for path in paths)
            if found is None and whole and (folder / OWNER_FILE).read_text() == _owner_text(state_dir, owner):
                anchor, momentum, local = (_map(path, numel) for path in paths)
                found = cls(folder, lock, anchor, momentum, local, folder.parent == shm)
            else:
                _remove(folder)
                os.close(lock)
        return found

    def counters(self, name: str, count: int) -> NDArray[np.int64]:
        """(count,) int64 that live as long as the vectors: zeros, or what an earlier daemon left in them."""
        path = self.folder / f"{name}.i64"
        if not path.is_file() or path.stat().st_size != 8 * count:
            path.write_bytes(bytes(8 * count))
        return np.memmap(path, dtype=np.int64, mode="r+", shape=(count,))

    def path(self, name: str) -> str:
        """The file of the vector `name`, for the trainer to map."""
        return str(self.folder / f"{name}.f32")

    def copies(self) -> str:
        """A folder in memory for what the trainer keeps there; empty where the vectors are on disk."""
        if not self.in_memory:
            return ""
        folder = self.folder / "copies"
        folder.mkdir(exist_ok=True)
        return str(folder)

    def close(self) -> None:
        """Remove the files; who has mapped them keeps the memory."""
        _remove(self.folder)
        os.close(self.lock)


def clear_stale(state_dir: Path, shm: Path = SHM) -> None:
    """Remove vectors of daemons that died without removing theirs, but those that `create` may take over."""
    for folder in _folders(state_dir, shm):
        if not _belongs_to(folder, state_dir) and (lock := _claim(folder / LOCK_FILE)) is not None:
            _remove(folder)
            os.close(lock)


def own_folders(state_dir: Path, shm: Path = SHM) -> list[Path]:
    """The folders of vectors of this state directory's daemons, the living one's included."""
    return [folder for folder in _folders(state_dir, shm) if _belongs_to(folder, state_dir)]


def clear_own(state_dir: Path, shm: Path = SHM) -> int:
    """Remove what dead daemons of this state directory left, also what `create` may take over; return its size
    in bytes."""
    size = 0
    for folder in own_folders(state_dir, shm):
        if (lock := _claim(folder / LOCK_FILE)) is not None:
            size += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            _remove(folder)
            os.close(lock)
    return size


def _folders(state_dir: Path, shm: Path) -> list[Path]:
    return [lock.parent for lock in (*shm.glob("atoll-*/lock"), *state_dir.glob("vectors/atoll-*/lock"))]


def _remove(folder: Path) -> None:
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


def _owner_text(state_dir: Path, owner: str) -> str:
    return f"{state_dir.resolve()}\n{owner}\n"


def _belongs_to(folder: Path, state_dir: Path) -> bool:
    try:
        return (folder / OWNER_FILE).read_text().startswith(_owner_text(state_dir, "").rstrip("\n") + "\n")
    except (OSError, UnicodeDecodeError):  # anybody may put a folder into /dev/shm
        return False


def _allocate(path: Path, numel: int) -> NDArray[np.float32]:
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, numel * 4)  # now, not as a bus error in the middle of a round
    return _map(path, numel)


def _map(path: Path, numel: int) -> NDArray[np.float32]:
    return np.memmap(path, dtype=np.float32, mode="r+", shape=(numel,))
