"""Estimates of what a node's own link can carry, seen in passing: the best rate that its transfers reached. Pure.

The average of a reduce says little, since whoever waits for a slow peer is slow too. But while the link was the
bottleneck its rate was the link's, and somewhere in the reduce it was, if it ever is.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from atoll.comm.ids import NodeId

# Seconds, and what a rate over so many counts: shorter bursts are what buffers take, not what the link carries.
RATE_WINDOWS = (2.0, 1.0), (1.0, 0.95), (0.5, 0.85)
DECAY_PER_REDUCE = 0.97  # times the known rate, for each reduce that shows less: it may have had other reasons
MAX_ROUND_TRIPS = 64  # round trips that a node reports at most
# Bytes of a window that say something of a link; else it had little to carry, as whoever only says that it lives:
MIN_WINDOW_BYTES = 4096
MIN_BURST_BYTES = 512  # of one peer, of whom there may be many
BURST_SECONDS = 0.5  # over which a member sees what came from a peer: no longer than those of its peer's own rate
MAX_WITNESSED_PEERS = 64  # peers of which a node reports what it saw


class PeakRate:
    """The highest rate of a counter over any two seconds; a little less than that over less, while it has not been
    seen for so long."""

    def __init__(self) -> None:
        self._peaks = [WindowedMaxRate(window) for window, _ in RATE_WINDOWS]

    def add(self, now: float, *totals: int) -> None:
        """Take a sample: at `now`, in seconds, the counters stand at `totals`."""
        for peak in self._peaks:
            peak.add(now, *totals)

    @property
    def best(self) -> float:
        """The highest rate, a second; 0: not seen for long enough."""
        rates = (peak.rate * counts for peak, (_, counts) in zip(self._peaks, RATE_WINDOWS, strict=True))
        return next((rate for rate in rates if rate), 0.0)


class LinkEstimate:
    """An estimate of what a link carries one way, kept from reduce to reduce."""

    def __init__(self) -> None:
        self._before, self._latest = 0.0, PeakRate()

    @property
    def rate(self) -> float:
        """The rate that the link carries at best, in bytes a second; 0: nothing is known."""
        return max(self._before, self._latest.best)

    def begin(self) -> None:
        """Begin another reduce. The rate stays, or `DECAY_PER_REDUCE` of it where the last reduce showed less than
        that."""
        self._before, self._latest = max(DECAY_PER_REDUCE * self._before, self._latest.best), PeakRate()

    def add(self, now: float, *totals: int) -> None:
        """Take a sample: at `now`, in seconds, the counters stand at `totals`."""
        self._latest.add(now, *totals)


class WindowedMaxRate:
    """The highest rate of a counter over any `window` seconds; of several that count the same, of the slowest.
    Bytes that fill a queue are sent faster than the link carries them, those that leave it are acknowledged faster
    (the rate samples of BBR, Cardwell et al. 2016)."""

    def __init__(self, window: float) -> None:
        self.window = window
        self._samples = deque[tuple[float, tuple[int, ...]]]()
        self.rate = 0.0  # a second

    def add(self, now: float, *totals: int) -> None:
        """Take a sample: at `now`, in seconds, the counters stand at `totals`. A link that has nothing to carry,
        by the first one, says nothing of what it can."""
        if self._samples and totals[0] == self._samples[-1][1][0]:
            self._samples.clear()
        self._samples.append((now, totals))
        while len(self._samples) > 2 and now - self._samples[1][0] >= self.window:
            self._samples.popleft()
        then, before = self._samples[0]
        if now - then >= self.window:
            carried = min(total - was for total, was in zip(totals, before, strict=True))
            if carried >= MIN_WINDOW_BYTES:
                self.rate = max(self.rate, carried / (now - then))


class BurstRate:
    """The highest rate of a counter over any half second, pauses within it included: what one of a sender's peers
    saw of it. Those of all its peers add up to at least what it carried in its own best half second."""

    def __init__(self) -> None:
        self._samples = deque[tuple[float, int]]()
        self.rate = 0.0  # a second

    def add(self, now: float, total: int) -> None:
        """Take a sample: at `now`, in seconds, the counter stands at `total`."""
        samples = self._samples
        samples.append((now, total))
        while len(samples) > 2 and now - samples[1][0] >= BURST_SECONDS:
            samples.popleft()
        then, before = samples[0]
        if now - then >= BURST_SECONDS and total - before >= MIN_BURST_BYTES:
            self.rate = max(self.rate, (total - before) / (now - then))


def sample_peers(peers: Sequence[NodeId], me: int, most: int = MAX_WITNESSED_PEERS) -> list[NodeId]:
    """Of many peers those that a member, the `me`-th, tells what it saw of: all are told of by as many."""
    if len(peers) <= most:
        return list(peers)
    turned = [*peers[me % len(peers) :], *peers[: me % len(peers)]]
    return [turned[i * len(peers) // most] for i in range(most)]


def sample_round_trips(trips: Mapping[NodeId, float], most: int = MAX_ROUND_TRIPS) -> dict[NodeId, float]:
    """Round trips that tell who is near whom: the shortest, and some of all others."""
    order = sorted(trips, key=lambda node: trips[node])
    near, rest = order[: most // 2], order[most // 2 :]
    step = -(-len(rest) // (most - most // 2)) or 1
    return {node: trips[node] for node in (*near, *rest[::step])}
