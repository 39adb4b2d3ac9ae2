"""The flat vectors that daemon and trainer share: memory-mapped fp32 files.

They live in /dev/shm where it has room, else in the state directory (a container's default /dev/shm has 64 MB).
Where they are in memory, there is a folder beside them for what the trainer keeps there (`copies`), which goes
and is taken over with them.
What a daemon that was killed has left, the next one in its state directory takes over, if it is of the same run
and model: which chunks are of use, the outer state has in `counters` beside them. The folders are
`atoll.node.outer.vector_folders`'.
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
from atoll.comm.files import reserve
from atoll.node.outer.vector_folders import (
    COPIES,
    LOCK_FILE,
    OWNER_FILE,
    PREFIX,
    SHM,
    belongs_to,
    claim,
    folders,
    make_room,
    owner_text,
    remove,
)

VECTOR_NAMES = ("anchor", "momentum", "local")
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
                if parent == shm:
                    make_room(int(need * SPARE_SPACE), state_dir, shm)
                if shutil.disk_usage(parent).free < need * SPARE_SPACE:
                    continue
                text = owner_text(state_dir, owner) if owner else ""
                return cls._allocate_in(parent, numel, text, in_memory=parent == shm)
            except OSError:
                continue
        raise ResourceError(
            f"no room for the outer state: it takes {need / 1e9:.2f} GB in {shm} or {state_dir}; free some space"
        )

    @classmethod
    def _allocate_in(cls, parent: Path, numel: int, text: str, in_memory: bool) -> Self:
        """Raises `OSError`; then nothing is left of it: in shared memory that would be memory."""
        with ExitStack() as undo:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            if text:  # before the lock: what can be seen and is not locked is taken for a dead one's
                (folder / OWNER_FILE).write_text(text)
            lock = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR)
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            anchor, momentum, local = (_allocate(folder / f"{name}.f32", numel) for name in VECTOR_NAMES)
            made = cls(folder, lock, anchor, momentum, local, in_memory)
            undo.pop_all()
        return made

    @classmethod
    def _take_over(cls, numel: int, state_dir: Path, shm: Path, owner: str) -> Self | None:
        """Vectors that a dead daemon left; those that are of no use are removed."""
        found = None
        for folder in folders(state_dir, shm):
            if not belongs_to(folder, state_dir) or (lock := claim(folder)) is None:
                continue
            paths = [folder / f"{name}.f32" for name in VECTOR_NAMES]
            whole = all(path.is_file() and path.stat().st_size == 4 * numel for path in paths)
            if found is None and whole and (folder / OWNER_FILE).read_text() == owner_text(state_dir, owner):
                anchor, momentum, local = (_map(path, numel) for path in paths)
                found = cls(folder, lock, anchor, momentum, local, folder.parent == shm)
            else:
                remove(folder)
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
        folder = self.folder / COPIES
        folder.mkdir(exist_ok=True)
        return str(folder)

    def say_at_work(self) -> None:
        """Note the time: from now on it counts how long what is left here waits for the next daemon."""
        os.utime(self.lock)

    def close(self) -> None:
        """Remove the files; who has mapped them keeps the memory."""
        remove(self.folder)
        os.close(self.lock)


def _allocate(path: Path, numel: int) -> NDArray[np.float32]:
    with open(path, "wb") as file:
        reserve(file.fileno(), numel * 4)  # now, not as a bus error in the middle of a round
    return _map(path, numel)


def _map(path: Path, numel: int) -> NDArray[np.float32]:
    return np.memmap(path, dtype=np.float32, mode="r+", shape=(numel,))
