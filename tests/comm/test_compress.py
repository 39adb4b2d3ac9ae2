import os
import tracemalloc

import pytest
import zstandard

from atoll.comm.codec import Malformed
from atoll.comm.compress import pack, unpack


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


def test_a_frame_with_a_huge_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=True)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=1 << 24)
    frame = stream.compress(os.urandom(1 << 24)) + stream.flush()
    parameters_read = zstandard.get_frame_parameters(frame)
    if parameters_read.window_size > 1 << 24:
        with pytest.raises(Malformed, match="larger window"):
            unpack(frame, 1 << 24)


@pytest.mark.parametrize("frame", [b"", b"x", b"\x28\xb5\x2f\xfd", pack(bytes(1000))[:-3], os.urandom(100)])
def test_garbage_and_cut_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(Malformed):
        unpack(frame, 1000)
