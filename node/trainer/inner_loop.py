"""The inner loop: optimizer steps on this node's share of the round, over all its local ranks.

`train` tells the story of a round, or, with overlap, of one after the other. Every local rank calls it with the
same order and takes its slice of each batch; that the daemon has said something, which rank 0 alone knows, travels
to the others in the sum that averages the loss, so that all ranks hear it after the same step.

With overlap a trainer does not stand still while what it handed over travels:

    steps of round k | Ready(k) | ahead, `delay` steps or more | take state k | steps of round k+1 | Ready(k+1)
                                    told to Train on: round k is committed, and the state is here

It takes the state after `overlap.delay` steps. When it was not told by then, it goes on, and takes it as soon as
it is; it stops when it has all the steps that a round may have.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError
from atoll.comm.faults import fault_point
from atoll.comm.leases import samples, size
from atoll.node.data import Array, Source
from atoll.node.trainer.lr_rewarm import Rewarming
from atoll.node.trainer.lr_schedule import learning_rate
from atoll.node.trainer_channel import (
    Evaluate,
    Evaluated,
    Finish,
    Progress,
    Reached,
    Ready,
    ToDaemon,
    ToTrainer,
    Train,
    Waits,
)

WORST_LOSS = 1e4  # nats a token
REPORT_EVERY = 0.25  # seconds between two progress reports


@dataclass(frozen=True)
class RankGroup:
    """This process among the local ranks of its node."""

    rank: int
    size: int

    def total(self, *values: float) -> list[float]:
        """The sums over all ranks; every rank must call it."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def wait(self) -> None:
        """Return when every rank has called it."""
        self.total(0.0)

    def share(self, batch_size: int) -> int:
        """Sequences of a batch that each rank takes."""
        if batch_size % self.size:
            raise ConfigError(
                f"inner.batch_size={batch_size} cannot be divided among ranks={self.size}: "
                f"start this node with a number of ranks that divides {batch_size}"
            )
        return batch_size // self.size


@dataclass
class LearnerState:
    """What lives over rounds: the optimizer's moments; the parameters start from each round's anchor."""

    run: RunConfig
    team: RankGroup
    device: torch.device
    source: Source
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rewarming: Rewarming = field(default_factory=Rewarming)  # over, unless the moments were lost
    may_step: threading.Event = field(default_factory=threading.Event)  # the moments are not being copied

    def __post_init__(self) -> None:
        self.may_step.set()


class ThroughputMeter:
    """Turns steps into at most one report in `REPORT_EVERY` seconds."""

    def __init__(self) -> None:
        self._at, self._tokens = time.monotonic(), 0

    def tokens_per_s(self, tokens: int) -> float | None:
        """Tokens a second since the last report, with `tokens` more; None when it is too early for one."""
        self._tokens += tokens
        passed = time.monotonic() - self._at
        if passed < REPORT_EVERY:
            return None
        rate = self._tokens / passed
        self._at, self._tokens = time.monotonic(), 0
        return rate


@dataclass
class TrainingCursor:
    """Where a trainer stands on its way through an order's lease."""

    run: RunConfig
    order: Train
    steps: int = 0  # since the last Ready, or since the order
    behind: int = 0  # steps of the order before these: it is ahead of the order that it has
    loss: float = 0.0  # summed over the steps
    ahead: bool = False  # the order's work is handed over
    to_take: bool = False  # it was told where to put its steps since then, and has not done so
    told: bool = False  # that it has reached the order's steps
    closing: bool = False  # it was told to finish
    waits: bool = False  # and has said so

    @property
    def delay(self) -> int:
        """Steps beyond the order's after which its state is taken at the earliest; 0: it does not go beyond."""
        return self.run.delay(self.order.round)

    @property
    def left(self) -> int:
        """Steps for which there are samples."""
        return size(self.order.lease) // self.run.inner.batch_size - self.behind - self.steps

    @property
    def stands_still(self) -> bool:
        """It is as far ahead as it may be."""
        most = max(self.delay, self.order.ceiling)
        return self.ahead and (self.steps >= most or self.left <= 0)

    @property
    def complete(self) -> bool:
        """The order's work is to be handed over."""
        enough = self.steps >= (self.order.floor if self.closing else self.order.ceiling)
        return not self.ahead and (enough or self.left <= 0)

    @property
    def takes(self) -> bool:
        """It is time to take the new state: not before `overlap.delay` steps, nor after handing over."""
        return self.to_take and (self.complete or self.steps >= self.run.overlap.delay)

    @property
    def next_samples(self) -> list[int]:
        batch_size = self.run.inner.batch_size
        return samples(self.order.lease, (self.behind + self.steps) * batch_size, batch_size)

    @property
    def tokens(self) -> int:
        """The clock of the learning rate, interpolated."""
        step_tokens = self.run.inner.batch_size * self.run.model.seq_len
        return self.order.tokens + (self.behind + self.steps) * step_tokens * self.order.fleet

    def hand_over(self) -> Ready:
        """What came of the order. From now on it is ahead, if there is overlap, and anything to train on."""
        ready = Ready(
            self.order.round,
            self.steps,
            self.loss / max(self.steps, 1),
            self.steps * self.run.inner.batch_size,
            ahead=self.delay > 0 and self.steps > 0 and self.left > 0,
        )
        self.behind, self.steps, self.loss, self.ahead = self.behind + self.steps, 0, 0.0, True
        return ready

    def go_on(self, order: Train) -> None:
        """The steps since it handed over are the first of this order."""
        self.order, self.behind, self.ahead, self.to_take = order, 0, False, True
        self.told = self.closing = self.waits = False


class TrainerIO(Protocol):
    """Where the parameters come from and go to, and who gives the orders. All ranks call it alike."""

    def load(self, resume: bool) -> None:
        """Start from the anchor, or from the local vector."""

    def hand_over(self, ready: Ready) -> None:
        """Write the local vector and say so."""

    def take(self, order: Train) -> None:
        """Put what was trained since `hand_over` on top of the anchor, or of the local vector."""

    def evaluate(self, round: int) -> None:
        """Measure the anchor; the parameters stay what they are."""

    def next(self) -> ToTrainer:
        """The daemon's next command."""

    def waiting(self) -> bool:
        """Whether there is one; only rank 0 knows."""

    def send(self, message: ToDaemon) -> None: ...


def train(learner: LearnerState, order: Train, bench: TrainerIO) -> ToTrainer | None:
    """Take steps, until told to finish or at the ceiling or the end of the lease, and hand over. With overlap go
    on from there, order after order, until another command comes: that one is returned."""
    course, pace = TrainingCursor(learner.run, order), ThroughputMeter()
    bench.load(order.resume)
    learner.model.train()
    while True:
        if course.takes:
            course.to_take = False
            bench.take(course.order)
        if course.complete:
            ready = course.hand_over()
            bench.hand_over(ready)
            if not ready.ahead:
                return None
        if course.stands_still:
            if not course.waits:
                course.waits = True
                bench.send(Waits(course.order.round))
            heard = True
        else:
            heard = advance(learner, course, bench, pace)
        if heard and (command := obey(course, bench, bench.next())) is not None:
            return command
        if not (course.ahead or course.told) and course.steps >= course.order.steps:
            course.told = True
            bench.send(Reached(course.order.round))


def advance(learner: LearnerState, course: TrainingCursor, bench: TrainerIO, pace: ThroughputMeter) -> bool:
    """Take a step; return whether there is a command."""
    fault_point("trainer.step")
    config, team = learner.run.inner, learner.team
    sequences = batch(learner, learner.source.train, course.next_samples)
    rate = learning_rate(config, course.tokens) * learner.rewarming.share()
    loss = step(learner, sequences, rate)
    mean_loss, heard = team.total(finite(loss) / team.size, float(bench.waiting()))
    course.steps, course.loss = course.steps + 1, course.loss + mean_loss
    if (speed := pace.tokens_per_s(config.batch_size * learner.run.model.seq_len)) is not None:
        bench.send(Progress(course.order.round + course.ahead, course.steps, mean_loss, speed))
    return heard > 0


def obey(course: TrainingCursor, bench: TrainerIO, command: ToTrainer) -> ToTrainer | None:
    """Carry out what can be between two steps; else return the command."""
    match command:
        case Finish(round=number):
            if number == course.order.round and not course.ahead:  # else it had handed over when it came
                course.closing = True
        case Train(on=True) if course.ahead:
            course.go_on(command)
        case Evaluate(round=number):
            bench.evaluate(number)
        case _:
            return command
    return None


def step(learner: LearnerState, sequences: Tensor, rate: float) -> float:
    """One optimizer step on this rank's sequences; return their mean loss."""
    for group in learner.optimizer.param_groups:
        group["lr"] = rate
    loss = cross_entropy(learner.model, sequences)
    loss.backward()  # type: ignore[no-untyped-call]
    learner.may_step.wait()
    # An infinity or NaN would stay in the optimizer's moments for the rest of the run: such a step is left out.
    if clip_gradients(learner.model, learner.run.inner.clip):
        learner.optimizer.step()
    learner.optimizer.zero_grad()
    return loss.item()


def finite(loss: float) -> float:
    """A loss that can be told and averaged; what is not finite counts as a very bad one."""
    return min(loss, WORST_LOSS) if loss == loss else WORST_LOSS


def clip_gradients(model: nn.Module, limit: float) -> bool:
    """Scale the gradient to a norm of at most `limit`; return whether the norm was finite."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    full = getattr(norm, "full_tensor", None)  # of a DTensor: its local value is this rank's part of the norm
    return bool(torch.isfinite(full() if full else norm))


@torch.no_grad()
def evaluate(learner: LearnerState, round: int) -> Evaluated:
    """The mean loss over the run's `val_batches` validation batches, split over the ranks."""
    config, team = learner.run, learner.team
    learner.model.eval()
    loss = 0.0
    for number in range(config.data.val_batches):
        first = number * config.inner.batch_size
        sequences = batch(learner, learner.source.validation, range(first, first + config.inner.batch_size))
        loss += finite(cross_entropy(learner.model, sequences).item())
    (total,) = team.total(loss / team.size)
    return Evaluated(round, total / config.data.val_batches)


def batch(learner: LearnerState, sample: Callable[[int], Array], indices: Sequence[int]) -> Tensor:
    """This rank's sequences of the batch of the samples `indices`: (share, seq_len + 1) int64."""
    share = learner.team.share(learner.run.inner.batch_size)
    mine = learner.team.rank * share
    sequences: Sequence[Array] = [sample(index) for index in indices[mine : mine + share]]
    return torch.from_numpy(np.stack(sequences)).to(learner.device)


def cross_entropy(model: nn.Module, sequences: Tensor) -> Tensor:
    """Mean nats a token of predicting each next token of (B, T + 1)."""
    logits = model(sequences[:, :-1])  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())
