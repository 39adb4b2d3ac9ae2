"""A step whose loss or gradient is not finite names the ranks that brought it about, where others did not."""

import math

import pytest
import torch

from atoll.node.participant.step_outcome import RankStep, fault_of, rank_step

SOUND, EMPTY = rank_step(torch.tensor(2.0, requires_grad=True), 5, 1.0), rank_step(0.0, 0, 0.0)
NAN_EMPTY, NAN, INFINITE = (
    rank_step(math.nan, 0, math.nan),
    rank_step(math.nan, 5, math.nan),
    rank_step(math.inf, 5, math.inf),
)
MIXED = rank_step(2.0, 5, math.nan)  # a wrapper has brought another rank's NaN


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([MIXED, NAN_EMPTY], "rank 1 had no token to learn, and a loss of nan: "),
        ([MIXED, NAN, NAN_EMPTY], "the loss of rank 1 is nan"),
        ([INFINITE, MIXED], "the loss of rank 0 is inf"),
        ([MIXED, SOUND, EMPTY], "that of rank 0 is not"),
        ([MIXED] + [NAN_EMPTY] * 6, "ranks 1, 2, 3, 4 and 2 more had no token"),
        ([MIXED, MIXED], ""),
        ([NAN, NAN], ""),
    ],
)
def test_a_gradient_that_is_not_finite_is_of_the_ranks_that_are_not_as_all_others(
    steps: list[RankStep], said: str
) -> None:
    found = fault_of(steps, left_out=True)
    assert found.startswith(said) and bool(found) == bool(said)


def test_a_loss_that_is_not_finite_where_the_gradient_is_names_its_rank() -> None:
    alone = rank_step(math.nan, 5, 1.0)
    assert fault_of([SOUND, alone], left_out=False).startswith("the loss of rank 1 is nan, and the gradient is f")
    assert not fault_of([SOUND, EMPTY, rank_step(math.nan, 0, 0.0)], left_out=False)
