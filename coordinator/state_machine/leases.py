"""Data leases: who may train on which samples. Pure.

Samples are numbered 0, 1, 2, ... for the whole run. A lease is a queue of sample ranges that one node works off
from the front. Only a commit consumes, always a prefix; what a node used but did not get committed stays at the
front of its lease, so progress that a round left out can count in a later one. The front also names the lease:
a consumed sample is never leased again, so no two leases ever have the same work behind the same front.
"""

from collections.abc import Mapping

from msgspec import Struct

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace

Range = tuple[int, int]  # first, count
Lease = tuple[Range, ...]


class Leases(Struct, frozen=True, gc=False):
    """All samples of the run that were leased and are not consumed.

    Invariant: `free` and the leases in `by_node` are disjoint, and all of their samples lie below `next`.
    """

    next: int = 0  # first sample never leased
    free: Lease = ()  # returned ranges, ascending
    by_node: dict[NodeId, Lease] = {}


def size(lease: Lease) -> int:
    return lease[0][1] if len(lease) == 1 else sum(count for _, count in lease)


def front(lease: Lease) -> int:
    """The first sample of a lease that is not empty."""
    return lease[0][0]


def grant(leases: Leases, node: NodeId, count: int) -> Leases:
    """Top the node's lease up to at least `count` samples, returned ranges first."""
    return grant_each(leases, {node: count})


def grant_each(leases: Leases, counts: Mapping[NodeId, int]) -> Leases:
    """`grant` for many nodes, one after the other."""
    held, free, next_ = dict(leases.by_node), leases.free, leases.next
    for node, count in counts.items():
        lease = held.get(node, ())
        if (missing := count - size(lease)) <= 0:
            continue
        while missing and free:
            (first, some), *others = free
            taken = min(some, missing)
            lease = (*lease, (first, taken))
            free = ((first + taken, some - taken), *others) if some > taken else tuple(others)
            missing -= taken
        if missing:
            lease = (*lease, (next_, missing))
            next_ += missing
        held[node] = _joined(lease)
    return Leases(next_, free, held)


def first_samples(lease: Lease, count: int) -> Lease:
    """The first `count` samples of a lease, or all where it has fewer."""
    found: list[Range] = []
    for first, length in lease:
        if count > 0:
            found.append((first, min(length, count)))
        count -= length
    return tuple(found)


def consume(leases: Leases, node: NodeId, used: int) -> Leases:
    """A commit included the first `used` samples of the node's lease. ValueError if it has fewer."""
    return consume_each(leases, {node: used})


def consume_each(leases: Leases, used: Mapping[NodeId, int]) -> Leases:
    """`consume` for many nodes."""
    held = dict(leases.by_node)
    for node, left in used.items():
        rest = list(held.pop(node, ()))
        if not 0 <= left <= size(leases.by_node.get(node, ())):
            raise ValueError(f"{node} used {left} sample(s) of a lease of {size(leases.by_node.get(node, ()))}")
        while left > 0:
            first, count = rest.pop(0)
            if count > left:
                rest.insert(0, (first + left, count - left))
            left -= min(count, left)
        if rest:
            held[node] = tuple(rest)
    return replace(leases, by_node=held)


def release(leases: Leases, node: NodeId) -> Leases:
    """Free all of a node's lease: what it trained on will never be committed."""
    lease = leases.by_node.get(node, ())
    held = {n: r for n, r in leases.by_node.items() if n != node}
    return replace(leases, by_node=held, free=_joined(tuple(sorted((*leases.free, *lease)))))


def _joined(lease: Lease) -> Lease:
    """The same samples in the same order, neighbouring ranges as one."""
    joined: list[Range] = []
    for first, count in lease:
        if joined and joined[-1][0] + joined[-1][1] == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return tuple(joined)
