"""How often somebody may call: token buckets. No clock of its own."""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimit:
    per_second: float
    burst: int  # calls at once, after a while without any


class TokenBuckets:
    """One bucket for each caller. A caller that was quiet for a while needs none."""

    def __init__(self, rate: RateLimit, most: int = 10_000) -> None:
        self.rate = rate
        self._most = most  # buckets that are kept at a time
        self._left: dict[Hashable, tuple[float, float]] = {}  # calls left, and when it was so

    def take(self, caller: Hashable, now: float) -> bool:
        """Count one call; False: it is one too many, and was not counted."""
        left = self._at(caller, now)
        if left < 1:
            return False
        if len(self._left) >= self._most:
            self._forget(now)
        self._left[caller] = (left - 1, now)
        return True

    def empty(self, caller: Hashable, now: float) -> bool:
        return self._at(caller, now) < 1

    def _at(self, caller: Hashable, now: float) -> float:
        left, then = self._left.get(caller, (self.rate.burst, now))
        return min(self.rate.burst, left + (now - then) * self.rate.per_second)

    def _forget(self, now: float) -> None:
        """Those that are full again; where all of a crowd are busy, everybody."""
        busy = {caller: seen for caller, seen in self._left.items() if self._at(caller, now) < self.rate.burst}
        self._left = busy if len(busy) < self._most else {}
