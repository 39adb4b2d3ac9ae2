"""The number of cores that a node takes: those that it may use, shared with the nodes that are there already.

A node's daemon puts a file into shared memory, locked while it lives (`take_part`); whoever wants to know how many
there are counts the locked ones, so that one that was killed does not count. Several trainers on one machine that
each take every core are not twice but ten times slower.
"""

import fcntl
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SHM = Path("/dev/shm")
PREFIX, SUFFIX = "atoll-node-", ".here"
PROC, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class CoreShare:
    """`cores` that this process may use, and the `nodes` of this machine that share them."""

    cores: int
    nodes: int

    def threads(self, ranks: int = 1) -> int:
        """Threads of each of this node's local ranks."""
        return max(1, self.cores // max(1, self.nodes) // ranks)

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''} that this process may use"
        return f"{cores}, {self.nodes} nodes on this machine" if self.nodes > 1 else cores


def core_share(shm: Path | None = None) -> CoreShare:
    """The share of a node of this machine, as it is now."""
    return CoreShare(usable_cores(), max(1, _living(shm or _folder())))


@contextmanager
def take_part(shm: Path | None = None) -> Iterator[None]:
    """Count as a node of this machine while the context lasts; where no file can be had, without being counted."""
    folder = shm or _folder()
    try:
        descriptor, name = tempfile.mkstemp(".new", PREFIX, folder)
    except OSError:
        yield
        return
    here = f"{name.removesuffix('.new')}{SUFFIX}"
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.fchmod(descriptor, 0o644)  # another user's nodes count this one, too
            os.rename(name, here)  # only now: what can be seen and is not locked is of a dead one
        yield
    finally:
        for file in (name, here):
            with suppress(OSError):
                os.unlink(file)
        os.close(descriptor)


def usable_cores() -> int:
    """The cores that this process may run on, or less if its cgroup may use less time than theirs."""
    # macOS has no affinity to ask for.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, _quota())))


def _quota() -> float:
    """Cores' worth of time that the cgroups of this process, v1 or v2, leave it; infinity if they set no limit."""
    found = [math.inf]
    with suppress(OSError, ValueError):
        for line in PROC.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mounts = [CGROUPS / controllers, CGROUPS / "cpu"] if controllers else [CGROUPS, CGROUPS / "unified"]
            here = Path(path.lstrip("/"))  # in a container it may be the host's: its root is what is mounted
            found += [_limit(mount / part) for mount in mounts for part in (here, *here.parents)]
    return min(found)


def _limit(group: Path) -> float:
    """Cores' worth of time that one cgroup allows."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text().split()  # "max" is no number
        return int(quota) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = ((group / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    return math.inf


def _folder() -> Path:
    return SHM if SHM.is_dir() else Path(tempfile.gettempdir())


def _living(folder: Path) -> int:
    """How many nodes live; the files of those that were killed are removed."""
    files = list(folder.glob(f"{PREFIX}*{SUFFIX}"))
    dead = [file for file in files if not _locked(file)]
    for file in dead:
        with suppress(OSError):  # another user's
            file.unlink()
    return len(files) - len(dead)


def _locked(file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
