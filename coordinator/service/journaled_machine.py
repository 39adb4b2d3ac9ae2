"""The state machine on its journal, without any waiting: what the service and the simulation share.

    prepare (pure) --> write (durable, may fail and be repeated) --> adopt (now it has happened)

Nothing of a batch may leave the coordinator before `adopt`. A snapshot now and then bounds what a restart replays.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from atoll.comm.config.run import RunConfig
from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.errors import ConfigError
from atoll.comm.replace import replace
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.note_quota import NoteQuota
from atoll.coordinator.state_machine.events import CommitRecord, Decision, Effect, Event, Heartbeat, Note, Publish
from atoll.coordinator.state_machine.state import State
from atoll.coordinator.state_machine.step import hear, step

SNAPSHOT_EVERY = 2000  # events


@dataclass(frozen=True, slots=True)
class Batch:
    """Events that become durable together, and what comes of them."""

    now: float  # seconds
    state: State
    entries: list[tuple[float, Event]]
    effects: list[Effect]

    @property
    def records(self) -> list[CommitRecord]:
        return [e.record for e in self.effects if isinstance(e, Publish)]

    @property
    def notes(self) -> list[tuple[float, Note]]:
        return [(self.now, e) for e in self.effects if isinstance(e, Note)]

    @property
    def decisions(self) -> list[tuple[float, Decision]]:
        return [(self.now, e) for e in self.effects if isinstance(e, Decision)]


class JournaledMachine:
    """The state, and how a batch of events changes it durably."""

    def __init__(
        self,
        config: RunConfig,
        journal: Journal,
        snapshot_every: int = SNAPSHOT_EVERY,
        publish: Callable[[CommitRecord], list[Effect]] = lambda record: [Publish(record)],
        replayed: Callable[[State, State, Event, list[Effect], float], None] = lambda *_: None,
    ) -> None:
        """Rebuild the state from the journal; the caller then submits `Started`. `publish` completes a record that
        is about to be kept by what the service saw of its round, and may add notes. `replayed` is told of each
        event of the journal, with the state before and after it, its effects, and its time in seconds."""
        self._journal, self._every, self._publish = journal, snapshot_every, publish
        self._notes = NoteQuota()
        self.state, self.last_at = State(config), 0.0  # seconds; of the last event
        self.events_since_snapshot = journal.events_since_snapshot
        if (found := journal.restore()) is not None:
            self.state, self.last_at = decode(found.body, config), found.at
        for self.last_at, event in journal.events():
            before = self.state
            self.state, out = step(before, event, self.last_at)
            replayed(before, self.state, event, out, self.last_at)

    def prepare(self, events: Sequence[Event], now: float) -> Batch:
        """Step the events at `now` (seconds); nothing has changed yet."""
        state, entries, effects = self.state, list[tuple[float, Event]](), list[Effect]()
        for event in events:
            before = state
            state, out = step(state, event, now)
            out = self._notes.admit(event, state, out, now)
            for effect in out:
                effects += self._publish(effect.record) if isinstance(effect, Publish) else [effect]
            changed = out or (state is not before and state != before)
            if changed and not isinstance(event, Heartbeat):
                entries.append((now, event))
        return Batch(now, state, entries, effects)

    def write(self, batch: Batch) -> None:
        """Make the batch durable. Raises `JournalFull`; then it may be written again."""
        if batch.entries or batch.effects:
            self._journal.append(batch.entries, batch.records, batch.notes, batch.decisions)
            self.events_since_snapshot += len(batch.entries)

    def adopt(self, batch: Batch) -> None:
        """Take over the state after a batch that is durable: it has happened."""
        self.state, self.last_at = batch.state, batch.now

    def hear(self, beats: Iterable[Heartbeat], now: float) -> None:
        """Take in heartbeats, which the journal has no part in."""
        self.state, self.last_at = hear(self.state, beats, now), now

    def snapshot_due(self, busy: bool = False) -> bool:
        """Whether it is time for a snapshot; while many members wait for the next event (`busy`), which it would
        hold up, it has twice as long."""
        return self.events_since_snapshot >= self._every * (2 if busy else 1)

    def snapshot(self) -> None:
        """Bound what a restart replays. Raises `JournalFull`; then nothing changed."""
        self._journal.snapshot(self.last_at, encode(self.state))
        self.events_since_snapshot = 0


def encode(state: State) -> bytes:
    """The state as a snapshot's body (msgpack)."""
    return msgspec.msgpack.encode(state)


def decode(body: bytes, config: RunConfig) -> State:
    """A snapshot's state, under the config that the run has now. Raises `ConfigError` for another version's."""
    try:
        return replace(msgspec.msgpack.decode(body, type=State), config=config)
    except DECODE_ERRORS as error:
        raise ConfigError(
            f"the journal's snapshot is another version's ({error}): start the version of atoll that wrote it"
        ) from None
