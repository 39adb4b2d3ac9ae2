"""A node's side of the control plane: join, a stream of views, reports and heartbeats. What `ControlClient`
decides with its outbox, its stream's freshness and its backoff is decided here with the same ones; around them is
a network of messages for gRPC, and the virtual clock."""

import itertools
from math import inf
from typing import TYPE_CHECKING, Any

from sim import invariants
from sim.audit import key_of
from sim.engine import Call

from atoll.comm.ids import NodeId
from atoll.comm.pause_reasons import PauseReason
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto.packed_plan import OtherRoster, unpack_plan
from atoll.coordinator.service import validation
from atoll.node.control.backoff import FIRST_REOPENING_SECONDS, FIRST_RETRY_SECONDS, Backoff
from atoll.node.control.freshness import StreamFreshness
from atoll.node.control.outbox import ReportOutbox, ReportQueue, SessionLost
from atoll.node.control.roster import Roster
from atoll.node.state_machine import events as node_ev

if TYPE_CHECKING:
    from sim.node import Node
    from sim.service import Service

DEADLINE = 2.0  # seconds for one call
BEAT = 1.0  # seconds


class Control:
    def __init__(self, node: "Node") -> None:
        self.node, self.world = node, node.world
        self.me, self.life = NodeId(""), 0
        self.joining = True
        self.left = False
        self._numbers = itertools.count(1)
        self._ticket = 0  # of the latest join: older ones' answers do not count
        self.stream = 0  # number of the open one; 0: none
        self._asked: dict[int, ReportQueue] = {}  # by the number of the latest call for what is in flight there
        self._session = ""  # what reports and heartbeats are signed with
        self.outbox, self._freshness = ReportOutbox(), StreamFreshness()
        self.roster = Roster()
        self._accounted = "", 0  # the session in which it accounted last, for which round
        self._joins, self._streams = Backoff(FIRST_RETRY_SECONDS), Backoff(FIRST_REOPENING_SECONDS)

    @property
    def session(self) -> tuple[NodeId, int]:
        return self.me, self.life

    def admits(self, node: "Node") -> bool:
        """Whether it accepts connections of that process."""
        return self.roster.keys.get(node.me) == node.host.key

    # Join

    def join(self) -> None:
        if self.left or not self.joining:
            return
        self._ticket = next(self._numbers)
        host = self.node.host
        address = "" if host.leaf else host.name
        if not host.session:  # a new disk, or nobody has admitted the machine so that it heard of it
            host.key = key_of(host.name, self.node.engine.now)
        self._call(self._service.join, self._ticket, host.session, host.key, host.name, address, host.role)
        self._again(self._joins, self._rejoin_if, self._ticket)

    def _rejoin_if(self, ticket: int) -> None:
        if self.joining and ticket == self._ticket:
            self.join()

    def joined(self, ticket: int, node: NodeId, life: int, session: str) -> None:
        if not self.joining or ticket != self._ticket or self.left:
            return
        first = self.me == ""
        self.me, self.life, self.joining = node, life, False
        self.node.host.session = self._session = session
        self.outbox.begin_session(session)
        self._freshness.begin_session()
        self._joins.reset()
        self._streams.reset()
        self.world.admitted(self.node)
        if first:
            self.node.trainer.start()
        else:
            self.node.feed(node_ev.Rejoined())
        self.watch()
        self._beat(self.session)

    def lost(self) -> None:
        """The coordinator no longer counts this session among the members'."""
        if not self.joining:
            self._hang_up()
            self._asked.clear()
            self.joining = True
            self.join()

    # Views

    def watch(self) -> None:
        if self.joining or self.left:
            return
        self.stream = next(self._numbers)
        self._freshness.open_stream()
        roster = self.roster.open_stream()
        if self._service.alive:
            self._call(self._service.watch, self.stream, self._session, roster)
        else:
            self.broke(self.stream)

    def saw(self, number: int, encoded: bytes) -> None:
        if number != self.stream:
            return
        view = pb.View.FromString(encoded)
        if (changed := self.roster.read(view)) is None:
            self._hang_up()
            return self._watch_soon()
        try:
            unpack_plan(view, self.roster.members)
        except OtherRoster:
            if self.roster.is_late(view):
                return
            raise  # a view brings the members that its plan goes by
        if view.account and self._accounted != (self._session, view.account):
            self._accounted = self._session, view.account
            self.node.reports.account(view.account, pb.RoundAccount())
        if changed:
            invariants.rosters_are_the_views(self.node, view, self.roster)
            self.node.plane.links.admit(self.roster.members.keys())
        self._streams.reset()
        self._freshness.see((view.incarnation, view.version))
        self.node.feed(node_ev.ViewArrived(view))

    def broke(self, number: int) -> None:
        if number == self.stream:
            self.stream = 0
            self._watch_soon()

    def _watch_soon(self) -> None:
        self.node.later(self._streams.pause(self.world.rng.random()), self._watch_if, self.session)

    def _watch_if(self, session: tuple[NodeId, int]) -> None:
        if not self.stream and session == self.session:
            self.watch()

    def refused(self, number: int) -> None:
        if number == self.stream:
            self.lost()

    def _hang_up(self) -> None:
        """Close the stream; the coordinator notices, at some time or never."""
        if self.stream:
            self._call(self._service.closed, self.stream, *self.session, client=False)
            self.stream = 0

    # Heartbeats

    def _beat(self, session: tuple[NodeId, int]) -> None:
        if session != self.session or self.joining or self.left:
            return
        self.node.trainer.end_if_hung()
        phase, round_, step = self.node.progress
        beat = pb.HeartbeatRequest(session=self._session, phase=phase, round=round_, inner_step=step)
        paused, beat.saves_bytes = self.node.wishes
        beat.pause = PauseReason.TOLD * paused
        self._call(self._service.heartbeat, beat.SerializeToString())
        self.node.later(BEAT, self._beat, session)

    def beaten(self, session: str, ack: pb.Ack) -> None:
        if session != self._session or self.joining or self.left:
            return
        if not ack.known:
            self.lost()
        elif self.stream and self._freshness.is_stale((ack.incarnation, ack.version), self.node.engine.now):
            self._hang_up()
            self._watch_soon()

    # Reports

    def report(self, report: pb.ReportRequest, more: bool = False) -> None:
        """Send a report when its turn comes; `more`: others of its kind follow soon."""
        self.world.truth.hear(validation.event(*self.session, report))
        self._send_next(self.outbox.post(report, self.node.engine.now, more))

    def _send_next(self, queue: ReportQueue) -> None:
        pause = queue.pause(self.node.engine.now)
        if self.joining or self.left or pause == inf:
            return
        if pause:
            self.node.later(pause, self._send_next, queue)
        else:
            self._send(queue, queue.take().SerializeToString(), Backoff(FIRST_RETRY_SECONDS))

    def _send(self, queue: ReportQueue, request: bytes, backoff: Backoff) -> None:
        number = next(self._numbers)
        self._asked[number] = queue
        self._call(self._service.report, number, request)
        self._again(backoff, self._send_again, number, request, backoff)

    def _send_again(self, number: int, request: bytes, backoff: Backoff) -> None:
        queue = self._asked.pop(number, None)
        if queue is not None and not self.left:
            self._send(queue, request, backoff)

    def acked(self, number: int, ack: pb.Ack) -> None:
        queue = self._asked.pop(number, None)
        if queue is None or self.left:
            return
        try:
            queue.acknowledge(ack)
        except SessionLost:
            self.lost()
        else:
            self._send_next(queue)

    def leave(self, reason: str) -> None:
        """Say good-bye, once; the node goes in any case."""
        self.left = True
        if not self.joining:
            good_bye = pb.ReportRequest(session=self._session, leave=pb.Leave(reason=reason))
            self.world.truth.hear(validation.event(*self.session, good_bye))
            self._call(self._service.report, next(self._numbers), good_bye.SerializeToString())

    # Calls

    @property
    def _service(self) -> "Service":
        return self.world.service

    def _call(self, call: Call, *args: Any, client: bool = True) -> None:
        service = self._service
        if service.alive:
            self.world.network.send(self.node, service, call, *((self, *args) if client else args))

    def _again(self, backoff: Backoff, call: Call, *args: Any) -> None:
        """Try again when the answer does not come, or soon when nobody listens."""
        deadline = DEADLINE if self._service.alive else 0.0
        self.node.later(deadline + backoff.pause(self.world.rng.random()), call, *args)
