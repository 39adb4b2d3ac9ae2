"""Deltas that are unlike the others of their round, from squares and scalar products."""

import numpy as np
import pytest
from deltas import F32, deltas

from atoll.outer_opt.arrays import dot, norm
from atoll.outer_opt.outliers import odd_ones, scores

COMMON, LAST, *OWN = deltas(10, 5000)
HONEST = [COMMON + part for part in OWN]  # as long as one another, with a direction that all have
BEFORE = COMMON + np.float32(0.5) * LAST  # what the last round was sealed as


def odd(parts: list[F32], last: F32 | None = BEFORE) -> dict[int, str]:
    squares = [norm(x) ** 2 for x in parts]
    dots = [dot(x, last) if last is not None else 0.0 for x in parts]
    return odd_ones(squares, dots, norm(last) ** 2 if last is not None else 0.0)


def test_honest_deltas_are_no_outliers() -> None:
    assert odd(HONEST) == odd(HONEST, None) == {}
    assert odd([np.float32(0.3 + 0.2 * i) * x for i, x in enumerate(HONEST)]) == {}, "nodes of unequal speed"


@pytest.mark.parametrize(
    ("lie", "sentence"),
    [
        (-10 * HONEST[0], "9.89 times as long"),
        (1e4 * LAST, "times as long as the median"),
        (0 * LAST, "its delta is 0 times as long as the median"),
        (-HONEST[0], "cosine -0.6"),
        (OWN[0], "cosine"),
    ],
)
def test_one_that_is_unlike_the_others_is_named_and_why(lie: F32, sentence: str) -> None:
    found = odd([*HONEST[:5], lie.astype(np.float32), *HONEST[5:]])
    assert list(found) == [5] and sentence in found[5]


def test_before_the_first_round_lengths_alone_are_compared() -> None:
    assert odd([*HONEST, -HONEST[0]], None) == {}
    assert list(odd([*HONEST, -10 * HONEST[0]], None)) == [8]


def test_nobody_is_named_where_half_look_odd() -> None:
    halves = [*HONEST[:3], *(1e3 * x for x in HONEST[3:6])]
    assert odd([*HONEST[:3], *(np.float32(1e-3) * x for x in HONEST[3:6])]) == odd(halves) == {}
    assert odd([*HONEST[:5], *([0 * LAST] * 6)]) == {}
    assert len(odd([*HONEST[:6], *(-x for x in HONEST[6:])])) == 2


def test_work_that_the_last_round_left_out_is_compared_by_its_length_alone() -> None:
    late = [*HONEST[:7], -HONEST[7]]
    squares, dots, fresh = [norm(x) ** 2 for x in late], [dot(x, BEFORE) for x in late], [*[True] * 7, False]
    assert list(odd_ones(squares, dots, norm(BEFORE) ** 2)) == [7]
    assert odd_ones(squares, dots, norm(BEFORE) ** 2, fresh) == {}
    assert list(odd_ones([*squares[:7], 100 * squares[7]], dots, norm(BEFORE) ** 2, fresh)) == [7]


def test_of_few_deltas_none_is_the_odd_one() -> None:
    assert odd([*HONEST[:2], -10 * HONEST[2]]) == {}


def test_sums_over_chunks_are_those_of_the_whole() -> None:
    x, spans = HONEST[0], [slice(0, 999), slice(999, 5000)]
    assert sum(dot(x[s], BEFORE[s]) for s in spans) == pytest.approx(dot(x, BEFORE), rel=1e-12)
    (score,) = scores([norm(x) ** 2], [dot(x, BEFORE)], norm(BEFORE) ** 2)
    assert (score.norm, score.offset) == (1.0, 0.0)
    assert score.cosine == pytest.approx(dot(x, BEFORE) / norm(x) / norm(BEFORE))
