"""A node's lease of samples, as it works it off from the front."""

from collections.abc import Sequence

Range = tuple[int, int]  # first, count


def beyond(lease: Sequence[Range], used: int) -> tuple[Range, ...]:
    """What is left of the lease behind its first `used` samples."""
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
    return sum(count for _, count in lease)
