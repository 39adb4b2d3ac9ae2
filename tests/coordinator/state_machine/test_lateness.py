"""Lateness in a reduce: how long an attempt may take, and whom a timeout is held against."""

import pytest
from member_story import Story
from scenario import Run

from atoll.comm.bitmap import bitmap
from atoll.comm.evidence import Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.comm.strikes import Strikes
from atoll.coordinator.causes.slowness import RoundPace
from atoll.coordinator.service.view import view
from atoll.coordinator.state_machine import conduct, disputes, lateness
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.members import suspect
from atoll.coordinator.state_machine.rounds import choose_grace
from atoll.coordinator.state_machine.state import State, order

NAMES = ["a", "b", "c", "d"]
ALL = [NodeId(f"n{i}") for i in range(1, 5)]


@pytest.fixture
def story() -> Story:
    story = Story(NAMES)
    story.train()
    return story


def predicting(state: State, seconds: float, attempt: int = 1) -> State:
    assert state.round.plan is not None
    plan, ledger = (
        replace(state.round.plan, predicted=seconds, expected=seconds),
        replace(state.round.ledger, attempt=attempt),
    )
    rounds = replace(state.config.rounds, reduce_timeout=600.0)
    round_ = replace(state.round, plan=plan, ledger=ledger)
    return replace(state, config=replace(state.config, rounds=rounds), round=round_)


def test_a_timeout_is_ten_times_the_prediction_and_time_for_the_arithmetic(story: Story) -> None:
    state = story.state
    assert lateness.reduce_timeout(predicting(state, 0.0)) == 600.0, "nothing is known of the links"
    assert lateness.reduce_timeout(predicting(state, 0.001)) == pytest.approx(30.01, abs=0.001)
    assert lateness.reduce_timeout(predicting(state, 7.0)) == pytest.approx(100.0, abs=0.001)
    assert lateness.reduce_timeout(predicting(state, 1000.0)) == 600.0
    large = replace(predicting(state, 7.0), layout=(10**9, b""))
    assert lateness.reduce_timeout(large) == pytest.approx(200.0)


@pytest.mark.parametrize(("inner", "moment"), [(0.5, 5.0), (9.0, 10.0), (300.0, 30.0)])
def test_a_stage_allows_for_a_moment_as_long_as_rounds_are_but_from_5_to_30_seconds(
    story: Story, inner: float, moment: float
) -> None:
    pace = RoundPace(inner, 0.5, 0.25, 0.25)
    state = replace(predicting(story.state, 0.5), paces=(pace, pace))
    assert lateness.reduce_timeout(state) == pytest.approx(35.0, abs=0.001), "how long rounds are is not known yet"
    state = replace(state, paces=(pace, replace(pace, inner=1000.0), pace))
    assert lateness.reduce_timeout(state) == pytest.approx(5.0 + moment, abs=0.001)


def test_an_exchange_is_to_take_what_is_predicted_but_no_longer_than_the_longest_of_late(story: Story) -> None:
    """What exchanges show of links that are done at once is less than these carry."""
    pace = RoundPace(10.0, 0.5, 0.25, 0.25)
    assert lateness.expected(story.state, 7.0) == 7.0 and lateness.expected(story.state, 0.0) == 0.0
    state = replace(story.state, paces=(pace, replace(pace, reduce=2.0), pace))
    assert lateness.expected(state, 0.0) == 0.5, "in the middle"
    assert lateness.expected(state, 7.0) == 7.0, "somebody was not in those exchanges"
    here = {n: replace(m, measured=3) for n, m in state.members.here.items()}
    state = replace(state, members=replace(state.members, here=here))
    assert lateness.expected(state, 7.0) == 2.25 and lateness.expected(state, 1.0) == 1.0


def test_what_a_prediction_adds_to_what_exchanges_took_in_the_middle_is_believed_three_times_and_not_ten(
    story: Story,
) -> None:
    pace = RoundPace(100.0, 0.5, 4.0, 2.0)
    long = replace(pace, reduce=1000.0)
    state = in_exchanges(replace(story.state, paces=(pace, long, pace)), *ALL)
    for seconds, stage in ((0.5, 35.0), (6.0, 90.0), (26.0, 150.0), (1000.0, 600.0)):
        foreseen = predicting(state, seconds)
        assert lateness.reduce_timeout(foreseen) == pytest.approx(stage, abs=0.001)
    assert lateness.patience(foreseen, 26.0) == pytest.approx(105.0, abs=0.001), "half of 90 s is the owner's own"
    assert lateness.patience(foreseen, 1000.0) == pytest.approx(555.0, abs=0.001)
    short = replace(
        foreseen, config=replace(state.config, rounds=replace(state.config.rounds, reduce_timeout=60.0))
    )
    assert lateness.patience(short, 26.0) == 30.0


def test_each_further_attempt_has_twice_the_time(story: Story) -> None:
    found = [lateness.reduce_timeout(predicting(story.state, 7.0, attempt)) for attempt in (1, 2, 3, 4, 99)]
    assert found == pytest.approx([100.0, 200.0, 400.0, 600.0, 600.0], abs=0.01)


def in_exchanges(state: State, *nodes: NodeId) -> State:
    """An exchange was committed with them before."""
    here = {n: replace(m, exchanged=n in nodes) for n, m in state.members.here.items()}
    return replace(state, members=replace(state.members, here=here))


def test_a_contributor_may_hold_up_an_owner_for_half_a_stage_where_most_links_are_known(story: Story) -> None:
    state = in_exchanges(story.state, *ALL[:2])
    rounds = replace(state.config.rounds, reduce_timeout=600.0)
    state = replace(state, config=replace(state.config, rounds=rounds))
    assert lateness.patience(state, 7.0) == pytest.approx(50.0, abs=0.01)
    assert lateness.patience(state, 1000.0) == 300.0
    assert lateness.patience(state, 0.0) == 0.0 == lateness.patience(story.state, 7.0), (
        "it has as long as it takes"
    )
    assert view(predicting(state, 7.0), ALL[0]).plan.patience == 0.0, "as it was when the attempt opened"


def late(story: Story, *nodes: NodeId) -> set[NodeId]:
    """Who is charged."""
    state = lateness.hold_to_account(story.state, nodes, story.now + 60, [])
    return {n for n in ALL if conduct.consequence(state, n) is not None}


def test_owners_that_do_not_seal_are_held_to_account_where_others_do(story: Story) -> None:
    assert late(story, ALL[2]) == {ALL[2]}
    assert late(story, *ALL[:2]) == set(ALL[:2])
    assert late(story, *ALL[:3]) == set() == late(story, *ALL), "it is rather the network"


def test_members_that_say_nothing_are_held_to_account_where_others_do(story: Story) -> None:
    story.do("seal", NAMES)
    assert late(story, ALL[2]) == {ALL[2]}
    assert late(story, *ALL[:3]) == set()


def test_who_is_suspected_is_not_late(story: Story) -> None:
    story.state = replace(story.state, members=suspect(story.state.members, ALL[2], "its connection broke"))
    assert late(story, *ALL[1:3]) == {ALL[1]}
    assert conduct.owes_time(lateness.hold_to_account(story.state, ALL[1:3], story.now + 60, []), ALL[2])


def test_where_most_are_new_they_have_all_the_time_that_there_is_until_something_is_held_against_them(
    story: Story,
) -> None:
    state = predicting(in_exchanges(story.state, ALL[0]), 7.0)
    assert state.round.plan is not None
    opened = state.round.plan.opened_at
    assert [lateness.is_overdue(state, opened + s) for s in (99, 101, 599, 601)] == [False, False, False, True]
    struck = lateness.hold_to_account(state, [ALL[2]], opened + 601, [])
    assert conduct.consequence(struck, ALL[2]) is not None
    assert [lateness.is_overdue(struck, opened + s) for s in (99, 101)] == [False, True]


def owing(state: State, *nodes: NodeId) -> State:
    """They held the others up."""
    held = {str(n): Strikes(n, owes_until=state.committed + 1) for n in nodes}
    return replace(state, conduct=replace(state.conduct, strikes=held))


def test_the_commit_does_not_wait_for_those_few_who_owe_time_and_are_behind() -> None:
    names, five = [*NAMES, "e"], [*ALL, NodeId("n5")]
    story = Story(names)
    story.train()
    story.do("seal", names)
    story.now += 1.0
    story.do("held", names[:3])
    opened = story.state.round.sealed_at
    state = owing(story.state, *five[3:])
    assert lateness.spared(state, opened + 1.0) == set(five[3:])
    kept_up = replace(state, makers=frozenset(five))  # in the round before
    assert not lateness.spared(kept_up, opened + 2.1), "they have twice what the others took"
    assert lateness.spared(kept_up, opened + 2.3) == set(five[3:])
    assert not lateness.spared(owing(story.state, five[3]), opened + 2.3), "for the other one it waits in any case"
    story.do("held", names[3:4])
    assert lateness.spared(owing(story.state, five[4]), opened + 2.3) == {five[4]}
    assert not lateness.spared(owing(story.state, five[3]), opened + 2.3)
    members = replace(story.state.config.members, minimum=5)
    few = replace(story.state, config=replace(story.state.config, members=members))
    assert not lateness.spared(owing(few, five[4]), opened + 2.3), "the run needs it"


def test_it_waits_for_three_where_there_are_four_as_of_two_states_nobody_can_tell_which_is_right(
    story: Story,
) -> None:
    story.do("seal", NAMES)
    story.do("held", NAMES[:2])
    assert not lateness.spared(owing(story.state, *ALL[2:]), story.now + 3.0)
    story.do("held", NAMES[2:3])
    assert lateness.spared(owing(story.state, *ALL[2:]), story.now + 3.0) == {ALL[3]}


def test_who_says_that_it_holds_the_chunks_and_that_it_lacks_some_is_one_and_not_two() -> None:
    story = Story([*NAMES, "e"])
    story.train()
    story.do("seal", [*NAMES, "e"])
    story.do("held", NAMES[:3])
    story.state = disputes.tell_digests(story.state, story.now, [])
    story.do("lacking", ["d", "chunks=0"])
    story.do("held", ["d", "proven=1"])
    assert story.state.round.plan is not None and ALL[3] in story.state.round.plan.missing_chunks
    assert lateness.spared(owing(story.state, NodeId("n5")), story.now + 1.0) == {NodeId("n5")}


def test_who_owes_time_and_is_the_last_to_make_it_costs_those_before_it_nothing_of_their_grace() -> None:
    story = Story(NAMES)
    story.do("wait", ["10"])
    story.do("reached", NAMES[:2])
    here = story.state.members.here
    paces = {ALL[2]: replace(here[ALL[2]], pace=10 / 11), ALL[3]: replace(here[ALL[3]], pace=10 / 11.25)}
    state = replace(story.state, members=replace(story.state.members, here=here | paces))
    grace = choose_grace(owing(state, ALL[3]), ALL[2:])
    assert (grace.node, grace.until) == (ALL[2], 12.0), "it has a tenth of the round beyond its 11 seconds"
    assert choose_grace(owing(state, ALL[3]), ALL[3:]).until == pytest.approx(11.45)
    assert choose_grace(state, ALL[2:]).node == ALL[3]


def test_it_waits_for_all_while_nobody_knows_who_holds_orphans(story: Story) -> None:
    story.do("seal", NAMES)
    story.do("leave", ["d"])
    assert story.state.round.ledger.orphans
    story.do("held", NAMES[:2])
    assert not lateness.spared(owing(story.state, ALL[2]), story.now + 3.0)


def test_it_waits_for_most(story: Story) -> None:
    story.do("seal", NAMES)
    story.do("held", NAMES[:1])
    assert not lateness.spared(owing(story.state, *ALL[1:]), story.now + 3.0)


def test_in_two_levels_a_relay_that_sums_nothing_is_late_and_not_the_owners_that_wait_for_it() -> None:
    run, near, far = Run(), ["a", "b", "c"], ["d", "e", "f"]
    run.set("reduce.chunk", "5")  # eight chunks
    run.do("begin", [*near, *far])
    run.do("regions", [*near, "/", *far])
    for _ in range(2):
        run.do("commit", [])
    run.steps()
    ledger = run.state.round.ledger
    assert len(ledger.layered) == 8
    relays = {
        c: {ledger.entries[row[c]].node for row in ledger.relays} - {ledger.owners[c]} for c in ledger.layered
    }
    lazy = min(set[NodeId]().union(*relays.values()), key=order)
    for c, (relay,) in relays.items():
        if relay != lazy:
            summed = bitmap((i for i, g in enumerate(ledger.regions) if g == region(run, relay)), 6)
            run.feed(ev.ChunksSealed(relay, 1, run.fence({}), (), sums=((c, summed, bytes(12)),)))
            run.do("seal", [run.name(ledger.owners[c] or NodeId("")), f"chunk={c}"])
    assert run.state.round.ledger.unsealed
    run.do("wait", ["60.25"])
    assert set(run.state.conduct.strikes) == {lazy}
    assert run.state.conduct.strikes[lazy].latest == {Offence.LATE: 3}


def region(run: Run, node: NodeId) -> int:
    ledger = run.state.round.ledger
    return next(g for e, g in zip(ledger.entries, ledger.regions, strict=True) if e.node == node)
