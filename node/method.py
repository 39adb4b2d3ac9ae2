"""From a run's config to the pieces of `outer_opt` that carry it out; the only place that knows both. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from atoll.comm.config import RunConfig
from atoll.comm.outer_config import (
    FragmentsConfig,
    MergeName,
    OuterConfig,
    OverlapConfig,
    PatternName,
    TakeName,
    WeightName,
)
from atoll.outer_opt import weights
from atoll.outer_opt.arrays import Array
from atoll.outer_opt.feedback import ErrorFeedback
from atoll.outer_opt.fragments import Fragment, balanced, offsets, strided, whole
from atoll.outer_opt.merge import mean, radial
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.overlap import Adopt, Mix, rebase, replace
from atoll.outer_opt.ramp import Ramp, Rule
from atoll.outer_opt.sgd import Sgd
from atoll.outer_opt.tensors import Kind, Tensor

Weigh = Callable[[Sequence[float], Sequence[float]], list[float]]  # of tokens and inner steps of each member


@dataclass(frozen=True)
class Method:
    rule: Rule
    weigh: Weigh
    merging: MergeName
    feedback: ErrorFeedback | None
    fragments: tuple[Fragment, ...]
    due: tuple[int, ...]  # inner steps before each fragment's first exchange
    adopt: Adopt


def method_of(config: RunConfig, tensors: Sequence[Tensor]) -> Method:
    """The pieces for a model of these tensors."""
    fragments = _fragments(config.fragments, tensors)
    return Method(
        rule=rule_of(config.outer),
        weigh=_weigh(config.outer.weights),
        merging=config.outer.merge,
        feedback=feedback_of(config.outer),
        fragments=fragments,
        due=offsets(len(fragments), config.rounds.inner_steps, config.fragments.stagger),
        adopt=adopt_of(config.overlap),
    )


def merge_parts(
    merging: MergeName,
    pieces: Sequence[tuple[Kind, slice]],
    deltas: Sequence[Array],
    shares: Sequence[float],
    out: Array,
    scratch: Array,
) -> None:
    """Merge `deltas` (n,) into `out` (n,), piece by piece: the pieces are what a chunk has of each tensor. Radial
    merges are of matrices only; embeddings, whose rows are hit by few tokens, and vectors get a plain mean."""
    match merging:
        case MergeName.MEAN:
            mean(deltas, shares, out, scratch)
        case MergeName.RADIAL:
            for kind, span in pieces:
                merge = radial if kind is Kind.MATRIX else mean
                merge([delta[span] for delta in deltas], shares, out[span], scratch[span])
        case _:
            assert_never(merging)


def rule_of(outer: OuterConfig) -> Rule:
    if outer.momentum == 0.0 and not outer.decay_end:
        return Sgd(outer.lr)
    rule = Nesterov(outer.lr, outer.momentum)
    return Ramp(rule, outer.momentum_warmup, outer.decay_begin, outer.decay_end, outer.final_momentum)


def feedback_of(outer: OuterConfig) -> ErrorFeedback | None:
    return ErrorFeedback(outer.feedback) if outer.feedback else None


def _weigh(name: WeightName) -> Weigh:
    match name:
        case WeightName.TOKENS:
            return weights.by_tokens
        case WeightName.EQUAL:
            return weights.equal
        case WeightName.QUALITY:
            return weights.by_quality
        case _:
            assert_never(name)


def _fragments(config: FragmentsConfig, tensors: Sequence[Tensor]) -> tuple[Fragment, ...]:
    if config.count == 1:
        return whole(tensors)
    divide = partial(balanced if config.pattern is PatternName.BALANCED else strided, tensors)
    return divide(config.count)


def adopt_of(overlap: OverlapConfig) -> Adopt:
    """How a node that was counted takes the new anchor."""
    if overlap.take is TakeName.MIX:
        return Mix(overlap.alpha)
    return rebase if overlap.delay else replace
