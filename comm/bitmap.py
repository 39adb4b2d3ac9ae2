"""Bitmaps as they travel: bit i % 8 of byte i // 8 is bit i."""

from collections.abc import Iterable


def bitmap(places: Iterable[int], size: int) -> bytes:
    """Pack the bits at `places` of `size` bits, ceil(size / 8) bytes."""
    packed = bytearray(-(-size // 8))
    for i in places:
        packed[i // 8] |= 1 << i % 8
    return bytes(packed)


def bit(packed: bytes, i: int) -> bool:
    """Bit `i`; False beyond the end, too."""
    return i // 8 < len(packed) and bool(packed[i // 8] >> i % 8 & 1)


def places(packed: bytes) -> tuple[int, ...]:
    """The places of the bits that are set, ascending."""
    return tuple(8 * i + j for i, byte in enumerate(packed) if byte for j in range(8) if byte >> j & 1)
