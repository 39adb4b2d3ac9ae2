import json
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from atoll.comm.codecs.bench import codec as bench
from atoll.comm.codecs.codec import F32, LARGEST, U8, Bf16, Codec, Fp32, Int4, Int8, Malformed, NonFinite
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName, ReduceConfig, RunConfig, ScaleName, check
from atoll.comm.errors import ConfigError

TINIEST = np.float32(2.0**-149)
FP16, FP32 = ScaleName.FP16, ScaleName.FP32
SCALED: list[Codec] = [
    *(Int8(block, scales) for block in (1, 7, 128) for scales in ScaleName),  # others: test_kernels
    *(Int4(block, scales) for block in (2, 128) for scales in ScaleName),
]
CODECS = [Fp32(), Bf16(), *SCALED]
LARGEST_INT8 = np.nextafter(LARGEST / np.float32(127), np.float32(0))


def name(codec: Any) -> str | None:
    if isinstance(codec, Int8 | Int4):
        return f"{type(codec).__name__}-{codec.block}-{codec.scales}"
    return type(codec).__name__ if isinstance(codec, Fp32 | Bf16) else None


every = pytest.mark.parametrize("codec", CODECS, ids=name)


def normal(n: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(n, dtype=np.float32)


def student(n: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_t(3, n).astype(np.float32)


def encoded(codec: Codec, x: F32) -> U8:
    out = np.full(codec.size(x.size), 0xAA, np.uint8)
    codec.encode(x, out)
    return out


def decoded(codec: Codec, payload: Any, n: int) -> F32:
    out = np.full(n, np.nan, np.float32)
    codec.decode(payload, out)
    return out


def through(codec: Codec, x: F32) -> F32:
    return decoded(codec, encoded(codec, x), x.size)


def unaligned(x: NDArray[Any]) -> NDArray[Any]:
    """A copy that starts one byte after an aligned address."""
    memory = np.empty(x.nbytes + 1, np.uint8)
    copy = memory[1:].view(x.dtype)
    copy[...] = x
    return copy


def steps(codec: Codec, x: F32) -> F32:
    """The error that each element of `x` may have."""
    match codec:
        case Fp32():
            return np.zeros_like(x)
        case Bf16():
            return np.maximum(np.abs(x) * np.float32(2.0**-8), np.float32(2.0**-134))
        case Int8() | Int4():
            levels = 127 if isinstance(codec, Int8) else 7
            absmax = np.maximum.reduceat(np.abs(x), np.arange(0, x.size, codec.block))
            share_up = absmax * 2.0**-10 + absmax.max() * 2.0**-24 if codec.scales is FP16 else 0
            scale = (absmax + share_up) / levels
            return np.asarray(np.repeat(scale, codec.block)[: x.size] * (0.5 + 2.0**-15) + TINIEST, np.float32)
    raise AssertionError(codec)


def test_the_config_names_the_codecs() -> None:
    assert isinstance(make_codec(CodecName.FP32, 256), Fp32)
    assert isinstance(make_codec(CodecName.BF16, 256), Bf16)
    int8, int4 = make_codec(CodecName.INT8, 64), make_codec(CodecName.INT4, 32, FP32)
    assert isinstance(int8, Int8) and (int8.block, int8.scales) == (64, FP16)
    assert isinstance(int4, Int4) and (int4.block, int4.scales) == (32, FP32)


def test_a_run_needs_even_blocks_and_chunks_of_one_at_least() -> None:
    check(RunConfig())
    with pytest.raises(ConfigError, match=r"reduce.block is 127: it must be even"):
        check(RunConfig(reduce=ReduceConfig(block=127, chunk=127 * 4)))
    with pytest.raises(ConfigError, match=r"reduce.chunk 95 is less than one reduce.block of 96"):
        check(RunConfig(reduce=ReduceConfig(chunk=95)))
    for codec in (Int8, Int4):
        with pytest.raises(ValueError, match="a block of"):
            codec(-1)
    with pytest.raises(ValueError, match="even"):
        Int4(7)


@every
def test_every_codec_keeps_its_promises_at_any_length(codec: Codec) -> None:
    for n in [0, 1, 2, 6, 7, 8, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000]:
        for x in (normal(n), student(n) * np.float32(1e-4)):
            before = x.copy()
            payload = encoded(codec, x)
            assert payload.tobytes() == encoded(codec, x).tobytes()
            assert np.array_equal(x, before)
            codec.check(payload.tobytes(), n)
            if n:
                assert (np.abs(through(codec, x) - x) <= steps(codec, x)).all(), n
        assert not through(codec, np.zeros(n, np.float32)).any()


@every
def test_accumulating_is_numpys_weighted_sum_bit_for_bit(codec: Codec) -> None:
    for n in (1, 129, 5000):
        out = expected = normal(n, seed=9)
        for i, weight in enumerate(np.array([1 / 3, 0.25, -7.7, 0, 1e-30, 3e10], np.float32)):
            payload = encoded(codec, normal(n, i))
            expected = expected.copy()
            expected += weight * decoded(codec, payload, n)
            out = out.copy()
            codec.accumulate(payload, weight, out)
            assert out.tobytes() == expected.tobytes()


@every
def test_memory_may_be_unaligned_and_read_only(codec: Codec) -> None:
    x = normal(1001)
    expected = encoded(codec, x)
    readonly = x.copy()
    readonly.flags.writeable = False
    for source in (unaligned(x), readonly):
        assert encoded(codec, source).tobytes() == expected.tobytes()
        out = unaligned(np.zeros(codec.size(x.size), np.uint8))
        codec.encode(source, out)
        assert out.tobytes() == expected.tobytes()
    numbers = decoded(codec, expected, x.size)
    data = expected.tobytes()
    for payload in (data, bytearray(data), memoryview(b"?" + data)[1:], unaligned(expected)):
        for out in (np.zeros_like(x), unaligned(np.zeros_like(x))):
            codec.decode(payload, out)
            assert out.tobytes() == numbers.tobytes()
            codec.accumulate(payload, np.float32(0.5), out)
            assert out.tobytes() == (numbers + np.float32(0.5) * numbers).tobytes()


@every
def test_arrays_of_another_type_or_length_are_refused(codec: Codec) -> None:
    payload = encoded(codec, normal(100))
    with pytest.raises(TypeError):
        codec.encode(np.zeros(100), np.empty_like(payload))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        codec.accumulate(payload, np.float32(1), np.zeros(100))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an output of"):
        codec.encode(normal(100), np.empty(payload.size + 1, np.uint8))


def test_fp32_is_the_identity() -> None:
    x = np.concatenate([normal(100), np.array([0.0, -0.0, LARGEST, TINIEST], np.float32)])
    assert through(Fp32(), x).tobytes() == x.tobytes() == encoded(Fp32(), x).tobytes()


def test_bf16_rounds_to_nearest_even_and_never_to_infinity() -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0xBF818000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00000001], np.uint32
    )
    assert encoded(Bf16(), bits.view(np.float32)).view("<u2").tolist() == [
        *(0x3F80, 0x3F82, 0x3F81, 0xBF82),
        *(0x7F7F, 0xFF7F, 0x0000),
    ]


@pytest.mark.parametrize(
    ("codec", "header"),
    [
        (Int8(4, FP32), np.array([1, 0, 2], "<f4").tobytes()),
        (Int8(4, FP16), np.array([2], "<f4").tobytes() + np.array([0.5, 0, 1], "<f2").tobytes()),
    ],
)
def test_int8_is_laid_out_as_documented(codec: Codec, header: bytes) -> None:
    x = np.array([127, -127, 1, 0, 0, 0, 0, 0, 254, 2], np.float32)
    values = np.array([127, -127, 1, 0, 0, 0, 0, 0, 127, 1], np.int8)
    assert encoded(codec, x).tobytes() == header + values.tobytes()


@pytest.mark.parametrize(
    ("codec", "header"),
    [
        (Int4(4, FP32), np.array([1, 2], "<f4").tobytes()),
        (Int4(4, FP16), np.array([2], "<f4").tobytes() + np.array([0.5, 1], "<f2").tobytes()),
    ],
)
def test_int4_is_laid_out_as_documented(codec: Codec, header: bytes) -> None:
    x = np.array([7, -7, 1, -2, 14, 2, -4], np.float32)
    assert encoded(codec, x).tobytes() == header + bytes([0x17, 0xE9, 0xE7, 0x01])
    assert np.array_equal(through(codec, x), x)


def test_int8_rounds_to_nearest_and_not_towards_zero() -> None:
    x = np.concatenate([[127.0], np.linspace(-100, 100, 12345)]).astype(np.float32)
    for scales in ScaleName:
        assert np.array_equal(through(Int8(x.size, scales), x), np.rint(x))
    assert abs(float(np.mean(through(Int8(x.size), x)[1:] - x[1:]))) < 1e-3


@pytest.mark.parametrize("codec", SCALED, ids=name)
def test_constant_blocks_survive_at_any_magnitude(codec: Codec) -> None:
    for value in [1.0, -3.7, 1e-30, 1e30, LARGEST, -LARGEST, 2.0**-126, 2.0**-140, TINIEST]:
        x = np.full(300, value, np.float32)
        result = through(codec, x)
        assert np.isfinite(result).all(), value
        assert (np.abs(result - x) <= np.abs(x) * np.float32(3e-7) + TINIEST * 127).all(), value


@pytest.mark.parametrize("scales", ScaleName)
def test_subnormal_blocks_are_not_clipped(scales: ScaleName) -> None:
    for top in [1, 50, 127, 128, 190, 254, 1000, 100_000]:
        x = (np.arange(256) % (top + 1)).astype(np.float32) * TINIEST
        x[-1] = top * TINIEST
        step = max(TINIEST, x.max() / 127)
        assert np.abs(through(Int8(256, scales), x) - x).max() <= step, top
        x = np.concatenate(
            [x, x / 2, np.full(256, TINIEST), x * 64]
        )  # with fp16 scales: shares of a subnormal one
        assert np.abs(through(Int8(256, scales), x) - x)[:256].max() <= 2 * step, top


@pytest.mark.parametrize("codec", SCALED, ids=name)
def test_huge_values_decode_to_finite_ones(codec: Codec) -> None:
    x = np.array([LARGEST, -LARGEST, LARGEST / 2, 1.0] * 100, np.float32)
    result = through(codec, x)
    assert np.isfinite(result).all()
    assert np.abs(result.astype(np.float64) - x).max() <= float(LARGEST) / 7


def test_a_block_far_below_the_largest_has_the_precision_of_the_smallest_share() -> None:
    x = np.concatenate([np.full(128, 1.0), normal(128) * 1e-9, np.zeros(128)]).astype(np.float32)
    result = through(Int8(128, FP16), x)
    assert np.abs(result - x)[128:256].max() <= 2.0**-24 / 127 / 2
    assert not result[256:].any()
    exact = through(Int8(128, FP32), x)
    assert np.abs(exact - x)[128:256].max() <= np.abs(x[128:256]).max() / 127 * 0.5001


@every
def test_vectors_that_are_not_finite_are_not_encoded(codec: Codec) -> None:
    for bad, where in product([np.nan, -np.nan, np.inf, -np.inf], [0, 511, 999]):
        x = normal(1000)
        x[where:] = bad
        with pytest.raises(NonFinite, match=f"element {where} ") as caught:
            encoded(codec, x)
        assert caught.value.element == where


@every
def test_another_length_is_refused(codec: Codec) -> None:
    right = encoded(codec, normal(1000)).tobytes()
    for payload in (right[:-1], right + b"\0", b""):
        refused(codec, np.frombuffer(payload, np.uint8), f"{len(payload)} bytes where {codec.size(1000)}")


def refused(codec: Codec, payload: U8, sentence: str, n: int = 1000) -> None:
    """By every function that reads it, before anything is written."""
    out = np.ones(n, np.float32)
    reads: list[Callable[[], None]] = [
        lambda: codec.check(payload, n),
        lambda: codec.decode(payload, out),
        lambda: codec.accumulate(payload, np.float32(0), out),
    ]
    for read in reads:
        with pytest.raises(Malformed, match=sentence):
            read()
    assert (out == 1).all()


HOSTILE = [np.nan, -np.nan, np.inf, -np.inf, -1.0, -0.0, LARGEST, np.nextafter(LARGEST_INT8, LARGEST)]


@pytest.mark.parametrize("scale", HOSTILE)
def test_scales_that_would_decode_to_infinity_are_refused(scale: float) -> None:
    for codec, place in ((Int8(128, FP32), 8), (Int8(128, FP16), 0)):
        payload = encoded(codec, normal(1000))
        payload[place : place + 4] = np.array([scale], "<f4").view(np.uint8)
        refused(codec, payload, "scales")


@pytest.mark.parametrize(
    "share", [np.nan, np.inf, -np.inf, -1.0, -0.0, np.nextafter(np.float16(1), np.float16(2))]
)
def test_shares_beyond_one_are_refused(share: float) -> None:
    for codec in (Int8(128, FP16), Int4(128, FP16)):
        payload = encoded(codec, normal(1000))
        payload[8:10] = np.array([share], "<f2").view(np.uint8)
        refused(codec, payload, "shares")


@pytest.mark.parametrize("scales", ScaleName)
def test_the_value_that_no_encoder_writes_is_refused_where_it_would_overflow(scales: ScaleName) -> None:
    for codec, worst, sentence in ((Int8(128, scales), [0x80], "-128"), (Int4(128, scales), [0x08, 0x80], "-8")):
        for byte in worst:
            for value, overflows in ((LARGEST, True), (LARGEST / 2, False)):
                payload = encoded(codec, np.full(1000, value, np.float32))
                codec.check(payload, 1000)
                payload[-1] = byte
                if overflows:
                    refused(codec, payload, sentence)
                else:
                    assert np.isfinite(decoded(codec, payload, 1000)).all()


@pytest.mark.parametrize("codec", [Fp32(), Bf16()])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_plain_payloads_that_are_not_finite_are_refused(codec: Codec, value: float) -> None:
    payload = encoded(codec, normal(1000))
    upper = np.array([value], "<f4").view(np.uint8)
    payload[-2:] = upper[2:]  # the last number's upper half
    refused(codec, payload, "not finite")


# A scale for each smaller block costs more bytes, and absmax is smaller: a run's default stays below 0.9 %.
@pytest.mark.parametrize(
    ("codec", "of_normal", "of_student"),
    [
        (make_codec(CodecName.INT8, ReduceConfig().block), 0.0089, 0.025),
        (Int8(64, FP16), 0.0086, 0.016),
        (Int8(64, FP32), 0.0086, 0.016),
        (Int8(128, FP16), 0.0094, 0.020),
        (Int4(64, FP16), 0.16, 0.25),
        (Bf16(), 0.0024, 0.0024),
        (Fp32(), 1e-6, 1e-6),
    ],
    ids=name,
)
@pytest.mark.parametrize("members", [4, 16])
def test_the_error_of_a_mean_quantised_twice_is_small(
    codec: Codec, of_normal: float, of_student: float, members: int
) -> None:
    for draw, limit in ((normal, of_normal), (student, of_student)):
        xs = [draw(1 << 17, seed) for seed in range(members)]
        mean = np.zeros(1 << 17, np.float32)
        for x in xs:
            codec.accumulate(encoded(codec, x), np.float32(1 / members), mean)
        exact = np.mean(xs, axis=0, dtype=np.float64)
        assert np.linalg.norm(through(codec, mean) - exact) / np.linalg.norm(exact) < limit


def test_the_default_costs_two_percent_over_a_byte_an_element() -> None:
    reduce = ReduceConfig()
    codec = make_codec(reduce.codec, reduce.block, reduce.scales)
    assert 1 < codec.size(reduce.chunk) / reduce.chunk < 1.021


@every
def test_threads_encode_at_the_same_time(codec: Codec) -> None:
    xs = [normal(100_000, seed) for seed in range(4)]
    expected = [encoded(codec, x).tobytes() for x in xs]
    results = [b""] * len(xs)

    def work(i: int) -> None:
        results[i] = encoded(codec, xs[i]).tobytes()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected


@pytest.mark.long
def test_the_bench_measures_every_codec() -> None:
    result = CliRunner().invoke(bench, ["--chunk", "1000", "--repeat", "1", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)["codecs"]
    assert list(figures) == list(CodecName)
    assert figures["int8"]["rel_err_normal_4"] < 0.009 and figures["int8"]["rel_err_normal_16"] < 0.009
    assert figures["int8"]["rel_err_t3"] < 0.025
    assert all(f["encode_ns"] > 0 and f["decode_accumulate_ns"] > 0 for f in figures.values())
    assert "int4" in CliRunner().invoke(bench, ["--chunk", "1000", "--repeat", "1"]).stdout
