"""Bitmaps as they travel: bit i % 8 of byte i // 8 is bit i."""

from collections.abc import Iterable


def bitmap(places: Iterable[int], size: int) -> bytes:
    """The bits at `places`, of `size`."""
    packed = bytearray(-(-size // 8))
    for i in places:
        packed[i // 8] |= 1 << i % 8
    return bytes(packed)


def bit(packed: bytes, i: int) -> bool:
    """False beyond the end, too."""
    return i // 8 < len(packed) and bool(packed[i // 8] >> i % 8 & 1)


def places(packed: bytes) -> tuple[int, ...]:
    """Where bits are set, ascending."""
    return tuple(i for i in range(8 * len(packed)) if bit(packed, i))
