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

LOSS_LIMIT = 1e4  # nats a token; a worse loss, or one that is not finite, is told as this
REPORT_INTERVAL = 0.25  # seconds between two progress reports


@dataclass(frozen=True)
class RankGroup:
    """The local ranks of this node, and which of them this process is."""

    rank: int
    size: int

    def total(self, *values: float) -> list[float]:
        """The sums over all ranks; every rank must call it."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.total(0.0)

    def share(self, batch_size: int) -> int:
        """Sequences of a batch that each rank takes. Raises `ConfigError` if they cannot be divided."""
        if batch_size % self.size:
            raise ConfigError(
                f"inner.batch_size={batch_size} cannot be divided among ranks={self.size}: "
                f"start this node with a number of ranks that divides {batch_size}"
            )
        return batch_size // self.size


@dataclass
class LearnerState:
    """A trainer's model, data and optimizer, from round to round: the optimizer's moments live on, the parameters
    start from each round's anchor."""

    run: RunConfig
    ranks: RankGroup
    device: torch.device
    source: Source
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rewarming: Rewarming = field(default_factory=Rewarming)  # at its end, unless the moments were lost
    may_step: threading.Event = field(default_factory=threading.Event)  # clear while the moments are copied

    def __post_init__(self) -> None:
        self.may_step.set()


class ThroughputMeter:
    """Turns steps into at most one report in `REPORT_INTERVAL` seconds."""

    def __init__(self) -> None:
        self._at, self._tokens = time.monotonic(), 0

    def tokens_per_s(self, tokens: int) -> float | None:
        """Tokens a second since the last report, with `tokens` more; None when it is too early for one."""
        self._tokens += tokens
        passed = time.monotonic() - self._at
        if passed < REPORT_INTERVAL:
            return None
        rate = self._tokens / passed
        self._at, self._tokens = time.monotonic(), 0
        return rate


@dataclass
class TrainingCursor:
    """A trainer's position on its way through an order's lease.

    `ahead` says which of two: it takes the order's steps, or has handed them over and goes on with the next
    round's.
    """

    run: RunConfig
    order: Train
    steps: int = 0  # since the last Ready, or since the order
    earlier_steps: int = 0  # of the order, before these: it is ahead of the order that it has
    loss_sum: float = 0.0  # over `steps`
    ahead: bool = False  # the order's work is handed over
    state_due: bool = False  # the new order says where to put `steps`, and that was not done yet
    target_reported: bool = False  # the daemon was told that the order's steps are taken
    finishing: bool = False  # the daemon said to finish
    stall_reported: bool = False  # the daemon was told that nothing is done until the next order

    @property
    def delay(self) -> int:
        """Steps beyond the order's after which its state is taken at the earliest; 0: it does not go beyond."""
        return self.run.delay(self.order.round)

    @property
    def steps_left(self) -> int:
        """Steps for which there are samples."""
        return size(self.order.lease) // self.run.inner.batch_size - self.earlier_steps - self.steps

    @property
    def is_stalled(self) -> bool:
        """Whether the order is handed over and the trainer as far ahead of it as it may be, or out of samples."""
        limit = max(self.delay, self.order.ceiling)
        return self.ahead and (self.steps >= limit or self.steps_left <= 0)

    @property
    def is_complete(self) -> bool:
        """Whether the order's work is to be handed over now."""
        enough = self.steps >= (self.order.floor if self.finishing else self.order.ceiling)
        return not self.ahead and (enough or self.steps_left <= 0)

    @property
    def takes_state(self) -> bool:
        """Whether the new state is to be taken now: after `overlap.delay` steps, or before an earlier
        hand-over."""
        return self.state_due and (self.is_complete or self.steps >= self.run.overlap.delay)

    @property
    def next_samples(self) -> list[int]:
        """Sample indices of the next step's batch."""
        batch_size = self.run.inner.batch_size
        return samples(self.order.lease, (self.earlier_steps + self.steps) * batch_size, batch_size)

    @property
    def tokens(self) -> int:
        """The clock of the learning rate: the run's committed tokens, interpolated within the round."""
        step_tokens = self.run.inner.batch_size * self.run.model.seq_len
        return self.order.tokens + (self.earlier_steps + self.steps) * step_tokens * self.order.fleet

    def hand_over(self) -> Ready:
        """Close the order's steps and return the `Ready` that tells of them. From now on the cursor is ahead;
        `Ready.ahead` says whether there is overlap, and anything to train on."""
        ready = Ready(
            self.order.round,
            self.steps,
            self.loss_sum / max(self.steps, 1),
            self.steps * self.run.inner.batch_size,
            ahead=self.delay > 0 and self.steps > 0 and self.steps_left > 0,
        )
        self.earlier_steps, self.steps, self.loss_sum = self.earlier_steps + self.steps, 0, 0.0
        self.ahead = True
        return ready

    def go_on(self, order: Train) -> None:
        """Continue with `order`: the steps since the hand-over are its first."""
        self.order, self.earlier_steps, self.ahead, self.state_due = order, 0, False, True
        self.target_reported = self.finishing = self.stall_reported = False


class TrainerIO(Protocol):
    """The trainer's door to parameters and orders: where the former come from and go to, and who gives the latter.
    All ranks call it alike."""

    def load(self, resume: bool) -> None:
        """Set the parameters to the anchor; with `resume` to the local vector."""

    def hand_over(self, ready: Ready) -> None:
        """Write the parameters to the local vector, and send `ready` to the daemon."""

    def take_state(self, order: Train) -> None:
        """Adopt the anchor under the training since `hand_over`; with `order.resume` the local vector."""

    def evaluate(self, round: int) -> None:
        """Measure the anchor; the parameters stay what they are."""

    def next_command(self) -> ToTrainer:
        """Wait for the daemon's next command."""

    def has_command(self) -> bool:
        """Whether a command of the daemon waits; only rank 0 knows."""

    def send(self, message: ToDaemon) -> None: ...


def train(learner: LearnerState, order: Train, io: TrainerIO) -> ToTrainer | None:
    """Take steps, until told to finish or at the ceiling or the end of the lease, and hand over. With overlap go
    on from there, order after order, until another command comes: that one is returned."""
    cursor, throughput = TrainingCursor(learner.run, order), ThroughputMeter()
    io.load(order.resume)
    learner.model.train()
    while True:
        if cursor.takes_state:  # the steps since the hand-over go on top of the one that the new order begins with
            cursor.state_due = False
            io.take_state(cursor.order)
        if cursor.is_complete:
            ready = cursor.hand_over()
            io.hand_over(ready)
            if not ready.ahead:
                return None
        if cursor.is_stalled:
            report_stall(cursor, io)
            has_command = True
        else:
            has_command = advance(learner, cursor, io, throughput)
        if has_command and (command := carry_out(cursor, io, io.next_command())) is not None:
            return command
        report_target(cursor, io)


def report_stall(cursor: TrainingCursor, io: TrainerIO) -> None:
    """Tell the daemon, once an order, that the trainer may not go further ahead."""
    if not cursor.stall_reported:
        cursor.stall_reported = True
        io.send(Waits(cursor.order.round))


def report_target(cursor: TrainingCursor, io: TrainerIO) -> None:
    """Tell the daemon, once an order, that the order's steps are taken."""
    if not (cursor.ahead or cursor.target_reported) and cursor.steps >= cursor.order.steps:
        cursor.target_reported = True
        io.send(Reached(cursor.order.round))


def advance(learner: LearnerState, cursor: TrainingCursor, io: TrainerIO, throughput: ThroughputMeter) -> bool:
    """Take a step; return whether there is a command."""
    fault_point("trainer.step")
    config, ranks = learner.run.inner, learner.ranks
    sequences = load_batch(learner, learner.source.train, cursor.next_samples)
    rate = learning_rate(config, cursor.tokens) * learner.rewarming.next_factor()
    loss = optimizer_step(learner, sequences, rate)
    mean_loss, commands = ranks.total(bounded_loss(loss) / ranks.size, float(io.has_command()))
    cursor.steps, cursor.loss_sum = cursor.steps + 1, cursor.loss_sum + mean_loss
    if (speed := throughput.tokens_per_s(config.batch_size * learner.run.model.seq_len)) is not None:
        io.send(Progress(cursor.order.round + cursor.ahead, cursor.steps, mean_loss, speed))
    return commands > 0


def carry_out(cursor: TrainingCursor, io: TrainerIO, command: ToTrainer) -> ToTrainer | None:
    """Carry out what can be between two steps; else return the command."""
    match command:
        case Finish(round=number):
            if number == cursor.order.round and not cursor.ahead:  # else it had handed over when it came
                cursor.finishing = True
        case Train(continues=True) if cursor.ahead:
            cursor.go_on(command)
        case Evaluate(round=number):
            io.evaluate(number)
        case _:
            return command
    return None


def optimizer_step(learner: LearnerState, sequences: Tensor, rate: float) -> float:
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


def bounded_loss(loss: float) -> float:
    """A loss that can be told and averaged: `LOSS_LIMIT` at most, and for NaN."""
    return min(loss, LOSS_LIMIT) if loss == loss else LOSS_LIMIT


def clip_gradients(model: nn.Module, limit: float) -> bool:
    """Scale the gradient to a norm of at most `limit`; return whether the norm was finite."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    full = getattr(norm, "full_tensor", None)  # of a DTensor: its local value is this rank's part of the norm
    return bool(torch.isfinite(full() if full else norm))


@torch.no_grad()
def evaluate(learner: LearnerState, round: int) -> Evaluated:
    """The mean loss over the run's `val_batches` validation batches, split over the ranks."""
    config, ranks = learner.run, learner.ranks
    learner.model.eval()
    loss = 0.0
    for number in range(config.data.val_batches):
        first = number * config.inner.batch_size
        sequences = load_batch(learner, learner.source.validation, range(first, first + config.inner.batch_size))
        loss += bounded_loss(cross_entropy(learner.model, sequences).item())
    (total,) = ranks.total(loss / ranks.size)
    return Evaluated(round, total / config.data.val_batches)


def load_batch(learner: LearnerState, sample: Callable[[int], Array], indices: Sequence[int]) -> Tensor:
    """Load this rank's sequences of the batch of the samples `indices`: (share, seq_len + 1) int64, on the
    learner's device. Raises `ConfigError` if the batch cannot be divided among the ranks."""
    share = learner.ranks.share(learner.run.inner.batch_size)
    mine = learner.ranks.rank * share
    sequences: Sequence[Array] = [sample(index) for index in indices[mine : mine + share]]
    return torch.from_numpy(np.stack(sequences)).to(learner.device)


def cross_entropy(model: nn.Module, sequences: Tensor) -> Tensor:
    """Mean nats a token of predicting each next token of (B, T + 1)."""
    logits = model(sequences[:, :-1])  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())
