"""The flat plan of a reduce: which share of the chunks each member owns, by measured bandwidth. Pure.

A contributor sends its vector, encoded (`payload` bytes), chunk by chunk to the chunks' owners; an owner sends
each sealed chunk to all contributors. With C contributors, member i, who owns the share w_i, sends, in payloads,

    c_i (1 - w_i) + w_i (C - c_i) = c_i + (C - 2 c_i) w_i        c_i: 1 if it contributes, 0 if it only reduces

and receives exactly as much, so only the slower direction of its link counts. The shares minimise the longest
time of a member: the linear programme of hivemind's `load_balance_peers` (Diskin et al. 2021, DeDLOC), here with
members that own nothing (leaves) and members that only reduce.

The members' own links need no solver. Within a time each member can own what it can send beyond its own vector;
the shortest time in which this adds up to the whole is found by filling up in order of the links' speed. That is
an optimum of the programme, and of its many optima the one that is also best for the members that are not the
slowest, unless equal shares of those that own something are as good; a solver returns an arbitrary corner. Limits
that join several members' shares (rates within a region, a region's common link) are left to the solver.

Rates are told, and may be lies: with a `limit` no member owns more than so many equal shares, whatever its links.
What it could own beyond that falls to the next in speed; the programme has an upper bound of each share.

`predict` counts bytes on links that always have something to send; latency and the handling of peers and messages
are in `atoll.coordinator.placement.two_level`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from atoll.comm.errors import AtollError
from atoll.comm.replace import replace

# A plan that is predicted to take this many times as long as the best is as good: the rates are not known better.
ACCEPTED_SLOWDOWN = 1.1
ACCEPTED_DELAY_SECONDS = 0.25  # seconds: as good, too, is one that is predicted this much slower
LOWER_RATE_WEIGHT = 0.25  # how far one lower measurement pulls a rate down
Regions = Sequence[Sequence[int]]  # members, by region


class NobodyReachable(AtollError):
    """A reduce among members that cannot own a chunk."""


class PlanNode(Struct, frozen=True, gc=False):
    """A member as a plan sees it; rates in bytes/s, 0 = unknown."""

    up: float
    down: float
    leaf: bool = False  # dials out only: owns nothing
    contributes: bool = True  # sends a vector and receives the result; False: only reduces
    local: float = 0.0  # each way, to members of its own region; 0 = over the same link as everything
    link: float = 0.0  # each way, of all together; 0 = no limit but these


@dataclass(frozen=True, slots=True)
class ChunkShares:
    """A flat plan of a reduce."""

    shares: tuple[float, ...]  # of the chunks, by member; their sum is 1
    seconds: float  # predicted


class Traffic(NamedTuple):
    """Load of a member in a reduce: payloads that it sends; it receives as many."""

    inside: float  # to members of its own region
    outside: float


def plan_shares(
    nodes: Sequence[PlanNode],
    payload: float,
    *,
    chunks: int = 0,
    regions: Regions = (),
    between: float = 0.0,
    limit: float = inf,
) -> ChunkShares:
    """The shares that a reduce of `payload` bytes is fastest with; equal ones unless that is 10 %, and a
    quarter of a second, faster.

    Equal shares do not change from round to round with what was measured; so those that own something own as much
    as each other where that is as fast. Members whose share is less than half of one of `chunks` chunks own
    nothing, where that costs little. For `regions` and `between` see `predict`. `limit`: equal shares, of those
    who can own, that a contributor owns at most; members that only reduce own what is best.
    """
    if all(node.leaf for node in nodes):
        raise NobodyReachable(
            f"none of the {len(nodes)} members can be reached by the others: nobody to own a chunk"
        )
    nodes, bounds = with_rates(nodes), share_bounds(nodes, limit)
    if len(regions) == 1:  # everything is local
        nodes = [replace(node, up=node.local, down=node.local) if node.local else node for node in nodes]
    if len(regions) == 1 or not (between or any(node.local for node in nodes)):
        regions = ()

    def planned(shares: tuple[float, ...]) -> ChunkShares:
        return ChunkShares(shares, predict(nodes, shares, payload, regions=regions, between=between))

    equal = planned(_scaled([float(not node.leaf) for node in nodes]))
    if equal.seconds == 0 or _symmetric(nodes, regions):
        return equal
    best = planned(_solved(nodes, regions, between, bounds) if regions else _filled(nodes, bounds))
    if equal.seconds <= max(ACCEPTED_SLOWDOWN * best.seconds, best.seconds + ACCEPTED_DELAY_SECONDS):
        return equal
    trimmed = planned(bounded_shares(_trimmed(best.shares, chunks), bounds))
    chosen = trimmed if trimmed.seconds <= ACCEPTED_SLOWDOWN * best.seconds else best
    evened = planned(bounded_shares(_scaled([float(share > 0) for share in chosen.shares]), bounds))
    return evened if evened.seconds <= chosen.seconds else chosen


def predict(
    nodes: Sequence[PlanNode],
    shares: Sequence[float],
    payload: float,
    *,
    regions: Regions = (),
    between: float = 0.0,
) -> float:
    """Seconds until the slowest link has carried its part of a reduce with these shares.

    A member that has a `local` rate exchanges data with its region beside its own link. `between`: bytes/s that
    all members of a region together send to, and receive from, other regions; 0 = no such limit.
    """
    nodes, loads = with_rates(nodes), traffic(nodes, shares, regions)
    slowest = max(busy(node, load, payload) for node, load in zip(nodes, loads, strict=True))
    if between:
        slowest = max(
            [slowest, *(sum(loads[i].outside for i in region) * payload / between for region in regions)]
        )
    return slowest


def traffic(nodes: Sequence[PlanNode], shares: Sequence[float], regions: Regions = ()) -> list[Traffic]:
    """The load of each member for these shares of the chunks; without regions all of it goes outside."""
    loads = [Traffic(0.0, 0.0)] * len(nodes)
    everybody = sum(node.contributes for node in nodes)
    for region in regions or [(i,) for i in range(len(nodes))]:
        share, here = sum(shares[i] for i in region), sum(nodes[i].contributes for i in region)
        for i in region:
            w, c = shares[i], nodes[i].contributes
            loads[i] = Traffic(c * (share - w) + w * (here - c), c * (1 - share) + w * (everybody - here))
    return loads


def busy(node: PlanNode, load: Traffic, payload: float) -> float:
    """Seconds that a member's links need for its load."""
    rate = min(node.up, node.down)
    if node.local:
        all_ = (load.inside + load.outside) / node.link if node.link else 0.0
        return max(load.inside / node.local, load.outside / rate, all_) * payload
    return (load.inside + load.outside) / rate * payload


def with_rates(nodes: Sequence[PlanNode]) -> tuple[PlanNode, ...]:
    """The nodes, an unknown rate set to the median of the known ones, to no limit where none is known."""
    up = median([node.up for node in nodes if node.up > 0] or [inf])
    down = median([node.down for node in nodes if node.down > 0] or [inf])
    return tuple(
        node if node.up > 0 and node.down > 0 else replace(node, up=node.up or up, down=node.down or down)
        for node in nodes
    )


def deal(shares: Sequence[float], chunks: int) -> tuple[int, ...]:
    """The owner of each chunk: as many as its share (largest remainders), spread so that all work all the time.

    The k-th of an owner's m chunks is placed at (k + 1/2) / m of the way. Equal shares are dealt in turn, c % n.
    """
    quotas = [share * chunks for share in _scaled(shares)]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - quotas[i], i))
    for i in by_remainder[: chunks - sum(counts)]:
        counts[i] += 1
    places = ((2 * k + 1) / (2 * m) for m in counts for k in range(m))
    owners = (i for i, m in enumerate(counts) for _ in range(m))
    return tuple(i for _, i in sorted(zip(places, owners, strict=True)))


def share_bounds(nodes: Sequence[PlanNode], limit: float) -> tuple[float, ...]:
    """The largest share that each member may own: `limit` equal ones of those who can own; all of it for one that
    only reduces."""
    most = limit / sum(not node.leaf for node in nodes)
    return tuple(min(most, 1.0) if node.contributes else 1.0 for node in nodes)


def bounded_shares(shares: Sequence[float], bounds: Sequence[float]) -> tuple[float, ...]:
    """The shares, none above its bound: what is cut off goes to the others that own something, in proportion.
    Where these cannot take it all, it stays where it was, in proportion."""
    found = list(shares)
    while over := [i for i, share in enumerate(found) if share > bounds[i] * (1 + 1e-12)]:
        spare = sum(found[i] - bounds[i] for i in over)
        for i in over:
            found[i] = bounds[i]
        free = [i for i, share in enumerate(found) if 0 < share < bounds[i]]
        if not free:
            return _scaled(found)
        whole = sum(found[i] for i in free)
        for i in free:
            found[i] += spare * found[i] / whole
    return tuple(found)


def blend(old: float, measured: float) -> float:
    """A rate after one more measurement, bytes/s; 0 = nothing known, nothing measured.

    Up at once, down by a quarter of the way: what a link carried it can carry, but it may carry little because it
    was given little, because the other end was slow, or for one bad minute. The other way round a member that was
    once slow would get a small share, could then only demonstrate a small rate, and would stay slow for good.
    """
    if old <= 0 or measured <= 0 or measured >= old:
        return measured if measured > 0 else old
    return old + LOWER_RATE_WEIGHT * (measured - old)


def _symmetric(nodes: Sequence[PlanNode], regions: Regions) -> bool:
    """Members can be exchanged without a change of the programme: it is convex, so equal shares are an optimum."""
    return len(set(nodes)) == 1 and nodes[0].contributes and len({len(region) for region in regions}) <= 1


def _filled(nodes: Sequence[PlanNode], bounds: Sequence[float]) -> tuple[float, ...]:
    """The optimum where each member has its link for itself, by filling up from the fastest, each up to its
    bound."""
    everybody = sum(node.contributes for node in nodes)
    owners = [i for i, node in enumerate(nodes) if not node.leaf]
    givers = [i for i in owners if nodes[i].contributes]
    if givers and everybody <= 2:  # owning costs a contributor nothing
        return _scaled([float(i in givers) for i in range(len(nodes))])
    # at the time t (in payloads) member i can own w_i = (t rate_i - c_i) / k_i, if that is more than nothing
    rate = {i: min(nodes[i].up, nodes[i].down) for i in owners}
    c = {i: int(nodes[i].contributes) for i in owners}
    k = {i: everybody - 2 * c[i] for i in owners}

    def share(i: int, t: float) -> float:
        return min(bounds[i], max(0.0, t * rate[i] - c[i]) / k[i])

    def owned(t: float) -> float:
        return sum(share(i, t) for i in owners)

    # What all can own within t rises in straight pieces: member i begins to at c_i / rate_i, and has all it may at
    # (c_i + k_i bound_i) / rate_i. Rates may be told that are 1e15 times others': nothing is subtracted that was
    # added up.
    begins = (c[i] / rate[i] for i in owners)
    ends = ((c[i] + k[i] * bounds[i]) / rate[i] for i in owners)
    turns = sorted({0.0, *begins, *ends})
    last = min(bisect_left(turns, 1.0, key=owned), len(turns) - 1)
    after, t = turns[last], turns[max(last - 1, 0)]
    if (rise := owned(after) - owned(t)) > 0:
        t = min(after, t + (after - t) * max(0.0, 1 - owned(t)) / rise)
    return _scaled([share(i, t) if i in rate else 0.0 for i in range(len(nodes))])


def _solved(
    nodes: Sequence[PlanNode], regions: Regions, between: float, bounds: Sequence[float]
) -> tuple[float, ...]:
    """An optimum where members of a region share limits, by linear programme: minimise t, in payloads, over w.

    With W and C_g the share and the contributors of member i's region, `between` B:
        within the region   c_i W + (C_g - 2 c_i) w_i       <= t local_i
        to other regions    c_i (1 - W) + (C - C_g) w_i     <= t rate_i     (the sum of both without a local rate)
        a region's link     C_g (1 - W) + (C - C_g) W       <= t B
    """
    n, everybody = len(nodes), sum(node.contributes for node in nodes)
    unit = median(min(node.up, node.down) for node in nodes)
    unit = unit if unit < inf else median([node.local for node in nodes if node.local] or [between])
    most, t = n + len(regions), n + len(regions) + 1  # the columns after w and W; most: the largest share
    rows: list[dict[int, float]] = []
    limits: list[float] = []

    def limit(row: dict[int, float], rate: float, limit: float) -> None:
        if rate < inf:
            rows.append(row | {t: -rate / unit})
            limits.append(limit)

    for g, region in enumerate(regions, n):
        here = sum(nodes[i].contributes for i in region)
        for i in region:
            node, c = nodes[i], int(nodes[i].contributes)
            rate = min(node.up, node.down)
            if node.local:
                limit({g: c, i: here - 2 * c}, node.local, 0)
                limit({g: -c, i: everybody - here}, rate, -c)
            else:
                limit({i: everybody - 2 * c}, rate, -c)
            rows.append({i: n, most: -1})
            limits.append(0)
        if between:
            limit({g: everybody - 2 * here}, between, -here)
    sums = [{**dict.fromkeys(region, 1.0), g: -1.0} for g, region in enumerate(regions, n)]
    sums.append(dict.fromkeys(range(n, most), 1.0))

    cost = [0.0] * (t + 1)
    cost[t], cost[most] = 1.0, 1e-4  # of the optima, one without needlessly large shares
    own = (0.0 if node.leaf else bound for node, bound in zip(nodes, bounds, strict=True))
    upper = [*own, *[inf] * (len(regions) + 2)]
    found = _minimum(cost, upper, rows, limits, sums, [0.0] * len(regions) + [1.0])
    if found is None:  # numerical trouble, for any shares are a plan
        return _scaled([float(not node.leaf) for node in nodes])
    return _scaled([max(0.0, w) for w in found[:n]])


def _minimum(
    cost: Sequence[float],
    upper: Sequence[float],
    rows: Sequence[dict[int, float]],
    limits: Sequence[float],
    sums: Sequence[dict[int, float]],
    values: Sequence[float],
) -> list[float] | None:
    """The x that minimises cost * x, where 0 <= x <= upper, rows * x <= limits and sums * x = values; None: it was
    not found. Rows are {column: coefficient}."""
    import highspy
    import numpy as np

    program, all_ = highspy.HighsLp(), [*rows, *sums]
    program.num_col_, program.num_row_ = len(cost), len(all_)
    program.col_cost_, program.col_lower_ = np.array(cost), np.zeros(len(cost))
    program.col_upper_ = np.array(upper)
    program.row_lower_ = np.array([-inf] * len(limits) + [*values])
    program.row_upper_ = np.array([*limits, *values], float)
    entries = [entry for row in all_ for entry in sorted(row.items())]
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.cumsum([0, *map(len, all_)], dtype=np.int32)
    matrix.index_ = np.array([column for column, _ in entries], np.int32)
    matrix.value_ = np.array([value for _, value in entries], float)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.passModel(program)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return list(map(float, solver.getSolution().col_value))


def _trimmed(shares: tuple[float, ...], chunks: int) -> tuple[float, ...]:
    """The shares without those of less than half a chunk, if any is more."""
    kept = [share if share * chunks >= 0.5 else 0.0 for share in shares]
    return _scaled(kept) if any(kept) else shares


def _scaled(shares: Sequence[float]) -> tuple[float, ...]:
    """In proportion, with the sum 1."""
    whole = sum(shares)
    return tuple(share / whole for share in shares)
