"""Detection of the peers that are late in a reduce, by the times at which their chunks come. Pure: it is told the
time, and answers what to do.

A peer that says nothing is asked whether it is there, and then lost. One that speaks, and brings no contribution
although its window has room, is lost when its next chunk takes several times longer than chunks take here; it is
also asked anew, as its contribution may have come and been refused, and a run of few members needs them all. So is
one lost that sends each of its contributions in time, and so much later than all others that it has held up the
merges here for longer, in all, than the plan has patience. A sealed chunk that is late in that sense is asked of
others, which costs little if it was on its way.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf
from statistics import median

from atoll.comm.ids import NodeId

LATE_SPREADS = 8  # median absolute deviations beyond the median after which a chunk is late
LATE_TIMES = 3  # times the time after which a chunk is late: so long may a contribution take
MAX_LOOK_SECONDS = 1.0  # between two looks that count: a process that stood still cannot tell who held it up
KNOWN_INTERVALS = 64  # latest times from chunk to chunk that are remembered
MIN_INTERVALS = 8  # times from chunk to chunk that a median takes at least


@dataclass(frozen=True, slots=True)
class PeerDeadlines:
    """The times, in seconds, that a peer has. The defaults are those of a run; the simulation has shorter ones."""

    ping_after: float = 1.5  # of silence, after which a peer is asked whether it is there
    lost_after: float = 5.0  # of silence, after which a peer is lost
    chunk_time: float = 20.0  # that the next chunk of a peer may take at least
    # After which others are asked for a sealed chunk, at least: a busy machine may be silent for so long.
    pull_after: float = 3.0


DEADLINES = PeerDeadlines()


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask a peer that has been silent for a moment whether it is there."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class AskState:
    """Exchange with a peer that speaks what is here and there: what it was to send may be lost, or was refused."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Lost:
    """Tell the coordinator that a peer is lost."""

    node: NodeId
    sentence: str


@dataclass(frozen=True, slots=True)
class PullFrom:
    """Ask others for the sealed chunks of these owners, from which nothing has come for too long."""

    owners: frozenset[NodeId]


class LatePeers:
    """The clock of one reduction. All times are seconds of one clock, which may begin anywhere, also below 0."""

    def __init__(self, deadlines: PeerDeadlines = DEADLINES) -> None:
        self._deadlines = deadlines
        self._chunk_at: dict[NodeId, float] = {}  # when a peer's last chunk came, or it came into the plan
        self._intervals = deque[float]((), KNOWN_INTERVALS)  # from one chunk of a peer to its next
        self._planned_at = self._pulled_at = -inf
        self._asked_at: dict[NodeId, float] = {}  # when a peer that speaks was asked for what it owes
        self._reported_at: dict[NodeId, float] = {}  # when a peer was said to be lost
        self._patience = 0.0  # seconds for which a peer may hold up merges in all; 0: any time
        self._held_up: dict[NodeId, float] = {}  # seconds for which a peer did, in this reduce
        self._looked_at = inf

    def replan(self, now: float, peers: Sequence[NodeId], patience: float = 0.0) -> None:
        """Watch these peers, all of a new plan, from `now` on, in seconds; each of them may be reported lost
        again. A peer that was watched before keeps the time of its last chunk, and for how long it held up
        merges."""
        self._planned_at, self._patience = now, patience
        self._chunk_at = {node: self._chunk_at.get(node, now) for node in peers}
        self._reported_at.clear()

    def chunk_came(self, now: float, node: NodeId) -> None:
        """Take the time of a contribution, a region's sum or a sealed chunk of `node`, of use or not. How long it
        took is counted as its being late is: from the plan on, as an attempt that stood still says nothing of
        how fast chunks come."""
        if node in self._chunk_at:
            self._intervals.append(now - max(self._chunk_at[node], self._planned_at))
            self._chunk_at[node] = now

    def may_report(self, now: float, node: NodeId) -> bool:
        """Whether it is to be said now that `node` is lost: it is in the plan, and that was not said just now."""
        interval = self._deadlines.lost_after
        due = now - self._reported_at.get(node, -inf) >= interval and node in self._chunk_at
        if due:
            self._reported_at[node] = now
        return due

    def look(
        self,
        now: float,
        dues: Mapping[NodeId, str],
        contributors: Set[NodeId],
        holding_up: Collection[NodeId],
        heard: Callable[[NodeId], float | None],
    ) -> list[Ping | AskState | Lost | PullFrom]:
        """Find the peers that are late at `now`, in seconds. `dues`: what each peer that is waited for is to
        bring, in words; `contributors`: those of them whose window has room; `holding_up`: those for which a merge
        waits that has most others' contributions; `heard`: when bytes last came from a peer, in seconds, None if
        there is no link."""
        found: list[Ping | AskState | Lost | PullFrom] = list(self._impatient(now, holding_up))
        deadlines, late = self._deadlines, late_after(self._intervals, self._deadlines.lost_after)
        for node in [node for node in dues if node in self._chunk_at]:  # in an order that can be repeated
            if (heard_at := heard(node)) is None:
                continue  # whoever dials it says so
            silence = now - max(heard_at, self._planned_at)  # before, nobody had anything to say
            if silence > deadlines.lost_after:
                found.append(Lost(node, f"it has been silent for {silence:.0f} s"))
            elif silence > deadlines.ping_after:
                found.append(Ping(node))
            waited = now - max(self._chunk_at[node], self._planned_at)
            limit = max(deadlines.chunk_time, LATE_TIMES * late)
            if node in contributors and waited > limit:
                found.append(Lost(node, f"its {dues[node]} did not come for {waited:.0f} s"))
                if now - self._asked_at.get(node, -inf) >= limit:
                    self._asked_at[node] = now
                    found.append(AskState(node))
        if now - self._pulled_at > (interval := max(late, deadlines.pull_after)):
            self._pulled_at = now
            owners = frozenset(node for node, at in self._chunk_at.items() if at < now - interval)
            found += [PullFrom(owners)] if owners else []
        return found

    def _impatient(self, now: float, holding_up: Collection[NodeId]) -> Iterator[Lost]:
        """Those that have held up merges for too long, of those that do."""
        passed, self._looked_at = min(max(now - self._looked_at, 0.0), MAX_LOOK_SECONDS), now
        for node in holding_up:
            self._held_up[node] = held_up = self._held_up.get(node, 0.0) + passed
            if 0 < self._patience < held_up:
                yield Lost(node, f"it has held up what others contributed for {held_up:.0f} s in all")


def late_after(intervals: Sequence[float], unknown: float) -> float:
    """Seconds after which the next chunk of a peer is late, by those that others took: the median and some median
    absolute deviations; `unknown` where too few are known."""
    if len(intervals) < MIN_INTERVALS:
        return unknown
    middle = median(intervals)
    return middle + LATE_SPREADS * median(abs(interval - middle) for interval in intervals)
