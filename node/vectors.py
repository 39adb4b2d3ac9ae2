"""The flat vectors that daemon and trainer share: memory-mapped fp32 files.

They live in /dev/shm where it has room, else in the state directory (a container's default /dev/shm has 64 MB).
"""

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from atoll.comm.errors import ResourceError

SHM = Path("/dev/shm")
NAMES = ("anchor", "momentum", "local")


@dataclass(frozen=True)
class Vectors:
    """Three vectors of `numel` fp32; `close` removes their files."""

    folder: Path
    lock: int  # held while this daemon lives, so that another can tell what is left behind
    anchor: NDArray[np.float32]  # (numel,) the shared parameters; written by the daemon, read by the trainer
    momentum: NDArray[np.float32]  # (numel,) of the outer optimizer; the daemon's own
    local: NDArray[np.float32]  # (numel,) the trainer's parameters at the end of its inner steps

    @classmethod
    def create(cls, numel: int, state_dir: Path, shm: Path = SHM) -> Self:
        """Allocate zeroed vectors; raise `ResourceError` if they fit nowhere."""
        need = numel * 4 * len(NAMES)
        for parent in (shm, state_dir / "vectors"):
            try:
                parent.mkdir(parents=True, exist_ok=True)
                if shutil.disk_usage(parent).free < need * 1.05:
                    continue
                folder = Path(tempfile.mkdtemp(prefix="atoll-", dir=parent))
                lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls(folder, lock, *(_allocate(folder / f"{name}.f32", numel) for name in NAMES))
            except OSError:
                continue
        raise ResourceError(
            f"no room for the outer state: it takes {need / 1e9:.2f} GB in {shm} or {state_dir}; free some space"
        )

    def path(self, name: str) -> str:
        return str(self.folder / f"{name}.f32")

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


def clear_stale(state_dir: Path, shm: Path = SHM) -> None:
    """Remove vectors of daemons that died without removing theirs."""
    for lock in (*shm.glob("atoll-*/lock"), *state_dir.glob("vectors/atoll-*/lock")):
        with open(lock, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # its daemon lives
            shutil.rmtree(lock.parent, ignore_errors=True)


def _allocate(path: Path, numel: int) -> NDArray[np.float32]:
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, numel * 4)  # now, not as a bus error in the middle of a round
    return np.memmap(path, dtype=np.float32, mode="r+", shape=(numel,))
