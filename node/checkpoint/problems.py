"""The open problems of a node's disk: what does not work now, and why. Each is logged once for as long as it
lasts, and shown while it does."""

import errno
import logging

from atoll.comm.files import DiskFull
from atoll.comm.incidents import IncidentKind

log = logging.getLogger("atoll.node")


class Problems:
    """The checkpointer's open problems, by what does not work. Reported to and read from several threads."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._kinds: dict[str, IncidentKind] = {}

    def report(self, problem: str, reason: str, error: BaseException | None = None) -> None:
        """Log the problem unless it is known already; the newest reason is the one that is shown. `error`: what
        the system said."""
        if isinstance(error, OSError):
            self._kinds[problem] = IncidentKind.DISK_FULL if _is_full(error) else IncidentKind.DISK_FAILED
        if problem not in self._reasons:
            log.warning(f"{problem}: {reason}")
        self._reasons[problem] = reason

    def solve(self, problem: str) -> None:
        """Remove the problem, if it is open."""
        self._reasons.pop(problem, None)
        self._kinds.pop(problem, None)

    def __contains__(self, problem: str) -> bool:
        return problem in self._reasons

    @property
    def incidents(self) -> tuple[IncidentKind, ...]:
        """What the open problems are of: a disk that is full, or fails otherwise."""
        return tuple(set(self._kinds.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """The open problems without their reasons, which may name folders of this machine."""
        return tuple(self._reasons)

    def __str__(self) -> str:
        return "; ".join(f"{problem}: {reason}" for problem, reason in list(self._reasons.items()))


def _is_full(error: OSError) -> bool:
    return isinstance(error, DiskFull) or error.errno in (errno.ENOSPC, errno.EDQUOT)
