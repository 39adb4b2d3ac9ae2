"""A node's side of the control plane, as `atoll.node.control.client` and the daemon run it: join, a stream of
views, reports in order and each until it is acknowledged, heartbeats; and a stream that fell behind is opened
again."""

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

from sim.engine import Call

from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto.packed_plan import unpack_plan
from atoll.coordinator.state_machine import events as ev
from atoll.node.state_machine import events as node_ev

if TYPE_CHECKING:
    from sim.node import Node
    from sim.service import Service

DEADLINE = 2.0  # seconds for one call
BEAT = 1.0  # seconds
BEHIND = 3.0  # seconds that a stream may be behind the newest view
BACKOFF = 2.0  # seconds between two tries, at most


class Control:
    def __init__(self, node: "Node") -> None:
        self.node, self.world = node, node.world
        self.me, self.life = NodeId(""), 0
        self.joining = True
        self.left = False
        self._numbers = itertools.count(1)
        self._ticket = 0  # of the latest join, stream, report: older ones' answers do not count
        self.stream = 0  # number of the open one; 0: none
        self._sent = 0
        self._outbox: deque[ev.Event] = deque()
        self._seen = (0, 0)  # incarnation and version of the newest view
        self._behind_since: float | None = None  # seconds
        self._pause = self._pause_watch = 0.25  # seconds

    @property
    def session(self) -> tuple[NodeId, int]:
        return self.me, self.life

    # Join

    def join(self) -> None:
        if self.left or not self.joining:
            return
        self._ticket = next(self._numbers)
        host = self.node.host
        address = "" if host.leaf else host.name
        self._call(self._service.join, self._ticket, host.session, host.name, address, host.role)
        self._pause = self._again(self._pause, self._rejoin_if, self._ticket)

    def _rejoin_if(self, ticket: int) -> None:
        if self.joining and ticket == self._ticket:
            self.join()

    def joined(self, ticket: int, node: NodeId, life: int, session: str) -> None:
        if not self.joining or ticket != self._ticket or self.left:
            return
        first = self.me == ""
        self.me, self.life, self.joining = node, life, False
        self.node.host.session = session
        self._outbox.clear()
        self._seen, self._behind_since, self._pause = (0, 0), None, 0.25
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
            self.joining = True
            self.join()

    # Views

    def watch(self) -> None:
        if self.joining or self.left:
            return
        self.stream = next(self._numbers)
        self._behind_since = None
        if self._service.alive:
            self._call(self._service.watch, self.stream, *self.session)
        else:
            self.broke(self.stream)

    def saw(self, number: int, encoded: bytes) -> None:
        if number != self.stream:
            return
        view = pb.View.FromString(encoded)
        unpack_plan(view)
        self._pause_watch = 0.25
        if (view.incarnation, view.version) >= self._seen:
            self._seen, self._behind_since = (view.incarnation, view.version), None
        self.node.feed(node_ev.ViewArrived(view))

    def broke(self, number: int) -> None:
        if number == self.stream:
            self.stream = 0
            pause, self._pause_watch = self._pause_watch, min(2 * self._pause_watch, BACKOFF)
            self.node.later(pause * self.world.rng.uniform(0.5, 1.0), self._watch_if, self.session)

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
        self._call(self._service.heartbeat, ev.Heartbeat(*session, phase, round_, step))
        self.node.later(BEAT, self._beat, session)

    def beaten(self, node: NodeId, life: int, known: bool, newest: tuple[int, int]) -> None:
        if (node, life) != self.session or self.joining or self.left:
            return
        if not known:
            self.lost()
        elif newest <= self._seen:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = self.node.clock
        elif self.node.clock - self._behind_since > BEHIND:
            self._hang_up()
            self.watch()

    # Reports

    def report(self, event: ev.Event) -> None:
        self._outbox.append(event)
        if len(self._outbox) == 1:
            self._pause = 0.25
            self._send_first()

    def _send_first(self) -> None:
        self._sent = next(self._numbers)
        self._call(self._service.report, self._sent, self._outbox[0])
        self._pause = self._again(self._pause, self._send_again, self._sent)

    def _send_again(self, number: int) -> None:
        if number == self._sent and self._outbox and not self.left:
            self._send_first()

    def acked(self, number: int, known: bool) -> None:
        if number != self._sent or not self._outbox or self.left:
            return
        self._sent = 0
        self._outbox.popleft()
        if not known:
            self.lost()
        elif self._outbox:
            self._pause = 0.25
            self._send_first()

    def leave(self, reason: str) -> None:
        """Say good-bye, once; the node goes in any case."""
        self.left = True
        if not self.joining:
            good_bye = ev.Leaving(*self.session, reason)
            self.world.truth.hear(good_bye)
            self._call(self._service.report, next(self._numbers), good_bye)

    # Calls

    @property
    def _service(self) -> "Service":
        return self.world.service

    def _call(self, call: Call, *args: Any, client: bool = True) -> None:
        service = self._service
        if service.alive:
            self.world.network.send(self.node, service, call, *((self, *args) if client else args))

    def _again(self, pause: float, call: Call, *args: Any) -> float:
        """Try again when the answer does not come, or at once when nobody listens; return the next pause."""
        deadline = DEADLINE if self._service.alive else 0.0
        self.node.later(deadline + pause * self.world.rng.uniform(0.5, 1.0), call, *args)
        return min(2 * pause, BACKOFF)
