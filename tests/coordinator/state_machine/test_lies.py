"""What one of eight members gains by saying of itself what is not so: in the next plan, and in the mean."""

from collections import Counter
from typing import Any

import pytest
import scenario

from atoll.comm.config.security import SecurityConfig
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import Fence
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine.link_rates import witnessed_rates
from atoll.coordinator.state_machine.weights import weights

NAMES = ["ada", "bo", "cy", "dee", "eve", "fay", "gil", "hal"]
LIAR = NodeId("n8")
LINK = 1e7  # bytes a second that every link carries


def run_of_eight(names: list[str] = NAMES, **sections: Any) -> scenario.Run:
    run = scenario.Run()
    run.config = replace(run.config, reduce=replace(run.config.reduce, chunk=1), **sections)
    run.state = replace(run.state, config=run.config)
    run.do("begin", names)
    return run


def complete(run: scenario.Run, told: dict[NodeId, float], seen: dict[NodeId, float]) -> None:
    """All seal what they own, and hold it; they tell these rates of their links, and saw these of the others'."""
    ledger = run.state.round.ledger
    for owner in sorted({o for o in ledger.owners if o is not None}):
        run.do("seal", [run.name(owner)])
    members, whole = ledger.members, run.state.round.ledger.root
    for node in members:
        others = tuple(
            (n, seen[n] / (len(members) - 1), seen[n] / (len(members) - 1)) for n in members if n != node
        )
        fence = run.fence({})
        run.feed(ev.ReduceComplete(node, 1, fence, whole, 0, 0, told[node], told[node], seen=others))
    run.do("state", [*map(run.name, members), str(run.state.committed)])


def shares(run: scenario.Run) -> dict[NodeId, float]:
    run.steps()
    owners = run.state.round.ledger.owners
    return {n: k / len(owners) for n, k in Counter(o for o in owners if o is not None).items()}


def test_who_tells_a_rate_of_1e15_owns_no_more_than_others_saw_of_it() -> None:
    run = run_of_eight()
    run.steps()
    links = {NodeId(f"n{i}"): LINK for i in range(1, 9)}
    complete(run, links | {LIAR: 1e15}, links)
    assert run.state.members.here[LIAR].rates == (LINK, LINK)
    assert shares(run) == dict.fromkeys(links, 1 / 8)


def test_who_tells_a_rate_that_nobody_saw_has_none() -> None:
    run = run_of_eight()
    run.steps()
    links = {NodeId(f"n{i}"): LINK for i in range(1, 9)}
    complete(run, links | {LIAR: 1e15}, links | {LIAR: 0.0})
    assert run.state.members.here[LIAR].rates == (0.0, 0.0)
    assert shares(run)[LIAR] == 1 / 8, "it is taken for one like the others"


def test_who_is_seen_to_be_fast_by_all_owns_two_equal_shares_and_no_more() -> None:
    run = run_of_eight(NAMES[:3])
    run.steps()
    links, fast = {NodeId(f"n{i}"): 1.0 for i in range(1, 4)}, NodeId("n3")
    complete(run, links | {fast: 1e15}, links | {fast: 1e15})
    assert run.state.members.here[fast].rates[0] > 1e14
    assert shares(run)[fast] == pytest.approx(2 / 3, abs=1 / 40)


def test_a_node_that_says_less_than_was_seen_has_that() -> None:
    run = run_of_eight()
    run.steps()
    links = {NodeId(f"n{i}"): LINK for i in range(1, 9)}
    complete(run, links | {LIAR: LINK / 5}, links)
    assert run.state.members.here[LIAR].rates == (LINK / 5, LINK / 5)


def test_one_witness_counts_at_most_as_much_as_all_the_others() -> None:
    a, b, c, d = (NodeId(f"n{i}") for i in range(1, 5))

    def told(witness: NodeId, rate: float) -> ev.ReduceComplete:
        fence = Fence(Incarnation(1), Epoch(1), Round(1), 1)
        return ev.ReduceComplete(witness, 1, fence, b"", 0, 0, seen=((a, rate, 2 * rate), (witness, 1e15, 1e15)))

    assert witnessed_rates({b: told(b, 3.0), c: told(c, 4.0), d: told(d, 5.0)}) == {a: (12.0, 24.0)}
    assert witnessed_rates({b: told(b, 3.0), c: told(c, 4.0), d: told(d, 1e15)}) == {a: (14.0, 28.0)}
    assert witnessed_rates({b: told(b, 3.0), c: told(c, 9.0)}) == {a: (12.0, 24.0)}
    assert witnessed_rates({b: told(b, 3.0)}) == {a: (3.0, 6.0)}


def test_of_many_members_each_is_seen_by_some_and_taken_for_seen_alike_by_all() -> None:
    nodes = [NodeId(f"n{i}") for i in range(1, 11)]
    fence = Fence(Incarnation(1), Epoch(1), Round(1), 1)
    told = {
        n: ev.ReduceComplete(n, 1, fence, b"", 0, 0, seen=tuple((m, 2.0, 1.0) for m in nodes[:5] if m != n))
        for n in nodes[:5]
    } | {n: ev.ReduceComplete(n, 1, fence, b"", 0, 0) for n in nodes[5:]}
    assert witnessed_rates(told) == dict.fromkeys(nodes[:5], (18.0, 9.0))


# Samples that nobody trained on


def weighed(run: scenario.Run) -> dict[NodeId, float]:
    """The share of each member in the mean of the attempt in force."""
    ledger = run.state.round.ledger
    found = weights(ledger, run.config)
    return {e.node: w / sum(found) for e, w in zip(ledger.entries, found, strict=True)}


def trained(run: scenario.Run, claims: dict[NodeId, int]) -> None:
    """All take the round's ten steps in ten seconds, and claim as many samples, or these."""
    members = tuple(run.state.round.participants)
    run.do("wait", ["10"])
    run.do("reached", [run.name(n) for n in members])
    for node in members:
        samples = claims.get(node, 10)
        front = run.state.leases.by_node[node][0][0]
        work = ev.Contribution(samples, samples, 2.0, 1.0, front)
        run.feed(ev.ContributionReady(node, 1, run.state.round.number, work))
    assert run.state.round.plan is not None


def finish(run: scenario.Run) -> None:
    run.do("reduce", [])
    run.do("state", [*map(run.name, run.state.round.participants or run.state.makers), str(run.state.committed)])


def test_who_claims_twice_what_the_others_trained_counts_at_most_one_and_a_half() -> None:
    run = run_of_eight()
    trained(run, {LIAR: 20})
    assert weighed(run)[LIAR] == pytest.approx(1.5 / 8.5)


def test_who_was_silent_for_three_rounds_counts_at_most_one_and_a_half_for_all_that_it_then_claims() -> None:
    run = run_of_eight()
    for _ in range(3):
        others = NAMES[:-1]
        run.do("wait", ["10"])
        run.do("reached", others)
        run.do("wait", ["6"])  # the grace
        run.do("ready", others)
        run.do("wait", ["20"])
        run.do("reduce", [])
        run.do("state", [*NAMES, str(run.state.committed)])
    claim = data.size(run.state.leases.by_node[LIAR])
    assert run.state.committed == 3 and claim == 80
    trained(run, {LIAR: claim})
    assert run.state.round.ledger.contributions[LIAR].claimed == claim, "there was time enough"
    assert weighed(run)[LIAR] == pytest.approx(1.5 / 8.5)


def test_the_bound_of_weights_may_be_another_or_none() -> None:
    for bound, share in ((0.0, 2 / 9), (1.0, 1 / 8), (3.0, 2 / 9)):
        run = run_of_eight(security=SecurityConfig(weight_bound=bound))
        trained(run, {LIAR: 20})
        assert weighed(run)[LIAR] == pytest.approx(share)


def test_who_joined_a_moment_ago_counts_for_no_more_samples_than_there_was_time_for() -> None:
    """It has a lease for two rounds, since it may have trained before it was counted."""
    run = run_of_eight(NAMES[:7])
    trained(run, {})
    finish(run)
    trained(run, {})
    run.do("join", ["hal"])
    run.do("state", ["hal", str(run.state.committed)])
    finish(run)
    assert data.size(run.state.leases.by_node[LIAR]) == 40
    trained(run, {LIAR: 40})
    entry = run.state.round.ledger.contributions[LIAR]
    assert entry.claimed == 20 and entry.samples == 40
    assert any("claims 40 samples, and had the time for 20" in line for line in run.said)
    finish(run)
    assert run.state.pending is not None and run.state.pending.contributors[LIAR] == 20.0
    assert data.size(run.state.pending.samples[LIAR]) == 40, "its lease goes on behind all of them"


def test_a_node_eight_times_as_fast_counts_for_all_that_it_trained() -> None:
    """Also with its first contribution, and with what it kept of rounds that left it out."""
    run = run_of_eight()
    for _ in range(3):
        members = tuple(run.state.round.participants)
        run.do("wait", ["2.5"])
        work = ev.Contribution(20, 20, 2.0, 1.0, run.state.leases.by_node[LIAR][0][0])
        run.feed(ev.ContributionReady(LIAR, 1, run.state.round.number, work))
        run.do("wait", ["7.5"])
        run.do("reached", [run.name(n) for n in members if n != LIAR])
        run.do("ready", [run.name(n) for n in members if n != LIAR])
        assert run.state.round.ledger.contributions[LIAR].claimed == 20
        finish(run)
    assert run.state.members.here[LIAR].fastest == pytest.approx(8.0)
    # It is cut off for a round, trains on, and has twice as much in the next one.
    run.do("disconnect", ["hal"])
    trained_members = [run.name(n) for n in run.state.round.participants if n != LIAR]
    run.do("wait", ["1"])
    run.do("connect", ["hal"])
    run.do("wait", ["9"])
    run.do("reached", trained_members)
    run.do("ready", trained_members)
    run.do("wait", ["20"])
    run.do("reduce", [])
    run.do("state", [*NAMES, str(run.state.committed)])
    trained(run, {LIAR: 40})
    assert run.state.round.ledger.contributions[LIAR].claimed == 40
    assert weighed(run)[LIAR] == pytest.approx(1.5 / 8.5)
