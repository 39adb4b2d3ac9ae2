"""The compiled kernels against arithmetic in numpy that is short enough to be believed; mutated, they differ."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.comm.codecs import codec as codec_module
from atoll.comm.codecs import kernels
from atoll.comm.codecs.codec import F32, U8, Bf16, Codec, Fp32, Int4, Int8, Malformed, NonFinite
from atoll.comm.config.run import ScaleName

LARGEST = np.float32(np.finfo(np.float32).max)
TINIEST = np.float32(2.0**-149)
PART = 131_072  # elements that are encoded by themselves


def scales(x: F32, block: int, levels: int, kind: ScaleName) -> tuple[F32, bytes]:
    """The scale of each block, and how the scales are encoded."""
    count = -(-x.size // block)
    padded = np.zeros(count * block, np.float32)
    padded[: x.size] = x
    absmax = np.abs(padded).reshape(count, block).max(axis=1)
    exact = np.minimum(absmax / np.float32(levels), np.nextafter(LARGEST / np.float32(levels), np.float32(0)))
    short = (exact < np.float32(2.0**-126)) & (exact * np.float32(levels) < absmax)
    exact[short] += TINIEST
    if kind is ScaleName.FP32:
        return exact, exact.astype("<f4").tobytes()
    largest = exact.max(initial=np.float32(0))
    share = exact / largest if largest else exact
    half = share.astype(np.float16)
    up = half.astype(np.float32) < share
    half[up] = np.nextafter(half[up], np.float16(2))
    half[(exact > 0) & (half == 0)] = np.float16(2.0**-24)
    return largest * half.astype(np.float32), largest.astype("<f4").tobytes() + half.astype("<f2").tobytes()


def integers(x: F32, each: F32) -> F32:
    """x / scale, rounded; `each` is every element's scale."""
    lift = np.where(each < np.float32(2.0**-100), np.float32(2.0**64), np.float32(1))
    inverse = np.divide(np.float32(1), each * lift, out=np.zeros_like(each), where=each > 0)
    return np.asarray(np.rint(x * lift * inverse), np.float32)


def nibbles(q: F32, block: int) -> bytes:
    packed = []
    for start in range(0, q.size, block):
        part = q[start : start + block].astype(np.int8).view(np.uint8) & 15
        half = (part.size + 1) // 2
        high = np.zeros(half, np.uint8)
        high[: part.size - half] = part[half:]
        packed.append((part[:half] | (high << 4)).tobytes())
    return b"".join(packed)


def bf16(x: F32) -> F32:
    """The nearest number with 8 significant bits, the even one of two; not infinity."""
    bits = x.view(np.uint32).astype(np.uint64)
    below = (bits & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        step = np.ldexp(
            1.0, np.where(below == 0, -133, np.maximum(np.frexp(np.abs(below))[1] - 8, -133))
        ) * np.where(np.signbit(x), -1, 1)
    above = below + step
    distance = (x.astype(np.float64) - below) / step
    odd = (bits >> 16) & 1 == 1
    up = (distance > 0.5) | ((distance == 0.5) & odd)
    limit = float(np.uint32(0x7F7F0000).view(np.float32))
    return np.clip(np.where(up, above, below), -limit, limit).astype(np.float32)


def reference(codec: Codec, x: F32) -> tuple[bytes, F32]:
    """The encoded bytes of `x`, and what they decode to."""
    match codec:
        case Fp32():
            return x.astype("<f4").tobytes(), x
        case Bf16():
            rounded = bf16(x)
            return (rounded.view(np.uint32) >> 16).astype("<u2").tobytes(), rounded
        case Int8() | Int4() if x.size > PART:
            parts = [reference(codec, x[i : i + PART]) for i in range(0, x.size, PART)]
            return b"".join(octets for octets, _ in parts), np.concatenate([numbers for _, numbers in parts])
        case Int8() | Int4():
            levels = 127 if isinstance(codec, Int8) else 7
            of_block, header = scales(x, codec.block, levels, codec.scales)
            each = np.repeat(of_block, codec.block)[: x.size]
            q = integers(x, each)
            values = q.astype(np.int8).tobytes() if isinstance(codec, Int8) else nibbles(q, codec.block)
            return header + values, np.asarray((q + np.float32(0)) * each, np.float32)
    raise AssertionError(codec)


def verify(codec: Codec, x: F32, weight: float = 0.3) -> None:
    """Encoded, decoded and accumulated, `x` has the bits that the reference says."""
    expected, decoded = reference(codec, x)
    payload = np.full(codec.size(x.size), 0xAA, np.uint8)
    codec.encode(x, payload)
    assert payload.tobytes() == expected
    out = np.full(x.size, np.nan, np.float32)
    codec.decode(payload, out)
    assert out.tobytes() == decoded.tobytes()
    for first in (0, 1):  # at the beginning of a line of the caches, and not
        whole = np.full(x.size + 17, np.nan, np.float32)
        out = whole[-whole.ctypes.data % 64 // 4 + first :][: x.size]
        codec.decode(payload, out, far=True)
        assert out.tobytes() == decoded.tobytes()
    out = np.linspace(-1, 1, x.size, dtype=np.float32)
    sums = out + np.float32(weight) * decoded
    codec.accumulate(payload, np.float32(weight), out)
    assert out.tobytes() == sums.tobytes()
    mean = np.float32(0) + np.float32(weight) * decoded + np.float32(0.5) * decoded
    codec.mean([payload, payload], [weight, 0.5], out)
    assert out.tobytes() == mean.tobytes()


def refused(codec: Codec, x: F32, where: int, value: float) -> None:
    x = x.copy()
    x[where] = value
    with pytest.raises(NonFinite) as caught:
        codec.encode(x, np.empty(codec.size(x.size), np.uint8))
    assert caught.value.element == where


def vectors(n: int) -> Iterator[F32]:
    """Vectors that a wrong kernel has a hard time with."""
    random = np.random.default_rng(n)
    normal = random.standard_normal(n, dtype=np.float32)
    yield normal
    yield random.standard_t(3, n).astype(np.float32) * np.float32(1e-3)
    yield normal * np.exp2(random.integers(-160, 100, n)).astype(np.float32)  # also blocks of little or no share
    yield normal * np.exp2(random.integers(-20, 0, -(-n // 6))).astype(np.float32).repeat(6)[:n]
    yield random.integers(-300, 300, n).astype(np.float32) * TINIEST
    for levels in (7, 127):  # ties
        halves = random.integers(-2 * levels, 2 * levels + 1, n).astype(np.float32) * np.float32(0.5)
        halves[::6] = levels
        yield halves
        yield halves * kernels.SMALL_SCALE  # each block's scale is that
    yield normal * np.where(np.arange(n) < n // 2, 1e30, 1e-30).astype(np.float32)
    yield normal * np.float32(2.0**-105)
    yield np.where(random.random(n) < 0.5, LARGEST, -LARGEST).astype(np.float32)
    yield np.where(np.arange(n) < n // 2, normal, 0).astype(np.float32)
    upper = random.integers(0, 0x3FBF, n) << 1 | np.arange(n) // 3 % 2  # even and odd numbers of bf16,
    lower = np.resize([0x7FFF, 0x8000, 0x8001], n)  # and half a step, a bit less and a bit more
    yield (upper << 16 | lower).astype(np.uint32).view(np.float32)
    yield np.zeros(n, np.float32)
    yield np.full(n, -0.0, np.float32)


def codecs(*blocks: int) -> list[Codec]:
    scaled: list[Codec] = []
    for block in blocks:
        for kind in ScaleName:
            scaled.append(Int8(block, kind))
            if block % 2 == 0:
                scaled.append(Int4(block, kind))
    return [Fp32(), Bf16(), *scaled]


@pytest.mark.parametrize("n", [0, 1, 2, 5, 6, 7, 127, 128, 129, 1000, 4096 + 77])
def test_every_kernel_equals_the_reference_bit_for_bit(n: int) -> None:
    with np.errstate(over="ignore", under="ignore"):
        for codec in codecs(1, 2, 6, 7, 64, 96, 128, 256):
            for x in vectors(n):
                verify(codec, x)


@pytest.mark.parametrize("codec", codecs(128))
def test_a_large_chunk_too(codec: Codec) -> None:
    x = np.random.default_rng(1).standard_normal(262_144 - 3, dtype=np.float32)
    verify(codec, x, 1 / 3)


def battery() -> None:
    """What finds a wrong kernel in a few milliseconds, interpreted."""
    with np.errstate(all="ignore"):
        for codec in codecs(6):
            for x in vectors(15):
                verify(codec, x)
            for where, value in ((0, np.nan), (7, np.inf), (14, -np.inf)):
                refused(codec, next(vectors(15)), where, value)
        for block, n in ((32, 69), (96, 200), (128, 256)):
            verify(Int8(block, ScaleName.FP16), next(vectors(n)))
        for bits in (0x7F80, 0xFF80, 0x7FC0):
            with pytest.raises(Malformed):
                Bf16().check(np.array([0, bits], "<u2").tobytes(), 2)
            with pytest.raises(Malformed):
                Fp32().check(np.array([0, bits << 16], "<u4").tobytes(), 2)
        shares = np.array([1, 0x3C01, 0x3C00], "<u2")
        with pytest.raises(Malformed):
            Int8(1, ScaleName.FP16).check(np.float32(1).tobytes() + shares.tobytes() + bytes(3), 3)


SOURCE = Path(kernels.__file__).read_text()

# The function, a piece of one of its lines, and what a careless hand would write there.
MUTATIONS = [
    ("is_finite", "top < INFINITY", "top <= INFINITY"),
    ("is_finite", "range(x.size)", "range(x.size - 1)"),
    ("is_finite", "top < INFINITY", "True"),
    ("add_fp32", "out[i] + ", ""),
    ("add_fp32", "weight * x[i]", "x[i]"),
    ("to_bf16", "+ 0x7FFF +", "+ 0x8000 +"),
    ("to_bf16", "+ 0x7FFF + ((magnitude >> 16) & 1)", ""),
    ("to_bf16", " + ((magnitude >> 16) & 1)", ""),
    ("to_bf16", "min(half, LARGEST_BF16)", "half"),
    ("to_bf16", "& 0x8000", "& 0"),
    ("to_bf16", "top < INFINITY", "top <= INFINITY"),
    ("is_finite_bf16", "top <= LARGEST_BF16", "top <= 0x7F80"),
    ("is_finite_bf16", "& 0x7FFF", ""),
    ("_bf16", "<< 16", "<< 15"),
    ("add_bf16", "weight * ", ""),
    ("scales_of", "top >= INFINITY", "False"),
    ("scales_of", "top >= INFINITY", "top > INFINITY"),
    ("scales_of", "np.float32(absmax / levels)", "np.float32(absmax / (levels + ONE))"),
    ("scales_of", "min(np.float32(absmax / levels), largest)", "np.float32(absmax / levels)"),
    ("scales_of", "range(scales.size)", "range(scales.size - 1)"),
    ("scales_of", "range(part.size)", "range(part.size - 1)"),
    ("scales_of", "& MAGNITUDE", ""),
    ("scales_of", "scale < SMALLEST_NORMAL and", "False and"),
    ("scales_of", "scale < SMALLEST_NORMAL and", ""),
    ("_share", "<< 13", "<< 12"),
    ("to_shares", "0x1FFF", "0x1000"),
    ("to_shares", "0x1FFF", "0x2000"),
    ("to_shares", "share >= HALF_NORMAL", "True"),
    ("to_shares", "np.float32(half) < steps or half == 0", "half == 0"),
    ("to_shares", "np.float32(half) < steps or half == 0", "np.float32(half) < steps"),
    ("to_shares", "largest * _share(shares[b])", "scales[b]"),
    ("from_shares", "largest * _share(shares[b])", "largest"),
    ("from_shares", "top <= ONE_SHARE", "True"),
    ("from_shares", "max(top, shares[b])", "shares[b]"),
    ("from_shares", "range(scales.size)", "range(scales.size - 1)"),
    ("_inverse", "scale >= SMALL_SCALE", "scale > ZERO"),
    ("_inverse", "scale >= SMALL_SCALE", "scale > SMALL_SCALE"),
    ("_inverse", "ONE / np.float32(scale * LIFT)", "ONE / scale"),
    ("_rounded", "np.float32(x * inverse) + ROUNDING_SHIFT", "np.trunc(np.float32(x * inverse)) + ROUNDING_SHIFT"),
    (
        "_rounded",
        "np.float32(x * inverse) + ROUNDING_SHIFT",
        "np.floor(np.float32(x * inverse) + HALF) + ROUNDING_SHIFT",
    ),
    ("_rounded", "+ ROUNDING_SHIFT", "+ np.float32(2**23)"),
    ("_signed", "np.int8(byte)", "byte"),
    ("_low", "<< 4", ""),
    ("_high", "np.int8(byte)", "byte"),
    ("to_int8", "scales[b] >= SMALL_SCALE", "True"),
    ("to_int8", "part[i] * LIFT", "part[i]"),
    ("to_int8", "range(scales.size)", "range(scales.size - 1)"),
    ("to_int8", "range(part.size)", "range(part.size - 1)"),
    ("from_int8", "(part[i]) * scale", "(part[i]) * scales[0]"),
    ("from_int8", "range(scales.size)", "range(scales.size - 1)"),
    ("from_int8_far", "scales[b], out, i", "scales[0], out, i"),
    ("from_int8_far", "range(whole)", "range(whole - 1)"),
    ("from_int8_far", "+ block, STORE_ELEMENTS", "+ block, 2 * STORE_ELEMENTS"),
    ("from_int8_far", "scales[whole:]", "scales"),
    ("from_int8_far", "block % STORE_ELEMENTS == 0 and", ""),
    ("from_int8_far", "out.size // block", "-(-out.size // block)"),
    ("add_int8", "weight * np.float32(_signed(part[i]) * scale)", "np.float32(weight * scale) * _signed(part[i])"),
    ("add_int8", "to[i] + ", ""),
    ("mean_int8", "range(scales.shape[1])", "range(scales.shape[1] - 1)"),
    ("mean_int8", "+ block, REGISTER_ELEMENTS", "+ block, 2 * REGISTER_ELEMENTS"),
    ("mean_int8", "out, b, i", "out, 0, i"),
    ("to_int4", "first, second = part[:half], part[half:]", "second, first = part[:half], part[half:]"),
    ("to_int4", "to[i] |=", "to[i] ="),
    ("to_int4", "(part.size + 1) >> 1", "part.size >> 1"),
    ("to_int4", "<< 4", ""),
    ("to_int4", "ONE if scales[b] >= SMALL_SCALE else LIFT", "ONE"),
    ("from_int4", "_high(", "_low("),
    ("from_int4", "range(second.size)", "range(second.size - 1)"),
    ("add_int4", "_low(", "_high("),
    ("add_int4", "second[i] + np.float32(weight", "second[i] + np.float32(ONE"),
]


def put_far(values: U8, scale: np.float32, out: F32, at: int) -> None:
    assert out[at:].ctypes.data % 64 == 0 and at + 16 <= out.size
    out[at : at + 16] = values[at : at + 16].view(np.int8).astype(np.float32) * scale


def sum_wide(addresses: NDArray[np.intp], scales: F32, weights: F32, out: F32, block: int, at: int) -> None:
    wide = kernels.REGISTER_ELEMENTS
    out[at : at + wide] = 0
    for address, scale, weight in zip(addresses, scales[:, block], weights, strict=True):
        values = np.array((ctypes.c_int8 * wide).from_address(int(address) + at), np.float32)
        out[at : at + wide] += weight * (values * scale)


def interpreted(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the codecs use the kernels of `source`, not compiled."""
    module = ModuleType("interpreted")
    with monkeypatch.context() as context:
        context.setattr(numba.config, "DISABLE_JIT", 1)
        exec(compile(source, "kernels", "exec"), module.__dict__)
    module.__dict__.update(
        as_bits=lambda x: np.float32(x).view(np.uint32),
        as_float=lambda x: np.uint32(x).view(np.float32),
        HALF=np.float32(0.5),
        put_far=put_far,
        sum_wide=sum_wide,
    )
    monkeypatch.setattr(codec_module, "kernels", module)
    monkeypatch.setattr(np, "empty", np.zeros)  # not what an earlier call left in memory, which may be right


def test_interpreted_kernels_pass_the_battery_as_the_compiled_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    battery()
    interpreted(SOURCE, monkeypatch)
    battery()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("function", "right", "wrong"), MUTATIONS)
def test_a_mutated_kernel_fails_the_battery(
    function: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = SOURCE.index(f"def {function}(")
    place = SOURCE.index(right, start)
    assert place < SOURCE.find("\n\n\n", start) or "\n\n\n" not in SOURCE[start:]
    interpreted(SOURCE[:place] + wrong + SOURCE[place + len(right) :], monkeypatch)
    with pytest.raises(
        (AssertionError, Malformed, NonFinite, IndexError, ValueError, OverflowError, pytest.fail.Exception)
    ):
        battery()


ENCODE = (
    "import numpy as np; from atoll.comm.codecs.codec import Int8; from atoll.comm.codecs import kernels;"
    "c = Int8(128); c.encode(np.ones(9, np.float32), np.empty(c.size(9), np.uint8));"
    "print(sum(kernels.to_int8.stats.cache_hits.values()))"
)


@pytest.mark.long
def test_compiled_code_is_kept_for_the_next_process(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    hits = [
        subprocess.run(
            [sys.executable, "-c", ENCODE], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert hits == ["0", "1"]


@pytest.mark.long
def test_without_a_place_for_compiled_code_it_is_compiled_again() -> None:
    environment = os.environ | {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    environment.pop("NUMBA_CACHE_DIR", None)
    run = subprocess.run([sys.executable, "-c", ENCODE], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, "0"), run.stderr


def test_importing_the_codecs_does_not_import_numba() -> None:
    light = "import sys, atoll.comm.codecs.codec; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", light]).returncode == 0


def test_each_kernel_is_compiled_for_its_own_types_alone() -> None:
    script = (
        "from atoll.comm.codecs.kernels import SIGNATURES, compiled; import atoll.comm.codecs.sparse_kernels;"
        "print({len(compiled(kernel).nopython_signatures) for kernel in reversed(SIGNATURES)})"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{1}"
