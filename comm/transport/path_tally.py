"""What the paths to a node's peers carried in each of the latest reduces, and what went wrong on them, by the
kernel's counters of each connection. Pure: it is given samples, a few times a second of a reduce.

    busy     bytes were on their way to the peer, or waited to be sent, and it had room for them
    mute     nothing that was sent was acknowledged, though something was on its way
    deaf     the same, and no segment came from the peer's machine either: not even what it sends again, as nothing
             of this node's comes there

A path whose other end hears nothing while this one hears it loses what goes there, and only that.
"""

from dataclasses import dataclass, field

from atoll.comm.ids import NodeId, Round
from atoll.comm.transport.connection import Link, PathStats

ROUNDS = 4  # latest ones, of which tallies are kept
MAX_PEERS = 256  # in one round
MIN_RATE_BYTES = 1 << 15  # sent to a peer in a round: less says nothing of what the path carries
RATE_WEIGHT = 0.25  # of the latest round's rate in the usual one


@dataclass(slots=True)
class PathTally:
    """One peer in one round. Seconds, and bytes of this node's kernel."""

    sent: int = 0  # that reached the peer
    received: int = 0
    busy: float = 0.0
    segments: int = 0  # that were sent
    resent: int = 0  # of these
    rtt: float = 0.0  # the shortest round trip; 0: not known
    mute: float = 0.0  # the longest such time
    deaf: float = 0.0
    _queued: float = 0.0  # seconds of queue, times seconds in which bytes were on their way
    _waiting: float = 0.0  # of the latter
    _acked_at: float | None = None  # since when nothing is acknowledged; None: nothing is on its way
    _heard_at: float = 0.0  # when the latest segment came

    @property
    def rate(self) -> float:
        """Bytes a second while bytes were on their way; 0: hardly any were."""
        return self.sent / self.busy if self.busy > 0 and self.sent >= MIN_RATE_BYTES else 0.0

    @property
    def queue(self) -> float:
        """Seconds by which round trips were longer while bytes were on their way, on average."""
        return self._queued / self._waiting if self._waiting > 0 else 0.0

    def add(self, now: float, moves: list["PathMove"]) -> None:
        """Take what moved on each of the peer's connections since the last sample."""
        for move in moves:
            self.sent += move.acked
            self.received += move.received
            self.segments += move.sent
            self.resent += move.resent
            self.rtt = min(self.rtt or move.rtt, move.rtt) if move.rtt else self.rtt
            if move.flying:
                self._queued += max(move.smoothed - self.rtt, 0.0) * move.seconds
                self._waiting += move.seconds
        self.busy += max((min(move.busy, move.seconds) for move in moves), default=0.0)
        if any(move.heard for move in moves):
            self._heard_at = now
        if not any(move.flying for move in moves):
            self._acked_at = None
        elif self._acked_at is None or any(move.acked > 0 for move in moves):
            self._acked_at = now
        else:
            self.mute = max(self.mute, now - self._acked_at)
            self.deaf = max(self.deaf, now - max(self._acked_at, self._heard_at))


@dataclass(frozen=True, slots=True)
class PathMove:
    """What moved on one connection from one sample to the next."""

    seconds: float  # between them
    acked: int
    received: int
    sent: int  # segments
    resent: int
    heard: int  # segments that came in
    busy: float  # seconds
    flying: bool  # bytes are on their way, or wait to be
    rtt: float
    smoothed: float


@dataclass(slots=True)
class _Seen:
    at: float
    path: PathStats


@dataclass(slots=True)
class PathTallies:
    """The tallies of the latest rounds, and the rates that each path usually had."""

    rounds: dict[Round, dict[NodeId, PathTally]] = field(default_factory=dict)
    usual: dict[NodeId, float] = field(default_factory=dict)  # bytes a second, before the latest round
    _round: Round | None = None
    _seen: dict[Link, _Seen] = field(default_factory=dict)
    _moves: dict[NodeId, list[PathMove]] = field(default_factory=dict)

    def begin(self, round: Round) -> None:
        """Begin the tally of a round's reduce, or of another part of it; what an earlier round had is usual
        now."""
        self._seen.clear()
        self._moves.clear()
        if round == self._round:
            return
        for node, tally in self.rounds.get(self._round, {}).items() if self._round is not None else ():
            if tally.rate:
                was = self.usual.get(node, tally.rate)
                self.usual[node] = was + RATE_WEIGHT * (tally.rate - was)
        self._round = round
        self.rounds[round] = {}
        for old in sorted(self.rounds)[:-ROUNDS]:
            del self.rounds[old]

    def add(self, now: float, node: NodeId, link: Link, path: PathStats) -> None:
        """Take a sample of one of the node's connections to a peer."""
        if (seen := self._seen.get(link)) is None:
            self._seen[link] = _Seen(now, path)
            return
        was = seen.path
        self._moves.setdefault(node, []).append(
            PathMove(
                now - seen.at,
                path.acked - was.acked,
                path.received - was.received,
                path.sent - was.sent,
                path.resent - was.resent,
                path.heard - was.heard,
                max(path.busy - was.busy, 0.0),
                path.flying,
                path.rtt,
                path.smoothed,
            )
        )
        seen.at, seen.path = now, path

    def end_sample(self, now: float) -> None:
        """Enter what was added since the last time."""
        if self._round is None:
            return
        tallies = self.rounds[self._round]
        for node, moves in self._moves.items():
            if node in tallies or len(tallies) < MAX_PEERS:
                tallies.setdefault(node, PathTally()).add(now, moves)
        self._moves.clear()
