"""A node's trainer: takes inner steps on samples, may die or hang. Steps are counted, not simulated one by one."""

from typing import TYPE_CHECKING

from sim.engine import Call

from atoll.comm.proto import atoll_pb2 as pb
from atoll.node import machine

if TYPE_CHECKING:
    from sim.node import Node

RESTART = 0.5  # seconds


class Trainer:
    def __init__(self, node: "Node") -> None:
        self.node = node
        self.up = False
        self.steps = 0  # of the training under way
        self._life = 0  # what an earlier life, or an earlier task, still had to say is not heard
        self._order: pb.Train | None = None
        self._began = 0.0  # in seconds that the process ran
        self._most = 0  # steps
        self._finish = False
        self._hung = False
        self._moved = 0.0  # seconds on the node's clock; when it last made progress
        self._samples: list[int] = []  # of the lease, behind what was carried over

    def start(self) -> None:
        self.node.later(RESTART * self.node.world.rng.uniform(0.5, 3.0), self._hello, self._life)

    def _hello(self, life: int) -> None:
        if life == self._life and not self.up:
            self.up, self._hung = True, False
            self.node.restore()
            self.node.feed(machine.TrainerUp())

    def die(self) -> None:
        """A CUDA error, or out of memory; it is started again."""
        if not self.up:
            return
        self.up = False
        self._life += 1
        training, self._order = self._order is not None, None
        self.node.trainer_died(training)
        self.node.feed(machine.TrainerDown())
        self.start()

    def hang(self) -> None:
        self._count()
        self._hung = True

    def end_if_hung(self) -> None:
        """The daemon's watchdog."""
        self._count()
        if self.node.host.sick:
            return
        stall = self.node.world.config.members.stall
        if self.up and self.node.machine.task is not None and self.node.clock - self._moved > 0.7 * stall:
            self.node.say("ends its trainer, which made no progress")
            self.die()

    def busy(self, seconds: float, done: Call) -> None:
        """Initialise or evaluate."""
        self._moved = self.node.clock
        self._life += 1
        self.node.later(seconds / self.node.host.speed, self._done, self._life, done)

    def _done(self, life: int, done: Call) -> None:
        if life == self._life and self.up and not self._hung:
            done()

    def train(self, order: pb.Train, samples: list[int]) -> None:
        """Take steps on `samples`, until told to finish or at the ceiling."""
        if not self.up:
            return
        self._life += 1
        self._order, self._samples, self._finish, self.steps = order, samples, False, 0
        batch = self.node.world.config.inner.batch_size
        self._most = min(order.ceiling, len(samples) // batch)
        self._began, self._moved = self.node.ran, self.node.clock
        self._wait()

    def finish(self, round_: int) -> None:
        if self._order is not None and self._order.round == round_ and not self._finish:
            self._count()
            self._finish = True
            self._most = min(self._most, max(self.steps + 1, self._order.floor))
            self._life += 1
            self._wait()

    def _wait(self) -> None:
        """Until the next thing that it has to say."""
        assert self._order is not None
        self._count()
        order = self._order
        if self._hung:
            return
        if self.steps >= self._most:
            self._order = None
            batch = self.node.world.config.inner.batch_size
            self.node.trained(self._samples[: self.steps * batch])
            self.node.feed(machine.TrainerReady(order.round, self.steps, self.steps * batch, 2.0, 1.0))
            return
        goal = order.steps if self.steps < order.steps < self._most else self._most
        due = self._began + goal * self.node.step_time - self.node.ran
        self.node.later(max(due, 0.0) + 1e-6, self._goal, self._life, goal)

    def _goal(self, life: int, goal: int) -> None:
        if life != self._life or self._order is None or not self.up:
            return
        order = self._order
        self._count()
        if goal == order.steps <= self.steps and not self._hung:
            self.node.feed(machine.TrainerReached(order.round))
        if life == self._life:
            self._wait()

    def _count(self) -> None:
        """How many steps it has taken by now."""
        if self._order is None or self._hung or not self.up:
            return
        steps = min(self._most, int((self.node.ran - self._began) / self.node.step_time))
        if steps > self.steps:
            self.steps, self._moved = steps, self.node.clock
