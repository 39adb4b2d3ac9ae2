"""When a round's reduce goes in two levels."""

import pytest
import scenario

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.service.view import view
from atoll.coordinator.state_machine.chunk_owners import assign_owners, reducers
from atoll.coordinator.state_machine.reduce_levels import RegionLevels, choose_levels
from atoll.coordinator.state_machine.state import State
from atoll.node.control.reports import plan_of

NAMES = ["ada", "bo", "cy", "di", "ed", "fy"]


def told(
    near: float = 0.004, far: float = 0.1, inside: float = 100.0, outside: float = 10.0, only: int = 6
) -> State:
    """Three and three members, of whom the first `only` told what they measured."""
    run = scenario.Run()
    run.do("begin", NAMES)
    here = dict(run.state.members.here)
    for i, node in enumerate(list(here)[:only]):
        trips = {n: near if (j < 3) == (i < 3) else far for j, n in enumerate(here) if n != node}
        seen = inside + outside
        here[node] = replace(here[node], rtts=trips, inside=inside, outside=outside, seen_up=seen, measured=1)
    return replace(run.state, members=replace(run.state.members, here=here))


def chosen(state: State) -> RegionLevels | None:
    members = tuple(state.members.here)
    return choose_levels(state, members, assign_owners(state, members, reducers(state), 4))


def test_members_that_are_near_each_other_or_unknown_are_one_region() -> None:
    assert chosen(told(far=0.005)) is None
    assert chosen(told(only=0)) is None


def test_regions_are_told_before_anything_is_known_of_the_rates() -> None:
    split = chosen(told(inside=0.0, outside=0.0))
    assert split is not None and split.levels == 1 and not split.predictions
    assert list(split.regions.values()) == [0, 0, 0, 1, 1, 1]


def test_a_plan_in_regions_is_predicted_by_the_nodes_links_while_nothing_is_known_between_them() -> None:
    run = scenario.Run()
    run.do("begin", NAMES)
    here = told(inside=0.0, outside=0.0).members.here
    known = {
        n: replace(m, up=10.0, down=10.0, seen_up=10.0, seen_down=10.0, rtts=here[n].rtts)
        for n, m in run.state.members.here.items()
    }
    run.state = replace(run.state, members=replace(run.state.members, here=known))
    run.steps()
    assert run.state.round.plan is not None and run.state.round.ledger.regions == (0, 0, 0, 1, 1, 1)
    assert run.state.round.plan.predicted == assign_owners(run.state, tuple(known), (), 4).seconds > 0


def test_two_levels_are_chosen_where_links_between_regions_are_slow() -> None:
    split = chosen(told())
    assert split is not None and split.levels == 2
    assert split.predicted == split.two_level < split.flat / 1.1
    for c, owner in enumerate(split.owners):
        assert split.relays[split.regions[owner]][c] == owner
        assert [split.regions[row[c]] for row in split.relays] == [0, 1]


def test_two_levels_are_not_chosen_where_a_members_own_link_is_the_limit() -> None:
    split = chosen(told(inside=10.0, outside=10.0))
    assert split is not None and split.levels == 1
    assert split.predicted == split.flat <= 1.1 * split.two_level


def test_what_a_link_carries_near_and_far_at_different_times_it_does_not_carry_at_once() -> None:
    slow, fast = chosen(told(inside=11.0)), chosen(told(inside=1e6))
    assert slow is not None and fast is not None
    assert slow.flat > 1.2 * fast.flat


def test_members_that_told_no_rates_are_taken_for_like_the_others() -> None:
    all_told, some = chosen(told()), chosen(told(only=4))
    assert all_told is not None and some is not None and some.levels == 2
    assert some.two_level == pytest.approx(all_told.two_level)


def test_a_run_may_be_flat_always() -> None:
    state = told()
    config = replace(state.config, reduce=replace(state.config.reduce, levels=1))
    assert chosen(replace(state, config=config)) is None


def test_the_choice_and_both_predictions_are_in_the_commit_record_and_the_plan_at_the_nodes() -> None:
    run = scenario.Run()
    run.do("begin", NAMES)
    run.do("regions", [*NAMES[:3], "/", *NAMES[3:]])
    run.do("commit", [])
    assert run.state.pending is not None
    assert (run.state.pending.levels, run.state.pending.predictions, run.state.pending.regions) == (1, {}, ())
    run.do("commit", [])
    run.steps()
    plan = plan_of(view(run.state, NodeId("n1")).plan)
    plan.validate()
    assert plan.layered == set(range(4)) and plan.regions == (0, 0, 0, 1, 1, 1)
    assert {plan.region(plan.destination(c, 5)) for c in range(4) if not plan.relays_for(c, 5)} == {1}
    run.do("reduce", [])
    record = run.state.pending
    assert record is not None and record.levels == 2
    assert record.predicted == record.predictions["two_level"] < record.predictions["flat"]
    assert [len(region) for region in record.regions] == [3, 3]


def test_what_goes_out_in_two_levels_does_not_lower_what_is_known_of_the_link() -> None:
    run = scenario.Run()
    run.do("begin", NAMES)
    run.do("regions", [*NAMES[:3], "/", *NAMES[3:]])
    run.do("commit", [])
    run.do("commit", [])
    node = NodeId("n1")
    high = replace(run.state.members.here[node], inside=200.0, outside=20.0)
    run.state = replace(run.state, members=replace(run.state.members, here=run.state.members.here | {node: high}))
    run.do("commit", [])
    member = run.state.members.here[node]
    assert member.outside == 20.0 and 100.0 < member.inside < 200.0
