"""The estimate of what a node's own link carries, learned from its connections to all peers while a reduce is
under way; and how fast the node sends accordingly.

`sample` is called a few times in each second of a reduce. It reads the kernel's counters of each connection, keeps
what the link carried up and down at best (`bandwidth`), and sets the paces (`pacing`): of the node as a whole, and
to each peer whose link is slower.
"""

from collections.abc import Collection

from atoll.comm.ids import NodeId, Round
from atoll.comm.transport.bandwidth import BurstRate, LinkEstimate, PeakRate
from atoll.comm.transport.connection import ByteCounter, Link, RateLimiter
from atoll.comm.transport.pacing import LinkPacer
from atoll.comm.transport.path_tally import PathTallies
from atoll.comm.transport.peer import Peer
from atoll.comm.transport.stream_policy import LONG_PATH_RTT

RATE_INTERVAL = 2  # samples between two looks at the rates


class LinkEstimator:
    """The estimates of one node, from reduce to reduce. All rates are bytes a second; 0: not known."""

    def __init__(self, counter: ByteCounter) -> None:
        self.limiter = RateLimiter(0, burst=0.02)  # for all that goes over long paths
        self.region_peers: set[NodeId] | None = None  # peers of this node's region; None: there are no regions
        self.rate_inside = self.rate_outside = 0.0  # carried up to those peers, and to all others
        self._counter, self._pacer = counter, LinkPacer()
        self._up, self._down = LinkEstimate(), LinkEstimate()
        self.tallies = PathTallies()
        self.begin()

    @property
    def rate_up(self) -> float:
        """Bytes a second that this node's link carried up in the last reduces, at best; 0: not known."""
        return self._up.rate

    @property
    def rate_down(self) -> float:
        """Bytes a second that this node's link carried down in the last reduces, at best; 0: not known."""
        return self._down.rate

    def begin(self, round: Round | None = None) -> None:
        """Begin another reduce, of this round: its bytes are counted from zero, the pace and the rates known so
        far stay."""
        if round is not None:
            self.tallies.begin(round)
        self._up.begin()
        self._down.begin()
        self.limiter.change(self._pacer.rate)
        self._outside_peak = PeakRate()
        # Within a region a reduce waits for other regions: what a link carries shows in bursts only.
        self._inside_peak = 0.0
        self._seen: dict[Link, tuple[int, int]] = {}  # bytes acknowledged, and received, at the last sample
        # of each peer: bytes that came from it, and that it took, in this reduce; and how fast they did at best
        self._peer_bytes: dict[NodeId, tuple[int, int]] = {}
        self._peer_rates: dict[NodeId, tuple[BurstRate, BurstRate]] = {}
        self._acked = self._received = self._outside = 0  # bytes in this reduce; of the first, to other regions
        self._samples = 0

    def sample(self, now: float, peers: Collection[Peer]) -> None:
        """Look at all links; `now`: the loop's seconds."""
        trips: dict[NodeId, tuple[float, float]] = {}  # of those that took bytes: seconds without a queue, and now
        for peer in peers:
            for link in peer.links:
                self._add(now, peer.node, link, trips)
        self.tallies.end_sample(now)
        for peer in peers:
            if peer.pacer is not None and peer.node in trips:
                rtt, smoothed = trips[peer.node]
                peer.limiter.adjust(peer.pacer.look(rtt, smoothed - rtt))
            elif peer.pacer is not None:
                peer.limiter.adjust(peer.pacer.rest())
        if trips:
            rtt = max(rtt for rtt, _ in trips.values())
            queue = min(smoothed - rtt for rtt, smoothed in trips.values())
            sent = self._counter.up
            self.limiter.adjust(self._pacer.look(now, sent, self._acked, rtt, queue, self.rate_up))
        if self._samples % RATE_INTERVAL == 0:
            for node, totals in self._peer_bytes.items():
                rates = self._peer_rates.setdefault(node, (BurstRate(), BurstRate()))
                for rate, total in zip(rates, totals, strict=True):
                    rate.add(now, total)
            self._up.add(now, self._acked, self._counter.up)
            self._down.add(now, self._received)
            if self.region_peers is not None:
                self._outside_peak.add(now, self._outside)
                self.rate_inside = self._inside_peak or self.rate_inside
                self.rate_outside = self._outside_peak.best or self.rate_outside
        self._samples += 1

    @property
    def seen(self) -> dict[NodeId, tuple[float, float]]:
        """Bytes a second that came from each peer at best in this reduce, and that each took."""
        return {node: (came.rate, took.rate) for node, (came, took) in self._peer_rates.items()}

    def _add(self, now: float, node: NodeId, link: Link, trips: dict[NodeId, tuple[float, float]]) -> None:
        """What one connection carried since the last sample."""
        if (path := link.path()) is None:
            return
        self.tallies.add(now, node, link, path)
        was_acked, was_received = self._seen.get(link, (path.acked, path.received))
        self._seen[link] = path.acked, path.received
        acked = path.acked - was_acked
        self._acked += acked
        received = path.received - was_received
        self._received += received
        came, took = self._peer_bytes.get(node, (0, 0))
        self._peer_bytes[node] = came + received, took + acked
        if acked and path.rtt > LONG_PATH_RTT:
            rtt, smoothed = trips.get(node, (path.rtt, path.smoothed))
            trips[node] = min(rtt, path.rtt), min(smoothed, path.smoothed)
        if self.region_peers is not None and node not in self.region_peers:
            self._outside += acked
        elif self.region_peers is not None and acked:
            self._inside_peak = max(self._inside_peak, path.burst)
