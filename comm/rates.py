"""What a node's own link can carry, seen in passing: the best rate that its transfers reached. Pure.

The average of a reduce says little, since whoever waits for a slow peer is slow too. But while the link was the
bottleneck its rate was the link's, and somewhere in the reduce it was, if it ever is.
"""

from collections import deque

WINDOW = 1.0  # seconds; shorter bursts are what buffers take, not what the link carries


class Peak:
    """The highest rate of a counter over any second."""

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        self._samples = deque[tuple[float, int]]()
        self.rate = 0.0  # a second

    def add(self, now: float, total: int) -> None:
        """The counter stands at `total`."""
        self._samples.append((now, total))
        while len(self._samples) > 2 and now - self._samples[1][0] >= self._window:
            self._samples.popleft()
        then, before = self._samples[0]
        if now - then >= self._window:
            self.rate = max(self.rate, (total - before) / (now - then))
