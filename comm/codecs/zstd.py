"""zstandard for bytes whose size is known beforehand.

A frame states its own size and may be wrong or hostile: 32 KB can inflate to 1 GiB, and python-zstandard
ignores `max_output_size` when the frame states a size. So `unpack` asks what the frame declares, refuses
anything but the expected size, bounds the window, and stops reading one byte after the end.
"""

import threading

import numpy as np
import zstandard

from atoll.comm.byte_view import U8
from atoll.comm.codecs.codec import ByteShuffle, Malformed

LEVEL = 1  # fp32 state hardly compresses: what there is to gain, level 1 gains
_local = threading.local()
MAX_WINDOW = 1 << 23  # bytes; what RFC 8878 recommends decoders to support


def pack(data: bytes | bytearray | memoryview) -> bytes:
    """One zstandard frame that declares its size; may be larger than `data`."""
    return _compressor().compress(data)


def unpack(frame: bytes | bytearray | memoryview, expected_size: int) -> bytes:
    """The `expected_size` bytes in `frame`. Raises `Malformed` if it is no frame of exactly that size."""
    return _unpacked(frame, expected_size).tobytes()


def pack_shuffled(payload: U8, apart: ByteShuffle) -> bytes:
    """One frame of the payload's bytes in another order: first those outside `apart`, then of all its numbers the
    first byte, the second one, and so on. Each begins a block, which has a code of its own."""
    if not apart.spans:
        return pack(payload.data)
    ordered = _scratch(payload.size)
    edge = payload.size - sum(span.stop - span.start for span in apart.spans)
    np.concatenate([payload[:0], *(payload[span] for span in apart.complement(payload.size))], out=ordered[:edge])
    numbers = np.concatenate([payload[span] for span in apart.spans]).reshape(-1, apart.width)
    planes = ordered[edge:].reshape(apart.width, -1)
    planes[:] = numbers.T
    stream = _compressor().compressobj(size=payload.size)
    packed = [stream.compress(ordered[:edge].data)]
    for plane in planes:
        packed += stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK), stream.compress(plane.data)
    return b"".join([*packed, stream.flush()])


def unpack_shuffled(frame: bytes | bytearray | memoryview, payload: U8, apart: ByteShuffle) -> None:
    """Write what `pack_shuffled` packed into all of `payload`. Raises `Malformed` if that had another size."""
    whole = _unpacked(frame, payload.size)
    at = 0
    for span in apart.complement(whole.size):
        payload[span] = whole[at : (at := at + span.stop - span.start)]
    if not apart.spans:
        return
    numbers, first = whole[at:].reshape(apart.width, -1).T, 0
    for span in apart.spans:
        count = (span.stop - span.start) // apart.width
        payload[span].reshape(-1, apart.width)[:] = numbers[first : (first := first + count)]


def pack_floats(data: bytes | bytearray | memoryview) -> bytes:
    """Pack little-endian fp32: the lower three bytes of each as they are, in three planes, or nothing if all are
    zero; then a frame of the topmost ones, sign and exponent, which is where parameters are alike. Of a few
    numbers the frame is longer than the planes would be, and could be taken for them: zeros are written, too."""
    planes = np.frombuffer(data, np.uint8).reshape(-1, 4).T
    frame = pack(planes[3].tobytes())
    low = planes[:3].tobytes() if planes[:3].any() or len(frame) > planes[:3].size else b""
    return low + frame


def unpack_floats(packed: bytes, expected_size: int) -> bytes:
    """The `expected_size` bytes, a multiple of 4, in `packed`. Raises `Malformed` if it is nothing of that
    size."""
    numel = expected_size // 4
    low = 3 * numel if len(packed) > 3 * numel else 0
    floats = np.zeros((numel, 4), np.uint8)
    if low:
        floats[:, :3] = np.frombuffer(packed, np.uint8, low).reshape(3, numel).T
    floats[:, 3] = np.frombuffer(unpack(memoryview(packed)[low:], numel), np.uint8)
    return floats.tobytes()


def _unpacked(frame: bytes | bytearray | memoryview, expected_size: int) -> U8:
    """What is in `frame`, in this thread's scratch memory."""
    try:
        declared = zstandard.get_frame_parameters(frame)
        if declared.content_size != expected_size:
            raise Malformed(
                f"a compressed frame declares {_size(declared.content_size)}, expected {expected_size}"
            )
        if declared.window_size > max(MAX_WINDOW, expected_size) or declared.dict_id:
            raise Malformed("a compressed frame asks for a larger window or a dictionary")
        decompressor = zstandard.ZstdDecompressor(max_window_size=max(MAX_WINDOW, expected_size))
        data = _scratch(expected_size + 1)
        with decompressor.stream_reader(frame) as reader:
            size = reader.readinto(data.data)
    except zstandard.ZstdError as error:
        raise Malformed(f"a compressed frame is broken: {error}") from None
    if size != expected_size:
        raise Malformed(f"a compressed frame holds {size} bytes or more, expected {expected_size}")
    return data[:size]


def _compressor() -> zstandard.ZstdCompressor:
    """This thread's own."""
    if not hasattr(_local, "compressor"):  # making one takes as long as packing a small chunk
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    found: zstandard.ZstdCompressor = _local.compressor
    return found


def _scratch(size: int) -> U8:
    """Memory of this thread's own, (size,), until this is called again."""
    if len(getattr(_local, "scratch", ())) < size:
        _local.scratch = np.empty(size, np.uint8)
    whole: U8 = _local.scratch
    return whole[:size]


def _size(content_size: int) -> str:
    return "no size" if content_size == zstandard.CONTENTSIZE_UNKNOWN else f"{content_size} bytes"
