"""How a chunk of fp32 travels: as it is, or as one byte an element and a scale for each block.

A contributor encodes a chunk once; its owner decodes, averages, and encodes the mean once. What is sealed
is the encoded bytes, so everybody decodes the same numbers. Both directions use only operations that IEEE
arithmetic rounds once: the same input gives the same bytes on every processor.

Wire formats of n elements, little-endian:

    fp32    4n bytes                 the elements
    int8    4 ceil(n / block) bytes  fp32 scales, one for each block of consecutive elements
            n bytes                  int8 values q in [-127, 127]; element i is q[i] * scale[i // block]

Bytes that came from elsewhere are checked by `check`, which `decode` calls: what passes decodes to finite
numbers.
"""

from typing import Any, Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from atoll.comm.config import CodecName
from atoll.comm.errors import AtollError, PeerError

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Octets = bytes | bytearray | memoryview | U8

LEVELS = np.float32(127)
_LARGEST = np.float32(np.finfo(np.float32).max)
# The largest scale whose 127-fold is finite; one step below the quotient, which may have been rounded up.
MAX_SCALE = np.nextafter(_LARGEST / LEVELS, np.float32(0))
_SUBNORMAL = np.finfo(np.float32).smallest_normal  # below it, fp32 has fewer than 24 bits


class NonFinite(AtollError):
    """A vector to encode holds NaN or infinity: training diverged on this node."""


class Malformed(PeerError):
    """Encoded bytes have the wrong length, or would decode to something that is not finite."""


class Codec(Protocol):
    def size(self, numel: int) -> int:
        """Bytes of `numel` encoded elements: always the same, so a length is checked before it is read."""

    def encode(self, x: F32, out: U8) -> None:
        """Write `x` (n,) into `out` (size(n),); `x` is not modified. `NonFinite` if it holds NaN or infinity."""

    def check(self, payload: Octets, numel: int) -> None:
        """Raise `Malformed` unless `payload` decodes to `numel` finite elements."""

    def decode(self, payload: Octets, out: F32) -> None:
        """Check `payload` and write its elements into `out` (n,)."""


class Fp32:
    def size(self, numel: int) -> int:
        return 4 * numel

    def encode(self, x: F32, out: U8) -> None:
        _same_length(self.size(x.size), out)
        if not np.isfinite(x).all():
            raise NonFinite("the vector to encode holds NaN or infinity")
        np.copyto(out.view("<f4"), x)

    def check(self, payload: Octets, numel: int) -> None:
        self._elements(payload, numel)

    def decode(self, payload: Octets, out: F32) -> None:
        np.copyto(out, self._elements(payload, out.size))

    def _elements(self, payload: Octets, numel: int) -> F32:
        x: F32 = _octets(payload, self.size(numel)).view("<f4")
        if not np.isfinite(x).all():
            raise Malformed("it holds values that are not finite")
        return x


class Int8:
    """absmax / 127 is a block's scale, values are rounded to nearest: the error is at most scale / 2."""

    def __init__(self, block: int) -> None:
        if block < 1:
            raise ValueError(f"a block of {block} elements")
        self.block = block

    def size(self, numel: int) -> int:
        return 4 * self._blocks(numel) + numel

    def encode(self, x: F32, out: U8) -> None:
        _same_length(self.size(x.size), out)
        scales, values = self._parts(out, x.size)
        whole = x.size // self.block
        edge = whole * self.block
        if whole:
            _quantise(x[:edge].reshape(whole, -1), scales[:whole], values[:edge].reshape(whole, -1))
        if edge < x.size:
            _quantise(x[None, edge:], scales[whole:], values[None, edge:])

    def check(self, payload: Octets, numel: int) -> None:
        scales, values = self._parts(_octets(payload, self.size(numel)), numel)
        if not ((scales >= 0) & (scales <= MAX_SCALE)).all():  # NaN compares false
            raise Malformed("it holds scales that are negative or not finite")
        if numel and values.min() < -LEVELS:
            raise Malformed("it holds the value -128, which no encoder writes")

    def decode(self, payload: Octets, out: F32) -> None:
        self.check(payload, out.size)
        scales, values = self._parts(_octets(payload, self.size(out.size)), out.size)
        whole = out.size // self.block
        edge = whole * self.block
        np.copyto(out, values)
        if whole:
            out[:edge].reshape(whole, -1)[...] *= scales[:whole, None]
        out[edge:] *= scales[whole:]

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _parts(self, octets: U8, numel: int) -> tuple[F32, NDArray[np.int8]]:
        edge = 4 * self._blocks(numel)
        return octets[:edge].view("<f4"), octets[edge:].view(np.int8)


def make(name: CodecName, block: int) -> Codec:
    """The codec of a run's config; `block` is ignored by codecs that have no scales."""
    match name:
        case CodecName.FP32:
            return Fp32()
        case CodecName.INT8:
            return Int8(block)
        case _:
            assert_never(name)


def _quantise(x: F32, scales: F32, values: NDArray[np.int8]) -> None:
    """Rows of `x` (rows, width) to `scales` (rows,) and `values` (rows, width)."""
    absmax = np.abs(np.maximum(x.max(axis=1), -x.min(axis=1)))  # NaN propagates; -0.0 would be another scale
    if not np.isfinite(absmax).all():
        raise NonFinite("the vector to encode holds NaN or infinity")
    scale = np.minimum(absmax / LEVELS, MAX_SCALE)
    # A subnormal scale may be rounded down by up to a half of itself, which would clip the block: round it up.
    short = (scale < _SUBNORMAL) & (scale * LEVELS < absmax)
    scale[short] = np.nextafter(scale[short], np.float32(1))
    scales[...] = scale
    scale[scale == 0] = 1  # a block of zeros: its values are 0 / 1
    # Divided, not multiplied by the inverse, which overflows for subnormal scales.
    quotient = x / scale[:, None]
    np.rint(quotient, out=quotient)
    np.copyto(values, quotient, casting="unsafe")  # within [-127, 127] by the choice of the scale


def view(data: Octets | NDArray[Any]) -> memoryview:
    """The bytes of a contiguous buffer, not copied."""
    return memoryview(data.data if isinstance(data, np.ndarray) else data).cast("B")


def _same_length(size: int, out: U8) -> None:
    if out.size != size:
        raise ValueError(f"an output of {out.size} bytes for {size} encoded bytes")


def _octets(payload: Octets, size: int) -> U8:
    octets: U8 = np.frombuffer(payload, np.uint8)
    if octets.size != size:
        raise Malformed(f"it has {octets.size} bytes where {size} were expected")
    return octets
