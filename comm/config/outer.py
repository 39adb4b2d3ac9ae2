"""The outer optimizer's sections of the run's configuration: merging and stepping, fragments, overlap.

Named methods (`configs/methods`) are settings of these keys, and of `inner`, `rounds` and `reduce`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from atoll.comm.config.plugin import name_rules
from atoll.comm.config.rules import Rule, positive, representable


class WeightName(StrEnum):
    """The weights of the members' deltas in the mean (`atoll.outer_opt.weights`)."""

    TOKENS = "tokens"  # behind the delta
    EQUAL = "equal"
    QUALITY = "quality"  # tokens times tokens a step, bounded


class MergeName(StrEnum):
    """The ways to make the members' deltas one (`atoll.outer_opt.merge`, `atoll.outer_opt.robust_merge`)."""

    MEAN = "mean"
    RADIAL = "radial"  # of matrices: the mean norm in the mean direction
    CENTERED = "centered"  # what lies farther from the middle than the median counts as if it lay at it
    TRIMMED = "trimmed"  # of each coordinate, without the largest and the smallest values


class PatternName(StrEnum):
    """The ways to divide a model into fragments (`atoll.outer_opt.fragments`)."""

    BALANCED = "balanced"  # tensors, so that fragments have about the same bytes
    STRIDED = "strided"  # layer l belongs to fragment l mod count


class TakeName(StrEnum):
    """The ways to take an anchor after training on (`atoll.outer_opt.overlap`)."""

    REBASE = "rebase"  # what was trained during the exchange is kept, on top of the new anchor
    MIX = "mix"  # alpha of the local parameters, 1 - alpha of the new anchor


class LeftOutName(StrEnum):
    """The ways to take an anchor whose round left this node's work out (`atoll.outer_opt.overlap`)."""

    MIX = "mix"  # half of the local parameters, half of the new anchor
    REBASE = "rebase"  # all that was trained, on top of the new anchor


@dataclass
class OuterConfig:
    """Merging the members' deltas, and moving the anchor by the merged one (`atoll.outer_opt`)."""

    # name of an entry point of the group atoll.outer, whose function makes the rule of each round's step; empty:
    # Nesterov's, or plain SGD
    plugin: str = ""
    lr: float = 0.9  # of the outer step
    momentum: float = 0.7  # Nesterov's; 0 is plain SGD
    momentum_warmup: int = 0  # rounds in which the momentum rises from 0
    decay_begin: int = 0  # the round in which the momentum begins to fall
    decay_end: int = 0  # and the one in which it has reached final_momentum; 0: it does not fall
    final_momentum: float = 0.0  # where the momentum ends, if it falls
    per_token: bool = False  # keep the momentum's decay a token in rounds of more or fewer steps than inner_steps
    weights: WeightName = WeightName.TOKENS
    merge: MergeName = MergeName.MEAN
    trim: float = 0.25  # merge=trimmed: share of the weight that is left out at each end of every coordinate
    clip: bool = True  # deltas to the median of the members' norms
    left_out: LeftOutName = LeftOutName.MIX  # what becomes of work that a round left out
    damping: bool = False  # of late deltas, by how far the anchor has moved since
    feedback: float = 0.0  # share of what the wire lost that is added to the next delta; 0: none

    def rules(self) -> Iterator[Rule]:
        """Rules of the outer rule's coefficients."""
        yield from name_rules("outer.plugin", self.plugin)
        yield from positive("outer", lr=self.lr)
        yield from representable("outer", self)
        yield 0 <= self.momentum < 1, f"outer.momentum is {self.momentum}: it must be in [0, 1)"
        yield 0 <= self.final_momentum < 1, f"outer.final_momentum is {self.final_momentum}: it must be in [0, 1)"
        yield self.momentum_warmup >= 0, f"outer.momentum_warmup is {self.momentum_warmup}: it must be 0 or more"
        yield (
            0 <= self.decay_begin < max(self.decay_end, 1),
            f"outer.decay_begin {self.decay_begin} must be 0 or more and below outer.decay_end {self.decay_end}",
        )
        yield 0 <= self.trim < 0.5, f"outer.trim is {self.trim}: it must be in [0, 0.5)"
        yield 0 <= self.feedback <= 1, f"outer.feedback is {self.feedback}: it must be in [0, 1]"


@dataclass
class FragmentsConfig:
    """Parts of the model that are exchanged each by itself, in turns (Streaming DiLoCo, arXiv 2501.18512): nodes
    exchange one in each round. What is to happen every few rounds then happens every few turns of all."""

    count: int = 1  # 1: the whole model at once
    pattern: PatternName = PatternName.BALANCED
    stagger: bool = True  # spread evenly over the inner steps; else all at once

    def rules(self) -> Iterator[Rule]:
        """Rules of the number of fragments."""
        yield from positive("fragments", count=self.count)
        yield from representable("fragments", self)
        yield 1 <= self.count <= 4096, f"fragments.count is {self.count}: it must be in 1 ... 4096"


@dataclass
class OverlapConfig:
    """Training goes on while the delta travels."""

    delay: int = 0  # inner steps (tau) after which the new anchor is taken at the earliest; 0: nodes wait for it
    take: TakeName = TakeName.REBASE
    alpha: float = 0.0  # for take=mix

    def rules(self) -> Iterator[Rule]:
        """Rules of the delay and of the mixture."""
        yield from representable("overlap", self)
        yield self.delay >= 0, f"overlap.delay is {self.delay}: it must be 0 or more"
        yield 0 <= self.alpha <= 1, f"overlap.alpha is {self.alpha}: it must be in [0, 1]"
        yield (
            self.alpha == 0 or self.take is TakeName.MIX,
            f"overlap.alpha is {self.alpha} and overlap.take is {self.take}: set overlap.take=mix",
        )
