"""The coordinator of the simulation. Its machine, journal, group commit, sessions and dispatch of views are the
real ones; here are the waiting, on the virtual clock, and the network's calls.

What comes in while a batch is being written makes the next batch; nothing of a batch (answers, views, records)
leaves before it is durable.
"""

import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim import invariants
from sim.engine import Call, Process
from sim.truth import digest

from atoll.comm.errors import Refused
from atoll.comm.ids import NodeId, PublicKey
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.service import validation
from atoll.coordinator.service.data_keys import DataKeys
from atoll.coordinator.service.event_loop import RETRY_INTERVAL
from atoll.coordinator.service.group_commit import Commit, GroupCommit
from atoll.coordinator.service.journal import Journal, JournalFull
from atoll.coordinator.service.journaled_machine import JournaledMachine
from atoll.coordinator.service.sessions import Admission, SessionDirectory, session_of
from atoll.coordinator.service.view_dispatch import ViewDispatch, ViewStream, pause
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.conduct import refusal
from atoll.coordinator.state_machine.state import State

if TYPE_CHECKING:
    from sim.control import Control
    from sim.world import World

WRITE = 0.002  # seconds that one write to the journal takes, and that events are gathered for it
DISPATCH = 0.01  # seconds that one dispatch of views takes
KEYS = DataKeys(b"of the simulation")
READ = 0.001  # seconds until a stream's reader has what it is woken for


@dataclass(eq=False, slots=True)
class Waiter:
    """Who waits for an event to be durable, and is called then."""

    call: Call
    args: tuple[Any, ...]
    gone: bool = False

    def cancelled(self) -> bool:
        return self.gone


@dataclass(eq=False, slots=True)
class Stream:
    """One node's call for views: what carries its stream to it."""

    client: "Control"
    number: int  # the client's, for its streams
    node: NodeId
    life: int
    deaf: bool = False  # half-open: what is sent on it goes nowhere, and nobody is told
    views: ViewStream = field(init=False)
    connecting: Waiter = field(init=False)
    reading: bool = False  # since the node is connected
    over: bool = False


class Service(Process):
    """One life of the coordinator."""

    def __init__(self, world: "World", folder: Path, snapshot_every: int) -> None:
        super().__init__(world.engine, "coordinator")
        self.world, self.folder = world, folder
        self.journal = Journal(folder)
        self.machine = JournaledMachine(world.config, self.journal, snapshot_every)
        last_at = self.machine.last_at + 1e-6  # so that rounding does not take its clock back
        self._clock = max(last_at, world.engine.now + world.rng.uniform(-20, 20)) - world.engine.now
        self.crash_at = ""  # the point in the next write at which it dies
        self._group = GroupCommit[Waiter](self.machine, self.now)
        self._busy = True  # with a batch, or about to be
        self._turns = 0  # of the loop, so far
        self._joins: deque[Callable[[], None]] = deque()  # ids are given one at a time
        self._sessions = SessionDirectory(self.state.members)
        self.dispatch, self.streams = ViewDispatch(self.state, KEYS.key), dict[NodeId, Stream]()
        self._dispatch_due = self._dispatching = False
        self._reason_due = False  # a dispatch will come for a reason that was held back
        self.heard_at: dict[tuple[NodeId, int], float] = {}  # seconds; of the latest heartbeat of a node's life
        self.back_at = -inf  # seconds; when it could go on, the last time that it could not,
        self.lenient_until = -inf  # and, if that had been long, until when nobody may be judged
        self.late_since = inf  # seconds; since when the streams do not show why the round is where it is
        self.sent: dict[NodeId, int] = {}  # version of the newest view that each node was sent
        self._full_since: float | None = None  # seconds; since when the disk takes no writes

    def start(self) -> None:
        """Begin the next incarnation."""
        nonce = digest("nonce", self.world.seed, self.world.lives) * 2
        self._commit(self._group.prepare_start(self.now, nonce), self._rest)

    def die(self) -> None:
        """Its files stay as they are: the caller has copied them."""
        self.alive = False
        self.journal.close()

    def resume(self) -> None:
        if self._stopped_at is not None:
            self._back_after(self.engine.now - self._stopped_at)
        super().resume()

    def _back_after(self, seconds: float) -> None:
        self.back_at = self.now
        if seconds > invariants.LONG_AWAY:
            self.lenient_until = self.now + invariants.LENIENCY

    @property
    def state(self) -> State:
        return self.machine.state

    @property
    def full(self) -> bool:
        return self._full_since is not None

    @property
    def now(self) -> float:
        """Seconds on its own clock, which never goes back, not even across restarts."""
        return self.engine.now + self._clock

    # From event to effect: the turns of the event loop

    def submit(self, event: ev.Event, done: Call | None = None, *args: Any) -> Waiter | None:
        """Take in one event; call `done` when it is durable."""
        waiter = Waiter(done, args) if done is not None else None
        self._group.put(event, waiter)
        if not self._busy:
            self._busy = True
            self.later(WRITE, self._turn)
        return waiter

    def _turn(self) -> None:
        if self._group.waiting:
            self._commit(self._group.prepare_queue(self.now), self._look)
        else:
            self._look()

    def _look(self) -> None:
        """At the clock, if it is time."""
        now = self.now
        if not self._group.ticks.due(now):
            return self._rest()
        invariants.reasons_are_shown_soon(self)
        invariants.who_has_a_stream_is_connected(self)
        commit = self._group.prepare_tick(now)
        invariants.verdicts_are_on_the_silent(self, commit.events, now)
        self._commit(commit, self._looked, self.state, now)

    def _looked(self, then: State, now: float) -> None:
        invariants.the_late_are_out(self, then, now)
        self._rest()

    def _rest(self) -> None:
        self._turns += 1
        self._busy = self._group.waiting
        if self._busy:
            self.later(WRITE, self._turn)
        else:
            self.later(max(self._group.ticks.wait(self.now), WRITE), self._wake, self._turns)

    def _wake(self, turns: int) -> None:
        if not self._busy and turns == self._turns:
            self._busy = True
            self._turn()

    def _commit(self, commit: Commit[Waiter], then: Call, *args: Any) -> None:
        before, batch = self.state, commit.batch
        self.world.heard(before)
        if batch.entries or batch.effects:
            self.later(WRITE, self._write, before, commit, partial(then, *args))
        else:
            self.world.written(before, batch)
            self._adopt(commit, partial(then, *args))

    def _write(self, before: State, commit: Commit[Waiter], then: Call) -> None:
        """Make the batch durable, or die on the way, or try again while the disk is full."""
        batch = commit.batch
        crash = self.crash_at if batch.entries else ""
        try:
            if crash.endswith("the snapshot") and self._dies_with_a_snapshot():
                return
            if self.machine.snapshot_due():
                self.machine.snapshot()
            if crash == "before the write":
                return self.world.coordinator_dies(crash)
            intact = files(self.folder) if crash == "in the write" else None
            self.machine.write(batch)
        except JournalFull:
            self._full_since = self.now if self._full_since is None else self._full_since
            self.world.say("the journal is full")
            return self.later(RETRY_INTERVAL, self._write, before, commit, then)
        if self._full_since is not None:
            self._back_after(self.now - self._full_since)
            self._full_since = None
        if intact is not None:
            return self.world.coordinator_dies(crash, lambda copy: tear(copy, intact, self.world.rng.random()))
        self.world.written(before, batch)
        if crash == "after the write":
            return self.world.coordinator_dies(crash)
        self.later(WRITE, self._adopt, commit, then)

    def _adopt(self, commit: Commit[Waiter], then: Call) -> None:
        self.machine.adopt(commit.batch)
        self.world.adopted(self, commit.batch)
        if self.crash_at == "before the effects" and commit.batch.entries:
            return self.world.coordinator_dies(self.crash_at)
        if commit.batch.entries:
            self._changed()
        for waiter in commit.waiters:
            waiter.call(*waiter.args)
        then()

    def _dies_with_a_snapshot(self) -> bool:
        """If one is due."""
        if not self.machine.snapshot_due():
            return False
        before = files(self.folder)
        self.machine.snapshot()
        torn = self.crash_at == "in the snapshot"
        harm = (lambda copy: tear(copy, before, self.world.rng.random())) if torn else None
        self.world.coordinator_dies(self.crash_at, harm)
        return True

    # Calls

    def join(
        self, client: "Control", ticket: int, session: str, key: PublicKey, name: str, address: str, role: str
    ) -> None:
        if self.full:
            return
        self._joins.append(lambda: self._admit(client, ticket, session, key, name, address, role))
        if len(self._joins) == 1:
            self._joins[0]()

    def _admit(
        self, client: "Control", ticket: int, session: str, key: PublicKey, name: str, address: str, role: str
    ) -> None:
        fresh = f"secret{self.world.rng.getrandbits(40):x}"
        try:
            who = self._sessions.admission(session, key, self.state.members, fresh)
        except Refused:
            # Else the network has brought a join twice, and the node has a newer session since.
            assert self._sessions.holder(session, self.state.members) is None, f"{name} is not let back in"
            return self._next_join()
        if refusal(self.state, who.node, key):
            self._expelled(client)
            return self._next_join()
        owner = f"owner {int(name[1:]) % 3}"  # of the host
        leaf = not address
        joined = ev.Joined(
            who.node, who.life, name, address, who.secret, leaf=leaf, role=role, key=key, owner=owner
        )
        self.submit(joined, self._admitted, client, ticket, session, who)

    def _expelled(self, client: "Control") -> None:
        """Its operator gives up a node that may not join."""
        self.world.say(f"{client.node.place} is not let in any more")
        client.node.host.gone = True
        self.world.kill(client.node)

    def _admitted(self, client: "Control", ticket: int, asked: str, who: Admission) -> None:
        self._sessions.enter(who.secret, who.node)
        if who.node not in self.state.members.here:  # it was put out in the same batch
            self._expelled(client)
            return self._next_join()
        member = self.state.members.here[who.node]
        invariants.one_node_a_session(self.world, asked, who.node, member.life, session_of(member))
        self._answer(client, client.joined, ticket, who.node, member.life, session_of(member))
        self._next_join()

    def _next_join(self) -> None:
        self._joins.popleft()
        if self._joins:
            self._joins[0]()

    def watch(self, client: "Control", number: int, session: str, roster: bytes) -> None:
        """Open a stream of views; it takes the place of the node's earlier one."""
        member = self._sessions.member(session, self.state.members)
        if member is None:
            return self._answer(client, client.refused, number)
        stream = self.streams[member.node] = Stream(client, number, member.node, member.life)
        stream.views = self.dispatch.open(
            member.node, member.life, partial(self.later, READ, self._read, stream), roster
        )
        self._changed()
        waiter = self.submit(ev.Connected(member.node, member.life), self._connected, stream)
        assert waiter is not None
        stream.connecting = waiter
        if self.full:
            self._close(stream)

    def _connected(self, stream: Stream) -> None:
        stream.reading = True
        self._read(stream)

    def _read(self, stream: Stream) -> None:
        """Send what is new on the stream, and end it if it has ended."""
        if not stream.reading or stream.over:
            return
        while (latest := stream.views.next()) is not None:
            self.sent[stream.node] = latest.version
            shown = self.state.incarnation, latest.version
            self.world.truth.rosters.setdefault(shown, latest.common.roster.members)
            if not stream.deaf:
                self._answer(stream.client, stream.client.saw, stream.number, latest.encode())
        if stream.views.ended:
            self._close(stream)

    def _close(self, stream: Stream) -> None:
        """The call is over; the client hears of it, if it can."""
        stream.over = stream.connecting.gone = True
        if not stream.deaf:
            self._answer(stream.client, stream.client.broke, stream.number)
        if self.dispatch.close(stream.views):
            invariants.a_stream_takes_no_other_with_it(stream, self.streams.pop(stream.node))
            self.submit(ev.Disconnected(stream.node, stream.life))

    def closed(self, number: int, node: NodeId, life: int) -> None:
        """A stream of views broke."""
        stream = self.streams.get(node)
        if stream is not None and stream.number == number and stream.life == life:
            stream.deaf = True  # nobody listens
            self._close(stream)

    def heartbeat(self, client: "Control", encoded: bytes) -> None:
        request = pb.HeartbeatRequest.FromString(encoded)
        if (member := self._sessions.member(request.session, self.state.members)) is not None:
            self._group.hear(validation.heartbeat(member.node, member.life, request))
            self.heard_at[member.node, member.life] = self.now
        ack = self._sessions.ack(request.session, self.state, self.dispatch.version)
        if member is not None:
            invariants.nodes_are_told_of_views_that_they_lack(self, member.node, ack.version)
        self._answer(client, client.beaten, request.session, ack)

    def report(self, client: "Control", number: int, encoded: bytes) -> None:
        """Where the node joins anew before it is written, the machine must refuse it."""
        request = pb.ReportRequest.FromString(encoded)
        if (member := self._sessions.member(request.session, self.state.members)) is None:
            return self._reported(client, number, request.session)
        assert request.fence.incarnation <= self.state.incarnation, "a node spoke to a later incarnation"
        if not self.full:
            event = validation.event(member.node, member.life, request)
            self.submit(event, self._reported, client, number, request.session)

    def _reported(self, client: "Control", number: int, session: str) -> None:
        self._answer(client, client.acked, number, self._sessions.ack(session, self.state, self.dispatch.version))

    def _answer(self, client: "Control", call: Call, *args: Any) -> None:
        self.world.network.send(self, client.node, call, *args)

    # Views

    def _changed(self) -> None:
        """Have the views looked at; what changes until then is shown with it."""
        self._dispatch_due = True
        if not self._dispatching:
            self._dispatching = True
            self.later(DISPATCH, self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_due, state = False, self.state
        sent = len(list(self.dispatch.update(state, self.now)))
        invariants.streams_show_the_state(self, state)
        if self.dispatch.update_at is not None and not self._reason_due:
            self._reason_due = True
            self.later(max(self.dispatch.update_at - self.now, 0.0), self._dispatch_a_reason)
        self.later(pause(DISPATCH, sent), self._dispatched)

    def _dispatch_a_reason(self) -> None:
        self._reason_due = False
        self._changed()

    def _dispatched(self) -> None:
        self._dispatching = False
        if self._dispatch_due:
            self._changed()


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
