"""The shell around the state machine: takes events in order, journals them, then lets their effects out.

Events that arrive together share one disk write (group commit). `submit` returns when the event is durable.
Whoever must act on the state waits on `changed`; records and notes go to the listeners.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from atoll.comm.config import RunConfig
from atoll.comm.ids import NodeId
from atoll.coordinator import membership
from atoll.coordinator.events import (
    CommitRecord,
    Effect,
    Event,
    Expired,
    Heard,
    Joined,
    Note,
    Publish,
    Started,
    Tick,
)
from atoll.coordinator.goodput import Meter
from atoll.coordinator.journal import Journal
from atoll.coordinator.machine import State, step
from atoll.coordinator.membership import MemberState

log = logging.getLogger("atoll.coordinator")
TICK = 0.25  # seconds
NOTES = 200  # kept for the page


class Clock:
    """Seconds that never go back, across restarts of the coordinator too."""

    def __init__(self, last: float) -> None:
        self._base = max(last, time.time()) - time.monotonic()

    def __call__(self) -> float:
        return self._base + time.monotonic()


class Kernel:
    def __init__(
        self, config: RunConfig, journal: Journal, listeners: tuple[Callable[[Effect], None], ...]
    ) -> None:
        """Rebuild the state from the journal; `run` begins the next incarnation."""
        self._journal = journal
        self._listeners = listeners
        self._queue: asyncio.Queue[tuple[Event, asyncio.Future[None]]] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self.meter = Meter()
        self.notes: list[tuple[float, Note]] = []
        self.state = State(config)
        last = 0.0
        for last, event in journal.events():
            self.state, _ = step(self.state, event, last)
        self.clock = Clock(last)
        self.version = 0
        past = [r.val_loss for r in journal.rounds() if r.val_loss is not None]
        self.last_val_loss: float | None = past[-1] if past else None

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write())
            tasks.create_task(self._tick())
            await self.submit(Started(self.state.incarnation + 1))

    async def submit(self, event: Event) -> None:
        """Take in one event; returns when it is durable and its effects are out."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((event, done))
        await done

    def post(self, event: Event) -> None:
        """Hand in an event without waiting for it."""
        self._queue.put_nowait((event, asyncio.get_running_loop().create_future()))

    async def changed(self, version: int) -> int:
        """Wait until the state is newer than `version`; return its version."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version > version)
            return self.version

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            state, now = self.state, self.clock()
            for node, reason in membership.overdue(state.members, state.config.members, state.awaited, now):
                await self.submit(Expired(node, reason))
            await self.submit(Tick())

    async def _write(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            now = self.clock()
            state, entries, effects = self.state, [], list[Effect]()
            for event, _ in batch:
                before = state
                state, out = step(state, event, now)
                effects += out
                if not isinstance(event, Heard) and (out or state != before):
                    entries.append((now, event))
            records = [e.record for e in effects if isinstance(e, Publish)]
            if entries or records:
                await asyncio.to_thread(self._journal.append, entries, records)
            before, self.state = self.state, state
            self._meter(before, [event for event, _ in batch], records, now)
            for effect in effects:
                self._tell(effect, now)
            if entries:
                async with self._changed:
                    self.version += 1
                    self._changed.notify_all()
            for _, done in batch:
                if not done.done():
                    done.set_result(None)

    def _meter(self, before: State, events: list[Event], records: list[CommitRecord], now: float) -> None:
        pending = [self.state.pending] if self.state.pending is not None else []
        for record in (*records, *pending):
            if record.round > before.committed:
                self.meter.committed(record.contributors, now)
        for event in events:
            if isinstance(event, Heard) and event.node in self.state.members.here:
                self.meter.phase(event.node, event.phase, now)
            if isinstance(event, Joined):
                self.meter.returned(event.node, now)
        for node in before.members.here:
            gone = self.state.members.gone.get(node)
            if gone is not None:
                self.meter.gone(node, gone.state is MemberState.LEFT, now)

    def _tell(self, effect: Effect, now: float) -> None:
        if isinstance(effect, Note):
            self.notes = [*self.notes[1 - NOTES :], (now, effect)]
            log.info(effect.sentence, extra={"fields": {"node": effect.node}})
        else:
            log.info(sentence(effect.record), extra={"fields": {"round": effect.record.round}})
            self.last_val_loss = effect.record.val_loss or self.last_val_loss
        for listener in self._listeners:
            listener(effect)

    def member_of(self, session: str) -> NodeId | None:
        """The living member that holds this session."""
        return next((n for n, m in self.state.members.here.items() if m.session == session), None)


def sentence(record: CommitRecord) -> str:
    """A commit record in one line."""
    loss = "" if record.val_loss is None else f", validation loss {record.val_loss:.3f}"
    seconds = sum(record.seconds.values())
    return (
        f"round {record.round} committed: {len(record.contributors)} contributors, train loss "
        f"{record.train_loss:.3f}{loss}, {record.tokens:,} tokens, {seconds:.1f} s"
    )
