"""A node's trainer: takes inner steps on samples, may die or hang. Steps are counted, not simulated one by one."""

from typing import TYPE_CHECKING

from sim import invariants
from sim.engine import Call

from atoll.comm.proto import atoll_pb2 as pb
from atoll.node import trainer_channel as channel
from atoll.node.state_machine import events as node_ev

if TYPE_CHECKING:
    from sim.node import Node

RESTART = 0.5  # seconds


class Trainer:
    def __init__(self, node: "Node") -> None:
        self.node = node
        self.up = False
        self.steps = 0  # of the training under way
        self._starts = 0  # what an earlier life still had to say is not heard
        self._life = 0  # nor what an earlier order had
        self._order: pb.Train | None = None
        self._began = 0.0  # in seconds that the process ran
        self._most = 0  # steps
        self._finish = self._rests = False
        self._hung = False
        self._moved = 0.0  # seconds on the node's clock; when it last made progress
        self._samples: list[int] = []  # of the lease, behind what was carried over
        self.ahead = False  # it trains on what follows its order
        self._taking: tuple[int, bytes] | None = None  # the state that it is to put its steps on top of
        self._reached = False  # it has said so

    @property
    def _batch(self) -> int:
        return self.node.world.config.inner.batch_size

    @property
    def _delay(self) -> int:
        return self.node.world.config.overlap.delay

    def _ahead(self, order: pb.Train) -> int:
        """Steps that it takes at most beyond those that it handed over."""
        delay = self.node.world.config.delay(order.round)
        return max(delay, order.ceiling) if delay else 0

    def start(self) -> None:
        self.node.later(RESTART * self.node.world.rng.uniform(0.5, 3.0), self._hello, self._life)

    def _hello(self, life: int) -> None:
        if life == self._life and not self.up:
            self.up, self._hung = True, False
            self.node.restore()
            self.node.feed(node_ev.TrainerUp(self.node.layout))

    def die(self) -> None:
        """A CUDA error, or out of memory; it is started again."""
        if not self.up:
            return
        self.up = False
        self._starts += 1
        self._life += 1
        training, self._order = self._order is not None and not self.ahead, None
        self.ahead = False
        self.node.without_steps(training)
        self.node.feed(node_ev.TrainerDown())
        self.start()

    def miscalculate(self) -> None:
        """Its steps are of no use: it drops them, says so, and waits for an order."""
        if not self.up or self._hung or (order := self._order) is None:
            return
        self._life += 1
        training, self._order = not self.ahead, None
        self.ahead = False
        self.node.without_steps(training)
        self.node.feed(channel.BadArithmetic(order.round, "the loss is too large"))

    def hang(self) -> None:
        self._count()
        self._hung = True

    def end_if_hung(self) -> None:
        """The daemon's watchdog."""
        self._count()
        if self.node.host.sick:
            return
        if self.up:
            self.node.feed(node_ev.TrainerSilent(self.node.clock - self._moved))

    def busy(self, seconds: float, done: Call) -> None:
        """Initialise or evaluate; the latter in between steps, if it is at work."""
        self._moved = self.node.clock
        self.node.later(seconds / self.node.host.speed, self._done, self._starts, done)

    def _done(self, start: int, done: Call) -> None:
        if start == self._starts and self.up and not self._hung:
            done()

    def train(self, order: pb.Train, samples: list[int], on: bool) -> None:
        """Take steps on `samples`, until told to finish or at the ceiling; the first of them may be taken."""
        if not self.up:
            return
        self._life += 1
        if on:
            self._count()
            invariants.steps_ahead_are_the_next_ones(self.node, self.taken, samples)
        else:
            self.steps, self._began = 0, self.node.ran
        self._moved = self.node.clock
        self._order, self._samples, self._finish, self.ahead = order, samples, False, False
        self._rests = False
        self._most = max(self.steps, min(order.ceiling, len(samples) // self._batch))
        self._taking, self._reached = (self.node.state if on else None), False
        if on:
            self.node.later(0.0, self._goal, self._life)
        else:
            self._wait()

    def finish(self, round_: int, rest: bool = False) -> None:
        if self._order is not None and self._order.round == round_ and not self._finish and not self.ahead:
            self._count()
            self._finish, self._rests = True, rest
            self._most = min(self._most, max(self.steps + 1, self._order.floor))
            self._life += 1
            self._wait()

    def hold(self, round_: int) -> None:
        """Go no further ahead than the step at hand."""
        if self._order is not None and self._order.round == round_ and self.ahead:
            self._count()
            self._most = min(self._most, self.steps + 1)
            self._life += 1
            self._wait()

    @property
    def taken(self) -> list[int]:
        """Samples that it took steps on since it handed over."""
        return self._samples[: self.steps * self._batch] if self._order is not None and self.up else []

    def _wait(self) -> None:
        """Until the next thing that it has to say, or to do."""
        assert self._order is not None
        self._count()
        order = self._order
        if self._hung:
            return
        self._take_if_due()
        if not (self.ahead or self._reached) and self.steps >= order.steps:
            self._reached = True
            self.node.feed(channel.Reached(order.round))
        if self.steps >= self._most:
            return self.node.feed(channel.Waits(order.round)) if self.ahead else self._hand_over(order)
        goals = [self._most] + [g for g in (order.steps, self._delay) if self.steps < g < self._most]
        goal = min(goals)
        due = self._began + goal * self.node.step_time - self.node.ran
        self.node.later(max(due, 0.0) + 1e-6, self._goal, self._life)

    def _take_if_due(self) -> None:
        """After so many steps, or before it hands over, it puts its steps on top of the new state."""
        if self._taking is not None and (self.steps >= self._delay or self.steps >= self._most):
            invariants.the_state_stands_still_until_it_is_taken(self.node, self._taking)
            self._taking = None

    def _hand_over(self, order: pb.Train) -> None:
        """Write the local vector, and go ahead if it may."""
        steps, used = self.steps, self.steps * self._batch
        self.node.trained(order.round, self._samples[:used])
        self._samples = self._samples[used:]
        self.steps, self._began = 0, self._began + steps * self.node.step_time
        self._most = min(self._ahead(order), len(self._samples) // self._batch)
        self.ahead = steps > 0 and self._most > 0 and not self._rests
        self._life += 1
        if self.ahead:
            self._began = max(self._began, self.node.ran - self.node.step_time)
            self.node.later(0.0, self._goal, self._life)
        else:
            self._order = None
        self.node.feed(channel.Ready(order.round, steps, 2.0, used, 1.0, self.ahead))

    def _goal(self, life: int) -> None:
        if life == self._life and self._order is not None and self.up:
            self._wait()

    def _count(self) -> None:
        """How many steps it has taken by now."""
        if self._order is None or self._hung or not self.up:
            return
        steps = min(self._most, int((self.node.ran - self._began) / self.node.step_time))
        if steps > self.steps:
            self.steps, self._moved = steps, self.node.clock
        if self.steps == self._most:  # it stands still
            self._began = self.node.ran - self._most * self.node.step_time
