"""Steps of an optimizer that another one takes, left out where the gradient is not finite."""

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from atoll.node.engines.step_guard import StepGuard
from atoll.node.participant.rank_group import RankGroup


class OtherRanks:
    """Ranks of which the others say what they are told to."""

    def __init__(self, *others: float) -> None:
        self._others = list(others)

    def total(self, mine: float) -> list[float]:
        return [mine + (self._others.pop(0) if self._others else 0.0)]


def guarded(optimizer: torch.optim.Optimizer, ranks: object = None) -> tuple[StepGuard, list[str]]:
    called = list[str]()
    group = cast(RankGroup, ranks) if ranks else RankGroup(0, 1)
    return StepGuard(optimizer, group, lambda: called.append("before")), called


def model_with(gradients: list[Tensor]) -> nn.ParameterList:
    parameters = nn.ParameterList([nn.Parameter(torch.ones_like(g)) for g in gradients])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_is_as_if_it_had_not_been(
    bad: float, fused: bool
) -> None:
    good = [torch.full((3,), 0.5), torch.full((2, 2), -1.0)]
    parameters, reference = model_with([g.clone() for g in good]), model_with([g.clone() for g in good])
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
    guard, called = guarded(optimizer)
    optimizer.step()
    assert not guard.left_out
    wrong = [g.clone() for g in good]
    wrong[1][0, 1] = bad
    wrong[1][1, 1] = bad
    for parameter, gradient in zip(parameters, wrong, strict=True):
        parameter.grad = gradient
    optimizer.step()
    assert guard.left_out and called == ["before"] * 2
    assert all(p.grad is g for p, g in zip(parameters, wrong, strict=True)), "its memory may have been captured"
    for parameter, gradient in zip(parameters, good, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    assert not guard.left_out
    twice = torch.optim.AdamW(reference, lr=0.1, fused=fused)
    twice.step()
    twice.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, reference, strict=True))


def test_a_step_is_left_out_where_another_ranks_gradient_is_not_finite() -> None:
    parameters = model_with([torch.ones(2)])
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    guard, _ = guarded(optimizer, OtherRanks(1.0))
    optimizer.step()
    assert guard.left_out and torch.equal(parameters[0], torch.ones(2))
    optimizer.step()
    assert not guard.left_out and torch.equal(parameters[0], torch.full((2,), 0.9))
