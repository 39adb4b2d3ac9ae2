"""Columns of numbers, one for each member of a record, in as few bytes as hold them exactly.

A column is bytes: a kind, then what the kind needs.

    "=" VALUE             all are alike: VALUE is msgpack, an integer or a float
    "i" WIDTH BASE PLANES integers, as what each is above BASE (msgpack): WIDTH bytes each
    "f" WIDTH PLANES      floats: the topmost WIDTH bytes (2, 3 or 4) of each as fp32, or all 8 as fp64

PLANES are the numbers' bytes, first the lowest of each, then the next: neighbours are alike there, which a
compressor sees. Floats with few significant bits (`atoll.comm.rounding`) take fewer bytes.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.comm.decode_errors import DECODE_ERRORS

Number = int | float
_FLOAT_WIDTHS = (2, 3, 4)  # bytes of an fp32 that are kept
_LIMIT = 1 << 63


class BadColumn(ValueError):
    """The bytes are no column of so many numbers."""


def pack(values: Sequence[Number]) -> bytes:
    """The column of these numbers. Integers are between -2**63 and 2**63."""
    if not values:
        return b""
    first = values[0]
    if all(type(value) is type(first) for value in values) and len(set(values)) == 1 and first == first:
        return b"=" + msgspec.msgpack.encode(first)
    if all(isinstance(value, int) or (value.is_integer() and abs(value) < _LIMIT) for value in values):
        return _pack_integers([int(value) for value in values])
    return _pack_floats(np.array(values, np.float64))


def unpack(column: bytes, count: int) -> list[Number]:
    """The `count` numbers of a column. What was an integral float may come back as an integer. Raises
    `BadColumn`."""
    if not count:
        return []
    kind, rest = column[:1], column[1:]
    try:
        if kind == b"=":
            value: Number = msgspec.msgpack.decode(rest, type=int | float)
            return [value] * count
        width = rest[0]
        if kind == b"i" and 1 <= width <= 8:
            edge = len(rest) - count * width
            base = msgspec.msgpack.decode(rest[1:edge], type=int)
            above = _joined(rest[edge:], count, width, 8).view(np.uint64)[:, 0]
            return [base + value for value in above.tolist()]
        if kind == b"f" and width in (*_FLOAT_WIDTHS, 8):
            return list(_floats(rest[1:], count, width).tolist())
    except (IndexError, *DECODE_ERRORS) as error:
        raise BadColumn(f"a column is cut short or spoiled: {error}") from None
    raise BadColumn(f"a column begins with {column[:2]!r}, which is no kind of column")


def _pack_integers(values: list[int]) -> bytes:
    base = min(values)
    width = max((max(values) - base).bit_length() + 7 >> 3, 1)
    above = np.array([value - base for value in values], np.uint64)
    return b"i" + bytes([width]) + msgspec.msgpack.encode(base) + _planes(above, width, 0)


def _pack_floats(values: NDArray[np.float64]) -> bytes:
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    if not np.array_equal(single.astype(np.float64), values, equal_nan=True):
        return b"f\x08" + _planes(values, 8, 0)
    raw = single.view(np.uint32)
    width = next(w for w in _FLOAT_WIDTHS if w == 4 or not (raw & np.uint32((1 << 32 - 8 * w) - 1)).any())
    return b"f" + bytes([width]) + _planes(raw, width, 4 - width)


def _floats(planes: bytes, count: int, width: int) -> NDArray[np.float32] | NDArray[np.float64]:
    if width == 8:
        return _joined(planes, count, 8, 8).view(np.float64)[:, 0]
    return _joined(planes, count, width, 4).view(np.float32)[:, 0]


def _planes(numbers: NDArray[np.generic], width: int, first: int) -> bytes:
    """The bytes `first` to `first + width` of each number, plane by plane."""
    whole = numbers.view(np.uint8).reshape(len(numbers), -1)
    return whole[:, first : first + width].T.tobytes()


def _joined(planes: bytes, count: int, width: int, size: int) -> NDArray[np.uint8]:
    """Numbers of `size` bytes, (count, size), whose planes these are: the lowest `width` bytes of integers, the
    topmost of fp32."""
    if len(planes) != count * width:
        raise BadColumn(f"a column has {len(planes)} bytes, {count} numbers take {count * width}")
    whole = np.zeros((count, size), np.uint8)
    first = 4 - width if size == 4 else 0
    whole[:, first : first + width] = np.frombuffer(planes, np.uint8).reshape(width, count).T
    return whole
