"""A commit record says what was in the round, number by number."""

import pytest
import scenario

from atoll.comm.bitmap import bitmap
from atoll.comm.digest import digest, root
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.comm.rounding import rounded
from atoll.coordinator.state_machine import events as ev

ADA, BO, CY = NODES = (NodeId("n1"), NodeId("n2"), NodeId("n3"))
DIGESTS = [digest(b"%d" % c) for c in range(4)]


def run_of_three(feedback: float) -> scenario.Run:
    run = scenario.Run()
    outer = replace(run.config.outer, clip=True, damping=True, feedback=feedback)
    run.config = replace(run.config, outer=outer, model=replace(run.config.model, seq_len=2))
    run.state = replace(run.state, config=run.config)
    run.do("begin", ["ada", "bo", "cy"])
    return run


def contribute(run: scenario.Run, node: NodeId, samples: int, loss: float, norm: float, damping: float) -> None:
    front = run.state.leases.by_node[node][0][0]
    run.feed(ev.ContributionReady(node, 1, 1, ev.Contribution(samples, 10, loss, norm, front, damping)))


def seal(run: scenario.Run, c: int, *places: int) -> None:
    owner = run.state.round.ledger.owners[c]
    assert owner is not None
    seals = ((c, DIGESTS[c], bitmap(places, 3)),)
    run.feed(ev.ChunksSealed(owner, 1, run.fence({}), seals, scenario.norms_of(run.state.round.ledger, seals)))


@pytest.mark.parametrize("feedback", [0.0, 1.0])
def test_of_a_round_with_contributions_of_all_kinds(feedback: float) -> None:
    run = run_of_three(feedback)
    run.do("wait", ["10"])
    run.do("reached", ["ada", "bo", "cy"])
    contribute(run, ADA, 10, 1.0, 3.0, 1.0)
    run.do("wait", ["1"])
    contribute(run, BO, 8, 2.0, 12.0, 1.0)
    contribute(run, CY, 6, 4.0, 3.0, 0.5)
    run.do("wait", ["2"])
    for c, places in enumerate([(0, 1, 2), (0, 1), (0, 1), (0, 1, 2)]):
        seal(run, c, *places)
    run.do("wait", ["1"])
    seal(run, 0, 0, 1, 2)  # again, which changes nothing
    run.do("wait", ["2"])
    for i, node in enumerate(NODES, 1):
        seen = tuple((peer, 2e3, 6e3) for peer in NODES if peer != node)
        told = ev.ReduceComplete(
            node, 1, run.fence({}), root(DIGESTS), 10 * i, 100 * i, 1e3 * i, 1e4 * i, seen=seen
        )
        run.feed(told)
        if node != CY:
            run.do("wait", ["1"])
            run.feed(told)  # again, which changes nothing
    record = run.state.pending
    assert record is not None
    assert record.contributors == {ADA: 20.0, BO: 16.0, CY: 6.0} and record.tokens == 42
    assert record.train_loss == pytest.approx((10 * 1.0 + 8 * 2.0 + 3 * 4.0) / 21)
    assert record.seconds == {"inner": 10.0, "collect": 1.0, "reduce": 2.0, "commit": 5.0}
    assert record.exchange == {ADA: 5.0, BO: 6.0, CY: 7.0}
    assert (record.bytes_up, record.bytes_down) == ({ADA: 10, BO: 20, CY: 30}, {ADA: 100, BO: 200, CY: 300})
    assert record.shares == {ADA: 0.5, BO: 0.25, CY: 0.25} and record.predicted == 0.0
    rates = {ADA: (1e3, 1e4), BO: (2e3, 1.2e4), CY: (3e3, 1.2e4)}  # what others saw, or less
    assert record.rates == {n: (rounded(up, 8), rounded(down, 8)) for n, (up, down) in rates.items()}
    assert record.losses == {ADA: 1.0, BO: 2.0, CY: 4.0} and record.committed_at == run.now
    assert record.names == {n: run.state.name(n) for n in NODES}
    assert record.norms == {ADA: 3.0, BO: 12.0, CY: 3.0} and record.scales == pytest.approx({BO: 4 / 12, CY: 0.5})
    assert record.lacking == {1: (CY,), 2: (CY,)}
    assert record.samples == {ADA: ((0, 10),), BO: ((20, 8),), CY: ((40, 6),)}
    assert (record.members, record.attempts, record.sealed_digest) == (NODES, 1, root(DIGESTS).hex())
    assert run.state.leases.by_node[CY][0] == (46, 14)
    assert (run.state.sealed, run.state.makers, run.state.digest) == (root(DIGESTS), frozenset(NODES), b"")
    out: dict[NodeId, list[int]] = {ADA: [], BO: [], CY: [1, 2]}
    assert run.state.last_counted == ({n: (1, bitmap(cs, 4)) for n, cs in out.items()} if feedback else {})


def test_what_the_model_writes_is_in_the_record_as_the_evaluator_says_it() -> None:
    run = run_of_three(0.0)
    run.steps()
    run.do("reduce", [])
    evaluator = run.state.round.evaluator
    assert evaluator is not None and run.state.pending is not None
    other = next(n for n in NODES if n != evaluator)
    for node in (other, evaluator):
        run.feed(ev.LossEvaluated(node, 1, 1, 2.0, ev.Passage(node, "def", f" {node}")))
    record = run.state.pending
    assert (record.passage, record.val_loss) == (ev.Passage(evaluator, "def", f" {evaluator}"), 2.0)


def test_samples_whose_steps_were_left_out_are_consumed_and_count_for_nothing() -> None:
    run = run_of_three(0.0)
    run.do("wait", ["10"])
    run.do("reached", ["ada", "bo", "cy"])
    for node, skipped, loss in ((ADA, 0, 1.0), (BO, 8, 4.0), (CY, 0, 1.0)):
        front = run.state.leases.by_node[node][0][0]
        work = ev.Contribution(10, 10, loss, 1.0, front, skipped=skipped)
        run.feed(ev.ContributionReady(node, 1, 1, work))
    run.do("wait", ["2"])
    for c in range(4):
        seal(run, c, 0, 1, 2)
    for node in NODES:
        run.feed(ev.ReduceComplete(node, 1, run.fence({}), root(DIGESTS), 0, 0))
    record = run.state.pending
    assert record is not None
    assert record.contributors == {ADA: 20.0, BO: 4.0, CY: 20.0} and record.tokens == 44
    assert record.train_loss == pytest.approx((10 * 1.0 + 2 * 4.0 + 10 * 1.0) / 22)
    assert record.samples[BO] == ((20, 10),) and run.state.leases.by_node[BO][0] == (30, 10)


def test_of_one_that_left_and_came_back_nothing_of_its_new_lease_is_consumed() -> None:
    run = run_of_three(0.0)
    run.do("wait", ["10"])
    run.do("reached", ["ada", "bo", "cy"])
    for node in NODES:
        contribute(run, node, 10, 1.0, 3.0, 1.0)
    for c in range(4):
        seal(run, c, 0, 1, 2)
    run.do("leave", ["cy"])
    assert run.state.leases.free == ((50, 10),), "ten of its samples are in sealed chunks"
    run.do("return", ["cy"])
    run.do("state", ["cy", "0"])
    assert run.state.leases.by_node[CY] == ((50, 20),)
    for node in (ADA, BO):
        here = tuple((c, DIGESTS[c]) for c in run.state.round.ledger.orphans)
        run.feed(ev.OrphansFound(node, 1, run.fence({}), here))
    for node in (ADA, BO):
        run.feed(ev.ReduceComplete(node, 1, run.fence({}), root(DIGESTS), 10, 100, 1e3, 1e4))
    assert run.state.pending is not None and run.state.pending.samples[CY] == ()
    assert run.state.leases.by_node[CY][0] == (50, 20)


def test_of_a_delta_that_hardly_counts_it_is_said_once() -> None:
    run = run_of_three(0.0)
    run.do("wait", ["10"])
    run.do("reached", ["ada", "bo", "cy"])
    contribute(run, ADA, 10, 1.0, 3.0, 1.0)
    contribute(run, BO, 10, 1.0, 30.0, 1.0)  # a tenth of it counts, no less
    contribute(run, CY, 10, 1.0, 0.003, 1.0)
    assert run.state.round.ledger.attempt == 1 and not said(run)
    run = run_of_three(0.0)
    run.do("wait", ["10"])
    run.do("reached", ["ada", "bo", "cy"])
    for node, norm in ((ADA, 3.0), (BO, 3.0), (CY, 1500.0)):
        contribute(run, node, 10, 1.0, norm, 1.0)
    assert said(run) == ["the delta of cy is 500 times as long as most: it is scaled down"]
    run.do("lost", ["ada", "bo"])
    run.do("wait", ["5"])
    assert run.state.round.ledger.attempt == 2 and len(said(run)) == 1


def said(run: scenario.Run) -> list[str]:
    return [line for line in run.said if "times as long as most" in line]
