"""What a node's own link can carry, seen in passing: the best rate that its transfers reached. Pure.

The average of a reduce says little, since whoever waits for a slow peer is slow too. But while the link was the
bottleneck its rate was the link's, and somewhere in the reduce it was, if it ever is.
"""

from collections import deque
from collections.abc import Mapping

from atoll.comm.ids import NodeId

WINDOWS = 2.0, 1.0  # seconds; shorter bursts are what buffers take, not what the link carries

PACE = 1.02  # times what the link carried: in bursts above that, packets are lost
PROBE = 1.5
REST = 8
MOST = 64  # round trips that a node tells


class Rate:
    """The highest rate of a counter over any two seconds; over any one while it has not been seen for longer."""

    def __init__(self) -> None:
        self._peaks = [Peak(window) for window in WINDOWS]

    def add(self, now: float, total: int) -> None:
        """The counter stands at `total`."""
        for peak in self._peaks:
            peak.add(now, total)

    @property
    def best(self) -> float:
        """A second."""
        return next((peak.rate for peak in self._peaks if peak.rate), 0.0)


class Peak:
    """The highest rate of a counter over any `window` seconds."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._samples = deque[tuple[float, int]]()
        self.rate = 0.0  # a second

    def add(self, now: float, total: int) -> None:
        """The counter stands at `total`. A link that has nothing to carry says nothing of what it can."""
        if self._samples and total == self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, total))
        while len(self._samples) > 2 and now - self._samples[1][0] >= self._window:
            self._samples.popleft()
        then, before = self._samples[0]
        if now - then >= self._window:
            self.rate = max(self.rate, (total - before) / (now - then))


class Pace:
    """How fast a node sends: a little above what its link was seen to carry, so that no queue builds up. Now and
    then it sends faster, to see whether the link carries more."""

    def __init__(self) -> None:
        self._seen = 0.0  # bytes a second
        self._probing = True
        self._rest = 0  # reduces until the next probe

    def next(self, rate: float) -> float:
        """Of the next reduce, in bytes a second, when the link carried `rate` in the last ones; 0: no limit."""
        if self._probing and rate > 1.1 * self._seen:
            self._rest = 0  # it does
        elif self._probing:
            self._rest = REST
        else:
            self._rest = max(self._rest - 1, 0)
        self._probing, self._seen = self._rest == 0, rate
        return rate * (PROBE if self._probing else PACE)


def some(trips: Mapping[NodeId, float], most: int = MOST) -> dict[NodeId, float]:
    """Round trips that tell who is near whom: the shortest, and some of all others."""
    order = sorted(trips, key=lambda node: trips[node])
    near, rest = order[: most // 2], order[most // 2 :]
    step = -(-len(rest) // (most - most // 2)) or 1
    return {node: trips[node] for node in (*near, *rest[::step])}
