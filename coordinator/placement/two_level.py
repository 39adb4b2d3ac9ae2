"""The two-level plan of a reduce for large fleets, and the choice between it and the flat one. Pure.

    members --contributions--> relay --partial sum--> owner (one of the chunk's relays)
    members <-----sealed------ relay <----sealed-----

For each chunk every region has a relay. It sums its region's contributions and sends one encoded partial sum to
the chunk's owner, the relay of one of the regions; this one merges the partial sums, seals, and sends the sealed
chunk to the other relays; each relay sends it to its region. With G regions of n members, what leaves a region
falls from 2 n (1 - 1/G) payloads to 2 (1 - 1/G); it costs two hops and one more quantisation. A member is relay of
a share r of the chunks, by bandwidth, and owns the same part of these as its whole region, O. In a region of C
contributors it sends, in payloads, and receives as much:

    within its region   c + (C - 2 c) r          c: 1 if it contributes, 0 if it only reduces
    to other regions    (1 + (G - 2) O) r

A prediction, flat or two-level, is the sum of
    the longest of      a member's links (bytes / rate), a region's common link, and a member's handling of
                        messages, `SECONDS_PER_MESSAGE` for each chunk that it sends or receives: these overlap
    connections         `SECONDS_PER_PEER` for each peer of the member that has the most
    latency             of the longest known links: flat 2 hops; two-level 2 hops, and 2 within a region
It leaves out the codec's time and the start and end of the pipeline, which are short if every owner has several
chunks and every link carries the lowest chunk first. With first in, first out, the chunks that fast members send
early delay those of slow members, by a third of the whole in the worst simulated case.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import inf

from atoll.coordinator.placement.bandwidth_shares import (
    ACCEPTED_SLOWDOWN,
    ChunkShares,
    PlanNode,
    Traffic,
    bounded_shares,
    busy,
    deal,
    plan_shares,
    predict,
    traffic,
    with_rates,
)

SECONDS_PER_PEER = 1e-3  # seconds: a connection, its streams and buffers; an assumption
SECONDS_PER_MESSAGE = 50e-6  # seconds: header, system calls and bookkeeping of one chunk at one end; an assumption
MIN_RTT_GAP = 3.0  # a jump between successive round trips by less than this factor separates nothing
# Shorter, longer round trips tell no more about the place than these:
MIN_RTT_SECONDS, MAX_RTT_SECONDS = 1e-3, 0.3
BISECTIONS = 20  # bisections, to a millionth
Rtts = Mapping[tuple[int, int], float]  # (i, j), i < j -> seconds; not every pair is measured


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """A plan of a reduce in two levels."""

    regions: tuple[tuple[int, ...], ...]
    relays: tuple[tuple[int, ...], ...]  # (chunks, regions): a member of each
    owners: tuple[int, ...]  # (chunks,) one of the chunk's relays
    seconds: float  # predicted


def choose(
    nodes: Sequence[PlanNode], rtts: Rtts, payload: float, chunks: int, *, between: float = 0.0
) -> ChunkShares | TwoLevel:
    """The plan that is predicted faster; see `faster`, and `plan_regions` for `between`."""
    flat = plan_flat(nodes, rtts, payload, chunks, between=between)
    return faster(flat, plan_regions(nodes, rtts, payload, chunks, between=between))


def faster(flat: ChunkShares, layered: TwoLevel | None) -> ChunkShares | TwoLevel:
    """The flat plan, which rounds once less, unless two levels are predicted to save 10 %."""
    return layered if layered is not None and layered.seconds * ACCEPTED_SLOWDOWN < flat.seconds else flat


def plan_flat(
    nodes: Sequence[PlanNode], rtts: Rtts, payload: float, chunks: int, *, between: float = 0.0
) -> ChunkShares:
    """`plan_shares` in whole chunks, with the prediction of this module."""
    regions = usable(find_regions(len(nodes), rtts), nodes, rtts)
    planned = plan_shares(nodes, payload, chunks=chunks, regions=regions, between=between).shares
    return predict_flat(nodes, planned, rtts, payload, chunks, regions, between=between)


def predict_flat(
    nodes: Sequence[PlanNode],
    planned: tuple[float, ...],
    rtts: Rtts,
    payload: float,
    chunks: int,
    regions: Sequence[tuple[int, ...]],
    *,
    between: float = 0.0,
) -> ChunkShares:
    """Predict a flat plan with the shares `planned`, dealt in whole chunks, by the model of this module."""
    owners = deal(planned, chunks)
    dealt = [owners.count(i) / chunks for i in range(len(nodes))]
    seconds = predict(nodes, dealt, payload, regions=regions, between=between)
    handling = max(_handling(load, chunks) for load in traffic(nodes, dealt))
    own, give = set(owners), {i for i, node in enumerate(nodes) if node.contributes}
    peers = len(own | give) - 1 if own & give else max(len(own), len(give))
    return ChunkShares(
        planned, max(seconds, handling) + SECONDS_PER_PEER * peers + max(rtts.values(), default=0.0)
    )


def plan_regions(
    nodes: Sequence[PlanNode],
    rtts: Rtts,
    payload: float,
    chunks: int,
    *,
    between: float = 0.0,
    limit: float = inf,
) -> TwoLevel | None:
    """The fastest two-level plan, or one with equal shares unless it is 10 % slower; None if there is one region.

    `between`: bytes/s that all members of a region together send to, and receive from, others; 0 = no such limit.
    `limit`: equal shares that a member who contributes relays of its region's chunks, and owns of all, at most; a
    region owns no more than that for each of its members that can be dialled.
    """
    regions = usable(find_regions(len(nodes), rtts), nodes, rtts)
    if len(regions) < 2:
        return None
    nodes = with_rates(nodes)
    reachable = [[i for i in region if not nodes[i].leaf] for region in regions]
    owned = [1 / len(regions)] * len(regions)
    relayed = [{i: 1 / len(own) for i in own} for own in reachable]
    equal = _dealt(nodes, regions, *_bounded(nodes, relayed, owned, limit), rtts, payload, chunks, between)
    alike = len(set(nodes)) == 1 and len({len(region) for region in regions}) == 1
    if alike or not any(0 < rate < inf for node in nodes for rate in (node.up, node.local)):
        return equal
    filled = _bounded(nodes, *_filled(nodes, regions, between), limit)
    best = _dealt(nodes, regions, *filled, rtts, payload, chunks, between)
    return equal if equal.seconds <= ACCEPTED_SLOWDOWN * best.seconds else best


def find_regions(members: int, rtts: Rtts) -> tuple[tuple[int, ...], ...]:
    """Group the members that are connected by links shorter than the widest gap in the sorted round trips.

    The gap is the largest factor between successive times, all taken as at least `MIN_RTT_SECONDS` and at most
    `MAX_RTT_SECONDS`; the threshold is its geometric middle. Without a gap of `MIN_RTT_GAP` there is one region.
    Joining whoever is connected (single linkage) is safe, since a round trip cannot be measured too short. Members
    of which nothing is measured are a region of their own, the unknown one.
    """
    times = sorted(min(max(rtt, MIN_RTT_SECONDS), MAX_RTT_SECONDS) for rtt in rtts.values())
    factor, threshold = max(((b / a, (a * b) ** 0.5) for a, b in pairwise(times)), default=(1.0, 0.0))
    if factor < MIN_RTT_GAP:
        return (tuple(range(members)),)
    parent = list(range(members))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for (i, j), rtt in rtts.items():
        if rtt <= threshold:
            parent[max(root(i), root(j))] = min(root(i), root(j))
    known = {i for pair in rtts for i in pair}
    together = defaultdict[int, list[int]](list)
    for i in range(members):
        together[root(i) if i in known else -1].append(i)
    return tuple(sorted(tuple(region) for region in together.values()))


def usable(
    regions: Sequence[tuple[int, ...]], nodes: Sequence[PlanNode], rtts: Rtts
) -> tuple[tuple[int, ...], ...]:
    """The regions that have a contributor and a member that can be reached; the other members join the region that
    they have the shortest known link to, the largest where none is known."""
    able = [
        region
        for region in regions
        if any(nodes[i].contributes for i in region) and not all(nodes[i].leaf for i in region)
    ]
    if not able:
        return (tuple(range(len(nodes))),)
    joined = [list(region) for region in able]
    home = {i: g for g, region in enumerate(able) for i in region}
    largest = max(range(len(able)), key=lambda g: len(able[g]))
    nearest = dict[int, tuple[float, int]]()  # of a member without a region: the shortest link, and where it leads
    for (i, j), rtt in rtts.items():
        for lost, found in ((i, j), (j, i)):
            if lost not in home and found in home:
                nearest[lost] = min(nearest.get(lost, (rtt, home[found])), (rtt, home[found]))
    for i in range(len(nodes)):
        if i not in home:
            joined[nearest[i][1] if i in nearest else largest].append(i)
    return tuple(tuple(sorted(region)) for region in joined)


def _bounded(
    nodes: Sequence[PlanNode], relayed: Sequence[Mapping[int, float]], owned: Sequence[float], limit: float
) -> tuple[list[dict[int, float]], list[float]]:
    """The relays' shares of their regions, and the regions' shares of the chunks, within `limit` equal ones. A
    region's bound is its members' together; of one in which somebody only reduces there is none, nor of that
    one."""
    able = sum(map(len, relayed))
    free = [any(not nodes[i].contributes for i in shares) for shares in relayed]
    parts = bounded_shares(
        owned, [1.0 if f else limit * len(shares) / able for f, shares in zip(free, relayed, strict=True)]
    )
    rows = []
    for shares, part in zip(relayed, parts, strict=True):
        whole = sum(shares.values())
        scaled = [share / whole for share in shares.values()]
        most = limit / max(len(shares), able * part)  # of its region's chunks, and so of all that this one owns
        bounds = [min(most, 1.0) if nodes[i].contributes else 1.0 for i in shares]
        rows.append(dict(zip(shares, bounded_shares(_widened(scaled, bounds), bounds), strict=True)))
    return rows, list(parts)


def _widened(shares: Sequence[float], bounds: Sequence[float]) -> list[float]:
    """The shares; equal ones where those that have any cannot have it all within their bounds."""
    enough = sum(bound for share, bound in zip(shares, bounds, strict=True) if share > 0) >= 1
    return list(shares) if enough else [1 / len(shares)] * len(shares)


def _dealt(
    nodes: Sequence[PlanNode],
    regions: tuple[tuple[int, ...], ...],
    relayed: Sequence[Mapping[int, float]],
    owned: Sequence[float],
    rtts: Rtts,
    payload: float,
    chunks: int,
    between: float,
) -> TwoLevel:
    """The plan in whole chunks of these shares of relays, by region and member, and of owners, by region."""
    region_of = deal(owned, chunks)
    relays = [[0] * len(regions) for _ in range(chunks)]
    for g, shares in enumerate(relayed):
        able = list(shares)
        # first the chunks that the region owns, then the others, so that each relay has its part of both
        order = sorted(range(chunks), key=lambda c: (region_of[c] != g, c))
        for c, k in zip(order, deal(list(shares.values()), chunks), strict=True):
            relays[c][g] = able[k]
    plan = TwoLevel(
        regions=regions,
        relays=tuple(tuple(row) for row in relays),
        owners=tuple(row[g] for row, g in zip(relays, region_of, strict=True)),
        seconds=0.0,
    )
    return replace(plan, seconds=predict_two_level(nodes, plan, rtts, payload, between=between))


def predict_two_level(
    nodes: Sequence[PlanNode], plan: TwoLevel, rtts: Rtts, payload: float, *, between: float = 0.0
) -> float:
    """Seconds that the plan takes; the model is at the top."""
    nodes, chunks, others = with_rates(nodes), len(plan.owners), len(plan.regions) - 2
    relays, owners = Counter(i for row in plan.relays for i in row), Counter(plan.owners)
    links = {
        pair
        for row, owner in zip(plan.relays, plan.owners, strict=True)
        for i in row
        for pair in ((i, owner), (owner, i))
    }
    far = Counter(i for i, j in links if i != j)  # peers in other regions
    slowest, peers, near = 0.0, 0, 0.0
    for region in plan.regions:
        here, crossing = sum(nodes[i].contributes for i in region), 0.0
        busy_relays = sum(i in relays for i in region)
        for i in region:
            r, c = relays[i] / chunks, nodes[i].contributes
            load = Traffic(c * (1 - r) + r * (here - c), (relays[i] + others * owners[i]) / chunks)
            slowest = max(slowest, busy(nodes[i], load, payload), _handling(load, chunks))
            crossing += load.outside * payload
            peers = max(peers, far[i] + (len(region) - 1 if i in relays else busy_relays))
        if between:
            slowest = max(slowest, crossing / between)
        near = max([near, *(rtts[pair] for pair in combinations(region, 2) if pair in rtts)])
    return slowest + SECONDS_PER_PEER * peers + near + max(rtts.values(), default=0.0)


def _handling(load: Traffic, chunks: int) -> float:
    """Seconds that a member handles the messages it sends and receives."""
    return 2 * chunks * (load.inside + load.outside) * SECONDS_PER_MESSAGE


def _filled(
    nodes: Sequence[PlanNode], regions: Sequence[Sequence[int]], between: float
) -> tuple[list[dict[int, float]], list[float]]:
    """The relays' shares of their regions, and the regions' shares of the chunks, for the shortest time.

    A time, for a payload of 1, is long enough if what the regions can own in it adds up to 1. A region can own O
    if what its members can relay adds up to 1. Both grow with the time, so it is found by bisection.
    """
    here = [sum(nodes[i].contributes for i in region) for region in regions]

    def relayed(g: int, time: float, owned: float) -> dict[int, float]:
        """What each member of region g can relay within the time, if the region owns this part of all chunks."""
        outside = 1 + (len(regions) - 2) * owned  # payloads that each share sends to other regions
        if between and outside > time * between:
            return {}
        return {i: _relayed(nodes[i], here[g], outside, time) for i in regions[g] if not nodes[i].leaf}

    def most(g: int, time: float) -> float:
        """The largest part of the chunks that region g can own; -len(regions) if it cannot even relay."""
        if sum(relayed(g, time, 0.0).values()) < 1:
            return -len(regions)
        return _bisect(lambda owned: sum(relayed(g, time, owned).values()) >= 1, 0.0, 1.0)

    def long_enough(time: float) -> bool:
        return sum(most(g, time) for g in range(len(regions))) >= 1

    long = 1 / max(rate for node in nodes for rate in (node.up, node.down, node.local) if 0 < rate < inf)
    while not long_enough(long):
        long *= 2
    time = -_bisect(lambda t: long_enough(-t), -long, 0.0)
    parts = [most(g, time) for g in range(len(regions))]
    owned = [part / sum(parts) for part in parts]
    return [relayed(g, time, part) for g, part in enumerate(owned)], owned


def _relayed(node: PlanNode, here: int, outside: float, time: float) -> float:
    """The part of its region's chunks that a member can relay within the time, for a payload of 1.

    here: the region's contributors; outside: payloads to other regions for each relayed.
    """
    c, rate = int(node.contributes), min(node.up, node.down)
    inside = here - 2 * c
    if not node.local:
        return _part(time * rate - c, inside + outside)
    return min(_part(time * node.local - c, max(inside, 0)), _part(time * rate, outside))


def _part(budget: float, cost: float) -> float:
    """How much of 1 the budget pays for."""
    if budget < 0:
        return 0.0
    return 1.0 if budget >= cost else budget / cost


def _bisect(holds: Callable[[float], bool], good: float, bad: float) -> float:
    """Nearly the last value from `good`, where it holds, towards `bad`, up to which it does."""
    if holds(bad):
        return bad
    for _ in range(BISECTIONS):
        middle = (good + bad) / 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
