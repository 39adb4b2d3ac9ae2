"""The outcome of one inner step, as a node's ranks agree on it, and whose loss or gradient was not finite.

A step's loss is the mean of what the ranks say, as a wrapper (DDP, FSDP) averages their gradients. A rank whose
share of the batch has no token to learn may say NaN, the mean over nothing, and counts as 0. Where a wrapper has
mixed such a rank's gradient into all others' nothing can be saved: the step is left out, and `fault_of` names the
rank. Used by the participant, by engines for `bounded_loss`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from atoll.node.participant.batches import learned

LOSS_LIMIT = 1e4  # nats a token; a worse loss, or one that is not finite, is told as this
NAMED_RANKS = 4  # in a sentence
NORM_LIMIT = 1e30  # of a gradient; a larger norm, or one that is not finite, is told as this


@dataclass
class Step:
    """The outcome of one inner step."""

    loss: float  # mean over the ranks, in nats a token
    gradient_norm: float  # l2, before it was bounded; 0: not known
    skipped: bool  # it was left out, for its gradient was not finite
    targets: float  # tokens that are learned, of all ranks; 0: there was no step to take
    commands: float  # ranks to which the daemon has said something
    copies_due: float  # ranks that say that it is time for a copy of what is trained
    ranks_behind: float  # ranks that had not prepared the next batch of the run's data
    device_bytes: float  # of all ranks
    host_bytes: float  # of all ranks

    @property
    def is_empty(self) -> bool:
        """Whether no rank had a token to learn."""
        return not self.targets


class RankStep(msgspec.Struct, frozen=True):
    """A step as one rank has it."""

    loss: str  # as people read it: JSON has no NaN
    is_finite: bool  # the loss
    targets: int  # tokens of its share that are learned
    gradient_is_finite: bool  # of its part of the gradient, which a wrapper may have mixed with the others'


def rank_step(loss: Tensor | float, targets: int, square: float) -> RankStep:
    """Describe a step as a rank has it; `square`: of the norm of its part of the gradient."""
    value = loss_of(loss, 1)
    return RankStep(f"{value:g}", math.isfinite(value), targets, math.isfinite(square))


def fault_of(steps: Sequence[RankStep], left_out: bool) -> str:
    """Say what is not finite in a step, and of which ranks; `steps`: by rank. Empty where all ranks are alike.
    `left_out`: the gradient over all ranks is not finite."""
    wrong = [rank for rank, step in enumerate(steps) if not step.is_finite and step.targets]
    empty = [rank for rank, step in enumerate(steps) if not step.is_finite and not step.targets]
    broken = [rank for rank, step in enumerate(steps) if not step.gradient_is_finite]
    if wrong and not left_out:
        return (
            f"the loss of {_ranks(wrong)} is {steps[wrong[0]].loss}, and the gradient is finite: where a piece of "
            "the batch has no token to learn, let the script count its loss, 0/0, as 0"
        )
    if wrong:
        return f"the loss of {_ranks(wrong)} is {steps[wrong[0]].loss}" if len(wrong) < len(steps) else ""
    if empty and left_out:
        return (
            f"{_ranks(empty)} had no token to learn, and a loss of {steps[empty[0]].loss}: the mean over nothing "
            "is 0/0, and so is its gradient; let the script divide by 1 at least"
        )
    return f"that of {_ranks(broken)} is not" if left_out and 0 < len(broken) < len(steps) else ""


def _ranks(numbers: list[int]) -> str:
    more = f" and {len(numbers) - NAMED_RANKS} more" if len(numbers) > NAMED_RANKS else ""
    return f"rank{'s'[: len(numbers) > 1]} {', '.join(map(str, numbers[:NAMED_RANKS]))}{more}"


def targets_of(batch: Any) -> int:
    """The number of a batch's labels that are learned; 1 where it has no `labels`, and only its script knows."""
    labels = batch.get("labels") if isinstance(batch, dict) else None
    return int(learned(batch)) if isinstance(labels, Tensor) else 1


def loss_of(loss: Tensor | float, targets: int) -> float:
    """A mean loss as a number; 0 where it is that of no `targets`, and so NaN."""
    value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
    return value if targets or math.isfinite(value) else 0.0


def bounded_loss(loss: float) -> float:
    """A loss that can be told and averaged: within `LOSS_LIMIT` on either side, and that for NaN."""
    return max(-LOSS_LIMIT, min(loss, LOSS_LIMIT)) if loss == loss else LOSS_LIMIT
