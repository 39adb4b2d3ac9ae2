"""Who is late, by the clock alone: `LatePeers` is told the times."""

import pytest

from atoll.comm.allreduce.late_peers import DEADLINES, AskState, LatePeers, Lost, Ping, PullFrom
from atoll.comm.ids import NodeId

PING_AFTER, LOST_AFTER = DEADLINES.ping_after, DEADLINES.lost_after
A, B = NodeId("a"), NodeId("b")
START = -3600.0  # seconds: a clock may begin anywhere


def begun() -> LatePeers:
    late = LatePeers()
    late.replan(START, [A, B])
    late.look(START, {}, set(), [], lambda node: None)  # nothing is asked of others for a moment
    return late


@pytest.mark.parametrize(
    ("silence", "found"),
    [
        (PING_AFTER, []),
        (PING_AFTER + 0.1, [Ping(A)]),
        (LOST_AFTER, [Ping(A)]),
        (LOST_AFTER + 0.1, [Lost(A, "it has been silent for 5 s")]),
    ],
)
def test_a_silent_peer_is_pinged_and_then_lost(silence: float, found: list[object]) -> None:
    said = begun().look(START + silence, {A: "contributions"}, set(), [], lambda node: START)
    assert [order for order in said if not isinstance(order, PullFrom)] == found


def test_a_peer_without_a_link_is_its_diallers_to_report() -> None:
    said = begun().look(START + LOST_AFTER + 1, {A: "contributions"}, {A}, [], lambda node: None)
    assert not [order for order in said if not isinstance(order, PullFrom)]


def test_nobody_is_late_with_what_the_plan_has_just_begun_to_ask() -> None:
    late = begun()
    late.replan(START + 100, [A, B])
    said = late.look(START + 100 + PING_AFTER, {A: "contributions"}, {A}, [], lambda node: START)
    assert not [order for order in said if not isinstance(order, PullFrom)]


@pytest.mark.parametrize("contributes", [True, False])
def test_who_speaks_and_brings_no_contribution_is_lost(contributes: bool) -> None:
    late, now = begun(), START + DEADLINES.chunk_time + 1
    said = late.look(now, {A: "contributions"}, {A} if contributes else set(), [], lambda node: now)
    lost = [Lost(A, "its contributions did not come for 21 s")] if contributes else []
    assert [order for order in said if isinstance(order, Lost)] == lost


def test_who_speaks_and_brings_no_contribution_is_asked_anew_but_not_at_each_look() -> None:
    """What it sent may have been refused: unasked it would not send it again as long as the link lives."""
    late, asked = begun(), list[float]()
    for t in range(1, 3 * int(DEADLINES.chunk_time)):
        said = late.look(START + t, {A: "contributions"}, {A}, [], lambda node: START + t)  # noqa: B023
        asked += [t for order in said if isinstance(order, AskState)]
    assert asked == [21, 41]


def test_an_attempt_that_stood_still_does_not_make_chunks_slow() -> None:
    """Else whoever owes a contribution under the next plan would have longer than the attempt lasts."""
    late, stood = begun(), 100.0
    for attempt in range(1, 9):
        late.replan(START + attempt * stood, [A, B])
        for node in (A, B):
            late.chunk_came(START + attempt * stood + 0.1, node)
    last = START + 9 * stood
    late.replan(last, [A, B])
    now = last + DEADLINES.chunk_time + 1
    said = late.look(now, {A: "contributions"}, {A}, [], lambda node: now)
    assert AskState(A) in said and Lost(A, "its contributions did not come for 21 s") in said


def held_up(late: LatePeers, since: float, seconds: float) -> list[Lost]:
    """What is said while A alone holds up a merge, and brings each of its contributions in time."""
    said, now = list[Lost](), since
    while now < since + seconds:
        now += 0.5
        late.chunk_came(now, A)
        found = late.look(now, {A: "contributions"}, {A}, [A], lambda node: now)  # noqa: B023
        said += [order for order in found if isinstance(order, Lost)]
    return said


def test_who_holds_up_merges_for_longer_in_all_than_the_plan_has_patience_is_lost() -> None:
    late = begun()
    late.replan(START, [A, B], patience=20.0)
    assert held_up(late, START, 12.0) == []
    late.look(START + 13.0, {}, set(), [], lambda node: START + 13.0)  # for a moment it does not
    assert held_up(late, START + 13.0, 7.0) == []
    assert held_up(late, START + 20.0, 2.0)[0] == Lost(A, "it has held up what others contributed for 20 s in all")
    late.replan(START + 60.0, [A, B], patience=20.0)
    assert held_up(late, START + 60.0, 0.5), "in the next attempt there is nothing to wait for"


def test_who_holds_up_merges_has_all_its_time_where_the_plan_has_no_limit() -> None:
    late = begun()
    late.replan(START, [A, B])
    assert held_up(late, START, 600.0) == []


def test_a_process_that_stood_still_does_not_say_that_others_held_it_up() -> None:
    late = begun()
    late.replan(START, [A, B], patience=20.0)
    held_up(late, START, 1.0)
    late.chunk_came(START + 600.0, A)
    said = late.look(START + 600.0, {A: "contributions"}, {A}, [A], lambda node: START + 600.0)
    assert not [order for order in said if isinstance(order, Lost)]


@pytest.mark.parametrize("start", [-3600.0, 0.0, 1e9])
def test_the_clock_may_begin_anywhere(start: float) -> None:
    late = LatePeers()
    late.replan(start, [A])
    assert late.may_report(start, A)
    assert late.look(start + 0.1, {}, set(), [], lambda node: None) == []
    assert late.look(start + LOST_AFTER + 0.2, {}, set(), [], lambda node: None) == [PullFrom(frozenset({A}))]


def test_late_chunks_are_asked_of_others_again_and_again_but_not_at_each_look() -> None:
    late, wait = begun(), LOST_AFTER + 0.1  # so long while too little is known
    assert wait > DEADLINES.pull_after
    late.chunk_came(START + wait - 1, B)
    assert late.look(START + wait, {}, set(), [], lambda node: None) == [PullFrom(frozenset({A}))]
    assert late.look(START + wait + 0.3, {}, set(), [], lambda node: None) == []
    assert late.look(START + 2 * wait, {}, set(), [], lambda node: None) == [PullFrom(frozenset({A, B}))]


def test_that_a_peer_is_lost_is_said_once_in_a_while_and_anew_under_each_plan() -> None:
    late = begun()
    assert [late.may_report(START + t, A) for t in (0, LOST_AFTER - 1, LOST_AFTER)] == [True, False, True]
    late.replan(START + LOST_AFTER + 1, [A])
    assert late.may_report(START + LOST_AFTER + 1, A)
    assert not late.may_report(START + LOST_AFTER + 1, B), "it is not in the plan"
