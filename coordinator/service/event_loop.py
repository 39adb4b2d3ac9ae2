"""The shell around the state machine: one task that takes events in order, makes them durable, then lets out what
comes of them. `rpc` and `view_streams` hand events in, `control_plane` runs it.

    submit, post --> group_commit --> write, in a thread --> adopt --> answers, notes, records, views

Which events share a write, and when the clock is looked at, is `group_commit`'s; here are the waiting and the real
clock. `submit` returns when its event is durable. While the disk takes no writes nothing leaves: the same batch is
written again each second, `trouble` says why.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf

import numpy as np

from atoll.comm import faults
from atoll.comm import log as logs
from atoll.comm.config.run import RunConfig, to_json
from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.digest import digest
from atoll.comm.replace import replace
from atoll.coordinator.history.series import F64, SeriesTable
from atoll.coordinator.service.crash_points import crash_points
from atoll.coordinator.service.failures import sentences
from atoll.coordinator.service.group_commit import Commit, GroupCommit
from atoll.coordinator.service.journal import Journal, JournalFull
from atoll.coordinator.service.journaled_machine import Batch, JournaledMachine
from atoll.coordinator.service.metrics import Metrics
from atoll.coordinator.service.telemetry import Telemetry, Vitals
from atoll.coordinator.state_machine.events import (
    CommitRecord,
    Decision,
    Effect,
    Event,
    Heartbeat,
    Note,
    Publish,
    WritesResumed,
)
from atoll.coordinator.state_machine.state import CLOSING, Phase, State

log = logging.getLogger("atoll.coordinator")
NONCE_BYTES = 32
MAX_NOTES = 200  # the latest, for the page
# Seconds between two writes at most, if the last took as long: the events of many nodes share one.
MAX_WRITE_PAUSE = 0.01
RETRY_INTERVAL = 1.0  # seconds between two tries to write on a disk that is full
RULING_INTERVAL = 1.0  # seconds between two looks whether the operator bans or pardons somebody
TELEMETRY = "observed"  # its key in the journal's meta
# Seconds between two saves of the telemetry: what heartbeats said since the last one is lost with the process.
# With many members it is long to write.
MIN_TELEMETRY_INTERVAL, MAX_TELEMETRY_INTERVAL, TELEMETRY_INTERVAL_PER_NODE = 1.0, 10.0, 0.02
OBSERVATION_DELAY = 0.25  # seconds after which the telemetry takes in what happened: views go before it
# Members that wait for one write from which on they are a crowd, and seconds for which they are after it: so long
# the next step and the views that follow from it may take.
CROWD, CROWD_SECONDS = 8, 0.25
# The share of a phase's reports from which on the last ones are awaited, where they are so many that to act on the
# last one takes tens of milliseconds.
LAST_SHARE, MANY = 0.9, 100
ANSWER_DELAY = 0.1  # seconds that a batch's answers and views take to leave; only for tests that let it crash then
STOPPING = "the coordinator is stopping for a while; try again"


class CoordinatorStopping(Exception):
    """The coordinator is stopping: the event was not taken."""


class Clock:
    """The coordinator's clock: seconds since 1970 that never go back, across its restarts too."""

    def __init__(self, last: float) -> None:
        self._base = max(last, time.time()) - time.monotonic()

    def __call__(self) -> float:
        return self._base + time.monotonic()


class EventLoop:
    """The coordinator's one task: everything that changes the state goes through it, in order."""

    def __init__(
        self,
        config: RunConfig,
        journal: Journal,
        metrics: Metrics,
        tell: Callable[[Effect], None],
        healthy: Callable[[bool], Awaitable[None]],
    ) -> None:
        """Rebuild the state from the journal; `run` begins the next incarnation. `tell` is called with every
        durable effect, `healthy` when the journal stops taking writes and when it takes them again."""
        self._journal, self.metrics, self._tell, self._healthy = journal, metrics, tell, healthy
        self._telemetry = _telemetry(journal)
        self._seen_until = self._telemetry.until  # seconds; what the journal has of later is new to it
        self._unobserved = deque[Callable[[], None]]()  # what the telemetry is yet to take in, in order
        self.config_digest = digest(to_json(config)).hex()
        self._machine = JournaledMachine(config, journal, publish=self._published, replayed=self._replayed)
        self.clock = Clock(self._machine.last_at)
        self._telemetry.reconcile(self.state, self.clock())
        self.notes = deque(journal.notes(MAX_NOTES), MAX_NOTES)
        lately = self.state.committed - 2 * config.data.eval_every * self.state.turns.fragments
        recent = SeriesTable()
        recent.extend(journal.iter_series(lately))
        self.last_val_loss, self.last_train_loss = map(_last_known, recent.columns("val_loss", "train_loss"))
        self.trouble = ""  # why nothing can be written now
        self.draining = False  # the process is about to end
        self.refusing: Callable[[], bool] = lambda: False  # whether calls are not answered now
        self.on_change: list[Callable[[], None]] = []  # called after every change of the state, heartbeats aside
        self._arrived, self._stop, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._crowd_until = -inf  # seconds of the monotonic clock
        self._telemetry_saved_at = self._rulings_read_at = self.clock()
        self._last_ruling = 0  # number of the latest that was handed in
        self._group = GroupCommit[asyncio.Future[None]](self._machine, self._telemetry_saved_at)

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def telemetry(self) -> Telemetry:
        """What was seen of the run, up to now; in the loop's thread alone."""
        self._catch_up()
        return self._telemetry

    @property
    def stopped(self) -> bool:
        """Whether `run` is to end."""
        return self._stop.is_set()

    @property
    def crowded(self) -> bool:
        """Whether many members wait to be served, so that whoever only looks on should wait; from any thread."""
        return time.monotonic() < self._crowd_until

    def crowd(self) -> None:
        """Count many members as waiting from now on, for a while."""
        self._crowd_until = time.monotonic() + CROWD_SECONDS

    @property
    def _is_awaited(self) -> bool:
        """Whether many members wait for the last reports of a phase: any may be the one that ends it, and the step
        that follows from that one is long."""
        r = self.state.round
        said = r.ledger.contributions if r.phase is Phase.COLLECTING else r.completions
        return r.phase in CLOSING and len(said) >= max(LAST_SHARE * len(r.participants), MANY)

    async def run(self) -> None:
        """Serve until `stop`; raises what the journal says when it is damaged."""
        next_write = 0.0  # seconds; when the next write is due
        with suppress(CoordinatorStopping):
            await self._commit(self._group.prepare_start(self.clock(), secrets.token_bytes(NONCE_BYTES)))
            while not self._stop.is_set():
                await self._arrival(self._group.ticks.wait(self.clock()))
                if self._group.waiting:
                    await asyncio.sleep(next_write - time.monotonic())
                    if self._is_awaited:
                        self.crowd()
                    began = time.monotonic()
                    await self._commit(self._group.prepare_queue(self.clock()))
                    ended = time.monotonic()
                    next_write = ended + min(ended - began, MAX_WRITE_PAUSE)
                if self._group.ticks.due(now := self.clock()):
                    if self.refusing():
                        self._group.ticks.excuse(now)
                    await self._commit(self._group.prepare_tick(now))
                    if now - self._rulings_read_at > RULING_INTERVAL:
                        await self._take_rulings(now)
                    if now - self._telemetry_saved_at > self._telemetry_interval:
                        await self._durably(self._save(self.telemetry.dump()))
            # Who goes on from the journal repeats no event: another version of Atoll might take it in otherwise.
            await self._durably(partial(self._snapshot, self.telemetry.dump()))

    def stop(self) -> None:
        """End `run` after the batch at hand, which is durable then; later events are not taken."""
        self._stop.set()
        self._arrived.set()

    async def submit(self, event: Event) -> None:
        """Take in one event; returns when it is durable and its effects are out. Raises `CoordinatorStopping`."""
        if self._stop.is_set():
            raise CoordinatorStopping
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._group.put(event, done)
        self._arrived.set()
        await done

    def post(self, event: Event) -> None:
        """Hand in an event without waiting for it."""
        self._group.put(event)
        self._arrived.set()

    def heartbeat(self, event: Heartbeat, vitals: Vitals, unanswered: Mapping[str, float]) -> None:
        """Take in a heartbeat without a write, and what it said of the node (`Telemetry.record_heartbeat`); the
        next tick judges by it."""
        self._observe(partial(self._telemetry.record_heartbeat, event, vitals, unanswered, self.clock()))
        self._group.hear(event)

    async def wait_until(self, holds: Callable[[State], bool]) -> None:
        """Return once `holds` is true of the state; it is asked again after every batch that changes it."""
        while not holds(self.state):
            await self._changed.wait()

    async def _take_rulings(self, now: float) -> None:
        """Hand in what the operator rules, and enter what was handed in and is durable by now. A ruling that is
        handed in twice, by a process that ended in between, changes nothing the second time."""
        self._rulings_read_at = now
        with suppress(JournalFull):
            rulings = await asyncio.to_thread(self._journal.rulings)
            if rulings and rulings[-1][0] <= self._last_ruling and not self._group.waiting:
                await asyncio.to_thread(self._journal.take_rulings, self._last_ruling)
            for number, ruling in rulings:
                if number > self._last_ruling:
                    self.post(ruling)
                    self._last_ruling = number

    async def _arrival(self, timeout: float) -> None:
        if not self._group.waiting and timeout > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._arrived.wait()
        self._arrived.clear()

    async def _commit(self, commit: Commit[asyncio.Future[None]]) -> None:
        batch = commit.batch
        if len(commit.waiters) >= CROWD:
            self.crowd()
        points = crash_points(self.state, batch.state, commit.events) if faults.FAULTS else []
        _hit(points, "before-write")
        if batch.entries or batch.effects:
            dump = self.telemetry.dump() if self._machine.snapshot_due(self._is_awaited) else ""
            await self._durably(partial(self._write, batch, dump))
        _hit(points, "written")
        self._adopt(batch, commit.events)
        for done in commit.waiters:
            if not done.done():
                done.set_result(None)
        if points:
            asyncio.get_running_loop().call_later(ANSWER_DELAY, _hit, points, "told")

    def _write(self, batch: Batch, dump: str) -> None:
        """In a thread. The snapshot is of the state before the batch, which is what the journal has."""
        if dump and self._machine.snapshot_due():  # else the write alone is done again
            self._snapshot(dump)
        with self.metrics.writes.time():
            self._machine.write(batch)
        self.metrics.events_since_snapshot.set(self._machine.events_since_snapshot)

    def _observe(self, observation: Callable[[], None]) -> None:
        """Have the telemetry take something in a moment later."""
        if not self._unobserved:
            asyncio.get_running_loop().call_later(OBSERVATION_DELAY, self._catch_up)
        self._unobserved.append(observation)

    def _catch_up(self) -> None:
        while self._unobserved:
            _take_in(self._unobserved.popleft())

    @property
    def _telemetry_interval(self) -> float:
        nodes = len(self._telemetry.meter.accounts)
        return min(MIN_TELEMETRY_INTERVAL + nodes * TELEMETRY_INTERVAL_PER_NODE, MAX_TELEMETRY_INTERVAL)

    def _save(self, dump: str) -> Callable[[], None]:
        self._telemetry_saved_at = self.clock()
        return partial(self._journal.set_meta, TELEMETRY, dump)

    def _snapshot(self, dump: str) -> None:
        """In a thread. What a snapshot stands for is not replayed: the telemetry has to know it as well."""
        self._journal.set_meta(TELEMETRY, dump)
        self._machine.snapshot()

    async def _durably(self, write: Callable[[], None]) -> None:
        """Do `write` in a thread; while the disk is full, again and again. Raises `CoordinatorStopping`, and what
        else the journal says."""
        failing_since: float | None = None
        while True:
            try:
                await asyncio.to_thread(write)
            except JournalFull as error:
                failing_since = self.clock() if failing_since is None else failing_since
                await self._set_trouble(str(error))
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_INTERVAL):
                        await self._stop.wait()
                if self._stop.is_set():
                    raise CoordinatorStopping from None
            else:
                if failing_since is not None:
                    self.post(WritesResumed(self.clock() - failing_since))
                return await self._set_trouble("")

    async def _set_trouble(self, trouble: str) -> None:
        before, self.trouble = self.trouble, trouble
        if bool(trouble) != bool(before):
            log.warning(trouble) if trouble else log.info("the journal takes writes again: the run goes on")
            await self._healthy(not trouble)

    def _published(self, record: CommitRecord) -> list[Effect]:
        """The record with what was seen of its round beyond what the state machine decides upon, and what its
        failures cost, in sentences."""
        record = replace(self.telemetry.complete(record), config_digest=self.config_digest)
        names = {failure.node: self.state.name(failure.node) for failure in record.failures}
        told = sentences(record.failures, names, record.round)
        notes = [Note(sentence, failure.node, failure.round) for failure, sentence in told]
        return [*notes, Publish(record)]

    def _replayed(self, before: State, after: State, event: Event, out: list[Effect], at: float) -> None:
        """What the journal has that was not seen yet when the telemetry was saved."""
        if at > self._seen_until:
            records = [effect.record for effect in out if isinstance(effect, Publish)]
            _take_in(partial(self._telemetry.record_batch, before, after, [event], records, at))

    def _adopt(self, batch: Batch, events: Sequence[Event]) -> None:
        """The batch has happened: everybody hears of it."""
        before = self.state
        self._machine.adopt(batch)
        self._observe(partial(self._telemetry.record_batch, before, batch.state, events, batch.records, batch.now))
        logs.about(round=batch.state.round.number)
        for effect in batch.effects:
            match effect:
                case Note(text, node):
                    self.notes.append((batch.now, effect))
                    log.info(text, extra={"fields": {"node": node}})
                case Publish(record):
                    log.info(sentence(record), extra={"fields": {"round": record.round}})
                    self.last_val_loss = self.last_val_loss if record.val_loss is None else record.val_loss
                    self.last_train_loss = self.last_train_loss if record.void else record.train_loss
                    self.metrics.publish(record)
                case Decision():  # its note says it
                    self.metrics.decide(effect)
            self._tell(effect)
        if batch.entries:
            self._changed.set()
            self._changed = asyncio.Event()
            for changed in self.on_change:
                changed()


def _last_known(values: F64) -> float | None:
    """The last one that is a number; None: none is."""
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else None


def _hit(points: list[str], when: str) -> None:
    for point in points:
        faults.fault_point(f"coordinator.{point}.{when}")


def _take_in(observation: Callable[[], None]) -> None:
    """Have the telemetry take something in. It decides nothing: neither what comes behind that nor who reads it
    then, which may be a commit, fails with it."""
    try:
        observation()
    except Exception:
        log.exception("something that was seen of the run is not counted: a fault of the coordinator")


def _telemetry(journal: Journal) -> Telemetry:
    try:
        return Telemetry.load(journal.meta(TELEMETRY))
    except DECODE_ERRORS as error:
        log.warning(f"goodput is counted anew, what the journal has of it is another version's: {error}")
        return Telemetry()


def sentence(record: CommitRecord) -> str:
    """A commit record in one line, for logs."""
    if record.void:
        return record.reason
    loss = "" if record.val_loss is None else f", validation loss {record.val_loss:.3f}"
    seconds = sum(record.seconds.values())
    who = f"{len(record.contributors)} contributor{'s' if len(record.contributors) != 1 else ''}"
    return (
        f"round {record.round} committed: {who}, train loss "
        f"{record.train_loss:.3f}{loss}, {record.tokens:,} tokens, {seconds:.1f} s"
    )
