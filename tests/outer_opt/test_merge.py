"""Weights and merges."""

import math

import numpy as np
import pytest
import torch
from deltas import F32, deltas

from atoll.outer_opt.arrays import norm
from atoll.outer_opt.clip import clip_factors
from atoll.outer_opt.merge import Merge, mean, radial
from atoll.outer_opt.weights import bounded, by_quality, by_tokens, equal, shares

MERGES = pytest.mark.parametrize("merge", [mean, radial])


def merged(merge: Merge, parts: list[F32], weights: list[float]) -> F32:
    out, scratch = np.full_like(parts[0], np.nan), np.empty_like(parts[0])
    merge(parts, shares(weights), out, scratch)
    return out


@MERGES
def test_numpy_and_torch_arrays_give_the_same_bits(merge: Merge) -> None:
    parts = deltas(5, 1003)
    expected = merged(merge, parts, [1, 2, 0, 3.5, 1])
    out, scratch = torch.empty(1003), torch.empty(1003)
    merge([torch.from_numpy(p) for p in parts], shares([1, 2, 0, 3.5, 1]), out, scratch)
    assert out.numpy().tobytes() == expected.tobytes()
    assert norm(torch.from_numpy(parts[0])) == norm(parts[0])


@MERGES
def test_a_weight_of_zero_is_as_if_absent(merge: Merge) -> None:
    a, b, c = deltas(3, 500)
    bad = np.full_like(a, np.nan)
    assert merged(merge, [a, bad, b, c], [1, 0, 2, 3]).tobytes() == merged(merge, [a, b, c], [1, 2, 3]).tobytes()


def test_equal_weights_are_the_plain_mean() -> None:
    parts = deltas(4, 500)
    expected = np.float32(0.25) * parts[0]
    for part in parts[1:]:
        expected = expected + np.float32(0.25) * part
    assert merged(mean, parts, [7, 7, 7, 7]).tobytes() == expected.tobytes()


def test_the_mean_of_ones_is_one_whoever_is_missing() -> None:
    for arrived in (1, 2, 3, 7):
        np.testing.assert_allclose(merged(mean, [np.ones(9, np.float32)] * arrived, [3.0] * arrived), 1, rtol=2e-7)


def test_radial_is_the_identity_for_one_member() -> None:
    (delta,) = deltas(1, 1000)
    np.testing.assert_allclose(merged(radial, [delta], [3.0]), delta, rtol=1e-5)


def test_radial_keeps_the_norm_of_orthogonal_deltas() -> None:
    parts = list(np.eye(8, 64, dtype=np.float32) * np.float32(3))
    weights = [1.0] * 8
    assert norm(merged(radial, parts, weights)) == pytest.approx(3, rel=1e-5)
    assert norm(merged(mean, parts, weights)) == pytest.approx(3 / math.sqrt(8), rel=1e-5)


def test_radial_takes_the_weighted_mean_of_unequal_norms() -> None:
    parts = [np.array(x, np.float32) for x in ([2, 0], [0, 6])]
    assert norm(merged(radial, parts, [3, 1])) == pytest.approx(0.75 * 2 + 0.25 * 6, rel=1e-6)


def test_radial_of_zeros_and_of_what_cancels_is_the_mean() -> None:
    (delta,) = deltas(1, 100)
    zero = np.zeros_like(delta)
    assert not merged(radial, [zero, zero], [1, 1]).any()
    assert not merged(radial, [delta, -delta], [1, 1]).any()
    np.testing.assert_allclose(merged(radial, [delta, zero], [1, 1]), delta / 2, rtol=1e-5)


@pytest.mark.parametrize("angle", [1e-3, 1e-6])
def test_radial_keeps_the_norm_of_directions_that_nearly_cancel(angle: float) -> None:
    one, other = (np.array([math.cos(angle), sign * math.sin(angle)], np.float32) for sign in (1, -1))
    found = merged(radial, [one, -other], [1, 1])
    np.testing.assert_allclose(found, [0, 1], atol=1e-4)


def test_norms_do_not_overflow_or_vanish_where_fp32_squares_would() -> None:
    for size in (1e-30, 1.0, 1e30):
        x = np.full(10_000, size, np.float32)
        assert norm(x) == norm(torch.from_numpy(x)) == pytest.approx(100 * float(np.float32(size)), rel=1e-14)
    x = np.random.default_rng(0).standard_normal(4099).astype(np.float32)
    assert norm(x) == pytest.approx(math.sqrt(math.fsum(float(v) ** 2 for v in x)), rel=1e-14)


def test_an_outsized_delta_is_clipped_to_the_median() -> None:
    def factors(*norms: float) -> list[float]:
        return clip_factors(norms, [8.0] * len(norms), 8.0)

    assert factors(1.0, 1.1, 1.2, 100.0) == [1.0, 1.0, 1.1 / 1.2, 1.1 / 100]
    assert factors(1.0, 50.0) == [1.0, 1 / 50]
    assert factors(0.0, 0.0) == [1.0, 1.0]
    assert factors(3.0) == [1.0]


def test_a_delta_with_more_steps_than_most_is_as_long_as_they_make_it() -> None:
    """A machine that was started again brings one step of forty, half of a fleet is half as fast."""
    assert clip_factors([0.2, 5.0], [1.0, 40.0], 40.0) == [1.0, 1.0]
    assert clip_factors([2.4, 2.5, 2.6, 5.0], [16.0, 16.0, 16.0, 40.0], 40.0) == [1.0, 1.0, 2.5 / 2.6, 1.0]
    assert clip_factors([2.5, 2.5, 5.0, 5.0], [16.0, 16.0, 40.0, 40.0], 40.0) == [1.0] * 4
    many = clip_factors([2.5, 2.5, 2.5, 50.0], [16.0, 16.0, 16.0, 4000.0], 40.0)
    assert many == [1.0, 1.0, 1.0, 40 * 2.5 / 16 / 50], "who claims more than a round asks for"
    assert clip_factors([1.0, 1.0, 1.0, 4.0], [40.0, 40.0, 40.0, 1.0], 40.0) == [1.0, 1.0, 1.0, 0.25]
    assert clip_factors([1.0, 9.0], [0.0, 0.0], 40.0) == [1.0, 1 / 9], "whose steps nobody knows"
    # The factor shortens the delta; the others' shares stay what they were.
    assert shares([1, 1, 2], [1.0, 0.5, 1.0]) == [0.25, 0.125, 0.5]


def test_weights() -> None:
    assert by_tokens([100, 0, 50], [1, 0, 2]) == [100.0, 0.0, 50.0]
    assert equal([100, 0, 50], [1, 0, 2]) == [1.0, 0.0, 1.0]
    assert by_quality([80, 40, 0], [10, 10, 0]) == [640.0, 160.0, 0.0]
    assert by_quality([8000, 80, 80], [10, 10, 10]) == [4 * 640.0, 640.0, 640.0]
    assert bounded([1.0, 1.0, 8.0], 1.5) == [1.0, 1.0, 1.5] and bounded([1.0, 1.0, 8.0], 0) == [1.0, 1.0, 8.0]
    assert bounded([0.0, 2.0, 4.0], 1.0) == [0.0, 2.0, 3.0] and bounded([0.0], 1.5) == [0.0]
    assert bounded([2.0, 9.0, 9.0], 1.5, [0]) == [2.0, 3.0, 3.0]
    with pytest.raises(ValueError, match="at least one above 0"):
        shares([0.0, 0.0])
