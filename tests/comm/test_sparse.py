"""The sparse codec against a reference in plain numpy, its size, and bytes that no encoder writes."""

import numpy as np
import pytest
from deltas import F32, deltas

from atoll.comm.codec import Malformed, NonFinite, make
from atoll.comm.config import CodecName, ReduceConfig
from atoll.comm.sparse import GROUP, HEADER, Sparse
from atoll.outer_opt.feedback import ErrorFeedback

CODEC = Sparse()
SIZES = [1, 2, 63, 64, 65, 130, 4095, 4096, 4097, 4160, 3 * 4096 + 700]


def encoded(x: F32) -> np.ndarray:
    out = np.empty(CODEC.size(x.size), np.uint8)
    CODEC.encode(x, out)
    return out


def decoded(payload: np.ndarray, numel: int) -> F32:
    out = np.full(numel, np.nan, np.float32)
    CODEC.decode(payload, out)
    return out


def test_it_is_what_a_config_names() -> None:
    assert isinstance(make(CodecName.SPARSE, 64), Sparse)


@pytest.mark.parametrize("numel", [1 << 16, 1 << 18, 1 << 20])
def test_its_size_is_within_three_percent_of_the_formula(numel: int) -> None:
    formula = numel * 64 * (12 + 2) / 4096 / 8
    assert formula <= CODEC.size(numel) <= 1.03 * formula
    told = ReduceConfig(codec=CodecName.SPARSE).bytes_per_element * numel
    assert told == pytest.approx(CODEC.size(numel), rel=0.03)


@pytest.mark.parametrize("name", CodecName)
def test_every_codec_has_the_size_that_the_config_tells_to_three_percent(name: CodecName) -> None:
    config = ReduceConfig(codec=name)
    size = make(name, config.block, config.scales).size(config.chunk)
    assert size == pytest.approx(config.bytes_per_element * config.chunk, rel=0.03)
    formula = {"fp32": 4, "bf16": 2, "int8": 1 + 2 / 64, "int4": 0.5 + 2 / 64, "sparse": 0.21875 / 8}[name]
    assert size == pytest.approx(formula * config.chunk, rel=0.03)


@pytest.mark.parametrize("n", SIZES)
def test_the_largest_of_each_group_arrive_and_nothing_else(n: int) -> None:
    (x,) = deltas(1, n, seed=n)
    back = decoded(encoded(x), n)
    for start in range(0, n, GROUP):
        part, got = x[start : start + GROUP], back[start : start + GROUP]
        count = -(-part.size // 64)
        largest = np.sort(np.argsort(-np.abs(part), kind="stable")[:count])
        np.testing.assert_array_equal(np.flatnonzero(got), largest)
        assert (np.sign(got[largest]) == np.sign(part[largest])).all()


def test_levels_are_the_means_of_what_they_stand_for() -> None:
    (x,) = deltas(1, 64 * GROUP)
    x *= np.repeat(np.geomspace(1e-6, 1e3, 64), GROUP).astype(np.float32)  # groups of very unlike tensors
    back = decoded(encoded(x), x.size)
    sent = back != 0
    for group in range(64):
        span = slice(group * GROUP, (group + 1) * GROUP)
        a, b = x[span][sent[span]], back[span][sent[span]]
        assert np.unique(np.abs(b)).size <= 4
        # Two levels a sign for magnitudes from 2.15 sigma on: a tenth of their norm is lost. One level loses 14 %.
        assert np.linalg.norm(a - b) < 0.12 * np.linalg.norm(a)


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    x = np.ones(GROUP, np.float32)
    x[::2] *= -1
    back = decoded(encoded(x), GROUP)
    np.testing.assert_array_equal(back[:64], x[:64])
    assert not back[64:].any()


def test_zeros_stay_zeros_and_extremes_stay_finite() -> None:
    assert not decoded(encoded(np.zeros(5000, np.float32)), 5000).any()
    for value in (np.finfo(np.float32).max, np.float32(1e-45), np.finfo(np.float32).tiny):
        x = np.zeros(5000, np.float32)
        x[[3, 4500]] = value, -value
        back = decoded(encoded(x), 5000)
        assert np.isfinite(back).all()
        assert back[3] > 0 > back[4500] or value < 1e-40


def test_adding_up_is_decoding_times_weight() -> None:
    (x,) = deltas(1, 9000)
    (total,) = deltas(1, 9000, seed=1)
    payload, weight = encoded(x), np.float32(0.3)
    expected = total + weight * decoded(payload, x.size)
    CODEC.accumulate(payload.tobytes(), weight, total)
    np.testing.assert_array_equal(total, expected)


def test_with_feedback_everything_arrives_in_the_end() -> None:
    (delta,) = deltas(1, 2 * GROUP)
    feedback, residual = ErrorFeedback(1.0), np.zeros_like(delta)
    arrived, offered = np.zeros_like(delta), np.empty_like(delta)
    for _ in range(400):
        feedback.offer(residual, delta, offered)
        sent = decoded(encoded(offered), delta.size)
        feedback.commit(residual, offered, sent)
        arrived += sent / 400
    assert np.linalg.norm(arrived - delta) < 0.15 * np.linalg.norm(delta)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_sent(value: float) -> None:
    (x,) = deltas(1, 5000)
    x[4321] = value
    with pytest.raises(NonFinite, match="element 4321") as caught:
        encoded(x)
    assert caught.value.element == 4321


def bad(change: str, numel: int = GROUP + 65) -> np.ndarray:
    payload = encoded(deltas(1, numel)[0])
    groups = HEADER + 2 * 2
    match change:
        case "short":
            return payload[:-1]
        case "infinite level":
            payload[:4].view("<f4")[0] = np.inf
        case "level that is no number":
            payload[4:8].view("<f4")[0] = np.nan
        case "level too large for the scale":
            payload[:4].view("<f4")[0] = 1e38
            payload[16:18].view("<u2")[0] = 0x5015  # 1e10
        case "negative scale":
            payload[16:18].view("<u2")[0] = 0x8000
        case "infinite scale":
            payload[16:18].view("<u2")[0] = 0x7F80
        case "positions that fall":
            payload[groups : groups + 3] = payload[groups + 3 : groups + 6]
        case "position beyond a short group":
            payload[-3] = 0xFF
        case "padding of values":
            payload[-1] |= 0x80
    return payload


@pytest.mark.parametrize(
    "change",
    [
        "short",
        "infinite level",
        "level that is no number",
        "level too large for the scale",
        "negative scale",
        "infinite scale",
        "positions that fall",
        "position beyond a short group",
        "padding of values",
    ],
)
def test_bytes_that_no_encoder_writes_are_refused(change: str) -> None:
    payload = bad(change)
    with pytest.raises(Malformed):
        CODEC.check(payload, GROUP + 65)
    CODEC.check(bad("nothing"), GROUP + 65)


def test_random_bytes_are_refused_or_decode_to_finite_numbers() -> None:
    rng = np.random.default_rng(0)
    good = encoded(deltas(1, 700)[0])
    for _ in range(2000):
        payload = good.copy()
        payload[rng.integers(payload.size, size=2)] = rng.integers(256, size=2)
        try:
            assert np.isfinite(decoded(payload, 700)).all()
        except Malformed:
            pass
