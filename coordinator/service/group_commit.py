"""Events on their way into the state machine: which ones become durable together, and what the clock adds. Pure.

    put --> queue --------+
                          +--> prepare_queue, prepare_tick --> Commit --> (written by the caller) --> adopt
    hear --> heartbeats --+

Events that arrive while a batch is being written share the next one (group commit, as in databases). A heartbeat
waits for no write: the latest of each node is entered before the next batch, and before the clock judges anybody.
The caller (`event_loop`, and the simulation) tells the time, writes, and has one commit on its way at a time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from atoll.comm.ids import NodeId
from atoll.coordinator.service.journaled_machine import Batch, JournaledMachine
from atoll.coordinator.service.tick_schedule import TickSchedule
from atoll.coordinator.state_machine.events import Event, Heartbeat, Started, Tick

MAX_BATCH_EVENTS = 250  # so that heartbeats are answered in between


class Waiter(Protocol):
    """Somebody who waits until an event is durable."""

    def cancelled(self) -> bool:
        """Whether it does not want the event any more, which is then left out of the batch."""


W = TypeVar("W", bound=Waiter)


@dataclass(frozen=True, slots=True)
class Commit(Generic[W]):
    """One batch, prepared, with what it was made from and who waits for it."""

    batch: Batch
    events: Sequence[Event]
    waiters: Sequence[W]


class GroupCommit(Generic[W]):
    """The queue in front of a journaled machine; answers for what is durable are the caller's."""

    def __init__(self, machine: JournaledMachine, now: float) -> None:
        """`now`: seconds on the coordinator's clock; its first tick comes one interval later."""
        self._machine = machine
        self.ticks = TickSchedule(now)
        self._queue: deque[tuple[Event, W | None]] = deque()
        self._heartbeats: dict[NodeId, Heartbeat] = {}

    @property
    def waiting(self) -> bool:
        """Whether events are queued."""
        return bool(self._queue)

    def put(self, event: Event, waiter: W | None = None) -> None:
        """Queue an event."""
        self._queue.append((event, waiter))

    def hear(self, heartbeat: Heartbeat) -> None:
        """Take in a heartbeat, in the place of the node's earlier one if that was not entered yet."""
        self._heartbeats[heartbeat.node] = heartbeat

    def prepare_start(self, now: float, nonce: bytes) -> Commit[W]:
        """The first commit of a process: the next incarnation begins, before anything that is queued. `nonce`:
        random; what the incarnation draws follows from it."""
        return self._prepare([(Started(self._machine.state.incarnation + 1, nonce), None)], now, first=True)

    def prepare_queue(self, now: float) -> Commit[W]:
        """A commit of the events that came first, at most MAX_BATCH_EVENTS of them."""
        size = min(len(self._queue), MAX_BATCH_EVENTS)
        return self._prepare([self._queue.popleft() for _ in range(size)], now)

    def prepare_tick(self, now: float) -> Commit[W]:
        """A commit of what the clock says of the members and of the round."""
        self._enter_heartbeats(now)
        verdicts = self.ticks.judge(self._machine.state, now)
        return self._prepare([(event, None) for event in (*verdicts, Tick())], now)

    def _prepare(self, arrived: Sequence[tuple[Event, W | None]], now: float, first: bool = False) -> Commit[W]:
        self._enter_heartbeats(now)
        absence = self.ticks.absence(now)
        events = [event for event, waiter in arrived if waiter is None or not waiter.cancelled()]
        events = events if first else [*absence, *events]
        waiters = [waiter for _, waiter in arrived if waiter is not None and not waiter.cancelled()]
        return Commit(self._machine.prepare(events, now), events, waiters)

    def _enter_heartbeats(self, now: float) -> None:
        if self._heartbeats:
            heartbeats, self._heartbeats = self._heartbeats, {}
            self._machine.hear(heartbeats.values(), now)
