"""Data leases: who may train on which samples. Pure.

Samples are numbered 0, 1, 2, ... for the whole run. A lease is a contiguous range for one node and round.
Only a commit consumes it; what a dead node held, or a living one did not use, is leased again.
"""

from dataclasses import dataclass, field, replace

from atoll.comm.ids import NodeId

Range = tuple[int, int]  # first, count


@dataclass(frozen=True, slots=True)
class Leases:
    next: int = 0  # first sample never leased
    free: tuple[Range, ...] = ()  # returned ranges, ascending
    held: dict[NodeId, Range] = field(default_factory=dict)


def grant(leases: Leases, node: NodeId, count: int) -> Leases:
    """Give `node` a lease of exactly `count` samples; a lease it already holds stays."""
    if node in leases.held:
        return leases
    for i, (first, size) in enumerate(leases.free):
        if size >= count:
            rest = ((first + count, size - count),) if size > count else ()
            free = leases.free[:i] + rest + leases.free[i + 1 :]
            return replace(leases, free=free, held=leases.held | {node: (first, count)})
    return replace(leases, next=leases.next + count, held=leases.held | {node: (leases.next, count)})


def consume(leases: Leases, node: NodeId, used: int) -> Leases:
    """A commit included `used` samples from the start of the node's lease; the rest is free again."""
    first, count = leases.held.get(node, (0, 0))
    if not 0 <= used <= count:
        raise ValueError(f"{node} used {used} samples of a lease of {count}")
    held = {n: r for n, r in leases.held.items() if n != node}
    return replace(leases, held=held, free=_merge(leases.free, (first + used, count - used)))


def release(leases: Leases, node: NodeId) -> Leases:
    """The node's work will not be committed: all of its lease is free again."""
    return consume(leases, node, 0)


def _merge(free: tuple[Range, ...], returned: Range) -> tuple[Range, ...]:
    merged: list[Range] = []
    for first, count in sorted((*free, returned)):
        if not count:
            continue
        if merged and merged[-1][0] + merged[-1][1] == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return tuple(merged)
