"""The reports that a member has for the coordinator: their order, which of them travel together, and which is to
be sent now. Pure: told the time, in seconds of any clock that does not go back.

    post --> waiting --take--> in flight --acknowledge--> gone

A report leaves when the one before it in its queue was acknowledged, and is in flight until it is acknowledged
itself, however often it must be said; a new session drops all of them, as nobody would take them any more. A peer
that is lost again and again waits to be reported once: else the node's state would have a long queue before it
when the coordinator was away for long. Seals, completed reduces, reached steps and audits have a queue of their
own each, so that nothing else waits for their acknowledgements; that a seal is too long goes with completed
reduces, before which it has to come. `ControlClient` sends what is here.
"""

from collections import deque
from math import inf

from atoll.comm.proto import atoll_pb2 as pb

BATCH_SECONDS = 0.1  # seconds for which a report waits when more of its kind are to follow
KINDS_APART = ("chunks_sealed", "reduce_complete", "steps_reached", "audit_reported")  # with a queue of their own
# What is too long is said before that it is held: else that could be the last word before the commit.
KIND_BEFORE = {"seal_outsized": "reduce_complete"}  # kinds that go with another's queue


class SessionLost(Exception):
    """A session that the coordinator no longer counts among the members'."""


class ReportQueue:
    """Reports in their order, one of them in flight at a time."""

    def __init__(self, kind: str) -> None:
        self.kind = kind  # the field of `pb.ReportRequest`; empty: all that have no queue of their own
        self.in_flight: pb.ReportRequest | None = None
        self._waiting: deque[tuple[float, pb.ReportRequest]] = deque()  # with the time at which each was posted
        self._more = False  # others follow the newest one soon

    def post(self, report: pb.ReportRequest, now: float, more: bool) -> None:
        """Add a report; `more`: others follow it soon. Seals join those of their fence that still wait; the loss
        of a peer that still waits to be reported is not added again."""
        last = self._waiting[-1][1] if self._waiting else None
        if last is not None and report.HasField("chunks_sealed") and report.fence == last.fence:
            last.chunks_sealed.MergeFrom(report.chunks_sealed)
        elif not any(_same_loss(report, waiting) for _, waiting in self._waiting):
            self._waiting.append((now, report))
        self._more = more

    def pause(self, now: float) -> float:
        """Seconds until the next report is to be sent; 0: now; inf: not before something else happens."""
        if self.in_flight is not None or not self._waiting:
            return inf
        since = self._waiting[0][0]
        return max(0.0, since + BATCH_SECONDS - now) if self._more and len(self._waiting) == 1 else 0.0

    def take(self) -> pb.ReportRequest:
        """The next report, in flight from now on. Raises `IndexError` if none waits."""
        self.in_flight = self._waiting.popleft()[1]
        return self.in_flight

    def acknowledge(self, ack: pb.Ack) -> None:
        """Be done with the report in flight. Raises `SessionLost` if the session is no longer a member's."""
        self.in_flight = None
        if not ack.known:
            raise SessionLost(ack.reason)

    def clear(self) -> None:
        """Drop every report, the one in flight too."""
        self._waiting.clear()
        self.in_flight, self._more = None, False


def _same_loss(report: pb.ReportRequest, other: pb.ReportRequest) -> bool:
    """Whether both say that one peer was lost in one attempt, for whatever reason."""
    both = report.HasField("peer_unreachable") and other.HasField("peer_unreachable")
    same = report.peer_unreachable.node_id == other.peer_unreachable.node_id
    return both and same and report.fence == other.fence


class ReportOutbox:
    """All queues of reports of a member."""

    def __init__(self) -> None:
        self.queues = tuple(ReportQueue(kind) for kind in (*KINDS_APART, ""))
        self._by_kind = {queue.kind: queue for queue in self.queues}
        self._session = ""

    def begin_session(self, session: str) -> None:
        """Report under this session from now on; what was to be reported under the one before is dropped."""
        self._session = session
        for queue in self.queues:
            queue.clear()

    def post(self, report: pb.ReportRequest, now: float, more: bool = False) -> ReportQueue:
        """Have a report sent when its turn comes; `more`: others of its kind follow soon. Returns its queue."""
        report.session = self._session
        kind = report.WhichOneof("report") or ""
        queue = self._by_kind.get(KIND_BEFORE.get(kind, kind), self._by_kind[""])
        queue.post(report, now, more)
        return queue
