import numpy as np
import pytest

from atoll.comm.codec import F32, MAX_SCALE, U8, Codec, Fp32, Int8, Malformed, NonFinite, make
from atoll.comm.config import CodecName

CODECS = [Fp32(), Int8(256), Int8(64), Int8(7), Int8(1)]
LARGEST = np.finfo(np.float32).max
TINIEST = np.float32(2.0**-149)


def normal(n: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(n, dtype=np.float32)


def encoded(codec: Codec, x: F32) -> U8:
    out = np.full(codec.size(x.size), 0xAA, np.uint8)
    codec.encode(x, out)
    return out


def through(codec: Codec, x: F32) -> F32:
    out = np.full(x.size, np.nan, np.float32)
    codec.decode(encoded(codec, x), out)
    return out


def reference(x: F32, block: int) -> tuple[F32, F32]:
    """Decoded values and each one's scale, an element at a time."""
    decoded, scales = np.empty_like(x), np.empty_like(x)
    for start in range(0, x.size, block):
        part = x[start : start + block]
        scale = np.float32(np.abs(part).max() / np.float32(127))
        for i, value in enumerate(part, start):
            q = int(np.rint(np.float32(value / scale))) if scale > 0 else 0
            decoded[i], scales[i] = np.float32(np.float32(q) * scale), scale
    return decoded, scales


def test_the_config_names_the_codecs() -> None:
    assert isinstance(make(CodecName.FP32, 256), Fp32)
    int8 = make(CodecName.INT8, 64)
    assert isinstance(int8, Int8) and int8.block == 64


@pytest.mark.parametrize("n", [1, 6, 7, 8, 255, 256, 257, 1000])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_keeps_its_promises_at_any_length(codec: Codec, n: int) -> None:
    x = normal(n)
    kept = x.copy()
    assert np.array_equal(encoded(codec, x), encoded(codec, x))
    assert np.array_equal(x, kept)
    assert np.abs(through(codec, x) - x).max() <= np.abs(x).max() / 127 * 0.5001
    assert not through(codec, np.zeros(n, np.float32)).any()
    codec.check(encoded(codec, x).tobytes(), n)


def test_fp32_is_the_identity() -> None:
    x = np.concatenate([normal(100), np.array([0.0, -0.0, LARGEST, TINIEST], np.float32)])
    assert through(Fp32(), x).tobytes() == x.tobytes() == encoded(Fp32(), x).tobytes()


@pytest.mark.parametrize("block", [1, 7, 64, 256])
def test_int8_equals_the_arithmetic_of_its_docstring_bit_for_bit(block: int) -> None:
    x = normal(1000) * np.float32(1e-3)
    decoded, scales = reference(x, block)
    assert through(Int8(block), x).tobytes() == decoded.tobytes()
    assert (np.abs(decoded - x) <= scales * np.float32(0.5001)).all()


def test_int8_is_laid_out_as_documented() -> None:
    x = np.array([127, -127, 1, 0, 0, 0, 254, 2], np.float32)
    expected = np.array([1, 0, 2], "<f4").tobytes() + np.array([127, -127, 1, 0, 0, 0, 127, 1], np.int8).tobytes()
    assert encoded(Int8(3), x).tobytes() == expected


def test_int8_rounds_to_nearest_and_not_towards_zero() -> None:
    x = np.concatenate([[127.0], np.linspace(-100, 100, 12345)]).astype(np.float32)
    assert np.array_equal(through(Int8(x.size), x), np.rint(x))
    assert abs(float(np.mean(through(Int8(x.size), x)[1:] - x[1:]))) < 1e-3


@pytest.mark.parametrize("value", [1.0, -3.7, 1e-30, 1e30, LARGEST, -LARGEST, 2.0**-126, 2.0**-140, TINIEST])
def test_constant_blocks_survive_at_any_magnitude(value: float) -> None:
    x = np.full(300, value, np.float32)
    decoded = through(Int8(256), x)
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded - x) <= np.abs(x) * np.float32(2e-7) + TINIEST * 127).all()


def test_subnormal_blocks_are_not_clipped() -> None:
    for top in [1, 50, 127, 128, 190, 254, 1000, 100_000]:
        x = (np.arange(256) % (top + 1)).astype(np.float32) * TINIEST
        x[-1] = top * TINIEST
        step = max(TINIEST, x.max() / 127)
        assert np.abs(through(Int8(256), x) - x).max() <= step, top


def test_a_block_of_huge_values_decodes_to_finite_ones() -> None:
    x = np.array([LARGEST, -LARGEST, LARGEST / 2, 1.0], np.float32)
    decoded = through(Int8(256), x)
    assert np.isfinite(decoded).all()
    assert np.abs(decoded - x).max() <= LARGEST / 127


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 511, 999])
def test_vectors_that_are_not_finite_are_not_encoded(codec: Codec, bad: float, where: int) -> None:
    x = normal(1000)
    x[where] = bad
    with pytest.raises(NonFinite):
        encoded(codec, x)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("change", [-1, 1])
def test_another_length_is_refused(codec: Codec, change: int) -> None:
    payload = encoded(codec, normal(1000)).tobytes()
    payload = payload[:change] if change < 0 else payload + b"\0"
    with pytest.raises(Malformed, match=f"{len(payload)} bytes where {codec.size(1000)}"):
        codec.decode(payload, np.empty(1000, np.float32))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, LARGEST, np.nextafter(MAX_SCALE, LARGEST)])
def test_scales_that_would_decode_to_infinity_are_refused(scale: float) -> None:
    payload = encoded(Int8(256), normal(1000))
    payload[8:12] = np.array([scale], "<f4").view(np.uint8)
    with pytest.raises(Malformed, match="scales"):
        Int8(256).decode(payload, np.empty(1000, np.float32))


def test_the_value_that_no_encoder_writes_is_refused() -> None:
    payload = encoded(Int8(256), normal(1000))
    payload[-1] = 0x80
    with pytest.raises(Malformed, match="-128"):
        Int8(256).check(payload, 1000)


def test_fp32_payloads_that_are_not_finite_are_refused() -> None:
    with pytest.raises(Malformed, match="not finite"):
        Fp32().decode(np.array([1.0, np.nan], "<f4").tobytes(), np.empty(2, np.float32))


# absmax of a larger block is larger: 64 elements to a scale cost 4.7 % more bytes than 256 do.
@pytest.mark.parametrize(("block", "limit"), [(64, 0.0087), (256, 0.0102)])
def test_the_error_of_a_mean_quantised_twice_is_below_one_percent(block: int, limit: float) -> None:
    codec = Int8(block)
    xs = [normal(1 << 18, seed) for seed in range(4)]
    mean = through(codec, np.mean([through(codec, x) for x in xs], axis=0, dtype=np.float32))
    exact = np.mean(xs, axis=0, dtype=np.float64)
    assert np.linalg.norm(mean - exact) / np.linalg.norm(exact) < limit
