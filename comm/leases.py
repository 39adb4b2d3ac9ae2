"""Arithmetic of a node's lease of samples, which it works off from the front. Pure; coordinator, node and trainer
use it alike."""

from collections.abc import Sequence

Range = tuple[int, int]  # first, count


def remaining(lease: Sequence[Range], used: int) -> tuple[Range, ...]:
    """The lease without its first `used` samples."""
    rest = []
    for first, count in lease:
        skipped = min(used, count)
        if count > skipped:
            rest.append((first + skipped, count - skipped))
        used -= skipped
    return tuple(rest)


def samples(lease: Sequence[Range], skip: int, count: int) -> list[int]:
    """The `count` samples of the lease behind its first `skip`; fewer at its end."""
    found: list[int] = []
    for first, size in lease:
        start = min(skip, size)
        found += range(first + start, first + min(size, start + count - len(found)))
        skip -= start
    return found


def size(lease: Sequence[Range]) -> int:
    """The number of samples in the lease."""
    return sum(count for _, count in lease)
