import os
import random
import tracemalloc

import numpy as np
import pytest
import zstandard

from atoll.comm.codecs import codec
from atoll.comm.codecs.codec import ByteShuffle, Malformed
from atoll.comm.codecs.factory import make_codec
from atoll.comm.codecs.zstd import pack, pack_floats, pack_shuffled, unpack, unpack_floats, unpack_shuffled
from atoll.comm.config.run import CodecName


@pytest.mark.parametrize("data", [b"", b"a", bytes(1 << 20), os.urandom(1 << 20), b"ab" * 20_000_000])
def test_what_was_packed_is_unpacked(data: bytes) -> None:
    assert unpack(pack(data), len(data)) == data
    assert unpack(memoryview(pack(data)), len(data)) == data


def test_a_bomb_is_refused_before_its_bytes_exist() -> None:
    bomb = pack(bytes(1 << 26))
    assert len(bomb) < 1 << 16
    tracemalloc.start()
    with pytest.raises(Malformed, match="declares 67108864 bytes, expected 1000"):
        unpack(bomb, 1000)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_bomb_that_declares_no_size_is_refused() -> None:
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    with pytest.raises(Malformed, match="declares no size"):
        unpack(stream, 1 << 20)


def test_a_bomb_behind_a_frame_of_the_expected_size_stays_packed() -> None:
    honest = pack(b"x" * 1000)
    assert unpack(honest + pack(bytes(1 << 26)), 1000) == b"x" * 1000


def test_a_frame_that_declares_less_than_it_holds_is_refused() -> None:
    frame = bytearray(pack(bytes(1000)))
    size = frame.index((1000 - 256).to_bytes(2, "little"))  # RFC 8878: a two-byte content size is offset by 256
    frame[size : size + 2] = (300 - 256).to_bytes(2, "little")
    with pytest.raises(Malformed):
        unpack(bytes(frame), 300)


def frame_by_hand(window_log: int, dictionary: bytes = b"") -> bytes:
    """1000 stored bytes in a frame of RFC 8878 with this window."""
    descriptor = bytes([0x80 | len(dictionary), (window_log - 10) << 3])
    return b"\x28\xb5\x2f\xfd" + descriptor + dictionary + (1000).to_bytes(4, "little") + block(b"x" * 1000)


def block(data: bytes) -> bytes:
    return (len(data) << 3 | 1).to_bytes(3, "little") + data


def test_a_frame_with_a_huge_window_or_a_dictionary_is_refused() -> None:
    assert unpack(frame_by_hand(10), 1000) == b"x" * 1000
    for frame in (frame_by_hand(27), frame_by_hand(41), frame_by_hand(10, dictionary=b"\x07")):
        with pytest.raises(Malformed, match="larger window or a dictionary|too much memory"):
            unpack(frame, 1000)


NOISE = random.Random(1).randbytes(100)


@pytest.mark.parametrize("frame", [b"", b"x", b"\x28\xb5\x2f\xfd", pack(bytes(1000))[:-3], NOISE])
def test_garbage_and_cut_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(Malformed):
        unpack(frame, 1000)


@pytest.mark.parametrize("kind", ["parameters", "zeros", "noise", "one"])
def test_packed_floats_come_back_bit_for_bit(kind: str) -> None:
    rng = np.random.default_rng(0)
    data = {
        "parameters": (0.02 * rng.standard_normal(65536)).astype("<f4").tobytes(),
        "zeros": bytes(65536),
        "noise": rng.bytes(65536),
        "one": np.float32(-1.5).tobytes(),
    }[kind]
    packed = pack_floats(data)
    assert unpack_floats(packed, len(data)) == data
    share = {"parameters": 0.86, "zeros": 0.001}
    assert len(packed) < share.get(kind, 20.0) * len(data)
    for wrong in (packed[:-1], packed[: len(packed) // 2], b""):
        with pytest.raises(Malformed):
            unpack_floats(wrong, len(data))
    with pytest.raises(Malformed):
        unpack_floats(packed, len(data) + 4)


CODECS = [make_codec(name, 64) for name in CodecName]


@pytest.mark.parametrize("kind", CODECS, ids=lambda kind: type(kind).__name__)
def test_what_was_packed_apart_of_a_chunk_in_several_parts_is_unpacked(kind: codec.Codec) -> None:
    payload = np.random.default_rng(0).integers(0, 256, kind.size(300_001) + 8, np.uint8)  # 8: a round's length
    apart = kind.apart(300_001)
    frame = pack_shuffled(payload, apart)
    assert zstandard.frame_content_size(frame) == payload.size
    unpacked = np.full_like(payload, 7)
    unpack_shuffled(frame, unpacked, apart)
    assert unpacked.tobytes() == payload.tobytes()


@pytest.mark.parametrize(
    ("name", "saved"), [(CodecName.INT8, 0.010), (CodecName.BF16, 0.08), (CodecName.FP32, 0.08)]
)
def test_scales_packed_apart_from_the_values_save_a_hundredth_more(name: CodecName, saved: float) -> None:
    kind, x = make_codec(name, 64), np.random.default_rng(0).standard_normal(1 << 19).astype(np.float32)
    payload = np.empty(kind.size(x.size), np.uint8)
    kind.encode(x, payload)
    apart, whole = len(pack_shuffled(payload, kind.apart(x.size))), len(pack(payload.data))
    assert apart < whole - saved * payload.size


def test_a_frame_of_another_size_is_refused_before_it_is_put_in_order() -> None:
    apart = ByteShuffle(2, [slice(0, 100)])
    with pytest.raises(Malformed, match="declares 999 bytes, expected 1000"):
        unpack_shuffled(pack(bytes(999)), np.empty(1000, np.uint8), apart)
