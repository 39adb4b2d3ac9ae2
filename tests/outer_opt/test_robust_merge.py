"""Robust merges: what one wrong delta can do to them, and that they are the mean where none is wrong."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from deltas import F32, deltas

from atoll.outer_opt.arrays import norm
from atoll.outer_opt.merge import Merge, mean
from atoll.outer_opt.robust_merge import COORDINATES_AT_ONCE, TrimmedMean, centered, weighted_median
from atoll.outer_opt.weights import shares

N, MEMBERS = 4099, 8
MERGES = pytest.mark.parametrize("merge", [centered, TrimmedMean(0.25)], ids=["centered", "trimmed"])
LIES: dict[str, Callable[[F32], F32]] = {
    "flipped": lambda x: -10 * x,
    "huge": lambda x: np.full_like(x, 3e38),
    "alternating": lambda x: np.where(np.arange(x.size) % 2, np.float32(3e38), np.float32(-3e38)),
    "noise": lambda x: np.random.default_rng(5).standard_normal(x.size).astype(np.float32) * np.float32(1e4),
    "zeros": np.zeros_like,
}


def merged(merge: Merge, parts: list[F32], weights: list[float], factors: list[float] | None = None) -> F32:
    out, scratch = np.full_like(parts[0], np.nan), np.empty_like(parts[0])
    merge(parts, shares(weights, factors), out, scratch)
    return out


def correlated(count: int, n: int = N) -> list[F32]:
    """Honest deltas: a direction that all have, and as much of their own."""
    common, *parts = deltas(count + 1, n)
    return [common + part for part in parts]


@MERGES
def test_numpy_and_torch_arrays_give_the_same_bits(merge: Merge) -> None:
    parts = deltas(5, 1003)
    expected = merged(merge, parts, [1, 2, 0, 3.5, 1])
    out, scratch = torch.empty(1003), torch.empty(1003)
    merge([torch.from_numpy(p) for p in parts], shares([1, 2, 0, 3.5, 1]), out, scratch)
    assert out.numpy().tobytes() == expected.tobytes()


@MERGES
def test_a_weight_of_zero_is_as_if_absent(merge: Merge) -> None:
    a, b, c = deltas(3, 500)
    bad = np.full_like(a, np.nan)
    assert merged(merge, [a, bad, b, c], [1, 0, 2, 3]).tobytes() == merged(merge, [a, b, c], [1, 2, 3]).tobytes()
    assert not merged(lambda p, s, o, t: merge(p, [0.0] * 3, o, t), [a, b, c], [1, 1, 1]).any()


@MERGES
def test_of_equal_deltas_it_is_that_delta_as_short_as_the_shares_make_it(merge: Merge) -> None:
    (delta,) = deltas(1, N)
    for weights in ([1.0], [3.0, 1.0, 2.0]):
        np.testing.assert_allclose(merged(merge, [delta] * len(weights), weights), delta, rtol=1e-6)
    np.testing.assert_allclose(merged(merge, [delta] * 2, [1, 1], [1.0, 0.5]), 0.75 * delta, rtol=1e-6)


@MERGES
@pytest.mark.parametrize("lie", LIES)
def test_one_of_eight_moves_it_no_further_than_an_honest_one_could(merge: Merge, lie: str) -> None:
    honest = correlated(MEMBERS - 1)
    without = merged(mean, honest, [1.0] * (MEMBERS - 1))
    farthest = max(norm(delta - without) for delta in honest)
    found = merged(merge, [*honest, LIES[lie](honest[0])], [1.0] * MEMBERS)
    assert norm(found - without) < 0.3 * farthest
    assert not norm(merged(mean, [*honest, LIES[lie](honest[0])], [1.0] * MEMBERS) - without) < 0.3 * farthest or (
        lie == "zeros"
    )


@MERGES
def test_two_of_eight_that_agree_are_bounded_too(merge: Merge) -> None:
    honest = correlated(MEMBERS - 2)
    without = merged(mean, honest, [1.0] * (MEMBERS - 2))
    farthest = max(norm(delta - without) for delta in honest)
    found = merged(merge, [*honest, -10 * honest[0], -10 * honest[0]], [1.0] * MEMBERS)
    assert norm(found - without) < 0.8 * farthest


def test_centered_is_off_the_mean_by_what_lies_beyond_the_median_at_most() -> None:
    parts, weights = correlated(MEMBERS), [1.0, 2, 1, 1, 3, 1, 1, 1]
    plain, found = merged(mean, parts, weights), merged(centered, parts, weights)
    away = [norm(delta - found) for delta in parts]
    radius, total = weighted_median(away, weights), sum(weights)
    bound = sum(w / total * max(0.0, d - radius) for w, d in zip(weights, away, strict=True))
    assert norm(found - plain) < 1.5 * bound + 1e-6 * norm(plain), "the middle has moved once more since"
    assert norm(found - plain) < 0.05 * norm(plain)


def test_centered_is_the_mean_where_all_are_equally_far() -> None:
    parts = list(np.eye(8, 64, dtype=np.float32) * np.float32(3))
    np.testing.assert_allclose(merged(centered, parts, [1.0] * 8), merged(mean, parts, [1.0] * 8), atol=1e-6)


def test_centered_of_two_in_one_direction_is_the_shorter() -> None:
    (delta,) = deltas(1, 100)
    found = merged(centered, [delta, 1e6 * delta], [1, 1])
    np.testing.assert_allclose(found, delta, rtol=1e-5)


def test_centered_follows_the_weights() -> None:
    a, b = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    assert merged(centered, [a, b], [3, 1])[0] > merged(centered, [a, b], [1, 1])[0]
    assert weighted_median([3.0, 1.0, 2.0], [1, 1, 1]) == 2.0
    assert weighted_median([3.0, 1.0, 2.0], [5, 1, 1]) == 3.0
    assert weighted_median([1.0, 9.0], [0.1, 0.1]) == 1.0


def test_trimmed_is_the_mean_of_the_middle_values_where_weights_are_equal() -> None:
    parts = deltas(8, 500)
    middle = np.sort(np.stack(parts), axis=0)[2:6].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(merged(TrimmedMean(0.25), parts, [2.0] * 8), middle, rtol=1e-5, atol=1e-9)
    plain = merged(mean, parts, [2.0] * 8)
    np.testing.assert_allclose(merged(TrimmedMean(0.0), parts, [2.0] * 8), plain, rtol=1e-4, atol=1e-8)


def test_trimmed_counts_a_value_across_the_border_with_the_rest_of_its_weight() -> None:
    parts = [np.array([x], np.float32) for x in (0.0, 1.0, 10.0)]
    # Of weights 0.5, 0.25, 0.25 a quarter goes at each end: 0 keeps a quarter, 1 all of its, 10 nothing.
    assert merged(TrimmedMean(0.25), parts, [2, 1, 1])[0] == pytest.approx(0.5)
    assert merged(TrimmedMean(0.125), parts, [2, 1, 1])[0] == pytest.approx((0.25 + 1.25) / 0.75)


def test_trimmed_is_the_same_in_parts_and_at_once() -> None:
    parts = deltas(5, COORDINATES_AT_ONCE + 777)
    whole = merged(TrimmedMean(0.2), parts, [1, 2, 3, 4, 5])
    spans = slice(999), slice(999, None)
    pieces = [merged(TrimmedMean(0.2), [p[span] for p in parts], [1, 2, 3, 4, 5]) for span in spans]
    assert np.concatenate(pieces).tobytes() == whole.tobytes()


@MERGES
def test_it_overflows_for_nobody(merge: Merge) -> None:
    honest = correlated(5, 100)
    for lie in (np.float32(3.4e38), np.float32(-3.4e38)):
        found = merged(merge, [*honest, np.full_like(honest[0], lie)], [1.0] * 6)
        assert np.isfinite(found).all() and math.isfinite(norm(found))
