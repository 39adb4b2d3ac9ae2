"""The loops of the sparse codec, compiled as those of `kernels` are, whose rules for arithmetic hold here too.

Sums are in fp64, one element after another, so that every processor computes the same bits.
"""

from typing import Any

import numpy as np
from numba import types

from atoll.comm.codecs.kernels import F32, INFINITY, MAGNITUDE, U8, U16, _int, _kernel, _read, _write, as_bits

_f32, _f64, _u8, _u16, _u64 = types.float32, types.float64, types.uint8, types.uint16, types.uint64
LLOYD_ITERATIONS = 8
POSITION_MASK = np.uint64(0xFFFFFFFF)  # the low half of a heap's key, which holds the inverted position


@_kernel(types.void, types.Array(_u64, 1, "C"), _int, _int)
def _sift_down(heap: Any, i: int, size: int) -> None:
    """Restore the order of a heap whose smallest is first, below place `i`."""
    key = heap[i]
    child = 2 * i + 1
    while child < size:
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[i] = heap[child]
        i, child = child, 2 * child + 1
    heap[i] = key


@_kernel(types.boolean, _read(_f32), _int, _int, _write(_u16), _write(_f32))
def pick(x: F32, group: int, ratio: int, positions: U16, scales: F32) -> bool:
    """Pick the 1/ratio elements of largest magnitude of each group, of equal ones the first: their positions
    within the group, ascending, one group's after another's, and the mean of their magnitudes. False if not
    finite."""
    heap = np.empty((group + ratio - 1) // ratio, np.uint64)
    at = 0
    for g in range(scales.size):
        part = x[g * group : g * group + group]
        count = (part.size + ratio - 1) // ratio
        for i in range(part.size):
            magnitude = np.uint32(as_bits(part[i]) & MAGNITUDE)
            if magnitude >= INFINITY:
                return False
            key = (np.uint64(magnitude) << np.uint64(32)) | (POSITION_MASK - np.uint64(i))
            if i < count:
                heap[i] = key
                if i == count - 1:
                    for j in range(count // 2, -1, -1):
                        _sift_down(heap, j, count)
            elif key > heap[0]:
                heap[0] = key
                _sift_down(heap, 0, count)
        for i in range(count):  # insertion sort
            position = np.uint16(POSITION_MASK - (heap[i] & POSITION_MASK))
            j = at + i
            while j > at and positions[j - 1] > position:
                positions[j] = positions[j - 1]
                j -= 1
            positions[j] = position
        total = 0.0
        for i in range(at, at + count):
            total += abs(np.float64(part[positions[i]]))
        scales[g] = np.float32(total / count)
        at += count
    return True


@_kernel(types.void, _read(_f32), _int, _int, _read(_u16), _read(_f32), _f32, _write(_f32), _write(_u8))
def quantise(
    x: F32, group: int, ratio: int, positions: U16, scales: F32, limit: np.float32, levels: F32, q: U8
) -> None:
    """Write two bits for each picked element, its sign and whether it is large, and the mean of each of the four
    kinds in units of the groups' scales, at most `limit`. What is large is settled by iterations of Lloyd's
    (1982) over all picked elements: the threshold is halfway between the means of small and large magnitudes."""
    sums, counts = np.empty(4, np.float64), np.empty(4, np.int64)
    threshold = 1.0
    for iteration in range(LLOYD_ITERATIONS + 1):
        sums[:], counts[:] = 0.0, 0
        at = 0
        for g in range(scales.size):
            part = x[g * group : g * group + group]
            count = (part.size + ratio - 1) // ratio
            scale = np.float64(scales[g])
            for i in range(at, at + count):
                u = np.float64(part[positions[i]]) / scale if scale > 0 else 0.0
                kind = (2 if u < 0 else 0) + (1 if abs(u) > threshold else 0)
                q[i] = kind
                sums[kind] += u
                counts[kind] += 1
            at += count
        if iteration < LLOYD_ITERATIONS:
            small, large = counts[0] + counts[2], counts[1] + counts[3]
            if small == 0 or large == 0:
                continue
            threshold = ((sums[0] - sums[2]) / small + (sums[1] - sums[3]) / large) / 2
    for kind in range(4):
        level = np.float32(sums[kind] / counts[kind]) if counts[kind] > 0 else np.float32(0)
        levels[kind] = min(max(level, -limit), limit)


@_kernel(types.void, _read(_u16), _read(_u8), _int, _int, _int, _write(_u8))
def pack(positions: U16, q: U8, numel: int, group: int, ratio: int, out: U8) -> None:
    """Write the groups as they travel (`sparse`): 12 bits a position, then 2 bits an element."""
    out[:] = 0
    at, to = 0, 0
    for start in range(0, numel, group):
        count = (min(group, numel - start) + ratio - 1) // ratio
        for i in range(count):
            position, byte = np.int64(positions[at + i]), to + 3 * i // 2
            if i % 2 == 0:
                out[byte] = position & 255
                out[byte + 1] |= position >> 8
            else:
                out[byte] |= (position & 15) << 4
                out[byte + 1] = position >> 4
        to += (3 * count + 1) // 2
        for i in range(count):
            out[to + i // 4] |= q[at + i] << (2 * (i % 4))
        to += (count + 3) // 4
        at += count


@_kernel(types.boolean, _read(_u8), _int, _int, _int, _write(_u16), _write(_u8))
def unpack(packed: U8, numel: int, group: int, ratio: int, positions: U16, q: U8) -> bool:
    """Read what `pack` wrote. False if positions do not ascend within their group, or bits that fill up a byte are
    not 0."""
    at, to, good = 0, 0, True
    for start in range(0, numel, group):
        size = min(group, numel - start)
        count = (size + ratio - 1) // ratio
        before = -1
        for i in range(count):
            byte = to + 3 * i // 2
            first, second = np.int64(packed[byte]), np.int64(packed[byte + 1])
            position = first | (second & 15) << 8 if i % 2 == 0 else first >> 4 | second << 4
            good = bool(good and before < position < size)
            before = int(position)
            positions[at + i] = position
        to += (3 * count + 1) // 2
        if count % 2:
            good = bool(good and packed[to - 1] >> 4 == 0)
        for i in range(count):
            q[at + i] = (packed[to + i // 4] >> (2 * (i % 4))) & 3
        to += (count + 3) // 4
        if count % 4:
            good = bool(good and packed[to - 1] >> (2 * (count % 4)) == 0)
        at += count
    return good


@_kernel(types.void, _read(_u16), _read(_u8), _read(_f32), _read(_f32), _int, _int, _f32, _write(_f32))
def add(
    positions: U16, q: U8, levels: F32, scales: F32, group: int, ratio: int, weight: np.float32, out: F32
) -> None:
    """`out += weight * decoded` at the picked elements, each product and sum rounded once."""
    at = 0
    for g in range(scales.size):
        part = out[g * group : g * group + group]
        count = (part.size + ratio - 1) // ratio
        for i in range(at, at + count):
            value = np.float32(levels[q[i]] * scales[g])
            p = positions[i]
            part[p] = np.float32(part[p] + np.float32(weight * value))
        at += count
