"""What members say of a reduce: what counts, and what changes nothing."""

import pytest
import scenario

from atoll.comm.ids import NodeId, Round
from atoll.comm.plan import Fence
from atoll.comm.replace import replace
from atoll.coordinator.causes.observations import Standing
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.changes import drop_from_round
from atoll.coordinator.state_machine.state import Phase

A, B, C, D, NOBODY = (NodeId(f"n{i}") for i in (1, 2, 3, 4, 9))
NAMES = ["ada", "bo", "cy", "dee"]


def reducing(names: list[str] = NAMES, **members: int) -> scenario.Run:
    run = scenario.Run()
    for key, value in members.items():
        run.set(f"members.{key}", str(value))
    run.do("reducing", names)
    return run


def fence(run: scenario.Run) -> Fence:
    assert run.state.round.plan is not None
    return run.state.round.plan.fence


def lost(run: scenario.Run, node: NodeId, peer: NodeId, under: Fence) -> None:
    life = run.state.members.here[node].life if node in run.state.members.here else 1
    run.feed(ev.PeerUnreachable(node, life, peer, under, "connection reset"))


# Who lost whom


@pytest.mark.parametrize(("node", "peer"), [(A, B), (B, A)])
def test_a_pair_is_the_same_whoever_tells_of_it(node: NodeId, peer: NodeId) -> None:
    run = reducing()
    lost(run, node, peer, fence(run))
    assert run.state.round.lost == ((A, B),) and run.state.round.ledger.attempt == 2


def test_what_is_said_of_an_earlier_attempt_is_remembered_once_and_costs_nothing() -> None:
    run = reducing()
    first = fence(run)
    lost(run, A, B, first)
    second = fence(run)
    assert second.attempt == 2
    lost(run, D, C, first)
    lost(run, C, D, first)
    assert run.state.round.lost == ((A, B), (C, D)) and fence(run) == second


def test_what_is_said_of_another_round_or_node_or_an_attempt_to_come_changes_nothing() -> None:
    run = reducing()
    first = fence(run)
    lost(run, A, B, first)
    second, before = fence(run), run.state
    for node, peer, under in [
        (C, D, first._replace(round=Round(0))),
        (C, D, second._replace(attempt=3)),
        (C, C, second),
        (C, C, first),
        (C, NOBODY, second),
        (C, NOBODY, first),
    ]:
        lost(run, node, peer, under)
        assert run.state == before
    run = scenario.Run()
    run.do("begin", NAMES)
    before = run.state
    lost(run, A, B, first)  # no attempt was opened yet
    assert run.state == before


def test_while_no_attempt_is_in_force_reports_of_the_last_one_say_who_names_whom_and_no_more() -> None:
    run = reducing(["ada", "bo"])
    run.do("seal", ["ada"])
    last = fence(run)
    lost(run, A, B, last)
    lost(run, A, B, fence(run))
    assert run.state.round.plan is None and run.state.round.phase is Phase.COLLECTING, "the run needs them both"
    lost(run, B, A, last)
    assert run.state.round.lost == ((A, B), (A, B)) and run.state.round.accused == {(A, B), (B, A)}
    before = run.state
    lost(run, B, A, last)
    run.feed(ev.OrphansFound(A, 1, last, ()))
    run.feed(ev.ChunksMissing(A, 1, last, (0,)))
    run.feed(ev.ChunkForged(A, 1, B, last, 0))
    assert run.state == before


def test_who_is_gone_cannot_be_lost() -> None:
    run = reducing()
    run.do("leave", ["dee"])
    before = run.state
    lost(run, A, D, fence(run))
    assert run.state == before


def test_who_has_time_to_come_back_is_not_put_out_for_its_connections() -> None:
    """They broke when the coordinator was away, too."""
    run = reducing()
    run.do("restart", [])
    assert not run.state.members.here[B].connected and run.state.members.here[B].suspect_at > run.now
    lost(run, A, B, fence(run))
    assert B in run.state.members.here and run.state.round.ledger.attempt == 2


# Who holds all


def test_what_a_member_measured_is_known_from_its_word_that_it_holds_all() -> None:
    run = reducing()
    run.do("seal", NAMES)
    root = run.state.round.ledger.root
    run.feed(ev.ReduceComplete(A, 1, fence(run), root, 1, 1, 1e3, 2e3, ((B, 0.05), (NOBODY, 0.1)), 3e3, 4e3))
    run.feed(ev.ReduceComplete(B, 1, fence(run), root, 1, 1))
    ada, bo = run.state.members.here[A], run.state.members.here[B]
    assert (ada.up, ada.down, ada.inside, ada.outside) == (1e3, 2e3, 3e3, 4e3)
    assert ada.rtts == {B: 0.05} and ada.measured == 1
    assert (bo.up, bo.rtts, bo.measured) == (0, {}, 0), "it has measured nothing"
    run.feed(ev.ReduceComplete(A, 1, fence(run), root, 1, 1, down=1e3, outside=2e3))
    ada = run.state.members.here[A]
    assert ada.measured == 2 and ada.up == 1e3 and 1e3 < ada.down < 2e3 and 2e3 < ada.outside < 4e3
    run.feed(ev.ReduceComplete(B, 1, fence(run), root, 1, 1, rtts=((A, 0.05),)))
    assert run.state.members.here[B].measured == 1


def test_in_two_levels_less_crosses_than_could() -> None:
    run = reducing()
    run.state = replace(run.state, round=replace(run.state.round, levels=2))
    run.do("seal", NAMES)
    for outside in (4e3, 2e3):
        run.feed(ev.ReduceComplete(A, 1, fence(run), run.state.round.ledger.root, 1, 1, up=1.0, outside=outside))
        assert run.state.members.here[A].outside == 4e3


def test_only_a_member_of_the_attempt_holds_what_counts() -> None:
    run = reducing()
    run.do("leave", ["dee"])
    run.do("seal", NAMES[:3])
    run.do("join", ["ed"])
    before = run.state
    for node in (D, NodeId("n5")):
        run.feed(ev.ReduceComplete(node, 1, fence(run), before.round.ledger.root, 1, 1))
        run.feed(ev.OrphansFound(node, 1, fence(run), ()))
    assert run.state == before


# How it ends


def test_nothing_is_committed_when_everybody_left_after_the_last_chunk_was_sealed() -> None:
    run = reducing(["ada", "bo"])
    run.do("seal", ["ada", "bo"])
    assert run.state.round.ledger.complete
    run.do("leave", ["ada", "bo"])
    run.do("wait", ["1"])
    assert run.state.committed == 0


def test_of_two_of_whom_one_suffices_the_one_that_is_late_is_left_out() -> None:
    run = reducing(["ada", "bo"], minimum=1)
    run.do("seal", ["ada"])
    run.do("wait", ["61"])
    assert run.state.round.ledger.members == (A,)
    bo = run.state.members.here[B]
    assert not bo.late and not bo.reason, "it is no reducer"


def test_the_only_one_that_can_be_dialled_is_not_left_out_for_being_late() -> None:
    run = scenario.Run()
    run.do("leaf", ["ada", "bo"])
    run.do("reducing", ["ada", "bo", "cy"])
    run.do("wait", ["61"])
    assert run.state.round.ledger.attempt == 2 and run.state.round.ledger.members == (A, B, C)


def test_a_reduce_is_timed_from_its_first_attempt() -> None:
    run = reducing(["ada", "bo", "cy"])
    run.do("wait", ["3"])
    lost(run, A, B, fence(run))
    run.do("wait", ["2"])
    run.do("reduce", [])
    assert run.state.pending is not None and run.state.pending.seconds["reduce"] == pytest.approx(5.0)
    run.do("state", ["ada", "bo", "cy", "1"])
    run.steps()
    run.do("reduce", [])
    assert run.state.pending.round == 2 and run.state.pending.seconds["inner"] == pytest.approx(10.0)


def test_where_all_owners_are_late_no_reducer_is_to_blame_and_it_takes_the_place_of_who_is_left_out() -> None:
    """A member that sends nothing to anybody, say: none of them could seal."""
    run = scenario.Run()
    run.do("leaf", ["ada", "bo"])
    run.do("reducer", ["dan"])
    run.do("join", ["dan"])
    run.do("reducing", ["ada", "bo", "cy"])
    dan, cy = run.node("dan"), run.node("cy")
    assert set(run.state.round.ledger.owners) == {dan, cy}
    run.do("wait", ["61"])
    ledger = run.state.round.ledger
    assert ledger.attempt == 2 and cy not in ledger.members and set(ledger.owners) == {dan}
    assert not run.state.members.here[dan].late


def test_a_reducer_that_is_late_twice_is_not_dealt_more_whoever_else_was_late() -> None:
    run = scenario.Run()
    run.do("reducer", ["dan"])
    run.do("join", ["dan"])
    run.do("reducing", ["ada", "bo"])
    both = {run.node("ada"), run.node("bo")}
    for attempt, owners in ((1, both | {run.node("dan")}), (2, both | {run.node("dan")}), (3, both)):
        assert (run.state.round.ledger.attempt, set(run.state.round.ledger.owners)) == (attempt, owners)
        run.do("wait", ["61"])


def test_a_new_life_is_not_asked_for_the_seals_of_the_one_before() -> None:
    run = reducing()
    disputed = replace(run.state, round=replace(run.state.round, wrong=frozenset({A, B})))
    assert drop_from_round(disputed, A, Standing.LEFT).round.wrong == {B}
