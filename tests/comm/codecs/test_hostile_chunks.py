"""Whatever bytes come as a chunk: they are refused, or decode to finite numbers; packed ones never become more
bytes than were expected."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hostile import nearly
from hypothesis import given
from hypothesis import strategies as st

from atoll.comm.codecs.codec import F32, U8, Codec, Malformed
from atoll.comm.codecs.factory import make_codec
from atoll.comm.codecs.zstd import pack, pack_floats, pack_shuffled, unpack, unpack_floats, unpack_shuffled
from atoll.comm.config.run import CodecName, ScaleName

CODECS = [
    *(make_codec(name, 64) for name in (CodecName.FP32, CodecName.BF16, CodecName.SPARSE)),
    *(
        make_codec(name, block, scales)
        for name in (CodecName.INT8, CodecName.INT4)
        for block in (2, 64)
        for scales in ScaleName
    ),
]
LENGTHS = st.sampled_from([1, 2, 5, 64, 130, 4100])  # elements: less than a block, several, more than a group
WEIGHTS = st.floats(-10, 10, width=32)
NUMBERS = st.floats(width=32)
SLACK = 1 << 20  # bytes that a decoder's own small arrays may take, and compiled code the first time


def name(codec: Codec) -> str:
    return " ".join(
        [type(codec).__name__, *(str(getattr(codec, what, "")) for what in ("block", "scales"))]
    ).strip()


def encoded(codec: Codec, x: F32) -> bytes:
    out = np.zeros(codec.size(x.size), np.uint8)
    codec.encode(x, out)
    return out.tobytes()


def taken(codec: Codec, payload: bytes, n: int, weight: np.float32) -> F32 | None:
    """Decoded, if it passes; every function that reads it says the same."""
    out, sums = np.full(n, 7, np.float32), np.zeros(n, np.float32)
    reads: list[Callable[[], None]] = [
        lambda: codec.check(payload, n),
        lambda: codec.decode(payload, out),
        lambda: codec.accumulate(payload, weight, sums),
        lambda: codec.mean([payload], [float(weight)], sums),
    ]
    try:
        reads[0]()
    except Malformed as error:
        assert str(error)
        for read in reads[1:]:
            with pytest.raises(Malformed):
                read()
        return None
    for read in reads[1:]:
        read()
    return out


@pytest.mark.parametrize("codec", CODECS, ids=name)
@given(n=LENGTHS, weight=WEIGHTS, data=st.data())
def test_any_bytes_are_refused_or_decode_to_finite_numbers(
    codec: Codec, n: int, weight: float, data: st.DataObject
) -> None:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32) * np.float32(
        data.draw(st.sampled_from([0, 1e-42, 1, 3e37]))
    )
    payload = data.draw(st.one_of(nearly(encoded(codec, x)), st.binary(max_size=codec.size(n) + 1)))
    if data.draw(st.booleans()):  # of the right length, so that more than that is looked at
        payload = payload[: codec.size(n)].ljust(codec.size(n), b"\0")
    found = taken(codec, payload, n, np.float32(weight))
    assert found is None or np.isfinite(found).all()
    assert found is None or len(payload) == codec.size(n)


@pytest.mark.parametrize("codec", CODECS, ids=name)
@given(st.lists(NUMBERS, min_size=1, max_size=200))
def test_what_can_be_encoded_is_never_refused(codec: Codec, numbers: list[float]) -> None:
    x = np.array(numbers, np.float32)
    x[~np.isfinite(x)] = 0
    assert taken(codec, encoded(codec, x), x.size, np.float32(1)) is not None


def refused_or_exact(read: Callable[[], bytes], size: int) -> None:
    """It raises `Malformed`, or gives so many bytes, and takes little more memory than those."""
    tracemalloc.start()
    try:
        got = read()
    except Malformed as error:
        assert str(error)
    else:
        assert len(got) == size
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 4 * size + SLACK


SIZES = st.sampled_from([0, 4, 100, 1000, 65_536])


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """Of few bytes and of many, honest and nearly so, one behind another, and none at all."""
    honest = pack(bytes(draw(st.sampled_from([0, 4, 100, 1000, 65_536, 1 << 24]))))
    first = draw(st.one_of(st.just(honest), nearly(honest), st.binary(max_size=60)))
    return first + (honest if draw(st.booleans()) else b"")


@given(frames(), SIZES)
def test_a_compressed_frame_is_of_the_expected_size_or_refused_and_a_bomb_stays_packed(
    frame: bytes, size: int
) -> None:
    refused_or_exact(lambda: unpack(frame, size), size)
    refused_or_exact(lambda: unpack_floats(frame, size), size)


@given(st.binary(max_size=400), st.binary(max_size=60), st.integers(0, 2))
def test_floats_with_three_planes_before_the_frame_are_taken_whole_or_refused(
    low: bytes, rest: bytes, off: int
) -> None:
    size = 4 * (len(low) // 3)
    frame = low[: 3 * (size // 4)] + (pack(rest[: size // 4 - off]) if off < 2 else rest)
    refused_or_exact(lambda: unpack_floats(frame, size), size)


@given(st.lists(st.floats(width=32), max_size=300))
def test_packed_floats_come_back_bit_for_bit(numbers: list[float]) -> None:
    data = np.array(numbers, "<f4").tobytes()
    assert unpack_floats(pack_floats(data), len(data)) == data


@pytest.mark.parametrize("codec", CODECS, ids=name)
@given(n=LENGTHS, behind=st.sampled_from([0, 8]), data=st.data())
def test_what_was_packed_apart_comes_back_and_what_was_spoiled_is_of_its_size_or_refused(
    codec: Codec, n: int, behind: int, data: st.DataObject
) -> None:
    payload: U8 = np.random.default_rng(n).integers(0, 256, codec.size(n) + behind, np.uint8)
    frame, apart = pack_shuffled(payload, codec.apart(n)), codec.apart(n)
    into = np.zeros_like(payload)
    unpack_shuffled(frame, into, apart)
    assert into.tobytes() == payload.tobytes()
    spoiled = data.draw(nearly(frame))

    def unpacked() -> bytes:
        unpack_shuffled(spoiled, into, apart)
        return into.tobytes()

    refused_or_exact(unpacked, payload.size)
