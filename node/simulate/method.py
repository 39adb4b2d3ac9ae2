"""The pieces of `outer_opt` that a simulated run is made of.

Nodes take them one by one where they need them (`atoll.node.outer.method`); a simulation has all in one place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from atoll.comm.config.outer import WeightName
from atoll.comm.config.run import RunConfig
from atoll.node.outer.method import anchor_adoption, divide, error_feedback, left_out_adoption, outer_schedule
from atoll.outer_opt import weights
from atoll.outer_opt.feedback import ErrorFeedback
from atoll.outer_opt.fragments import Fragment, first_due_steps
from atoll.outer_opt.overlap import Adopt
from atoll.outer_opt.schedule import Schedule
from atoll.outer_opt.tensors import Tensor

Weigh = Callable[[Sequence[float], Sequence[float]], list[float]]  # of tokens and inner steps of each member


@dataclass(frozen=True)
class Method:
    """The method of a run: how fragments are divided, merged, stepped and adopted."""

    schedule: Schedule
    weigh: Weigh
    feedback: ErrorFeedback | None
    fragments: tuple[Fragment, ...]
    due: tuple[int, ...]  # inner steps before each fragment's first exchange
    adopt: Adopt
    left_out: Adopt


def build_method(config: RunConfig, tensors: Sequence[Tensor]) -> Method:
    """The method that a config names, for a model of these tensors."""
    fragments = divide(config.fragments, tensors)
    return Method(
        schedule=outer_schedule(config),
        weigh=_bounded(_weigh(config.outer.weights), config.security.weight_bound),
        feedback=error_feedback(config.outer),
        fragments=fragments,
        due=first_due_steps(len(fragments), config.rounds.inner_steps, config.fragments.stagger),
        adopt=anchor_adoption(config.overlap),
        left_out=left_out_adoption(config.outer),
    )


def _bounded(weigh: Weigh, bound: float) -> Weigh:
    return lambda tokens, steps: weights.bounded(weigh(tokens, steps), bound)


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
