"""Rate limits: token buckets, one for each caller, address or member. Pure: the caller tells the time.

Called by whatever a stranger or a member can make work: the coordinator's calls (`rpc`), its door, the data plane.
"""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A limit on what one caller does, in calls, connections or bytes: a token bucket's rate and size."""

    per_second: float
    burst: int  # at once, after a while without any


class TokenBuckets:
    """A token bucket for each caller. A full one is as good as none: it is forgotten when there are many."""

    def __init__(self, rate: RateLimit, max_buckets: int = 10_000) -> None:
        self.rate = rate
        self._max_buckets = max_buckets
        self._left: dict[Hashable, tuple[float, float]] = {}  # tokens left, and when it was so

    def take(self, caller: Hashable, now: float, cost: float = 1) -> bool:
        """Count `cost` at `now` (seconds). Returns False for too much, which is not counted."""
        left = self._at(caller, now)
        if left < cost:
            return False
        self._set(caller, left - cost, now)
        return True

    def spend(self, caller: Hashable, now: float, cost: float) -> float:
        """Count `cost` at `now` (seconds) in any case, for it has happened. Returns the seconds that the caller is
        to wait before more, 0: none."""
        left = self._at(caller, now) - cost
        self._set(caller, left, now)
        return max(-left / self.rate.per_second, 0.0)

    def refund(self, caller: Hashable, now: float, cost: float = 1) -> None:
        """Give back `cost`: it was no stranger's after all."""
        self._set(caller, self._at(caller, now) + cost, now)

    def empty(self, caller: Hashable, now: float) -> bool:
        """Whether the next call would be one too many; nothing is counted."""
        return self._at(caller, now) < 1

    def _at(self, caller: Hashable, now: float) -> float:
        left, then = self._left.get(caller, (self.rate.burst, now))
        return min(self.rate.burst, left + (now - then) * self.rate.per_second)

    def _set(self, caller: Hashable, left: float, now: float) -> None:
        if len(self._left) >= self._max_buckets and caller not in self._left:
            self._forget(now)
        self._left[caller] = (left, now)

    def _forget(self, now: float) -> None:
        """Drop the buckets that are full again; where all of a crowd are busy, all of them."""
        busy = {caller: seen for caller, seen in self._left.items() if self._at(caller, now) < self.rate.burst}
        self._left = busy if len(busy) < self._max_buckets else {}
