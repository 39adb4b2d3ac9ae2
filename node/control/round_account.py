"""A node's account of a round, which it gives when the coordinator asks for it: from its ring of incidents, its
book of rounds, its tallies of paths, its clock, its owner's limits, and what is wrong with it now."""

import time
from collections.abc import Callable, Iterable, Mapping

from atoll.comm.ids import NodeId, Round
from atoll.comm.incidents import IncidentKind, mask
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.transport.path_tally import PathTallies, PathTally
from atoll.node.control.clock_offset import ClockOffset
from atoll.node.control.event_ring import EventRing
from atoll.node.control.round_book import RoundBook

MAX_INCIDENTS, MAX_LINKS = 16, 16  # of an account: the latest, and the oddest
LEAD_SECONDS = 1.0  # before a round is heard of: what happened then may be its doing


class Accountant:
    """What a node remembers of its rounds, to account for them."""

    def __init__(self, tallies: PathTallies, clock: ClockOffset, away: Callable[[float, float], float]) -> None:
        """`away(start, end)`: the longest time, within these seconds of the monotonic clock, in which the
        coordinator did not answer."""
        self.ring, self.book = EventRing(), RoundBook()
        self._tallies, self._clock, self._away = tallies, clock, away
        self.conditions: Callable[[], Iterable[IncidentKind]] = tuple  # what is wrong with the node now
        # Bytes a second that its owner lets it send, and take in; 0: no limit.
        self.limits: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        self._accounted: set[tuple[str, int]] = set()  # by session

    def record(self, kind: IncidentKind, peer: NodeId | None = None, value: float = 0.0) -> None:
        """Remember an incident."""
        self.ring.record(time.monotonic(), kind, peer, value)

    def incidents(self) -> int:
        """The kinds of incidents of the round under way, as `mask` has them, for who reports its end."""
        now = time.monotonic()
        entry = self.book.latest
        since = entry.began - LEAD_SECONDS if entry is not None else now
        return mask([*(i.kind for i in self.ring.between(since, now)), *self._lasting()])

    def answer(self, round_: int, session: str) -> pb.RoundAccount | None:
        """The account of a round, once in each session; None: it was given."""
        if (session, round_) in self._accounted:
            return None
        self._accounted = {(s, r) for s, r in self._accounted if s == session and r > round_ - 8} | {
            (session, round_)
        }
        return self.account(round_, time.monotonic())

    def account(self, round_: int, now: float) -> pb.RoundAccount:
        """The account of a round, at `now`, seconds of the monotonic clock."""
        account = pb.RoundAccount(clock=self._clock.seconds)
        if (entry := self.book.entry(round_, now)) is not None:
            began, ended = entry.began - LEAD_SECONDS, entry.ended or now
            account.steps, account.computing, account.data = entry.steps, entry.computing, entry.data
            account.still, account.paused, account.away = entry.still, entry.paused, self._away(began, ended)
            for found in self.ring.between(began, ended)[-MAX_INCIDENTS:]:
                incident = account.incidents.add(kind=found.kind, age=max(now - found.at, 0.0), value=found.value)
                incident.node_id = found.peer or ""
        known = {incident.kind for incident in account.incidents}
        for kind in self._lasting():
            if kind not in known and len(account.incidents) < MAX_INCIDENTS:
                account.incidents.add(kind=kind, value=self._clock.seconds * (kind is IncidentKind.CLOCK_OFF))
        tallies = self._tallies.rounds.get(Round(round_), {})
        for node in oddest(tallies, self._tallies.usual):
            account.links.append(_link(node, tallies[node], self._tallies.usual.get(node, 0.0)))
        account.sent = sum(max(tally.sent, 0) for tally in tallies.values())
        account.received = sum(max(tally.received, 0) for tally in tallies.values())
        account.limit_up, account.limit_down = self.limits()
        return account

    def _lasting(self) -> list[IncidentKind]:
        lasting = list(self.conditions())
        return [*lasting, IncidentKind.CLOCK_OFF] if self._clock.seconds else lasting


def oddest(tallies: Mapping[NodeId, PathTally], usual: Mapping[NodeId, float]) -> list[NodeId]:
    """The peers whose paths an account tells of: all, or of many those that were silent, lost segments, or took
    long."""

    def oddity(node: NodeId) -> tuple[float, float, float]:
        tally = tallies[node]
        expected = tally.sent / usual[node] if usual.get(node) else 0.0
        return -tally.mute, -tally.resent / max(tally.segments, 100), expected - tally.busy

    return sorted(tallies, key=oddity)[:MAX_LINKS]


def _link(node: NodeId, tally: PathTally, usual: float) -> pb.LinkAccount:
    return pb.LinkAccount(
        node_id=node,
        sent=max(tally.sent, 0),
        received=max(tally.received, 0),
        busy=tally.busy,
        usual=usual,
        segments=max(tally.segments, 0),
        resent=max(tally.resent, 0),
        rtt=tally.rtt,
        queue=tally.queue,
        mute=tally.mute,
        deaf=tally.deaf,
    )
