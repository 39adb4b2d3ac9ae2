"""Few elements of a delta, at two bits each: SparseLoCo's wire (arXiv 2508.15706, algorithm 1).

Of every 4096 consecutive elements (a group) the 64 of largest magnitude travel: 12 bits say where, 2 bits which of
four levels. What stays behind goes into the sender's error feedback; without it this codec loses most of a delta.
The mean of such vectors is not sparse, so members gather each other's instead of reducing: R - 1 payloads come
down, each a 37th of int8.

Wire format of n elements in m = ceil(n / 4096) groups, of which the last may be shorter; a group of g elements
has k = ceil(g / 64) picked ones; all numbers are little-endian:

    levels   16 bytes             what q = 0, 1, 2, 3 stand for, in units of a group's scale, fp32
    scales   2m bytes             of each group, bf16: the upper half of the fp32, not negative
    groups   ceil(12k / 8) bytes  positions of the picked elements within the group, ascending, 12 bits each: byte
                                  3j and the low half of byte 3j + 1 hold position 2j, the rest position 2j + 1
             ceil(2k / 8) bytes   their q, four a byte, the first in the lowest bits
                                  bits that fill up a byte are 0

That is 0.2227 bits an element in long chunks, 1.8 % above the 0.21875 of positions and values alone. An element
is levels[q] * scale in fp32 where it was picked, and 0 elsewhere. The encoder takes the mean magnitude of the
picked elements as a group's scale, two levels for each sign, and as a level the mean of the elements that have it
(over the chunk), so the sum of a chunk's picked elements of each level is kept.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from atoll.comm.codecs.codec import (
    F32,
    U8,
    U16,
    ByteShuffle,
    Malformed,
    NonFinite,
    Octets,
    Parts,
    decoded_square,
    sequential_mean,
)

if TYPE_CHECKING:
    from atoll.comm.codecs import kernels as kernels
    from atoll.comm.codecs import sparse_kernels as sparse_kernels
else:
    from atoll.comm.codecs.loaded import Kernels

    kernels, sparse_kernels = Kernels("kernels"), Kernels("sparse_kernels")

GROUP = 4096  # elements: 12 bits
RATIO = 64  # elements of which one is sent
HEADER_SIZE = 16  # bytes of the four levels
LARGEST = np.float32(np.finfo(np.float32).max)


class Sparse:
    """A `Codec` that needs error feedback."""

    def size(self, numel: int) -> int:
        full, rest = divmod(numel, GROUP)
        return HEADER_SIZE + full * _group_size(GROUP) + (_group_size(rest) if rest else 0)

    def parts(self, numel: int) -> Parts:
        return [(slice(0, numel), slice(0, self.size(numel)))]

    def apart(self, numel: int) -> ByteShuffle:
        return ByteShuffle()

    def encode(self, x: F32, out: U8) -> None:
        if out.size != self.size(x.size):
            raise ValueError(f"an output of {out.size} bytes for {self.size(x.size)} encoded bytes")
        groups = -(-x.size // GROUP)
        positions, q = np.empty(_picked(x.size), np.uint16), np.empty(_picked(x.size), np.uint8)
        scales, levels = np.empty(groups, np.float32), np.empty(4, np.float32)
        if not sparse_kernels.pick(x, GROUP, RATIO, positions, scales):
            element = int(np.argmin(np.isfinite(x)))
            raise NonFinite(f"element {element} of the vector to encode is {x[element]}", element)
        halves = out[HEADER_SIZE : HEADER_SIZE + 2 * groups].view("<u2")
        kernels.to_bf16(scales, halves)
        kernels.from_bf16(halves, scales)
        sparse_kernels.quantise(x, GROUP, RATIO, positions, scales, _limit(scales), levels, q)
        out[:16].view("<f4")[:] = levels
        sparse_kernels.pack(positions, q, x.size, GROUP, RATIO, out[HEADER_SIZE + 2 * groups :])

    def check(self, payload: Octets, numel: int) -> None:
        self._checked(payload, numel)

    def decode(self, payload: Octets, out: F32, far: bool = False) -> None:
        out[:] = 0.0
        self.accumulate(payload, np.float32(1), out)

    def accumulate(self, payload: Octets, weight: np.float32, out: F32) -> None:
        positions, q, levels, scales = self._checked(payload, out.size)
        sparse_kernels.add(positions, q, levels, scales, GROUP, RATIO, np.float32(weight), out)

    def mean(self, payloads: Sequence[Octets], weights: Sequence[float], out: F32) -> None:
        sequential_mean(self, payloads, weights, out)

    def square(self, payload: Octets, numel: int) -> float:
        return decoded_square(self, payload, numel)

    def _checked(self, payload: Octets, numel: int) -> tuple[U16, U8, F32, F32]:
        octets: U8 = np.frombuffer(payload, np.uint8)
        if octets.size != self.size(numel):
            raise Malformed(f"it has {octets.size} bytes where {self.size(numel)} were expected")
        groups = -(-numel // GROUP)
        levels: F32 = octets[:HEADER_SIZE].view("<f4").astype(np.float32)
        halves: U16 = octets[HEADER_SIZE : HEADER_SIZE + 2 * groups].view("<u2")
        if halves.max(initial=np.uint16(0)) > kernels.LARGEST_BF16:
            raise Malformed("it holds scales that are negative or not finite")
        scales = np.empty(groups, np.float32)
        kernels.from_bf16(halves, scales)
        if not (np.abs(levels) <= _limit(scales)).all():
            raise Malformed("it holds levels that are not finite, or not under its largest scale")
        positions, q = np.empty(_picked(numel), np.uint16), np.empty(_picked(numel), np.uint8)
        if not sparse_kernels.unpack(octets[HEADER_SIZE + 2 * groups :], numel, GROUP, RATIO, positions, q):
            raise Malformed("it holds positions that do not ascend within their group")
        return positions, q, levels, scales


def _picked(numel: int) -> int:
    """Elements that are sent."""
    full, rest = divmod(numel, GROUP)
    return full * (GROUP // RATIO) + -(-rest // RATIO)


def _group_size(elements: int) -> int:
    count = -(-elements // RATIO)
    return 2 + -(-12 * count // 8) + -(-2 * count // 8)


def _limit(scales: F32) -> np.float32:
    """The largest level that decodes to a finite number under each of these scales."""
    largest = max(scales.max(initial=np.float32(0)), np.float32(1))
    return np.float32(np.nextafter(np.float32(LARGEST / largest), np.float32(0)))
