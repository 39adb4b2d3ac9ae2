"""Wire formats of a chunk of fp32: as it is, rounded to bf16, or as small integers and a scale for each block.

A contributor encodes a chunk once; its owner decodes, averages, and encodes the mean once. What is sealed
is the encoded bytes, so everybody decodes the same numbers. Both directions use only operations that IEEE
arithmetic rounds once: the same input gives the same bytes on every processor.

A chunk is encoded in parts of 131,072 elements, one after the other, each by itself: what is done with a part
stays in a core's own cache. (Of int8 and int4 a part is the largest multiple of `block` up to that; of `sparse`
it is the whole chunk.)

Wire formats of a part of n elements in m = ceil(n / block) blocks of consecutive elements, of which the last may
be shorter; all numbers are little-endian:

    fp32    4n bytes       the elements

    bf16    2n bytes       the upper halves of the elements' fp32 bits, rounded to nearest even; what would
                           be rounded to infinity is the largest finite number

    int8    scales         as below, levels = 127
            n bytes        q of each element, in two's complement

    int4    scales         as below, levels = 7
            ceil(n / 2)    q of two elements a byte, in two's complement. Of a block of k elements (k is even
            bytes          but in the last block), h = ceil(k / 2): byte i of the block's h bytes holds element i
                           in its low four bits and element h + i in its high ones, 0 if there is none

    scales, fp32: 4m bytes s of each block, fp32
    scales, fp16: 4 bytes  the largest s of the part, fp32
                  2m bytes each block's share of it, fp16 in [0, 1]; s is the fp32 product of the two

An element is q * s in fp32, with q in [-levels, levels]. The encoder takes absmax / levels of a block as its
s, and rounds a share up: so no element is clipped. The error of an element is at most s / 2, and s / 2**15 for
rounding errors on the way. A block of zeros has s = 0.

Bytes that came from elsewhere are checked by `check`, which `decode` and `accumulate` call: what passes decodes
to finite numbers.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from atoll.comm.buffers import thread_scratch
from atoll.comm.byte_view import U8 as U8
from atoll.comm.byte_view import Octets as Octets
from atoll.comm.byte_view import view as view
from atoll.comm.config.run import ScaleName
from atoll.comm.errors import AtollError, PeerError

if TYPE_CHECKING:
    from atoll.comm.codecs import kernels as kernels
else:
    from atoll.comm.codecs.loaded import Kernels

    kernels = Kernels("kernels")

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]

Parts = Sequence[tuple[slice, slice]]  # elements of a vector, and their bytes encoded

PART_ELEMENTS = 1 << 17  # elements
SQUARE_ELEMENTS = 1 << 15  # elements that are squared at once: in fp64 they fit into a core's own cache
LARGEST = np.float32(np.finfo(np.float32).max)
LARGEST_SCALE = struct.Struct("<f")  # of a part, before the shares of it


class NonFinite(AtollError):
    """A vector to encode holds NaN or infinity: training diverged on this node."""

    def __init__(self, sentence: str, element: int = -1) -> None:
        super().__init__(sentence)
        self.element = element  # index of the first one in the vector; -1: not told


class Malformed(PeerError):
    """Encoded bytes have the wrong length, or would decode to something that is not finite."""


class ByteShuffle(NamedTuple):
    """The numbers among bytes that are unlike the rest: `spans` in order, each of whole numbers of `width`
    bytes."""

    width: int = 1
    spans: Sequence[slice] = ()

    def complement(self, size: int) -> list[slice]:
        """The spans of `size` bytes that lie between and around `spans`, in order."""
        edges = [0, *(edge for span in self.spans for edge in (span.start, span.stop)), size]
        return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


class Codec(Protocol):
    """A format in which fp32 vectors travel. Arrays are contiguous; none needs to be aligned. What `out` holds
    after an error has no meaning."""

    def size(self, numel: int) -> int:
        """The bytes of `numel` encoded elements: a function of `numel` alone, so a length is checked before it is
        read."""

    def parts(self, numel: int) -> Parts:
        """The parts of `numel` elements that are encoded each by itself: to encode or decode all is to do so with
        each."""

    def apart(self, numel: int) -> ByteShuffle:
        """The bytes of `numel` encoded elements that are unlike the others, as scales are unlike values, or of
        numbers whose bytes are unlike each other: `zstd.pack_shuffled` packs each with its like."""

    def encode(self, x: F32, out: U8) -> None:
        """Write `x` (n,) into `out` (size(n),); `x` is not modified. Raises `NonFinite` if it holds NaN or
        infinity."""

    def check(self, payload: Octets, numel: int) -> None:
        """Raise `Malformed` unless `payload` decodes to `numel` finite elements."""

    def decode(self, payload: Octets, out: F32, far: bool = False) -> None:
        """Check `payload` and write its elements into `out` (n,). `far`: nobody reads them soon, so they need not
        be in a cache; it takes half the time then. Raises `Malformed`."""

    def accumulate(self, payload: Octets, weight: np.float32, out: F32) -> None:
        """Check `payload` and do `out += weight * decoded` (n,), product and sum rounded once each. Raises
        `Malformed`."""

    def mean(self, payloads: Sequence[Octets], weights: Sequence[float], out: F32) -> None:
        """Write into `out` (n,) the bits that `accumulate` makes of zeros and each payload, in order. Raises
        `Malformed`."""

    def square(self, payload: Octets, numel: int) -> float:
        """Check `payload` and return the sum of the squares of its `numel` elements, in fp64, rounded as often as
        there are elements at most. Raises `Malformed`."""


class Fp32:
    """The `Codec` that loses nothing."""

    def size(self, numel: int) -> int:
        return 4 * numel

    def parts(self, numel: int) -> Parts:
        return _parts(numel, PART_ELEMENTS, 4 * PART_ELEMENTS, 4 * numel)

    def apart(self, numel: int) -> ByteShuffle:
        return ByteShuffle(4, [slice(0, self.size(numel))])

    def encode(self, x: F32, out: U8) -> None:
        _same_length(self.size(x.size), out)
        if not kernels.is_finite(x):
            raise _non_finite(x)
        np.copyto(out.view("<f4"), x)

    def check(self, payload: Octets, numel: int) -> None:
        self._elements(payload, numel)

    def decode(self, payload: Octets, out: F32, far: bool = False) -> None:
        np.copyto(out, self._elements(payload, out.size))

    def accumulate(self, payload: Octets, weight: np.float32, out: F32) -> None:
        kernels.add_fp32(self._elements(payload, out.size), np.float32(weight), out)

    def mean(self, payloads: Sequence[Octets], weights: Sequence[float], out: F32) -> None:
        sequential_mean(self, payloads, weights, out)

    def square(self, payload: Octets, numel: int) -> float:
        return squared_norm(self._elements(payload, numel))

    def _elements(self, payload: Octets, numel: int) -> F32:
        x: F32 = _octets(payload, self.size(numel)).view("<f4")
        if not kernels.is_finite(x):
            raise Malformed("it holds values that are not finite")
        return x


class Bf16:
    """The `Codec` of half the bytes. The error of an element is at most 2**-9 of it, or 2**-134 if it is
    subnormal."""

    def size(self, numel: int) -> int:
        return 2 * numel

    def parts(self, numel: int) -> Parts:
        return _parts(numel, PART_ELEMENTS, 2 * PART_ELEMENTS, 2 * numel)

    def apart(self, numel: int) -> ByteShuffle:
        return ByteShuffle(2, [slice(0, self.size(numel))])

    def encode(self, x: F32, out: U8) -> None:
        _same_length(self.size(x.size), out)
        if not kernels.to_bf16(x, out.view("<u2")):
            raise _non_finite(x)

    def check(self, payload: Octets, numel: int) -> None:
        self._halves(payload, numel)

    def decode(self, payload: Octets, out: F32, far: bool = False) -> None:
        kernels.from_bf16(self._halves(payload, out.size), out)

    def accumulate(self, payload: Octets, weight: np.float32, out: F32) -> None:
        kernels.add_bf16(self._halves(payload, out.size), np.float32(weight), out)

    def mean(self, payloads: Sequence[Octets], weights: Sequence[float], out: F32) -> None:
        sequential_mean(self, payloads, weights, out)

    def square(self, payload: Octets, numel: int) -> float:
        return decoded_square(self, payload, numel)

    def _halves(self, payload: Octets, numel: int) -> U16:
        halves: U16 = _octets(payload, self.size(numel)).view("<u2")
        if not kernels.is_finite_bf16(halves):
            raise Malformed("it holds values that are not finite")
        return halves


class _Integers:
    """Small integers, and a scale for each block of them."""

    def __init__(self, block: int, levels: int, scales: ScaleName) -> None:
        self.block, self.scales = block, scales
        self._header = _Header(block, levels, scales)
        self._part = max(PART_ELEMENTS // block, 1) * block

    def size(self, numel: int) -> int:
        full, rest = divmod(numel, self._part)
        return full * self._part_size(self._part) + (self._part_size(rest) if rest or not full else 0)

    def parts(self, numel: int) -> Parts:
        return _parts(numel, self._part, self._part_size(self._part), self.size(numel))

    def apart(self, numel: int) -> ByteShuffle:
        spans = [
            slice(octets.start, octets.start + self._header.size(elements.stop - elements.start))
            for elements, octets in self.parts(numel)
        ]
        return ByteShuffle(self._header.width, spans)

    def encode(self, x: F32, out: U8) -> None:
        _same_length(self.size(x.size), out)
        for elements, octets in self.parts(x.size):
            part = x[elements]
            header, values = self._header.split(out[octets], part.size)
            if (scales := self._header.write(part, header)) is None:
                raise _non_finite(x)
            self._pack(part, scales, values)

    def check(self, payload: Octets, numel: int) -> None:
        self._checked(payload, numel)

    def decode(self, payload: Octets, out: F32, far: bool = False) -> None:
        for elements, scales, values in self._checked(payload, out.size):
            self._unpack(values, scales, out[elements], far)

    def accumulate(self, payload: Octets, weight: np.float32, out: F32) -> None:
        for elements, scales, values in self._checked(payload, out.size):
            self._add(values, scales, np.float32(weight), out[elements])

    def mean(self, payloads: Sequence[Octets], weights: Sequence[float], out: F32) -> None:
        sequential_mean(self, payloads, weights, out)

    def square(self, payload: Octets, numel: int) -> float:
        return decoded_square(self, payload, numel)

    def _checked(self, payload: Octets, numel: int) -> list[tuple[slice, F32, U8]]:
        """Of each part its elements, the scales of its blocks, and the bytes of its integers."""
        octets = _octets(payload, self.size(numel))
        found = []
        for elements, span in self.parts(numel):
            size = elements.stop - elements.start
            header, values = self._header.split(octets[span], size)
            scales, overflows = self._header.read(header, size)
            if overflows:
                self._refuse_lowest(values)
            found.append((elements, scales, values))
        return found

    def _part_size(self, numel: int) -> int:
        return self._header.size(numel) + self._octets(numel)

    # What is between the headers

    def _octets(self, numel: int) -> int:
        """Bytes of so many integers."""
        raise NotImplementedError

    def _pack(self, x: F32, scales: F32, values: U8) -> None:
        raise NotImplementedError

    def _unpack(self, values: U8, scales: F32, out: F32, far: bool) -> None:
        raise NotImplementedError

    def _add(self, values: U8, scales: F32, weight: np.float32, out: F32) -> None:
        raise NotImplementedError

    def _refuse_lowest(self, values: U8) -> None:
        """The integer for which the bits have place, and which no encoder writes."""
        raise NotImplementedError


class Int8(_Integers):
    """The `Codec` of a byte an element: 255 levels of its block's scale."""

    def __init__(self, block: int, scales: ScaleName = ScaleName.FP32) -> None:
        super().__init__(block, 127, scales)

    def mean(self, payloads: Sequence[Octets], weights: Sequence[float], out: F32) -> None:
        if self.block % kernels.REGISTER_ELEMENTS or not payloads:
            sequential_mean(self, payloads, weights, out)
            return
        each, terms = np.array(weights, np.float32), [self._checked(payload, out.size) for payload in payloads]
        for parts in zip(*terms, strict=True):
            to = out[parts[0][0]]
            blocks = to.size // self.block  # whole ones
            edge = blocks * self.block
            addresses = np.array([values.__array_interface__["data"][0] for _, _, values in parts], np.intp)
            scales: F32 = np.array([of_blocks[:blocks] for _, of_blocks, _ in parts])
            kernels.mean_int8(addresses, self.block, scales, each, to[:edge])
            to[edge:] = 0.0
            for weight, (_, of_blocks, values) in zip(each, parts, strict=True):
                kernels.add_int8(values[edge:], self.block, of_blocks[blocks:], weight, to[edge:])

    def square(self, payload: Octets, numel: int) -> float:
        checked = self._checked(payload, numel)
        return sum(float(kernels.square_int8(values, self.block, scales)) for _, scales, values in checked)

    def _octets(self, numel: int) -> int:
        return numel

    def _pack(self, x: F32, scales: F32, values: U8) -> None:
        kernels.to_int8(x, self.block, scales, values)

    def _unpack(self, values: U8, scales: F32, out: F32, far: bool) -> None:
        (kernels.from_int8_far if far else kernels.from_int8)(values, self.block, scales, out)

    def _add(self, values: U8, scales: F32, weight: np.float32, out: F32) -> None:
        kernels.add_int8(values, self.block, scales, weight, out)

    def _refuse_lowest(self, values: U8) -> None:
        if (values == 0x80).any():
            raise Malformed("it holds the value -128, which no encoder writes, under scales too large for it")


class Int4(_Integers):
    """The `Codec` of half a byte an element: 15 levels of its block's scale."""

    def __init__(self, block: int, scales: ScaleName = ScaleName.FP32) -> None:
        if block % 2:
            raise ValueError(f"a block of {block} elements, two a byte: it must be even")
        super().__init__(block, 7, scales)

    def _octets(self, numel: int) -> int:
        return -(-numel // 2)

    def _pack(self, x: F32, scales: F32, values: U8) -> None:
        kernels.to_int4(x, self.block, scales, values)

    def _unpack(self, values: U8, scales: F32, out: F32, far: bool) -> None:
        kernels.from_int4(values, self.block, scales, out)

    def _add(self, values: U8, scales: F32, weight: np.float32, out: F32) -> None:
        kernels.add_int4(values, self.block, scales, weight, out)

    def _refuse_lowest(self, values: U8) -> None:
        if ((values & 15 == 8) | (values >> 4 == 8)).any():
            raise Malformed("it holds the value -8, which no encoder writes, under scales too large for it")


class _Header:
    """The scales that precede the integers: `levels` steps of a block's scale reach its absmax."""

    def __init__(self, block: int, levels: int, scales: ScaleName) -> None:
        if block < 1:
            raise ValueError(f"a block of {block} elements")
        self._block, self._levels, self._scales = block, np.float32(levels), scales
        self._first, self._each = (0, 4) if scales is ScaleName.FP32 else (LARGEST_SCALE.size, 2)  # bytes
        self._overflow = LARGEST / np.float32(levels + 1)
        # Times `levels` it is finite; one step below the quotient, which may have been rounded up.
        self._largest = np.nextafter(LARGEST / self._levels, np.float32(0))

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return self._each

    def size(self, numel: int) -> int:
        return self._first + self._each * -(-numel // self._block)

    def split(self, octets: U8, numel: int) -> tuple[U8, U8]:
        """The header and the values."""
        edge = self.size(numel)
        return octets[:edge], octets[edge:]

    def write(self, x: F32, header: U8) -> F32 | None:
        """Write the header of `x`; returns the scale of each block. None: `x` holds NaN or infinity."""
        scales: F32 = np.empty(-(-x.size // self._block), np.float32)
        if not kernels.scales_of(x, self._block, self._levels, self._largest, scales):
            return None
        match self._scales:
            case ScaleName.FP32:
                header.view("<f4")[:] = scales
            case ScaleName.FP16:
                largest = kernels.to_shares(scales, header[self._first :].view("<u2"))
                LARGEST_SCALE.pack_into(header.data, 0, largest)
            case _:
                assert_never(self._scales)
        return scales

    def read(self, header: U8, numel: int) -> tuple[F32, bool]:
        """The scale of each block, and whether -levels - 1, an integer that the bits of a value have place for,
        may decode to infinity. `Malformed` if a scale is not a number from 0 to the largest allowed."""
        match self._scales:
            case ScaleName.FP32:
                scales: F32 = header.view("<f4").astype(np.float32)
                self._within(scales)
                large = True
            case ScaleName.FP16:
                (largest,) = LARGEST_SCALE.unpack_from(header.data)
                # NaN is not in it either; and -0.0, which is equal to 0, no encoder writes.
                if not 0 <= largest <= self._largest or header[self._first - 1] & 0x80:
                    raise Malformed("it holds scales that are negative or not finite")
                scales = np.empty(-(-numel // self._block), np.float32)
                if not kernels.from_shares(header[self._first :].view("<u2"), np.float32(largest), scales):
                    raise Malformed("it holds shares of a scale that are not in [0, 1]")
                large = largest > self._overflow
            case _:
                assert_never(self._scales)
        return scales, large and bool(scales.max(initial=np.float32(0)) > self._overflow)

    def _within(self, scales: F32) -> None:
        """Compared as bits, so that NaN, infinity, and what is negative, even -0.0, are beyond the limit."""
        if scales.view(np.uint32).max(initial=np.uint32(0)) > self._largest.view(np.uint32):
            raise Malformed("it holds scales that are negative or not finite")


def decoded_square(codec: Codec, payload: Octets, numel: int) -> float:
    """`Codec.square` for codecs that have no faster way: decode, and look at what that gives."""
    decoded = thread_scratch(numel)
    codec.decode(payload, decoded)
    return squared_norm(decoded)


def squared_norm(x: F32) -> float:
    """The sum of squares of `x` (n,) fp32, in fp64."""
    parts = (x[i : i + SQUARE_ELEMENTS].astype(np.float64) for i in range(0, x.size, SQUARE_ELEMENTS))
    return sum(float(np.dot(part, part)) for part in parts)


def sequential_mean(codec: Codec, payloads: Sequence[Octets], weights: Sequence[float], out: F32) -> None:
    """`Codec.mean` for codecs that have no faster way: one `accumulate` after the other."""
    out[:] = 0.0
    for payload, weight in zip(payloads, weights, strict=True):
        codec.accumulate(payload, np.float32(weight), out)


@lru_cache(maxsize=256)
def _parts(numel: int, part: int, part_bytes: int, size: int) -> Parts:
    """Of `numel` elements and `size` bytes, in parts of `part` elements and `part_bytes` bytes."""
    count = max(-(-numel // part), 1)
    elements = [slice(i * part, min((i + 1) * part, numel)) for i in range(count)]
    octets = [slice(i * part_bytes, min((i + 1) * part_bytes, size)) for i in range(count)]
    return tuple(zip(elements, octets, strict=True))


def _non_finite(x: F32) -> NonFinite:
    element = int(np.argmin(np.isfinite(x)))
    return NonFinite(f"element {element} of the vector to encode is {x[element]}", element)


def _same_length(size: int, out: U8) -> None:
    if out.size != size:
        raise ValueError(f"an output of {out.size} bytes for {size} encoded bytes")


def _octets(payload: Octets, size: int) -> U8:
    octets: U8 = np.frombuffer(payload, np.uint8)
    if octets.size != size:
        raise Malformed(f"it has {octets.size} bytes where {size} were expected")
    return octets
