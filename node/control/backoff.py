"""Pauses between tries: each twice as long as the one before, up to a limit, and shortened at random so that those
who lost the coordinator at the same moment do not come back at the same moment. Pure: told its luck.
`ControlClient` paces its calls and its streams of views with it.
"""

FIRST_RETRY_SECONDS = 0.25  # between the first two tries of a call
FIRST_REOPENING_SECONDS = 0.1  # from the end of a stream of views to the next one
LONGEST_BACKOFF_SECONDS = 2.0  # between two tries at most; with what gRPC adds, less than the coordinator waits


class Backoff:
    """The pauses between the tries of one thing."""

    def __init__(self, first: float) -> None:
        """`first`: the longest that the first pause may be, in seconds."""
        self._first = self._limit = first

    def pause(self, luck: float) -> float:
        """The next pause, in seconds. `luck`: uniform in [0, 1)."""
        limit, self._limit = self._limit, min(2 * self._limit, LONGEST_BACKOFF_SECONDS)
        return limit * (0.5 + 0.5 * luck)

    def reset(self) -> None:
        """Begin with the first pause again: it worked."""
        self._limit = self._first
