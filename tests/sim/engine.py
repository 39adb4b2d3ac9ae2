"""A virtual clock, processes that may die or be stopped, and a network that gives every message its own fate.

Nothing here waits or reads a real clock: `Engine.step` runs what is due next.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

Call = Callable[..., None]


class Engine:
    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._due: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._number = (
            itertools.count()
        )  # what is due at the same time runs in the order in which it was asked for

    def after(self, delay: float, call: Call, *args: Any) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._number), call, args))

    def step(self) -> None:
        """Run what is due next."""
        self.now, _, call, args = heapq.heappop(self._due)
        call(*args)


class Process:
    """One life of a program on a host. What reaches it while it is stopped waits until it continues."""

    def __init__(self, engine: Engine, place: str) -> None:
        self.engine, self.place = engine, place
        self.alive = True
        self._waiting: list[tuple[Call, tuple[Any, ...]]] = []
        self._stopped_at: float | None = None  # seconds
        self._stopped_for = 0.0  # seconds

    @property
    def stopped(self) -> bool:
        return self._stopped_at is not None

    @property
    def ran(self) -> float:
        """Seconds that it could work in."""
        until = self.engine.now if self._stopped_at is None else self._stopped_at
        return until - self._stopped_for

    def later(self, delay: float, call: Call, *args: Any) -> None:
        self.engine.after(delay, self.wake, call, *args)

    def wake(self, call: Call, *args: Any) -> None:
        """Have it do something, if it still can."""
        if self.alive:
            if self._stopped_at is None:
                call(*args)
            else:
                self._waiting.append((call, args))

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = self.engine.now

    def resume(self) -> None:
        if self._stopped_at is None:
            return
        self._stopped_for += self.engine.now - self._stopped_at
        self._stopped_at = None
        waiting, self._waiting = self._waiting, []
        for call, args in waiting:
            self.wake(call, *args)


class Network:
    """Between hosts. A message may be late, lost, doubled, or overtaken by the next one."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine, self.rng = engine, rng
        self.cut: set[tuple[str, str]] = set()  # (from, to): nothing gets through
        self.latency: dict[str, float] = {}  # seconds that a host adds
        self.loss = 0.0  # share of messages
        self.doubled = 0.0  # share of messages
        self.slow = 0.0  # share of messages that take seconds

    def send(self, source: Process, to: Process, call: Call, *args: Any) -> None:
        """One message: an outcome, or a part of a call, that its sender must be able to repeat."""
        fate = self.rng.random()
        if (source.place, to.place) in self.cut or fate < self.loss:
            return
        self.engine.after(self.delay(source, to), to.wake, call, *args)
        if fate > 1 - self.doubled:
            self.engine.after(self.rng.uniform(0, 8), to.wake, call, *args)

    def carry(self, source: Process, to: Process, broken: Call, call: Call, *args: Any) -> None:
        """Data on a connection: it arrives, or the connection breaks and `broken` tells the sender, or neither."""
        fate = self.rng.random()
        if (source.place, to.place) in self.cut:
            if fate < 0.7:
                self.engine.after(self.rng.uniform(1, 5), source.wake, broken)
        elif fate < self.loss:  # sent again by TCP
            self.engine.after(self.rng.uniform(0.3, 1.5), to.wake, call, *args)
        else:
            self.engine.after(self.delay(source, to), to.wake, call, *args)

    def delay(self, source: Process, to: Process) -> float:
        """Seconds that a message takes."""
        usual = self.latency[source.place] + self.latency[to.place]
        luck = self.rng.random()
        return self.rng.uniform(0.5, 4.0) if luck < self.slow else usual * (1 + luck)
