"""The rests between inner steps of a trainer that may compute only for a share of the time.

What passes between two steps anyway, as while a round is exchanged, is rest, too. A rest is no longer than a
share of `members.stall`, so that nobody takes the trainer for hung: where a step asks for more, the node is paused
for it.
"""

import math
import time
from collections.abc import Callable, Iterator

POLL_SECONDS = 0.05  # between two looks whether the daemon has a command
SLICE_SECONDS = 0.5  # of a rest, after which the ranks agree whether there was one
REST_SHARE = 0.3  # of members.stall: the longest rest between two steps; the next one has the rest of the time
LONGEST_SECONDS = 3600.0  # that are ever owed
FIRST_REST_SECONDS = 60.0  # that are owed for a trainer's first step, which compiled


class Duty:
    """The rest that a trainer owes for the steps that it took."""

    def __init__(self, stall: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`stall`: seconds without an inner step after which a trainer counts as hung."""
        self.longest = REST_SHARE * stall  # seconds of one rest between two steps
        self._clock, self._until, self._steps = clock, 0.0, 0

    def stepped(self, seconds: float, duty: float) -> None:
        """A step has ended just now that took so many seconds, of a trainer that may compute for this share of the
        time."""
        self._steps += 1
        owed = min(rest_seconds(seconds, duty), LONGEST_SECONDS if self._steps > 1 else FIRST_REST_SECONDS)
        self._until = self._clock() + owed

    @property
    def owed(self) -> float:
        """Seconds of rest before the next step; 0: none."""
        return max(self._until - self._clock(), 0.0)


def rest_seconds(step: float, duty: float) -> float:
    """The seconds of rest after a step of `step` seconds for which steps take this share of the time."""
    return step * (1 / duty - 1)


def rest(seconds: float, has_command: Callable[[], bool]) -> Iterator[bool]:
    """Rest for so long, slice by slice, as many on each rank; yields after each whether the daemon has a command
    here, for the caller to end the rest by."""
    slices = math.ceil(seconds / SLICE_SECONDS)
    for _ in range(slices):
        end = time.monotonic() + seconds / slices
        while (left := end - time.monotonic()) > 0 and not has_command():
            time.sleep(min(left, POLL_SECONDS))
        yield has_command()
