"""Members in their first exchange, of whose links nobody knows what they carry: what they cost a run of others,
and what becomes of who is slow."""

import pytest
from member_story import Story

from atoll.comm.evidence import Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import conduct, lateness
from atoll.coordinator.state_machine import events as ev

NAMES = ["a", "b", "c", "d", "e", "f", "g", "h"]
NEW = NodeId("n9")
STAGE = 40.0 + 10 * 6.0  # seconds that a stage has here at most: a moment, and ten times what an exchange takes


def known(story: Story) -> None:
    """The links of the eight are measured: 40 bytes a second."""
    here = story.state.members.here
    told = {NodeId(f"n{k}"): here[NodeId(f"n{k}")] for k in range(1, 9)}
    rates = {n: replace(m, up=40.0, down=40.0, seen_up=40.0, seen_down=40.0, measured=9) for n, m in told.items()}
    story.state = replace(story.state, members=replace(story.state.members, here=here | rates))


def joined(story: Story, *names: str) -> None:
    """They join a run that has begun, and have its state."""
    story.do("join", [*names])
    story.do("state", [*names, str(story.state.committed)])


def play(story: Story) -> None:
    """A round in which nothing happens."""
    story.train()
    story.reduce()


@pytest.fixture
def story() -> Story:
    """Eight members that were in three exchanges, and a ninth that comes new."""
    story = Story(NAMES, rounds__reduce_timeout="600", reduce__chunk="2")  # twenty chunks
    for k in range(4):
        story.train()
        if k == 3:
            joined(story, "i")
        story.reduce()
        known(story)
    story.liar = story.node("i")
    assert story.liar == NEW
    return story


@pytest.mark.parametrize(("seals", "holds"), [(False, True), (True, False), (False, False)])
def test_who_is_silent_from_its_first_exchange_on_costs_the_others_two_stages(
    story: Story, seals: bool, holds: bool
) -> None:
    seconds = list[float]()
    for _ in range(8):
        story.train()
        seconds.append(story.reduce(seals, holds, 700.0))
    assert max(seconds) < STAGE, f"seconds of each reduce: {seconds}"
    assert sum(s > 1 for s in seconds) <= 2, f"seconds of each reduce: {seconds}"
    assert set(story.state.conduct.strikes) <= {"n9"}


def test_it_owns_nothing_in_its_first_exchange_and_as_much_as_others_from_the_second_on(story: Story) -> None:
    owned = list[bool]()
    for _ in range(3):
        story.train()
        assert story.contributes(NEW)
        owned.append(NEW in story.owners())
        story.reduce()
    assert owned == [False, True, True]


def stage(story: Story) -> float:
    """Seconds of one stage of the attempt in force."""
    assert story.state.round.plan is not None
    return lateness.reduce_timeout(story.state)


def wait_for_commit(story: Story, limit: float = 700.0) -> float:
    """Seconds from now to the commit, where those who have not done their part never do it; others go on in each
    further attempt."""
    began, number, attempt = story.now, story.state.round.number, story.state.round.ledger.attempt
    while story.state.round.number == number:
        assert story.now - began < limit, story.state.round
        ledger = story.state.round.ledger
        if story.state.round.plan is not None and ledger.attempt > attempt:
            attempt = ledger.attempt
            story.do("reduce", [])
        else:
            story.do("wait", ["0.25"])
    story.tell()
    return story.now - began


def name_it(story: Story) -> None:
    """All owners say that the newcomer has held them up for too long, those whose word comes first of the next
    attempt, too."""
    attempt = story.state.round.ledger.attempt
    for name in NAMES:
        story.do("lost", [name, "i", f"attempt={attempt}"])
    story.do("lost", ["a", "i"])


def test_a_link_ten_times_slower_than_the_others_is_waited_for_and_held_against_nobody(story: Story) -> None:
    """By the plan a vector takes 3 s over the others' links."""
    story.train()
    plan = story.state.round.plan
    assert plan is not None and plan.patience > 27.0
    story.do("wait", ["30"])  # its contribution takes so long, and holds up all that own chunks,
    story.do("seal", NAMES)
    story.do("held", NAMES)
    assert stage(story) > 30.0
    story.do("wait", ["30"])  # and so do the sealed chunks
    story.do("held", ["i"])
    assert story.state.committed == 5 and story.state.pending is not None
    assert NEW in story.state.pending.contributors and story.state.pending.attempts == 1
    assert not story.state.conduct.strikes
    story.tell()
    story.train()
    assert NEW in story.owners(), "now it is known"


def test_who_does_not_hold_the_chunks_in_its_first_stage_owes_that_time_and_is_tried_with_less(
    story: Story,
) -> None:
    story.train()
    story.do("seal", NAMES)
    story.do("held", NAMES)
    seconds = stage(story)
    assert wait_for_commit(story) == pytest.approx(seconds, abs=0.5)
    assert conduct.owes_time(story.state, NEW) and not story.state.conduct.decisions
    assert story.state.pending is not None and NEW in story.state.pending.contributors, "it had come until then"
    story.train()
    assert story.contributes(NEW) and NEW not in story.owners()
    story.do("seal", NAMES)
    story.do("held", NAMES)
    assert story.state.committed == 6, "nobody waits for who owes time"


def test_whose_contribution_takes_too_long_owes_that_time_and_then_comes_in_every_few_rounds(story: Story) -> None:
    """Twenty times slower than the others, as these have seen."""
    story.train()
    plan = story.state.round.plan
    assert plan is not None
    story.do("wait", [f"{int(4 * plan.patience) / 4 + 3}"])
    name_it(story)
    assert not story.contributes(NEW)
    story.do("seal", NAMES)
    for name in NAMES:
        held = story.event("held", name, [], {})
        assert isinstance(held, ev.ReduceComplete)
        story.feed(replace(held, seen=((NEW, 0.25, 0.25),)))
    assert story.state.committed == 5
    assert conduct.owes_time(story.state, NEW) and not story.state.conduct.decisions
    story.tell()
    found = list[bool]()
    for _ in range(9):
        story.train()
        found.append(story.contributes(NEW))
        story.reduce()
    assert found == [False, False, False, True] * 2 + [False], "15 s more than usual are allowed each time"


def test_who_brings_its_contribution_too_late_again_is_struck_for_it(story: Story) -> None:
    for _ in range(2):
        story.train()
        story.do("wait", ["40"])
        name_it(story)
        story.reduce()
    assert [(n, k) for n, k in story.state.conduct.strikes["n9"].latest.items()] == [(Offence.ACCUSER, 6)]
    assert set(story.state.conduct.strikes) == {"n9"}


def test_whoever_says_that_it_reaches_nobody_in_its_first_exchange_is_struck(story: Story) -> None:
    story.train()
    attempt = story.state.round.ledger.attempt
    for name in NAMES:
        story.do("lost", ["i", name, f"attempt={attempt}"])
    story.do("lost", ["i", "a"])
    story.reduce()
    assert story.state.conduct.strikes["n9"].latest == {Offence.ACCUSER: 5}


def test_several_at_once_cost_one_stage(story: Story) -> None:
    joined(story, *"jklmnopq")
    play(story)
    story.train()
    assert story.owners() == {NodeId(f"n{k}") for k in range(1, 10)}
    story.do("seal", [*NAMES, "i"])
    story.do("held", [*NAMES, "i"])
    assert wait_for_commit(story) < STAGE
    assert not story.state.conduct.decisions
    assert all(conduct.owes_time(story.state, NodeId(f"n{k}")) for k in range(10, 18))


def test_where_most_are_new_all_own_chunks_and_a_stage_has_all_the_time_that_there_is() -> None:
    story = Story(NAMES, rounds__reduce_timeout="600", reduce__chunk="2")
    story.train()
    assert story.owners() == {NodeId(f"n{k}") for k in range(1, 9)}
    joined(story, *"ijklmnopq")
    story.reduce()
    known(story)
    story.train()
    assert len(story.owners()) == 17
    plan = story.state.round.plan
    assert plan is not None and plan.predicted and not plan.patience
    assert [lateness.is_overdue(story.state, plan.opened_at + s) for s in (599, 601)] == [False, True]


def test_a_leaf_that_comes_new_has_no_more_time_either(story: Story) -> None:
    story.do("leaf", ["j"])
    joined(story, "j")
    play(story)
    story.train()
    story.do("seal", NAMES)
    story.do("held", [*NAMES, "i"])
    assert wait_for_commit(story) < STAGE


def test_who_was_in_an_exchange_before_the_coordinator_began_anew_or_in_an_earlier_life_is_not_new() -> None:
    story = Story(NAMES, rounds__reduce_timeout="600", reduce__chunk="2")
    story.train()
    joined(story, "i")
    story.reduce()
    story.do("restart", ["1"])
    story.do("connect", [*NAMES, "i"])
    exchanged = {m.name for m in story.state.members.here.values() if m.exchanged}
    assert exchanged == set(NAMES)
    story.do("back", ["a"])
    assert story.member(NodeId("n1")).exchanged
