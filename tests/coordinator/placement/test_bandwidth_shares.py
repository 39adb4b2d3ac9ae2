"""The flat plan: exact on known examples, and as good as a brute-force search and a solver on drawn ones."""

import random
import subprocess
import sys
import time
from itertools import accumulate, product
from math import inf

import pytest
from scipy.optimize import linprog

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.placement.bandwidth_shares import (
    ACCEPTED_SLOWDOWN,
    NobodyReachable,
    PlanNode,
    Regions,
    blend,
    deal,
    plan_shares,
    predict,
)
from atoll.coordinator.state_machine.chunk_owners import (
    LONG_PATH_NOISE,
    NEW_LINK_NOISE,
    NEW_LINK_REDUCES,
    SHORT_PATH_NOISE,
    rate_noise,
    smooth_rates,
)
from atoll.coordinator.state_machine.members import Member, MemberState

GBIT, MBIT = 125e6, 125e3  # bytes/s
FAST, SLOW = PlanNode(GBIT, GBIT), PlanNode(GBIT / 10, GBIT / 10)


def drawn(rng: random.Random, n: int) -> list[PlanNode]:
    """Links between 20 and 1000 Mbit/s; some leaves, some members that only reduce, member 0 neither."""
    rates = [(rng.uniform(20, 1000) * MBIT, rng.uniform(20, 1000) * MBIT) for _ in range(n)]
    kinds = [(i > 0 and rng.random() < 0.2, i == 0 or rng.random() < 0.8) for i in range(n)]
    return [PlanNode(*rate, *kind) for rate, kind in zip(rates, kinds, strict=True)]


def optimum(nodes: list[PlanNode], payload: float, limit: float = inf) -> float:
    """The linear programme as the reference has it: up and down apart, minimise the seconds. `limit`: equal shares
    that a contributor owns at most."""
    everybody = sum(node.contributes for node in nodes)
    rows, limits = [], []
    for i, node in enumerate(nodes):
        sends_own, sends_owned = int(node.contributes), everybody - node.contributes
        for rate in (node.up, node.down):
            row = [0.0] * (len(nodes) + 1)
            row[i], row[-1] = sends_owned - sends_own, -rate / payload
            rows.append(row)
            limits.append(-sends_own)
    most = limit / sum(not node.leaf for node in nodes)
    upper = [0 if node.leaf else min(most, 1.0) if node.contributes else 1.0 for node in nodes]
    bounds: list[tuple[float, float | None]] = [(0, bound) for bound in upper] + [(0, None)]
    whole = [[1.0] * len(nodes) + [0.0]]
    found = linprog([0.0] * len(nodes) + [1.0], rows, limits, whole, [1.0], bounds, method="highs")
    return float(found.x[-1])


def test_four_equal_members_own_exactly_a_quarter_each() -> None:
    plan = plan_shares([FAST] * 4, 1e9)
    assert plan.shares == (0.25, 0.25, 0.25, 0.25)
    assert plan.seconds == 2 * 3 / 4 * 1e9 / GBIT


def test_a_member_with_a_tenth_of_the_rate_of_fifteen_others_owns_nothing_and_halves_the_time() -> None:
    nodes = [FAST] * 15 + [SLOW]
    assert predict(nodes, [1 / 16] * 16, 1e9) == pytest.approx(150)
    plan = plan_shares(nodes, 1e9)
    assert plan.seconds == pytest.approx(80)
    assert plan.shares == (*[pytest.approx(1 / 15)] * 15, 0.0)


def test_one_member_at_20_mbit_among_three_at_100_sends_25_mb_in_the_10_s_that_its_own_vector_takes() -> None:
    nodes = [PlanNode(100 * MBIT, 100 * MBIT)] * 3 + [PlanNode(20 * MBIT, 20 * MBIT)]
    plan = plan_shares(nodes, 25e6)
    assert plan.seconds == pytest.approx(10)
    assert plan.shares[3] == 0
    assert predict(nodes, [0.25] * 4, 25e6) == pytest.approx(15)


def test_members_that_do_not_bound_the_time_own_as_much_as_each_other_whatever_was_measured() -> None:
    nodes = [
        PlanNode(60 * MBIT, 60 * MBIT),
        PlanNode(75 * MBIT, 70 * MBIT),
        PlanNode(90 * MBIT, 64 * MBIT),
        PlanNode(20 * MBIT, 20 * MBIT),
    ]
    plan = plan_shares(nodes, 25e6)
    assert plan.seconds == pytest.approx(10)
    assert plan.shares == pytest.approx((1 / 3, 1 / 3, 1 / 3, 0))
    almost = PlanNode(0.75 * GBIT, 0.75 * GBIT)
    assert plan_shares([FAST, FAST, almost, almost], 1e9).shares == pytest.approx((5 / 14, 5 / 14, 1 / 7, 1 / 7))


def test_only_the_slower_direction_of_a_link_counts() -> None:
    home = PlanNode(up=20 * MBIT, down=500 * MBIT)
    assert plan_shares([FAST] * 3 + [home], 1e9) == plan_shares([FAST] * 3 + [PlanNode(home.up, home.up)], 1e9)


@pytest.mark.parametrize("seed", range(40))
def test_the_closed_form_is_as_fast_as_the_linear_programme(seed: int) -> None:
    rng = random.Random(seed)
    nodes = drawn(rng, rng.randint(1, 24))
    plan, best = plan_shares(nodes, 1e9), optimum(nodes, 1e9)
    equal = [float(not node.leaf) for node in nodes]
    at_equal = predict(nodes, [w / sum(equal) for w in equal], 1e9)
    assert best * (1 - 1e-6) <= plan.seconds <= best * ACCEPTED_SLOWDOWN * (1 + 1e-6)
    if at_equal > best * ACCEPTED_SLOWDOWN * (1 + 1e-6):
        assert plan.seconds == pytest.approx(best, rel=1e-6)
    assert sum(plan.shares) == pytest.approx(1)
    assert all(w == 0 for w, node in zip(plan.shares, nodes, strict=True) if node.leaf)
    assert plan.seconds == predict(nodes, plan.shares, 1e9)


@pytest.mark.parametrize("limit", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("seed", range(20))
def test_with_a_limit_it_is_as_fast_as_the_programme_with_upper_bounds(seed: int, limit: float) -> None:
    rng = random.Random(seed)
    nodes = drawn(rng, rng.randint(3, 24))
    plan, best = plan_shares(nodes, 1e9, limit=limit), optimum(nodes, 1e9, limit)
    assert plan.seconds <= best * ACCEPTED_SLOWDOWN * (1 + 1e-6)
    able = sum(not node.leaf for node in nodes)
    givers = [share for share, node in zip(plan.shares, nodes, strict=True) if node.contributes]
    assert able < limit or len(givers) <= 2 or max(givers) <= limit / able * (1 + 1e-9)
    assert sum(plan.shares) == pytest.approx(1)
    assert all(w == 0 for w, node in zip(plan.shares, nodes, strict=True) if node.leaf)


def test_who_tells_of_a_link_that_no_machine_has_owns_two_equal_shares_and_no_more() -> None:
    plan = plan_shares([replace(FAST, up=1e15, down=1e15), *[FAST] * 7], 1e9, chunks=287, limit=2.0)
    assert plan.shares[0] <= 2 / 8 and sum(plan.shares) == pytest.approx(1)
    # One that alone can be dialled owns everything, and one that only reduces what is best.
    alone = [FAST, *[replace(SLOW, leaf=True)] * 7]
    assert plan_shares(alone, 1e9, limit=2.0).shares[0] == 1.0
    helped = [*[SLOW] * 7, replace(FAST, contributes=False)]
    assert plan_shares(helped, 1e9, limit=2.0) == plan_shares(helped, 1e9)
    assert plan_shares(helped, 1e9, limit=2.0).shares[7] > 2 / 8


def grid(n: int, steps: int) -> list[tuple[float, ...]]:
    """All shares of n members in multiples of 1 / steps."""
    firsts = product(range(steps + 1), repeat=n - 1)
    return [(*(k / steps for k in first), 1 - sum(first) / steps) for first in firsts if sum(first) <= steps]


@pytest.mark.parametrize("seed", range(10))
def test_no_shares_of_a_fine_grid_are_faster(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [
        PlanNode(rng.uniform(20, 1000) * MBIT, GBIT, contributes=i < 3 or rng.random() < 0.5) for i in range(4)
    ]
    searched = min(predict(nodes, shares, 1e9) for shares in grid(4, 40))
    at_equal = predict(nodes, [1 / 4] * 4, 1e9)
    assert plan_shares(nodes, 1e9).seconds <= (at_equal if at_equal <= searched * ACCEPTED_SLOWDOWN else searched)


@pytest.mark.parametrize("seed", range(10))
def test_no_shares_of_a_fine_grid_are_faster_where_regions_share_a_link(seed: int) -> None:
    rng = random.Random(seed)
    regions: Regions = ((0, 1, 2), (3,))
    nodes = [
        PlanNode(rng.uniform(50, 1000) * MBIT, GBIT, local=rng.choice([0, 10 * GBIT, GBIT])) for _ in range(4)
    ]
    nodes[rng.randrange(3)] = PlanNode(GBIT, GBIT, leaf=True, local=GBIT)
    between = rng.choice([0.1, 0.5, 2]) * GBIT
    inside = [w for w in grid(4, 40) if not any(w[i] and nodes[i].leaf for i in range(4))]
    searched = min(predict(nodes, w, 1e9, regions=regions, between=between) for w in inside)
    plan = plan_shares(nodes, 1e9, regions=regions, between=between)
    at_equal = predict(nodes, [float(not node.leaf) / 3 for node in nodes], 1e9, regions=regions, between=between)
    assert plan.seconds <= (at_equal if at_equal <= searched * ACCEPTED_SLOWDOWN else searched * 1.001)
    assert plan.seconds == predict(nodes, plan.shares, 1e9, regions=regions, between=between)


def test_a_large_region_behind_a_common_link_owns_less() -> None:
    nodes = [FAST] * 16
    regions: Regions = (tuple(range(6)), *((i,) for i in range(6, 16)))
    plan = plan_shares(nodes, 1e9, regions=regions, between=GBIT)
    assert sum(plan.shares[:6]) < 0.01
    assert plan.seconds == pytest.approx(48, rel=1e-3)  # 6 vectors out, the results of 6 in: nothing is less
    assert predict(nodes, [1 / 16] * 16, 1e9, regions=regions, between=GBIT) == pytest.approx(60)


def test_equal_shares_are_kept_unless_others_are_a_tenth_faster() -> None:
    almost = [FAST] * 7 + [PlanNode(0.95 * GBIT, GBIT)]
    assert plan_shares(almost, 1e9).shares == (1 / 8,) * 8
    apart = [FAST] * 7 + [PlanNode(0.7 * GBIT, GBIT)]
    assert plan_shares(apart, 1e9).shares[7] < 1 / 8


def test_a_slow_leaf_sets_the_time_and_leaves_the_others_equal() -> None:
    plan = plan_shares([FAST] * 4 + [PlanNode(MBIT, MBIT, leaf=True)], 1e6)
    assert plan.shares == (0.25, 0.25, 0.25, 0.25, 0.0)
    assert plan.seconds == pytest.approx(8)


def test_members_that_cannot_be_reached_alone_are_an_error() -> None:
    with pytest.raises(NobodyReachable, match="none of the 3 members can be reached"):
        plan_shares([PlanNode(GBIT, GBIT, leaf=True)] * 3, 1e9)


def test_a_reducer_takes_load_off_slow_contributors_and_receives_no_result() -> None:
    givers = [SLOW] * 4
    alone, helped = (
        plan_shares(givers, 1e9),
        plan_shares([*givers, PlanNode(10 * GBIT, 10 * GBIT, contributes=False)], 1e9),
    )
    assert alone.seconds == pytest.approx(120)
    assert helped.seconds == pytest.approx(80)  # each sends and receives one vector
    assert helped.shares == (0, 0, 0, 0, 1)
    leaf = [PlanNode(GBIT, GBIT, leaf=True)] * 2
    only = plan_shares([*leaf, PlanNode(GBIT, GBIT, contributes=False)], 1e9)
    assert only.shares == (0, 0, 1) and only.seconds == pytest.approx(16)  # two vectors in, two results out


def test_one_contributor_sends_nothing_and_two_send_one_vector() -> None:
    assert plan_shares([FAST], 1e9).seconds == 0
    reducer = PlanNode(GBIT, GBIT, contributes=False)
    assert plan_shares([FAST, reducer], 1e9).shares == (1, 0)
    assert plan_shares([FAST, SLOW], 1e9).seconds == pytest.approx(80)


def test_an_unknown_rate_is_the_median_of_the_known_ones_and_no_limit_if_none_is_known() -> None:
    known = [PlanNode(GBIT, GBIT), PlanNode(2 * GBIT, GBIT), PlanNode(3 * GBIT, GBIT)]
    assert plan_shares([*known, PlanNode(0, 0)], 1e9) == plan_shares([*known, PlanNode(2 * GBIT, GBIT)], 1e9)
    assert plan_shares([PlanNode(0, 0)] * 4, 1e9).shares == (0.25,) * 4
    assert plan_shares([PlanNode(0, 0), PlanNode(0, 0, leaf=True)], 1e9).seconds == 0


def test_shares_of_less_than_half_a_chunk_are_dropped_where_that_costs_little() -> None:
    nodes = [FAST] * 8 + [PlanNode(0.54 * GBIT, GBIT)]
    assert 0 < plan_shares(nodes, 1e9).shares[8] < 0.5 / 16
    assert plan_shares(nodes, 1e9, chunks=16).shares[8] == 0
    crowd = [PlanNode(100 * GBIT, 100 * GBIT)] + [FAST] * 300
    assert 0 < min(plan_shares(crowd, 1e9, chunks=100).shares) < 0.5 / 100


@pytest.mark.parametrize(("n", "chunks"), [(1, 5), (4, 12), (4, 13), (7, 100), (16, 1050), (5, 3)])
def test_equal_shares_are_dealt_in_turn(n: int, chunks: int) -> None:
    assert deal([1 / n] * n, chunks) == tuple(c % n for c in range(chunks))


@pytest.mark.parametrize("seed", range(30))
def test_every_stretch_of_chunks_is_shared_as_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    n, chunks = rng.randint(1, 20), rng.randint(1, 400)
    drawn_shares = [rng.choice([0.0, rng.random()]) for _ in range(n - 1)] + [0.5]
    shares = [w / sum(drawn_shares) for w in drawn_shares]
    owners = deal(shares, chunks)
    assert len(owners) == chunks and deal(shares, chunks) == owners
    for i in range(n):
        m = owners.count(i)
        assert abs(m - shares[i] * chunks) < 1 and (shares[i] > 0 or m == 0)
        before = list(accumulate((owner == i for owner in owners), initial=0))
        # among the places up to x there are m x chunks of each owner, rounded
        assert all(abs(before[c] - m * c / chunks) <= 0.5 + m * n / (2 * chunks) for c in range(chunks + 1))


def test_a_rate_rises_at_once_falls_slowly_and_ignores_what_was_not_measured() -> None:
    assert blend(0, 5) == 5
    assert blend(5, 0) == 5
    assert blend(5, 8) == 8
    assert blend(8, 4) == 7
    rate = 100.0
    for _ in range(20):
        rate = blend(rate, 10)
    assert rate == pytest.approx(10, rel=0.05)


def test_a_thousand_members_are_planned_well_under_a_second() -> None:
    rng = random.Random(1)
    nodes = drawn(rng, 1000)
    begun = time.process_time()
    plan_shares(nodes, 1e9, chunks=1000)
    assert time.process_time() - begun < 0.5
    local = [PlanNode(node.up, node.down, local=rng.uniform(1, 10) * GBIT) for node in nodes]
    regions = [range(g, min(g + 16, 1000)) for g in range(0, 1000, 16)]
    begun = time.process_time()
    plan_shares(local, 1e9, chunks=1000, regions=regions, between=GBIT)
    assert time.process_time() - begun < 2


def test_a_plan_without_regions_does_not_load_the_solver() -> None:
    probe = (
        "import sys; from atoll.coordinator.placement.bandwidth_shares import *;"
        "import atoll.coordinator.placement.two_level;"
        "plan_shares([PlanNode(1e8, 1e8), PlanNode(1e8, 1e8), PlanNode(1e8, 1e8), PlanNode(1e6, 1e6)], 1e9);"
        "sys.exit('highspy' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", probe], timeout=240).returncode == 0


def test_near_links_that_showed_less_than_others_because_their_machines_were_busy_own_as_much() -> None:
    busy = [PlanNode(rate * MBIT, rate * MBIT) for rate in (1000, 2000, 3000, 1500)]
    assert plan_shares(busy, 1e9).shares[0] < 0.1
    assert plan_shares(smooth_rates(busy, [2.0] * 4), 1e9).shares == (0.25,) * 4
    assert smooth_rates(busy, [1.0] * 4) == busy, "of links that are known it is what they carry"
    slow = [*busy[1:], PlanNode(20 * MBIT, 20 * MBIT)]
    assert plan_shares(smooth_rates(slow, [2.0] * 4), 1e9).shares[3] == 0
    unknown = PlanNode(0, 0)
    assert smooth_rates([unknown, *busy[1:]], [2.0] * 4)[0] == unknown


def test_rates_of_links_say_the_less_the_seldomer_they_were_measured_and_the_nearer_they_are() -> None:
    member = Member(NodeId("n1"), 1, "", "", "", MemberState.ACTIVE, 0.0, 0.0)
    far = replace(member, rtts={NodeId("n2"): 0.001, NodeId("n3"): 0.05})
    assert rate_noise(member) == rate_noise(far) == NEW_LINK_NOISE, "nobody knows where it is"
    assert rate_noise(replace(far, measured=NEW_LINK_REDUCES)) == LONG_PATH_NOISE
    assert rate_noise(replace(far, measured=NEW_LINK_REDUCES, rtts={NodeId("n2"): 0.001})) == SHORT_PATH_NOISE


@pytest.mark.parametrize(
    "links",
    [
        [(1e15, 1e15), (1e7, 1e3), (0, 0), (1e7, 0), (1, 1e9, True), (1, 0), (1, 0)],
        [(1e9, 1e9), (0, 1), (1e9, 1), (1e9, 1e9, True), (1e7, 1), (0, 0), (0, 1e7)],
    ],
)
def test_rates_that_differ_1e15_times_have_a_plan(links: list[tuple[float, ...]]) -> None:
    """Sums over all links lose what the slow ones add: nobody owned anything."""
    planned = plan_shares([PlanNode(*link) for link in links], 40.0, chunks=4, limit=2.0)  # type: ignore[arg-type]
    assert sum(planned.shares) == pytest.approx(1.0) and planned.seconds < inf


@pytest.mark.parametrize("seed", range(40))
def test_whatever_rates_are_told_the_shares_are_all_of_the_chunks(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        rates = [0.0, 1.0, 1.0 + 2**-52, 1e3, 1e7, 1e9, 1e15]
        nodes = [PlanNode(rng.choice(rates), rng.choice(rates), i > 0 and rng.random() < 0.2) for i in range(7)]
        planned = plan_shares(nodes, rng.choice([40.0, 1e12]), chunks=rng.choice([1, 4, 1000]), limit=2.0)
        assert sum(planned.shares) == pytest.approx(1.0) and 0 <= planned.seconds < inf
        assert not any(
            share < 0 or (share and node.leaf) for share, node in zip(planned.shares, nodes, strict=True)
        )
