"""How a run's rounds work, as far as the outer optimizer is concerned: a part of the run's configuration.

Named methods (`configs/methods`) are settings of these keys, and of `inner`, `rounds` and `reduce`.
"""

from dataclasses import dataclass
from enum import StrEnum


class WeightName(StrEnum):
    TOKENS = "tokens"  # behind the delta
    EQUAL = "equal"
    QUALITY = "quality"  # tokens times tokens a step, bounded


class MergeName(StrEnum):
    MEAN = "mean"
    RADIAL = "radial"  # of matrices: the mean norm in the mean direction


class PatternName(StrEnum):
    BALANCED = "balanced"  # tensors, so that fragments have about the same bytes
    STRIDED = "strided"  # layer l belongs to fragment l mod count


class TakeName(StrEnum):
    REBASE = "rebase"  # what was trained during the exchange is kept, on top of the new anchor
    MIX = "mix"  # alpha of the local parameters, 1 - alpha of the new anchor


class LeftOutName(StrEnum):
    MIX = "mix"  # half of the local parameters, half of the new anchor
    REBASE = "rebase"  # all that was trained, on top of the new anchor


@dataclass
class OuterConfig:
    """How the members' deltas become one, and how the anchor moves by it (`atoll.outer_opt`)."""

    lr: float = 0.9
    momentum: float = 0.7  # Nesterov's; 0 is plain SGD
    momentum_warmup: int = 0  # rounds in which the momentum rises from 0
    decay_begin: int = 0  # the round in which the momentum begins to fall
    decay_end: int = 0  # and the one in which it has reached final_momentum; 0: it does not fall
    final_momentum: float = 0.0
    per_token: bool = False  # keep the momentum's decay a token in rounds of more or fewer steps than inner_steps
    weights: WeightName = WeightName.TOKENS
    merge: MergeName = MergeName.MEAN
    clip: bool = False  # deltas to the median of the members' norms
    left_out: LeftOutName = LeftOutName.MIX  # what becomes of work that a round left out
    damping: bool = False  # of late deltas, by how far the anchor has moved since
    feedback: float = 0.0  # share of what the wire lost that is added to the next delta; 0: none


@dataclass
class FragmentsConfig:
    """Parts of the model that are exchanged each by itself, in turns (Streaming DiLoCo, arXiv 2501.18512): nodes
    exchange one in each round. What is to happen every few rounds then happens every few turns of all."""

    count: int = 1  # 1: the whole model at once
    pattern: PatternName = PatternName.BALANCED
    stagger: bool = True  # spread evenly over the inner steps; else all at once


@dataclass
class OverlapConfig:
    """Training goes on while the delta travels."""

    delay: int = 0  # inner steps (tau) after which the new anchor is taken at the earliest; 0: nodes wait for it
    take: TakeName = TakeName.REBASE
    alpha: float = 0.0  # for take=mix


def rules_of(outer: OuterConfig, fragments: FragmentsConfig, overlap: OverlapConfig) -> list[tuple[bool, str]]:
    """What must hold, and the sentence where it does not; that numbers are finite is checked already."""
    return [
        (0 <= outer.momentum < 1, f"outer.momentum is {outer.momentum}: it must be in [0, 1)"),
        (0 <= outer.final_momentum < 1, f"outer.final_momentum is {outer.final_momentum}: it must be in [0, 1)"),
        (outer.momentum_warmup >= 0, f"outer.momentum_warmup is {outer.momentum_warmup}: it must be 0 or more"),
        (
            0 <= outer.decay_begin < max(outer.decay_end, 1),
            f"outer.decay_begin {outer.decay_begin} must be 0 or more and below outer.decay_end {outer.decay_end}",
        ),
        (0 <= outer.feedback <= 1, f"outer.feedback is {outer.feedback}: it must be in [0, 1]"),
        (1 <= fragments.count <= 4096, f"fragments.count is {fragments.count}: it must be in 1 ... 4096"),
        (overlap.delay >= 0, f"overlap.delay is {overlap.delay}: it must be 0 or more"),
        (0 <= overlap.alpha <= 1, f"overlap.alpha is {overlap.alpha}: it must be in [0, 1]"),
        (
            overlap.alpha == 0 or overlap.take is TakeName.MIX,
            f"overlap.alpha is {overlap.alpha} and overlap.take is {overlap.take}: set overlap.take=mix",
        ),
    ]
