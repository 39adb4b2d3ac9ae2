"""The coordinator of the simulation: its real machine on a real journal. The shell around them does what kernel,
service and views do, on the virtual clock.

What comes in while a batch is being written makes the next batch; heartbeats wait for no write and are judged at
the next tick; nothing of a batch (answers, views, records) leaves before it is durable.
"""

import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim import invariants
from sim.engine import Call, Process

from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.service import validation
from atoll.coordinator.service.journal import Journal, JournalFull
from atoll.coordinator.service.journaled_machine import Batch, JournaledMachine
from atoll.coordinator.service.view import CommonView, NodeView, common_view, encode, node_view
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import members
from atoll.coordinator.state_machine.state import State

if TYPE_CHECKING:
    from sim.control import Control
    from sim.world import World

TICK = 0.25  # seconds
WRITE = 0.002  # seconds that one write to the journal takes
RETRY = 1.0  # seconds until a full disk is tried again
PAUSE = 0.02  # seconds between two dispatches of views
AWAY = 2.0  # seconds without a tick after which the coordinator, not its members, was silent
Done = tuple[Call, tuple[Any, ...]]


@dataclass(slots=True)
class Stream:
    """One node's open stream of views."""

    client: "Control"
    number: int  # the client's, for its streams
    node: NodeId
    life: int
    open: bool = False
    deaf: bool = False  # half-open: what is sent on it goes nowhere, and nobody is told
    parts: tuple[bytes, bytes, bytes, NodeView] | None = None  # of the latest view,
    version: int = 0  # and its version


class Service(Process):
    """One life of the coordinator."""

    def __init__(self, world: "World", folder: Path, snapshot_every: int) -> None:
        super().__init__(world.engine, "coordinator")
        self.world, self.folder = world, folder
        self.journal = Journal(folder)
        self.core = JournaledMachine(world.config, self.journal, snapshot_every)
        self.streams: dict[NodeId, Stream] = {}
        self.crash_at = ""  # the point in the next write at which it dies
        self.full = False  # the disk takes no writes
        self._queue: list[tuple[ev.Event, Done | None]] = []
        self._writing = False
        self._beats: dict[NodeId, ev.Heartbeat] = {}
        self._joins: deque[Callable[[], None]] = deque()  # ids are given one at a time
        self._common: CommonView | None = None
        self._version = 0
        self._dispatch_due = False
        self._clock = max(self.core.last_at, world.engine.now + world.rng.uniform(-20, 20)) - world.engine.now
        self._looked, self._patient_until = self.now, 0.0

    def start(self) -> None:
        """Begin the next incarnation. Nobody is judged before: nobody could be heard while there was none."""
        self.submit(ev.Started(self.state.incarnation + 1), self._look)

    def die(self) -> None:
        """Its files stay as they are: the caller has copied them."""
        self.alive = False
        self.journal.close()

    @property
    def state(self) -> State:
        return self.core.state

    @property
    def now(self) -> float:
        """Seconds on its own clock, which never goes back, not even across restarts."""
        return self.engine.now + self._clock

    # From event to effect

    def submit(self, event: ev.Event, done: Call | None = None, *args: Any) -> None:
        """Take in one event; call `done` when it is durable."""
        self._queue.append((event, None if done is None else (done, args)))
        if not self._writing:
            self._writing = True
            self.later(WRITE, self._write_all)

    def _write_all(self) -> None:
        if self.crash_at.endswith("the snapshot"):
            self._snapshot_and_die()
        else:
            self._snapshot()
        if not self.alive:
            return
        self._enter_beats()
        queue, self._queue = self._queue, []
        before = self.state
        batch = self.core.prepare([event for event, _ in queue], self.now)
        self._write(before, batch, [done for _, done in queue if done is not None])

    def _write(self, before: State, batch: Batch, waiting: list[Done]) -> None:
        """Make the batch durable, or die on the way, or try again while the disk is full."""
        crash = self.crash_at if batch.entries else ""
        if crash == "before the write":
            return self.world.coordinator_dies(crash)
        intact = files(self.folder) if crash == "in the write" else None
        try:
            self.core.write(batch)
        except JournalFull:
            self.full = True
            self.world.say("the journal is full")
            return self.later(RETRY, self._write, before, batch, waiting)
        self.full = False
        if intact is not None:
            return self.world.coordinator_dies(crash, lambda copy: tear(copy, intact, self.world.rng.random()))
        self.world.written(before, batch)
        if crash == "after the write":
            return self.world.coordinator_dies(crash)
        self.later(WRITE, self._adopt, batch, waiting)

    def _adopt(self, batch: Batch, waiting: list[Done]) -> None:
        self.core.adopt(batch)
        self.world.adopted(self, batch)
        if self.crash_at == "before the effects" and batch.entries:
            return self.world.coordinator_dies(self.crash_at)
        if batch.entries:
            self._changed()
        self._writing = bool(self._queue)
        if self._writing:
            self.later(WRITE, self._write_all)
        for done, args in waiting:
            done(*args)

    def _snapshot(self) -> None:
        try:
            self.core.snapshot_if_due()
        except JournalFull:
            self.world.say("the journal is full: no snapshot")

    def _snapshot_and_die(self) -> None:
        """If one is due."""
        size, before = self.journal.events_since_snapshot, files(self.folder)
        self._snapshot()
        if self.journal.events_since_snapshot < size:
            torn = self.crash_at == "in the snapshot"
            harm = (lambda copy: tear(copy, before, self.world.rng.random())) if torn else None
            self.world.coordinator_dies(self.crash_at, harm)

    def _enter_beats(self) -> None:
        if self._beats:
            beats, self._beats = self._beats, {}
            batch = self.core.prepare(list(beats.values()), self.now)
            assert not batch.entries and not batch.effects, "a heartbeat decides something"
            self.core.adopt(batch)
            self.world.heard(self.state)

    def _look(self) -> None:
        """A tick: what the clock says of the members and of the round."""
        now = self.now
        if now - self._looked > AWAY:
            self._patient_until = now + members.RECONNECT_GRACE_SECONDS
        self._looked = now
        if not self._writing:
            self._enter_beats()
        state = self.state
        if now > self._patient_until:
            for verdict in members.judge(state.members, state.config.members, state.awaited_members, now):
                self.submit(verdict)
            self.submit(ev.Tick(), self._looked_after, state, now)
        else:
            self.submit(ev.Tick(), self.later, TICK, self._look)

    def _looked_after(self, then: State, now: float) -> None:
        invariants.the_late_are_out(self.state, then, now)
        self.later(TICK, self._look)

    # Calls

    def join(self, client: "Control", ticket: int, session: str, name: str, address: str, role: str) -> None:
        if self.full:
            return
        self._joins.append(lambda: self._admit(client, ticket, session, name, address, role))
        if len(self._joins) == 1:
            self._joins[0]()

    def _admit(self, client: "Control", ticket: int, session: str, name: str, address: str, role: str) -> None:
        """A known session returns as the same node, in its next life."""
        members = self.state.members
        secret = session.partition(".")[0]
        known = (m for m in (*members.here.values(), *members.departed.values()) if secret and m.session == secret)
        member = next(known, None)
        if member is not None:
            node, life = member.node, member.life + 1
        else:
            node, life, secret = NodeId(f"n{members.next_id}"), 1, f"secret{self.world.rng.getrandbits(40):x}"
        joined = ev.Joined(node, life, name, address, secret, leaf=not address, role=role)
        self.submit(joined, self._admitted, client, ticket, node, life, secret)

    def _admitted(self, client: "Control", ticket: int, node: NodeId, life: int, secret: str) -> None:
        self._answer(client, client.joined, ticket, node, life, f"{secret}.{life}")
        self._joins.popleft()
        if self._joins:
            self._joins[0]()

    def watch(self, client: "Control", number: int, node: NodeId, life: int) -> None:
        """Open a stream of views; it takes the place of the node's earlier one."""
        if not self._knows(node, life):
            self._answer(client, client.refused, number)
        elif not self.full:
            stream = self.streams[node] = Stream(client, number, node, life)
            self.submit(ev.Connected(node, life), self._opened, stream)

    def _opened(self, stream: Stream) -> None:
        stream.open = True
        self._changed()

    def closed(self, number: int, node: NodeId, life: int) -> None:
        """A stream of views broke."""
        stream = self.streams.get(node)
        if stream is not None and stream.number == number:
            del self.streams[node]
            self.submit(ev.Disconnected(node, life))

    def heartbeat(self, client: "Control", encoded: bytes) -> None:
        request = pb.HeartbeatRequest.FromString(encoded)
        beat = validation.heartbeat(*self._sender(request.session), request)
        if self._knows(beat.node, beat.life):
            self._beats[beat.node] = beat
        stream = self.streams.get(beat.node)
        version = self._version + 1 if stream is None else stream.version
        newest = self.state.incarnation, version
        self._answer(client, client.beaten, beat.node, beat.life, self._knows(beat.node, beat.life), newest)

    def report(self, client: "Control", number: int, encoded: bytes) -> None:
        """Also from an earlier life: the machine must refuse what overtook the news of the next one."""
        if not self.full:
            request = pb.ReportRequest.FromString(encoded)
            assert request.fence.incarnation <= self.state.incarnation, "a node spoke to a later incarnation"
            node, life = self._sender(request.session)
            self.submit(validation.event(node, life, request), self._reported, client, number, node, life)

    def _reported(self, client: "Control", number: int, node: NodeId, life: int) -> None:
        self._answer(client, client.acked, number, self._knows(node, life))

    def _sender(self, session: str) -> tuple[NodeId, int]:
        """The node that has or had this session, and the life that it is of."""
        secret, _, life = session.partition(".")
        members = self.state.members
        everybody = (*members.here.values(), *members.departed.values())
        return next((m.node for m in everybody if m.session == secret), NodeId("")), int(life)

    def _knows(self, node: NodeId, life: int) -> bool:
        member = self.state.members.here.get(node)
        return member is not None and member.life == life

    def _answer(self, client: "Control", call: Call, *args: Any) -> None:
        self.world.network.send(self, client.node, call, *args)

    # Views

    def _changed(self) -> None:
        """Show every stream its view, soon: what changes until then is shown with it."""
        if not self._dispatch_due:
            self._dispatch_due = True
            self.later(PAUSE, self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_due = False
        self._version += 1
        self._common = common = common_view(self.state, self._common)
        for stream in list(self.streams.values()):
            mine = node_view(self.state, common, stream.node)
            train, plan = common.train if mine.lease else b"", common.plan if mine.planned else b""
            parts = common.head, train, plan, mine
            if stream.open and stream.parts != parts:
                stream.parts, stream.version = parts, self._version
                if not stream.deaf:
                    encoded = encode(common, mine, self._version)
                    self._answer(stream.client, stream.client.saw, stream.number, encoded)
            if stream.open and stream.node not in self.state.members.here:
                del self.streams[stream.node]
                self._answer(stream.client, stream.client.broke, stream.number)


# The journal's files


def files(folder: Path) -> tuple[bytes, bytes]:
    """Database and write-ahead log."""
    log = folder / "journal.sqlite-wal"
    return (folder / "journal.sqlite").read_bytes(), log.read_bytes() if log.exists() else b""


def copy(folder: Path, to: Path) -> None:
    """The journal as a killed process leaves it."""
    to.mkdir()
    for name in ("journal.sqlite", "journal.sqlite-wal"):
        if (folder / name).exists():
            shutil.copyfile(folder / name, to / name)


def tear(folder: Path, before: tuple[bytes, bytes], where: float) -> None:
    """Undo the end of the last transaction: of what it wrote to the log, only the first part reached the disk."""
    database, log = before
    after = files(folder)[1]
    old = log.ljust(len(after), b"\0")
    changed = [i for i in range(0, len(after), 512) if after[i : i + 512] != old[i : i + 512]]
    cut = changed[0] + int(where * (changed[-1] - changed[0]))
    (folder / "journal.sqlite").write_bytes(database)
    (folder / "journal.sqlite-wal").write_bytes(after[:cut] + log[cut:])
