"""The sparse codec against a reference in plain numpy, its size, and bytes that no encoder writes."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from deltas import F32, deltas

from atoll.comm.codecs.codec import Bf16, Malformed, NonFinite
from atoll.comm.codecs.factory import make_codec
from atoll.comm.codecs.sparse import GROUP, HEADER_SIZE, Sparse
from atoll.comm.config.run import CodecName, ReduceConfig
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


def total(x: "np.ndarray") -> float:
    """Added up in fp64, one after the other."""
    return float(np.cumsum(x, dtype=np.float64)[-1]) if x.size else 0.0


def packed(numbers: Sequence[int], bits: int) -> bytes:
    whole = sum(n << bits * i for i, n in enumerate(numbers))
    return whole.to_bytes(-(-bits * len(numbers) // 8), "little")


def reference(x: F32) -> tuple[bytes, F32]:
    """The encoded bytes of `x`, and what they decode to."""
    groups = [x[start : start + GROUP] for start in range(0, x.size, GROUP)]
    places = [np.sort(np.argsort(-np.abs(part), kind="stable")[: -(-part.size // 64)]) for part in groups]
    picked = [part[p].astype(np.float64) for part, p in zip(groups, places, strict=True)]
    scales = np.array([total(np.abs(part)) / part.size for part in picked], np.float32)
    halves = np.empty(2 * scales.size, np.uint8)
    Bf16().encode(scales, halves)
    Bf16().decode(halves, scales)
    u = [part / s if s > 0 else 0 * part for part, s in zip(picked, scales.astype(np.float64), strict=True)]
    all_, threshold = np.concatenate(u), 1.0
    for _ in range(8):
        kinds = 2 * (all_ < 0) + (np.abs(all_) > threshold)
        sums, (a, b, c, d) = [total(all_[kinds == k]) for k in range(4)], np.bincount(kinds, minlength=4)
        if a + c and b + d:
            threshold = ((sums[0] - sums[2]) / (a + c) + (sums[1] - sums[3]) / (b + d)) / 2
    kinds = 2 * (all_ < 0) + (np.abs(all_) > threshold)
    means = [total(all_[kinds == k]) / max((kinds == k).sum(), 1) for k in range(4)]
    most = np.nextafter(np.finfo(np.float32).max / max(scales.max(), np.float32(1)), np.float32(0))
    levels = np.clip(np.array(means, np.float32), -most, most)
    q = np.split(kinds, np.cumsum([part.size for part in picked])[:-1])
    values = b"".join(packed(p.tolist(), 12) + packed(k.tolist(), 2) for p, k in zip(places, q, strict=True))
    back = np.zeros_like(x)
    for g, (p, k) in enumerate(zip(places, q, strict=True)):
        back[g * GROUP + p] = levels[k] * scales[g]
    return levels.tobytes() + halves.tobytes() + values, back


def vectors(n: int) -> Iterator[F32]:
    """Vectors that a wrong kernel has a hard time with."""
    rng = np.random.default_rng(n)
    normal = rng.standard_normal(n).astype(np.float32)
    yield normal
    yield np.abs(normal)
    yield np.float32(10) + normal
    yield rng.standard_t(2, n).astype(np.float32) * np.float32(1e-6)
    yield normal * np.exp2(np.arange(n) // GROUP * 9).astype(np.float32)
    yield rng.integers(-4, 5, n).astype(np.float32)  # of many equal ones the first
    yield np.where(np.arange(n) % GROUP < 30, normal, 0).astype(np.float32)  # fewer than are sent
    yield np.where(np.arange(n) < n // 2, 0, normal).astype(np.float32)
    yield np.where(rng.random(n) < 0.5, 3e38, -3e38).astype(np.float32)
    yield np.full(n, np.finfo(np.float32).max)
    yield np.sort(normal)
    yield -np.sort(np.abs(normal))
    yield np.zeros(n, np.float32)


@pytest.mark.parametrize("n", SIZES)
def test_its_bytes_are_those_of_the_reference(n: int) -> None:
    for x in vectors(n):
        payload, back = reference(x)
        assert encoded(x).tobytes() == payload
        assert decoded(np.frombuffer(payload, np.uint8), n).tobytes() == back.tobytes()


def test_it_is_what_a_config_names() -> None:
    assert isinstance(make_codec(CodecName.SPARSE, 64), Sparse)


@pytest.mark.parametrize("numel", [1 << 16, 1 << 18, 1 << 20])
def test_its_size_is_within_three_percent_of_the_formula(numel: int) -> None:
    formula = numel * 64 * (12 + 2) / 4096 / 8
    assert formula <= CODEC.size(numel) <= 1.03 * formula
    told = ReduceConfig(codec=CodecName.SPARSE).bytes_per_element * numel
    assert told == pytest.approx(CODEC.size(numel), rel=0.03)


@pytest.mark.parametrize("name", CodecName)
def test_every_codec_has_the_size_that_the_config_tells_to_three_percent(name: CodecName) -> None:
    config = ReduceConfig(codec=name)
    size = make_codec(name, config.block, config.scales).size(config.chunk)
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
    groups = HEADER_SIZE + 2 * 2
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
        case "position that comes twice":
            payload[groups : groups + 3] = np.frombuffer(packed([7, 7], 12), np.uint8)
        case "position at the end of a short group":
            payload[-4:-1] = np.frombuffer(packed([3, 65], 12), np.uint8)
        case "last position of a short group":  # which is a good one
            payload[-4:-1] = np.frombuffer(packed([3, 64], 12), np.uint8)
        case "padding of values":
            payload[-1] |= 0x10
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
        "position that comes twice",
        "position at the end of a short group",
        "padding of values",
    ],
)
def test_bytes_that_no_encoder_writes_are_refused(change: str) -> None:
    payload = bad(change)
    with pytest.raises(Malformed):
        CODEC.check(payload, GROUP + 65)
    for good in ("nothing", "last position of a short group"):
        CODEC.check(bad(good), GROUP + 65)


def test_bits_that_fill_up_the_last_position_are_zero() -> None:
    payload = encoded(deltas(1, GROUP + 3 * 64 - 1)[0])
    CODEC.check(payload, GROUP + 3 * 64 - 1)
    payload[-2] |= 0x10
    with pytest.raises(Malformed):
        CODEC.check(payload, GROUP + 3 * 64 - 1)
