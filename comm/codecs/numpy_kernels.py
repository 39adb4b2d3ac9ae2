"""The kernels that decode, in numpy: the same bits as the compiled ones, some ten times slower.

For who reads what a run has sealed and has no numba, such as `atoll export` on an operator's machine
(`atoll.comm.codecs.loaded` chooses). A node encodes, too, and is refused without numba before it starts. Each
operation is an fp32 one that is rounded once, in the order of `kernels` and `sparse_kernels`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.comm.byte_view import U8
from atoll.comm.extras import MissingPackage, lacking

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]

LARGEST_BF16 = np.uint32(0x7F7F)
MAGNITUDE, INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
ONE_SHARE = np.uint16(0x3C00)  # 1 in fp16
# No block is a multiple of it: a mean is then made one contribution after another, as `add_int8` does.
REGISTER_ELEMENTS = 1 << 62


class MissingKernel(MissingPackage, AttributeError):
    """A kernel that is compiled only. An `AttributeError`, too: who looks through all modules for a name, as
    pickle does, goes on to the next one."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise MissingKernel(lacking(f"to encode ({name})", "numba") or f"there is no kernel {name}")


def is_finite(x: F32) -> bool:
    return bool((x.view(np.uint32) & MAGNITUDE).max(initial=np.uint32(0)) < INFINITY)


def add_fp32(x: F32, weight: np.float32, out: F32) -> None:
    out += weight * x


def is_finite_bf16(halves: U16) -> bool:
    return bool((halves & np.uint16(0x7FFF)).max(initial=np.uint16(0)) <= LARGEST_BF16)


def from_bf16(halves: U16, out: F32) -> None:
    out[:] = (halves.astype(np.uint32) << 16).view(np.float32)


def add_bf16(halves: U16, weight: np.float32, out: F32) -> None:
    out += weight * (halves.astype(np.uint32) << 16).view(np.float32)


def from_shares(shares: U16, largest: np.float32, scales: F32) -> bool:
    """The scales; false if there is a share that is not in [0, 1], -0.0 included."""
    if shares.max(initial=np.uint16(0)) > ONE_SHARE:
        return False
    scales[:] = largest * shares.view(np.float16).astype(np.float32)
    return True


def from_int8(values: U8, block: int, scales: F32, out: F32) -> None:
    out[:] = values.view(np.int8).astype(np.float32) * np.repeat(scales, block)[: out.size]


def from_int8_far(values: U8, block: int, scales: F32, out: F32) -> None:
    from_int8(values, block, scales, out)


def square_int8(values: U8, block: int, scales: F32) -> float:
    squares = values.view(np.int8).astype(np.int64) ** 2
    of_blocks = np.add.reduceat(squares, np.arange(0, values.size, block)) if values.size else squares
    return float(np.dot(scales.astype(np.float64) ** 2, of_blocks.astype(np.float64)))


def add_int8(values: U8, block: int, scales: F32, weight: np.float32, out: F32) -> None:
    decoded = np.empty(out.size, np.float32)
    from_int8(values, block, scales, decoded)
    out += weight * decoded


def from_int4(values: U8, block: int, scales: F32, out: F32) -> None:
    whole = out.size // block
    _from_int4(values, block, scales[:whole], out[: whole * block])
    if rest := out.size - whole * block:
        _from_int4(values[whole * block >> 1 :], rest, scales[whole:], out[whole * block :])


def _from_int4(values: U8, block: int, scales: F32, out: F32) -> None:
    """Of whole blocks."""
    half = (block + 1) >> 1
    each = values[: scales.size * half].reshape(-1, half)
    both = np.concatenate([(each << 4).view(np.int8) >> 4, each.view(np.int8) >> 4], axis=1)[:, :block]
    out.reshape(-1, block)[:] = both.astype(np.float32) * scales[:, np.newaxis]


def add_int4(values: U8, block: int, scales: F32, weight: np.float32, out: F32) -> None:
    decoded = np.empty(out.size, np.float32)
    from_int4(values, block, scales, decoded)
    out += weight * decoded


def unpack(packed: U8, numel: int, group: int, ratio: int, positions: U16, q: U8) -> bool:
    """False if positions do not ascend within their group, or bits that fill up a byte are not 0."""
    good, at, to = True, 0, 0
    for groups, size in ((numel // group, group), (1, numel % group)):
        count = (size + ratio - 1) // ratio
        octets, end = (3 * count + 1) // 2 + (count + 3) // 4, at + groups * count
        if groups and size:
            rows = packed[to : to + groups * octets].reshape(groups, octets)
            found = positions[at:end].reshape(groups, count), q[at:end].reshape(groups, count)
            good = _unpack(rows, size, count, *found) and good
            at, to = end, to + groups * octets
    return good


def _unpack(rows: U8, size: int, count: int, positions: U16, q: U8) -> bool:
    """Of groups of `size` elements, one a row, of which `count` were picked."""
    edge = (3 * count + 1) // 2
    bits = np.unpackbits(rows, axis=1, bitorder="little")
    of_position, of_q = bits[:, : 8 * edge], bits[:, 8 * edge :]
    weights = (1 << np.arange(12)).astype(np.uint16)
    positions[:] = of_position[:, : 12 * count].reshape(-1, count, 12) @ weights
    q[:] = of_q[:, : 2 * count].reshape(-1, count, 2) @ np.array([1, 2], np.uint8)
    filled = of_position[:, 12 * count :].any() or of_q[:, 2 * count :].any()
    ascending = (np.diff(positions.astype(np.int32), axis=1) > 0).all() and (positions < size).all()
    return bool(ascending and not filled)


def add(
    positions: U16, q: U8, levels: F32, scales: F32, group: int, ratio: int, weight: np.float32, out: F32
) -> None:
    """`out += weight * decoded` at the picked elements, each product and sum rounded once."""
    counts = [-(-min(group, out.size - start) // ratio) for start in range(0, out.size, group)]
    of_group = np.repeat(np.arange(len(counts)), counts)
    places = of_group * group + positions
    out[places] += weight * (levels[q] * scales[of_group])
