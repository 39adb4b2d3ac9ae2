"""The two-level plan: who is near whom, what each member carries, and that a simulated network needs the predicted
time, for flat plans too."""

import json
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from itertools import count, product

import pytest
from scipy.optimize import linprog

from atoll.coordinator.placement.bandwidth_shares import (
    ACCEPTED_SLOWDOWN,
    ChunkShares,
    PlanNode,
    Regions,
    deal,
    with_rates,
)
from atoll.coordinator.placement.two_level import (
    SECONDS_PER_PEER,
    Rtts,
    TwoLevel,
    choose,
    find_regions,
    plan_flat,
    plan_regions,
    predict_two_level,
    usable,
)

GBIT, MBIT = 125e6, 125e3  # bytes/s
PAYLOAD = 1e9
Fleet = Callable[[random.Random, int], list[PlanNode]]
Act = Callable[[], None]
NEAR, FAR = 0.001, 0.08  # seconds


def rtts(n: int, size: int, near: float = NEAR, far: float = FAR) -> Rtts:
    """Between all of n members in regions of `size`."""
    return {(i, j): near if i // size == j // size else far for i in range(n) for j in range(i + 1, n)}


def equal_members(rng: random.Random, n: int) -> list[PlanNode]:
    return [PlanNode(GBIT, GBIT)] * n


def homes(rng: random.Random, n: int) -> list[PlanNode]:
    return [PlanNode(rng.uniform(200, 1000) * MBIT, rng.uniform(200, 1000) * MBIT) for _ in range(n)]


def labs(rng: random.Random, n: int) -> list[PlanNode]:
    """Fast within a region."""
    return [PlanNode(GBIT * rng.uniform(0.3, 1), GBIT, local=GBIT * rng.uniform(3, 10)) for _ in range(n)]


def a_mixture(rng: random.Random, n: int) -> list[PlanNode]:
    """With leaves and members that only reduce; one of four is neither."""
    kinds = [(i % 4 > 0 and rng.random() < 0.3, i % 4 == 0 or rng.random() < 0.8) for i in range(n)]
    return [PlanNode(rng.uniform(300, 2000) * MBIT, 5 * GBIT, *kind) for kind in kinds]


FLEETS: list[Fleet] = [equal_members, homes, labs, a_mixture]


class Network:
    """Each direction of each link carries one chunk at a time, the lowest chunk that waits first."""

    def __init__(
        self, nodes: list[PlanNode], regions: Regions, between: float, latency: Rtts, chunks: int
    ) -> None:
        self._nodes, self._between, self._latency = with_rates(nodes), between, latency
        self._home = {i: g for g, region in enumerate(regions) for i in region}
        self.chunks, self._size = chunks, PAYLOAD / chunks  # bytes
        self._waiting = defaultdict[str, list[tuple[int, int, float, Act]]](
            list
        )  # at each link: chunk, -, seconds
        self._busy = set[str]()
        self._events: list[tuple[float, int, Act]] = []
        self._order, self._now = count(), 0.0

    def send(self, i: int, j: int, chunk: int, arrived: Act) -> None:
        """Carry the chunk from member i to member j, then call `arrived`."""
        if i == j:
            return arrived()
        delay = self._latency.get((min(i, j), max(i, j)), 0.0) / 2
        self._carry(chunk, self._path(i, j), lambda: self._at(self._now + delay, arrived))

    def run(self) -> float:
        """Seconds until nothing is under way."""
        while self._events:
            self._now, _, act = heappop(self._events)
            act()
        return self._now

    def _path(self, i: int, j: int) -> list[tuple[str, float]]:
        """The links from i to j and their rates, bytes/s."""
        sender, receiver = self._nodes[i], self._nodes[j]
        if self._home[i] == self._home[j]:
            out = (f"local {i} out", sender.local) if sender.local else (f"{i} out", sender.up)
            return [out, (f"local {j} in", receiver.local) if receiver.local else (f"{j} in", receiver.down)]
        common = [(f"region {self._home[i]} out", self._between), (f"region {self._home[j]} in", self._between)]
        return [(f"{i} out", sender.up), *(common if self._between else []), (f"{j} in", receiver.down)]

    def _carry(self, chunk: int, path: list[tuple[str, float]], done: Act) -> None:
        if not path:
            return done()
        (link, rate), rest = path[0], path[1:]
        entry = (chunk, next(self._order), self._size / rate, lambda: self._carry(chunk, rest, done))
        heappush(self._waiting[link], entry)
        self._serve(link)

    def _serve(self, link: str) -> None:
        if link in self._busy or not self._waiting[link]:
            return
        _, _, seconds, forward = heappop(self._waiting[link])
        self._busy.add(link)

        def carried() -> None:
            self._busy.discard(link)
            self._serve(link)
            forward()

        self._at(self._now + seconds, carried)

    def _at(self, when: float, act: Act) -> None:
        heappush(self._events, (when, next(self._order), act))


def when_all(expected: int, act: Act) -> Act:
    """To be called `expected` times; the last time acts."""
    left = count(expected - 1, -1)
    return lambda: act() if next(left) == 0 else None


def run_flat(network: Network, nodes: list[PlanNode], plan: ChunkShares) -> float:
    members = [i for i, node in enumerate(nodes) if node.contributes]

    def seal(c: int, owner: int) -> None:
        for j in members:
            network.send(owner, j, c, lambda: None)

    for c, owner in enumerate(deal(plan.shares, network.chunks)):
        contributed = when_all(len(members), partial(seal, c, owner))
        for i in members:
            network.send(i, owner, c, contributed)
    return network.run()


def run_two_level(network: Network, nodes: list[PlanNode], plan: TwoLevel) -> float:
    members = [[i for i in region if nodes[i].contributes] for region in plan.regions]

    def spread(c: int, g: int) -> None:
        for j in members[g]:
            network.send(plan.relays[c][g], j, c, lambda: None)

    def seal(c: int) -> None:
        for g, relay in enumerate(plan.relays[c]):
            network.send(plan.owners[c], relay, c, partial(spread, c, g))

    for c, owner in enumerate(plan.owners):
        merged = when_all(len(members), partial(seal, c))
        for g, relay in enumerate(plan.relays[c]):
            summed = when_all(len(members[g]), partial(network.send, relay, owner, c, merged))
            for i in members[g]:
                network.send(i, relay, c, summed)
    return network.run()


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
def test_a_flat_plan_takes_the_predicted_time_in_a_simulated_network(n: int, fleet: Fleet) -> None:
    nodes, chunks = fleet(random.Random(n), n), max(128, 4 * n)
    plan = plan_flat(nodes, {}, PAYLOAD, chunks)
    simulated = run_flat(Network(nodes, [range(n)], 0, {}, chunks), nodes, plan)
    assert 0.95 * plan.seconds <= simulated <= 1.15 * plan.seconds


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize(
    ("n", "size", "between"),
    [(8, 4, 0.0), (8, 4, GBIT), (24, 6, 0.0), (32, 8, GBIT)],
)
def test_a_two_level_plan_takes_the_predicted_time_in_a_simulated_network(
    n: int, size: int, between: float, fleet: Fleet
) -> None:
    nodes, measured, chunks = fleet(random.Random(n), n), rtts(n, size), max(128, 8 * n)
    plan = plan_regions(nodes, measured, PAYLOAD, chunks, between=between)
    assert plan is not None
    simulated = run_two_level(Network(nodes, plan.regions, between, measured, chunks), nodes, plan)
    assert 0.95 * plan.seconds <= simulated <= 1.15 * plan.seconds


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize(("n", "size"), [(8, 4), (24, 8)])
def test_a_flat_plan_across_regions_that_share_a_link_takes_the_predicted_time(
    n: int, size: int, fleet: Fleet
) -> None:
    nodes, measured, chunks = fleet(random.Random(n), n), rtts(n, size), max(128, 8 * n)
    regions = usable(find_regions(n, measured), nodes, measured)
    plan = plan_flat(nodes, measured, PAYLOAD, chunks, between=GBIT)
    simulated = run_flat(Network(nodes, regions, GBIT, measured, chunks), nodes, plan)
    assert 0.95 * plan.seconds <= simulated <= 1.15 * plan.seconds


def test_members_are_of_one_region_if_short_links_connect_them() -> None:
    towns = rtts(12, 4)
    assert find_regions(12, towns) == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    chain = {(0, 1): 0.002, (1, 2): 0.003, (3, 4): 0.002, (2, 3): 0.09, (0, 4): 0.1}
    assert find_regions(5, chain) == ((0, 1, 2), (3, 4))


@pytest.mark.parametrize("seed", range(20))
def test_regions_are_found_in_noisy_and_sparse_round_trips(seed: int) -> None:
    rng = random.Random(seed)
    n, size = rng.randint(4, 60), rng.randint(2, 9)
    chain = {(i, i + 1) for i in range(n - 1)}  # enough to know who is near
    kept = {
        pair: rtt * rng.uniform(1, 2) * (20 if rng.random() < 0.02 and pair not in chain else 1)
        for pair, rtt in rtts(n, size, near=0.004, far=0.06).items()
        if pair in chain or rng.random() < 0.3
    }
    expected = tuple(tuple(range(g, min(g + size, n))) for g in range(0, n, size))
    assert find_regions(n, kept) == expected


def test_round_trips_without_a_gap_or_without_a_measurement_are_one_region() -> None:
    rng = random.Random(1)
    assert find_regions(3, {}) == ((0, 1, 2),)
    assert find_regions(20, {pair: rng.uniform(0.02, 0.15) for pair in rtts(20, 20)}) == (tuple(range(20)),)
    assert find_regions(4, {pair: rng.uniform(2e-5, 1e-3) for pair in rtts(4, 4)}) == (tuple(range(4)),)


def test_members_that_nobody_measured_are_a_region_of_their_own() -> None:
    assert find_regions(8, rtts(6, 3)) == ((0, 1, 2), (3, 4, 5), (6, 7))


def test_a_region_without_a_relay_joins_the_nearest() -> None:
    leaf, reducer, node = (
        PlanNode(GBIT, GBIT, leaf=True),
        PlanNode(GBIT, GBIT, contributes=False),
        PlanNode(GBIT, GBIT),
    )
    measured = {(0, 1): NEAR, (2, 3): NEAR, (0, 2): FAR, (0, 4): 0.2, (3, 4): 0.1, (1, 5): 0.05}
    nodes = [node, node, node, node, leaf, reducer, leaf]
    assert usable(find_regions(7, measured), nodes, measured) == ((0, 1, 5, 6), (2, 3, 4))


@pytest.mark.parametrize("fleet", FLEETS)
def test_each_chunk_has_a_relay_in_each_region_and_one_of_them_owns_it(fleet: Fleet) -> None:
    nodes = fleet(random.Random(5), 40)
    plan = plan_regions(nodes, rtts(40, 8), PAYLOAD, 300)
    assert plan is not None and sorted(i for region in plan.regions for i in region) == list(range(40))
    assert len(plan.relays) == len(plan.owners) == 300
    for row, owner in zip(plan.relays, plan.owners, strict=True):
        assert owner in row
        assert all(relay in region for relay, region in zip(row, plan.regions, strict=True))
        assert not any(nodes[relay].leaf for relay in row)
    assert plan == plan_regions(nodes, rtts(40, 8), PAYLOAD, 300)


@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_with_a_limit_a_made_up_link_relays_and_owns_two_equal_shares_at_most(size: int) -> None:
    """Also in a region that has fewer members than the others."""
    n, chunks = 20 + size, 600
    nodes = [*[PlanNode(GBIT, GBIT, local=GBIT)] * 20, *[PlanNode(GBIT, GBIT, local=GBIT / 20)] * (size - 1)]
    nodes.append(PlanNode(1e15, 1e15, local=1e15))
    home = [min(i // 10, 2) for i in range(n)]
    measured = {(i, j): NEAR if home[i] == home[j] else FAR for i in range(n) for j in range(i + 1, n)}
    assert find_regions(n, measured)[-1] == tuple(range(20, n))
    plan = plan_regions(nodes, measured, PAYLOAD, chunks, limit=2.0)
    assert plan is not None
    owned, relayed = Counter(plan.owners), Counter(row[-1] for row in plan.relays)
    assert max(owned.values()) <= 2 * chunks / n + 2 and sum(owned.values()) == chunks
    assert relayed[n - 1] <= min(2 * chunks / size + 1, chunks) and sum(relayed.values()) == chunks
    free = plan_regions(nodes, measured, PAYLOAD, chunks)
    assert free is not None and Counter(free.owners)[n - 1] > owned[n - 1]


def test_equal_members_relay_and_own_equal_numbers_of_chunks() -> None:
    nodes = [PlanNode(GBIT, GBIT)] * 64
    plan = plan_regions(nodes, rtts(64, 16), PAYLOAD, 640)
    assert plan is not None
    assert set(Counter(relay for row in plan.relays for relay in row).values()) == {40}
    assert set(Counter(plan.owners).values()) == {10}


@pytest.mark.parametrize(("n", "size"), [(32, 16), (64, 16), (64, 4)])
def test_two_levels_divide_what_leaves_a_region_by_its_members(n: int, size: int) -> None:
    nodes, regions = [PlanNode(GBIT, GBIT, local=1000 * GBIT)] * n, n // size
    measured = rtts(n, size)
    plan = plan_regions(nodes, measured, PAYLOAD, 1024, between=GBIT)
    assert plan is not None
    out = sum((relay != owner) + (relay == owner) * (regions - 1) for relay, owner in first_region(plan))
    assert out / 1024 == pytest.approx(2 * (1 - 1 / regions), rel=0.01)
    flat = plan_flat(nodes, measured, PAYLOAD, 1024, between=GBIT)
    assert flat.seconds == pytest.approx(8 * 2 * size * (1 - 1 / regions), rel=0.02)
    assert plan.seconds == pytest.approx(8 * 2 * (1 - 1 / regions), rel=0.05)


def first_region(plan: TwoLevel) -> Iterator[tuple[int, int]]:
    """The relay of the first region and the owner, of each chunk."""
    return ((row[0], owner) for row, owner in zip(plan.relays, plan.owners, strict=True))


def best_two_level(nodes: list[PlanNode], regions: Regions, payload: float, between: float) -> float:
    """Seconds, by linear programme: relay shares r and owner shares o <= r of each member on their own."""
    n, others = len(nodes), len(regions) - 2
    t, rows, limits, sums = 2 * n, list[dict[int, float]](), list[float](), list[dict[int, float]]()
    for region in regions:
        here = sum(nodes[i].contributes for i in region)
        for i in region:
            c, rate = int(nodes[i].contributes), min(nodes[i].up, nodes[i].down) / payload
            inside, outside = {i: here - 2 * c}, {i: 1, n + i: others}
            if nodes[i].local:
                rows += [inside | {t: -nodes[i].local / payload}, outside | {t: -rate}]
                limits += [-c, 0]
            else:
                rows.append({i: inside[i] + 1, n + i: others, t: -rate})
                limits.append(-c)
            rows.append({n + i: 1, i: -1})
            limits.append(0)
        if between:
            rows.append({n + i: others for i in region} | {t: -between / payload})
            limits.append(-1)
        sums.append(dict.fromkeys(region, 1))
    sums.append(dict.fromkeys(range(n, 2 * n), 1))
    dense, whole = ([[row.get(k, 0.0) for k in range(t + 1)] for row in table] for table in (rows, sums))
    bounds = [(0, 0 if node.leaf else None) for node in nodes] * 2 + [(0, None)]
    cost = [0.0] * t + [1.0]
    return float(linprog(cost, dense, limits, whole, [1.0] * len(sums), bounds, method="highs").x[t])


@pytest.mark.long
@pytest.mark.parametrize("between", [0.0, GBIT])
@pytest.mark.parametrize(("fleet", "seed"), list(product(FLEETS, range(4))))
def test_no_two_level_plan_is_a_tenth_faster(fleet: Fleet, seed: int, between: float) -> None:
    rng = random.Random(seed)
    n, size, payload = 24, rng.choice([4, 8, 12]), 1e13  # bytes: so many that only the links count
    nodes, measured = fleet(rng, n), rtts(n, size)
    plan = plan_regions(nodes, measured, payload, 4000, between=between)
    assert plan is not None
    best = best_two_level(nodes, plan.regions, payload, between)
    assert best * 0.999 <= plan.seconds <= best * ACCEPTED_SLOWDOWN * 1.02


def test_the_prediction_of_a_small_plan_is_the_sum_that_is_written_down() -> None:
    nodes = [PlanNode(GBIT, GBIT)] * 4
    measured = rtts(4, 2, near=0.002, far=0.1)
    plan = TwoLevel(((0, 1), (2, 3)), relays=((0, 2), (1, 3)), owners=(0, 3), seconds=0.0)
    # each sends a half to its region's other relay and a half as relay, and a half to the other region
    links = 1.5 * 1e9 / GBIT
    assert predict_two_level(nodes, plan, measured, 1e9) == pytest.approx(
        links + 2 * SECONDS_PER_PEER + 0.002 + 0.1
    )
    slow_link = 2 * 0.5 * 1e9 / (0.1 * GBIT)
    at_slow_link = predict_two_level(nodes, plan, measured, 1e9, between=0.1 * GBIT)
    assert at_slow_link == pytest.approx(slow_link + 2 * SECONDS_PER_PEER + 0.002 + 0.1)


def test_two_levels_are_chosen_where_regions_share_a_link_and_not_where_members_have_their_own() -> None:
    labs_ = [PlanNode(GBIT, GBIT, local=10 * GBIT)] * 32
    assert isinstance(choose(labs_, rtts(32, 8), PAYLOAD, 256, between=GBIT), TwoLevel)
    homes_ = [PlanNode(GBIT / 10, GBIT / 10)] * 32
    assert isinstance(choose(homes_, rtts(32, 8), PAYLOAD, 256), ChunkShares)
    assert isinstance(choose(labs_, rtts(32, 32), PAYLOAD, 256, between=GBIT), ChunkShares)


def test_within_one_region_the_local_rate_counts() -> None:
    lab = [PlanNode(GBIT, GBIT, local=10 * GBIT)] * 8
    assert plan_flat(lab, {}, PAYLOAD, 256).seconds == pytest.approx(2 * 7 / 8 * 0.8, rel=0.02)


def test_a_thousand_peers_are_not_predicted_for_free() -> None:
    nodes = [PlanNode(100 * GBIT, 100 * GBIT)] * 1000
    assert plan_flat(nodes, {}, 1e6, 1000).seconds > 1.0


@pytest.mark.long
def test_a_thousand_members_are_planned_in_seconds() -> None:
    nodes, measured = labs(random.Random(1), 1000), rtts(1000, 16)
    begun = time.process_time()
    assert isinstance(choose(nodes, measured, PAYLOAD, 1000, between=GBIT), TwoLevel)
    assert time.process_time() - begun < 6


@pytest.mark.long
def test_the_bench_predicts_every_scenario_for_people_and_for_programs() -> None:
    command = [sys.executable, "-P", "-m", "atoll.comm.cli", "bench", "plan"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240, check=True)
    clusters, homes_ = json.loads(done.stdout)["scenarios"]
    assert [row["n"] for row in clusters["rows"]] == [4, 8, 16, 32, 64, 128, 256, 512, 1000]
    assert {row["chosen"] for row in homes_["rows"]} == {"flat"}
    for row in clusters["rows"]:
        assert (row["chosen"] == "two-level") == (row["n"] > 16) == (row["two_level_s"] is not None)
    table = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    assert "clusters: " in table and "two-level" in table
