"""The rest between two inner steps of a trainer that may compute only for a share of the time."""

import time
from collections.abc import Callable

POLL_SECONDS = 0.05  # between two looks whether the daemon has a command
LONGEST_SECONDS = 60.0  # of one rest: a step that compiled says nothing of those that follow


def rest(step: float, duty: float, has_command: Callable[[], bool]) -> None:
    """Rest after a step of `step` seconds for so long that steps take this share of the time; less if there is a
    command."""
    until = time.monotonic() + rest_seconds(step, duty)
    while (left := until - time.monotonic()) > 0 and not has_command():
        time.sleep(min(left, POLL_SECONDS))


def rest_seconds(step: float, duty: float) -> float:
    """The seconds of that rest."""
    return min(step * (1 / duty - 1), LONGEST_SECONDS)
