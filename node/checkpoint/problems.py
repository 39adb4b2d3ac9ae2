"""The open problems of a node's disk: what does not work now, and why. Each is logged once for as long as it
lasts, and shown while it does."""

import logging

log = logging.getLogger("atoll.node")


class Problems:
    """The checkpointer's open problems, by what does not work. Reported to and read from several threads."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def report(self, problem: str, reason: str) -> None:
        """Log the problem unless it is known already; the newest reason is the one that is shown."""
        if problem not in self._reasons:
            log.warning(f"{problem}: {reason}")
        self._reasons[problem] = reason

    def solve(self, problem: str) -> None:
        """Remove the problem, if it is open."""
        self._reasons.pop(problem, None)

    def __contains__(self, problem: str) -> bool:
        return problem in self._reasons

    @property
    def names(self) -> tuple[str, ...]:
        """The open problems without their reasons, which may name folders of this machine."""
        return tuple(self._reasons)

    def __str__(self) -> str:
        return "; ".join(f"{problem}: {reason}" for problem, reason in list(self._reasons.items()))
