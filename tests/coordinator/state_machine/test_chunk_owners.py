"""Who is to own chunks, and what that is predicted to take."""

import scenario

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.comm.strikes import Strikes
from atoll.coordinator.placement.bandwidth_shares import PlanNode, plan_shares
from atoll.coordinator.state_machine.chunk_owners import assign_owners, reachable, reducers
from atoll.coordinator.state_machine.ledger import Entry
from atoll.coordinator.state_machine.state import State

A, B, C, DAN = (NodeId(f"n{i}") for i in range(1, 5))
SLOW = 10.0  # bytes a second, of 40 elements: the wire is what counts


def told(up: float = SLOW, down: float = SLOW, leaves: tuple[NodeId, ...] = ()) -> State:
    """Three members and a reducer that have measured for long."""
    run = scenario.Run()
    run.do("reducer", ["dan"])
    run.do("begin", ["ada", "bo", "cy"])
    run.do("join", ["dan"])
    here = {
        n: replace(m, up=up, down=down, seen_up=up, seen_down=down, measured=9, exchanged=True, leaf=n in leaves)
        for n, m in run.state.members.here.items()
    }
    return replace(run.state, members=replace(run.state.members, here=here))


def test_a_reducer_is_dealt_what_a_node_that_brings_nothing_should_own() -> None:
    state, members = told(), (A, B, C)
    found = assign_owners(state, members, reducers(state), 4)
    links = [*(PlanNode(SLOW, SLOW) for _ in members), PlanNode(SLOW, SLOW, contributes=False)]
    expected = plan_shares(links, 40 * state.config.reduce.bytes_per_element, chunks=4)
    assert found.nodes == (*members, DAN)
    assert (found.shares, found.seconds) == (expected.shares, expected.seconds)
    assert found.seconds < assign_owners(state, (*members, DAN), (), 4).seconds


def test_nothing_is_predicted_while_nothing_is_known_of_any_link() -> None:
    state = told(0.0, 0.0)
    assert assign_owners(state, (A, B, C), (), 4).seconds == 0
    here = state.members.here | {B: replace(state.members.here[B], up=SLOW, down=SLOW, seen_up=9, seen_down=9)}
    state = replace(state, members=replace(state.members, here=here))
    assert assign_owners(state, (A, B, C), (), 4).seconds > 0


def test_where_nobody_can_be_dialled_there_is_one_owner_whom_nobody_can_follow() -> None:
    state = told(leaves=(A, B, C))
    found = assign_owners(state, (A, B, C), (), 4)
    assert found.deal(4) == (A,) * 4 and len(found.shares) == 3 and found.seconds == 0


def test_a_late_or_lost_reducer_is_taken_only_where_there_is_nobody_else() -> None:
    for state, expected in ((told(leaves=(A, B)), ()), (told(leaves=(A, B, C)), (DAN,))):
        state = replace(state, round=replace(state.round, participants=dict.fromkeys((A, B, C), 0.0)))
        late = state.members.here | {DAN: replace(state.members.here[DAN], late=True)}
        assert reducers(state) == (DAN,)
        assert reducers(replace(state, members=replace(state.members, here=late))) == expected
        assert reducers(replace(state, round=replace(state.round, lost=((A, DAN),)))) == expected


def owing(state: State, *nodes: NodeId) -> State:
    """They held the others up."""
    held = {str(n): Strikes(n, owes_until=state.committed + 1) for n in nodes}
    return replace(state, conduct=replace(state.conduct, strikes=held))


def test_who_owes_the_others_time_owns_nothing_unless_most_do() -> None:
    state, members = told(), (A, B, C)
    assert set(assign_owners(owing(state, A), members, (), 8).deal(8)) == {B, C}
    assert set(assign_owners(owing(state, A, B), members, (), 9).deal(9)) == {A, B, C}
    assert set(assign_owners(replace(owing(state, A), committed=1), members, (), 9).deal(9)) == {A, B, C}


def test_who_was_in_no_exchange_yet_owns_nothing_unless_that_is_so_of_most_and_reducers_are_there_for_it() -> None:
    def new(*nodes: NodeId) -> State:
        state = told()
        here = {n: replace(m, exchanged=n not in nodes) for n, m in state.members.here.items()}
        return replace(state, members=replace(state.members, here=here))

    assert set(assign_owners(new(A), (A, B, C), (), 8).deal(8)) == {B, C}
    assert set(assign_owners(new(A, B), (A, B, C), (), 9).deal(9)) == {A, B, C}
    assert set(assign_owners(new(DAN), (A, B, C), (DAN,), 8).deal(8)) >= {DAN}


def test_members_can_reduce_if_one_of_them_or_a_reducer_can_be_dialled() -> None:
    state = told(leaves=(A, B))
    assert reachable(state, (A, C)) and reachable(state, (A, B))
    gone = {n: m for n, m in state.members.here.items() if n != DAN}
    state = replace(state, members=replace(state.members, here=gone))
    assert reachable(state, (A, C)) and not reachable(state, (A, B)) and not reachable(state, (A, NodeId("n9")))


def test_a_late_reducer_is_taken_where_only_somebody_who_is_left_out_could_be_dialled() -> None:
    state = told(leaves=(A, B))
    late = state.members.here | {DAN: replace(state.members.here[DAN], late=True)}
    state = replace(state, members=replace(state.members, here=late))
    state = replace(state, round=replace(state.round, participants=dict.fromkeys((A, B, C), 0.0)))
    assert reducers(state) == () and reducers(state, (A, B)) == (DAN,) and reachable(state, (A, B))


def test_a_reducer_that_began_anew_in_the_round_owns_nothing_more_in_it_where_others_can() -> None:
    """Else one that does so in each attempt would keep the round from its end."""
    for leaves, expected in (((A, B), ()), ((A, B, C), (DAN,))):
        state = told(leaves=leaves)
        ledger = replace(state.round.ledger, entries=(Entry(DAN, None, gone=True),))
        state = replace(
            state, round=replace(state.round, ledger=ledger, participants=dict.fromkeys((A, B, C), 0.0))
        )
        assert reducers(state) == expected
