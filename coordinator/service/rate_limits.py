"""Rate limits of calls: token buckets. `rpc` has one set for each kind of call. No clock of its own."""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A limit on one caller's calls: a token bucket's rate and size."""

    per_second: float
    burst: int  # calls at once, after a while without any


class TokenBuckets:
    """A token bucket for each caller. A full one is as good as none: it is forgotten when there are many."""

    def __init__(self, rate: RateLimit, max_buckets: int = 10_000) -> None:
        self.rate = rate
        self._max_buckets = max_buckets
        self._left: dict[Hashable, tuple[float, float]] = {}  # calls left, and when it was so

    def take(self, caller: Hashable, now: float) -> bool:
        """Count one call at `now` (seconds). Returns False for one too many, which is not counted."""
        left = self._at(caller, now)
        if left < 1:
            return False
        if len(self._left) >= self._max_buckets:
            self._forget(now)
        self._left[caller] = (left - 1, now)
        return True

    def empty(self, caller: Hashable, now: float) -> bool:
        """Whether the next call would be one too many; nothing is counted."""
        return self._at(caller, now) < 1

    def _at(self, caller: Hashable, now: float) -> float:
        left, then = self._left.get(caller, (self.rate.burst, now))
        return min(self.rate.burst, left + (now - then) * self.rate.per_second)

    def _forget(self, now: float) -> None:
        """Drop the buckets that are full again; where all of a crowd are busy, all of them."""
        busy = {caller: seen for caller, seen in self._left.items() if self._at(caller, now) < self.rate.burst}
        self._left = busy if len(busy) < self._max_buckets else {}
