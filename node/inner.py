"""The inner loop: optimizer steps on this node's share of the round, over all its local ranks.

`train` tells the story of one round. Every local rank calls it with the same order and takes its slice of
each batch; what rank 0 alone knows (the daemon's wish to finish, that the daemon is gone) travels to the
others in the sum that averages the loss, so that all ranks leave the loop after the same step.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.comm.config import RunConfig
from atoll.comm.errors import ConfigError
from atoll.comm.faults import hit
from atoll.node.channel import Evaluated, Progress, Reached, Ready, Train
from atoll.node.data import Array, Source
from atoll.node.rewarming import Rewarming
from atoll.node.schedule import learning_rate

WORST_LOSS = 1e4  # nats a token
REPORT_EVERY = 0.25  # seconds between two progress reports


class Interrupt(IntEnum):
    """What rank 0 may hear while it trains; the larger one wins."""

    NONE = 0
    FINISH = 1  # answer with what there is
    LEAVE = 2  # the daemon is gone or said stop


class Left(Exception):
    """Training ended without an answer, because nobody waits for one."""


@dataclass(frozen=True)
class Team:
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
class Learner:
    """What lives over rounds: the optimizer's moments; the parameters start from each round's anchor."""

    run: RunConfig
    team: Team
    device: torch.device
    source: Source
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rewarming: Rewarming = field(default_factory=Rewarming)  # over, unless the moments were lost
    may_step: threading.Event = field(default_factory=threading.Event)  # the moments are not being copied

    def __post_init__(self) -> None:
        self.may_step.set()


class Pace:
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


def train(
    learner: Learner,
    order: Train,
    interrupted: Callable[[], Interrupt],
    report: Callable[[Progress | Reached], None],
) -> Ready:
    """Take steps until told to finish, at the ceiling, or at the end of the lease; raise `Left` when the daemon
    is gone."""
    config, team = learner.run.inner, learner.team
    step_tokens = config.batch_size * learner.run.model.seq_len
    ceiling = min(order.ceiling, sum(count for _, count in order.lease) // config.batch_size)
    pace, loss_sum, steps, wish = Pace(), 0.0, 0, Interrupt.NONE
    learner.model.train()
    while steps < ceiling and (wish is Interrupt.NONE or (wish is Interrupt.FINISH and steps < order.floor)):
        hit("trainer.step")
        sequences = batch(
            learner, learner.source.train, samples(order.lease, steps * config.batch_size, config.batch_size)
        )
        rate = learning_rate(config, order.tokens + steps * step_tokens * order.fleet)
        loss = step(learner, sequences, rate * learner.rewarming.share())
        mean_loss, heard = team.total(finite(loss) / team.size, float(interrupted()))
        loss_sum, steps, wish = loss_sum + mean_loss, steps + 1, max(wish, Interrupt(int(heard)))
        if (speed := pace.tokens_per_s(step_tokens)) is not None:
            report(Progress(order.round, steps, mean_loss, speed))
        if steps == order.steps:
            report(Reached(order.round))
    if wish is Interrupt.LEAVE:
        raise Left
    return Ready(order.round, steps, loss_sum / max(steps, 1), steps * config.batch_size)


def samples(lease: Sequence[tuple[int, int]], skip: int, count: int) -> list[int]:
    """The `count` samples of the lease behind its first `skip`; fewer at its end."""
    found: list[int] = []
    for first, size in lease:
        start = min(skip, size)
        found += range(first + start, first + min(size, start + count - len(found)))
        skip -= start
    return found


def step(learner: Learner, sequences: Tensor, rate: float) -> float:
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
def evaluate(learner: Learner, round: int) -> Evaluated:
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


def batch(learner: Learner, sample: Callable[[int], Array], indices: Sequence[int]) -> Tensor:
    """This rank's sequences of the batch of the samples `indices`: (share, seq_len + 1) int64."""
    share = learner.team.share(learner.run.inner.batch_size)
    mine = learner.team.rank * share
    sequences: Sequence[Array] = [sample(index) for index in indices[mine : mine + share]]
    return torch.from_numpy(np.stack(sequences)).to(learner.device)


def cross_entropy(model: nn.Module, sequences: Tensor) -> Tensor:
    """Mean nats a token of predicting each next token of (B, T + 1)."""
    logits = model(sequences[:, :-1])  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())
