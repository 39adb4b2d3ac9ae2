"""The coordinator of the simulation: its real machine on a real journal, behind calls that travel the network.

As the real service does it: whatever comes in while a batch is being written makes the next batch, and nothing of
a batch (views, answers, records) leaves before it is durable.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.comm.ids import NodeId
from atoll.coordinator import events as ev
from atoll.coordinator import membership
from atoll.coordinator.core import Batch, Core
from atoll.coordinator.journal import Journal, JournalFull
from atoll.coordinator.state import State
from atoll.coordinator.view import Shared, encode, own, shared
from sim.engine import Call, Process

if TYPE_CHECKING:
    from sim.control import Control
    from sim.world import World

TICK = 0.25  # seconds
WRITE = 0.002  # seconds that one write to the journal takes
FULL = 1.0  # seconds until a full disk is tried again


@dataclass(slots=True)
class Stream:
    client: "Control"
    number: int  # the client's, for its streams
    node: NodeId
    life: int
    open: bool = False
    deaf: bool = False  # half-open: what is sent on it goes nowhere, and nobody is told


@dataclass(frozen=True, slots=True)
class Shown:
    """The latest view of one node."""

    version: int
    parts: tuple[object, ...]
    encoded: bytes


class Service(Process):
    """One life of the coordinator."""

    def __init__(self, world: "World", folder: Path, snapshot_every: int) -> None:
        super().__init__(world.engine, "coordinator")
        self.world, self.folder = world, folder
        self.journal = Journal(folder)
        self.core = Core(world.config, self.journal, snapshot_every)
        self.streams: dict[NodeId, Stream] = {}
        self.crash_at = ""  # the point in the next write at which it dies
        self._queue: list[tuple[ev.Event, Call | None, tuple[Any, ...]]] = []
        self._writing = False
        self._ticking = False
        self._joins: list[Callable[[], None]] = []  # ids are given one at a time
        self._common: Shared | None = None
        self._shown: dict[NodeId, Shown] = {}
        self._clock = max(self.core.last, world.engine.now + world.rng.uniform(-20, 20)) - world.engine.now

    def start(self) -> None:
        """Begin the next incarnation. Nobody is judged before: nobody could be heard while there was none."""
        self.submit(ev.Started(self.core.state.incarnation + 1), self._tick)

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
        self._queue.append((event, done, args))
        if not self._writing:
            self._writing = True
            self.later(WRITE, self._write_all)

    def _write_all(self) -> None:
        queue, self._queue = self._queue, []
        batch = self.core.prepare([event for event, _, _ in queue], self.now)
        self._write(batch, [(done, args) for _, done, args in queue if done is not None])

    def _write(self, batch: Batch, waiting: list[tuple[Call, tuple[Any, ...]]]) -> None:
        crash = self.crash_at if batch.entries else ""
        if crash == "before the write":
            return self.world.coordinator_dies(crash)
        if crash == "in the write":
            database = (self.folder / "journal.sqlite").read_bytes()
            log = wal(self.folder)
        try:
            self.core.write(batch)
        except JournalFull:
            self.world.say("the journal is full")
            return self.later(FULL, self._write, batch, waiting)
        if crash == "in the write":
            return self.world.coordinator_dies(
                crash, lambda copy: tear(copy, database, log, self.world.rng.random())
            )
        self.world.written(self.core.state, batch)
        if crash == "after the write":
            return self.world.coordinator_dies(crash)
        self.later(WRITE, self._adopt, batch, waiting)

    def _adopt(self, batch: Batch, waiting: list[tuple[Call, tuple[Any, ...]]]) -> None:
        self.core.adopt(batch)
        self.world.adopted(self, batch)
        if self.crash_at == "before the effects" and batch.entries:
            return self.world.coordinator_dies(self.crash_at)
        if batch.entries:
            self._show_all()
        for done, args in waiting:
            done(*args)
        self._snapshot()
        if not self.alive:
            return
        self._writing = bool(self._queue)
        if self._writing:
            self.later(WRITE, self._write_all)

    def _snapshot(self) -> None:
        crash = self.crash_at == "in the snapshot"
        if crash:
            database, log, before = (self.folder / "journal.sqlite").read_bytes(), wal(self.folder), self._size()
        try:
            self.core.snapshot_if_due()
        except JournalFull:
            self.world.say("the journal is full: no snapshot")
            return
        if crash and self._size() < before:
            self.world.coordinator_dies(
                self.crash_at, lambda copy: tear(copy, database, log, self.world.rng.random())
            )

    def _size(self) -> int:
        return self.journal.events_since_snapshot

    def _tick(self) -> None:
        self.later(TICK, self._tick)
        if not self._ticking:
            self._ticking = True
            state = self.state
            for verdict in membership.judge(state.members, state.config.members, state.awaited, self.now):
                self.submit(verdict)
            self.submit(ev.Tick(), self._ticked)

    def _ticked(self) -> None:
        self._ticking = False

    # Calls

    def join(self, client: "Control", ticket: int, session: str, name: str, address: str) -> None:
        self._joins.append(lambda: self._admit(client, ticket, session, name, address))
        if len(self._joins) == 1:
            self._joins[0]()

    def _admit(self, client: "Control", ticket: int, session: str, name: str, address: str) -> None:
        """A known session returns as the same node, in its next life."""
        members = self.state.members
        secret = session.rpartition(".")[0]
        known = (m for m in (*members.here.values(), *members.gone.values()) if secret and m.session == secret)
        member = next(known, None)
        if member is not None:
            node, life = member.node, member.life + 1
        else:
            node, life, secret = NodeId(f"n{members.next_id}"), 1, f"secret{self.world.rng.getrandbits(40):x}"
        self.submit(
            ev.Joined(node, life, name, address, secret), self._admitted, client, ticket, node, life, secret
        )

    def _admitted(self, client: "Control", ticket: int, node: NodeId, life: int, secret: str) -> None:
        self._answer(client, client.joined, ticket, node, life, f"{secret}.{life}")
        self._joins.pop(0)
        if self._joins:
            self._joins[0]()

    def watch(self, client: "Control", number: int, node: NodeId, life: int) -> None:
        """Open a stream of views; it takes the place of the node's earlier one."""
        stream = Stream(client, number, node, life)
        if not self._knows(node, life):
            self._answer(client, client.refused, number)
            return
        self.streams[node] = stream
        self.submit(ev.Connected(node, life), self._opened, stream)

    def _opened(self, stream: Stream) -> None:
        if self.streams.get(stream.node) is not stream:
            return
        stream.open = True
        if (shown := self._shown.get(stream.node)) is not None:
            self._send_view(stream, shown)

    def closed(self, number: int, node: NodeId, life: int) -> None:
        """A stream of views broke."""
        stream = self.streams.get(node)
        if stream is not None and stream.number == number:
            del self.streams[node]
            self.submit(ev.Disconnected(node, life))

    def heartbeat(self, client: "Control", beat: ev.Heard) -> None:
        self.submit(beat, self._beaten, client, beat.node, beat.life)

    def _beaten(self, client: "Control", node: NodeId, life: int) -> None:
        shown = self._shown.get(node)
        newest = self.state.incarnation, shown.version if shown is not None else 0
        self._answer(client, client.beaten, node, life, self._knows(node, life), newest)

    def report(self, client: "Control", number: int, event: ev.Event) -> None:
        self.submit(event, self._reported, client, number, event)

    def _reported(self, client: "Control", number: int, event: Any) -> None:
        self._answer(client, client.acked, number, self._knows(event.node, event.life))

    def _knows(self, node: NodeId, life: int) -> bool:
        member = self.state.members.here.get(node)
        return member is not None and member.life == life

    def _answer(self, client: "Control", call: Call, *args: Any) -> None:
        self.world.network.send(self, client.node, call, *args)

    # Views

    def _show_all(self) -> None:
        """Give every node whose view is another one now a new version of it."""
        here = self.state.members.here
        self._common = common = shared(self.state, self._common)
        for node in here:
            mine = own(self.state, common, node)
            train, plan = common.train if mine.lease else b"", common.plan if mine.planned else b""
            parts = (common.head, train, plan, mine)
            before = self._shown.get(node)
            if before is None or before.parts != parts:
                version = 1 if before is None else before.version + 1
                shown = self._shown[node] = Shown(version, parts, encode(common, mine, version))
                stream = self.streams.get(node)
                if stream is not None and stream.open:
                    self._send_view(stream, shown)
        for node in [n for n, s in self.streams.items() if n not in here and s.open]:
            stream = self.streams.pop(node)
            self._answer(stream.client, stream.client.broke, stream.number)

    def _send_view(self, stream: Stream, shown: Shown) -> None:
        if not stream.deaf:
            self._answer(stream.client, stream.client.saw, stream.number, shown.encoded)


def wal(folder: Path) -> bytes:
    log = folder / "journal.sqlite-wal"
    return log.read_bytes() if log.exists() else b""


def copy(folder: Path, to: Path) -> None:
    """The journal's files as a killed process leaves them."""
    to.mkdir()
    for name in ("journal.sqlite", "journal.sqlite-wal"):
        if (folder / name).exists():
            shutil.copyfile(folder / name, to / name)


def tear(folder: Path, database: bytes, log: bytes, where: float) -> None:
    """Undo the end of the last transaction: of what it wrote to the log, only the first part reached the disk."""
    after = wal(folder)
    old = log.ljust(len(after), b"\0")[: len(after)] if len(log) < len(after) else log
    changed = [i for i in range(0, len(after), 512) if after[i : i + 512] != old[i : i + 512]]
    first, last = changed[0], changed[-1]
    cut = first + int(where * (last - first))
    torn = after[:cut] + log[cut:]
    (folder / "journal.sqlite").write_bytes(database)
    (folder / "journal.sqlite-wal").write_bytes(torn)
