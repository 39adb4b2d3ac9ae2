"""Members with slow links: in which rounds they take part, what that costs the others, and what it costs them when
one stands still in its turn."""

import math

import pytest
from member_story import Story

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace

NAMES = ["a", "b", "c", "d", "e", "f", "g", "h"]
SLOW, OTHERS = NodeId("n3"), [name for name in NAMES if name != "c"]
ROUNDS = 13


def with_rates(story: Story, **slow: float) -> None:
    """All links are known: 40 bytes a second, or what `slow` says."""
    members = story.state.members
    rates = {n: slow.get(m.name, 40.0) for n, m in members.here.items()}
    here = {
        n: replace(m, up=rates[n], down=rates[n], seen_up=rates[n], seen_down=rates[n], measured=9)
        for n, m in members.here.items()
    }
    story.state = replace(story.state, members=replace(members, here=here))


def played(story: Story, rounds: int, **slow: float) -> tuple[list[list[str]], float]:
    """Who contributed to each round, in order, and the seconds that the plans were predicted to take on
    average."""
    found, predicted = list[list[str]](), 0.0
    for _ in range(rounds):
        with_rates(story, **slow)
        story.train()
        assert story.state.round.plan is not None
        predicted += story.state.round.plan.predicted
        story.reduce()
        assert story.state.pending is not None
        found.append([story.name(n) for n in story.state.pending.contributors])
    return found, predicted / rounds


def test_whose_link_holds_the_others_up_takes_part_in_every_kth_round_and_costs_them_as_much_as_it_may() -> None:
    usual = played(Story(NAMES), 1)[1]
    rounds, predicted = played(Story(NAMES), ROUNDS, c=2.0)  # 60 s for 120 bytes; 15 s more than usual are allowed
    assert [k for k, names in enumerate(rounds) if "c" in names] == [3, 7, 11]
    assert all(set(names) >= set(NAMES) - {"c"} for names in rounds)
    assert predicted - usual < 15.0


def test_nothing_is_held_against_it_and_its_work_is_not_lost() -> None:
    story = Story(NAMES)
    played(story, 3, c=2.0)
    assert not story.state.conduct.strikes
    missed = story.state.members.here[NodeId("n3")].missed
    played(story, 1, c=2.0)
    assert (missed, story.state.members.here[NodeId("n3")].missed) == (3, 0)


def test_who_says_that_its_link_is_slow_has_the_others_wait_no_longer_than_who_is() -> None:
    story = Story(NAMES)
    _, predicted = played(story, ROUNDS, c=1e-6)
    assert predicted < 15.0


def test_it_is_not_in_a_further_attempt_of_the_round_either() -> None:
    story = Story(NAMES)
    with_rates(story, c=2.0)
    story.train()
    story.do("lost", ["a", "b"])
    assert story.state.round.ledger.attempt == 2 and not story.contributes(story.node("c"))


def test_those_with_slow_links_wait_together() -> None:
    rounds, _ = played(Story(NAMES), ROUNDS, c=2.0, d=2.2)
    assert [k for k, names in enumerate(rounds) if "c" in names] == [3, 7, 11]
    assert [k for k, names in enumerate(rounds) if "d" in names] == [3, 7, 11]


def test_where_more_than_a_third_are_slow_nobody_is() -> None:
    rounds, _ = played(Story(NAMES), 3, c=2.0, d=2.0, e=2.0)
    assert all(len(names) == len(NAMES) for names in rounds)


def test_that_a_reduce_among_fewer_is_shorter_is_no_reason() -> None:
    story = Story(NAMES[:3])
    rounds, _ = played(story, 3, a=1.0, b=1.0)
    assert all(len(names) == 3 for names in rounds)


def test_a_little_slower_is_no_reason() -> None:
    rounds, _ = played(Story(NAMES), 3, c=12.0)
    assert all(len(names) == len(NAMES) for names in rounds)


def test_who_is_needed_is_not_left_out() -> None:
    story = Story(NAMES)
    story.set("members.minimum", "8")
    rounds, _ = played(story, 2, c=2.0)
    assert all(len(names) == len(NAMES) for names in rounds)


EXCHANGE = 6.0  # seconds, usually
STAGE = 30.0 + 10 * EXCHANGE  # seconds that a stage has at most where no link is slow
EXTRA = 15.0  # seconds that a slow link may add for each round, by the plan


def minute(story: Story, **slow: float) -> None:
    """A round of about a minute."""
    with_rates(story, **slow)
    story.do("wait", ["40"])
    story.train()
    story.do("wait", [f"{EXCHANGE / 2}"])
    story.do("seal", [story.name(n) for n in story.owners()])
    story.do("wait", [f"{EXCHANGE / 2}"])
    story.do("held", [n for n in NAMES if story.contributes(story.node(n))])
    story.tell()


def in_its_turn(turns: int) -> tuple[Story, float]:
    """At the beginning of an exchange in which c has its turn, after so many rounds, with a link as slow as that
    allows, as its first exchange has shown; and what the plan predicts, in seconds."""
    story = Story(NAMES, rounds__reduce_timeout="600", reduce__chunk="2")
    for _ in range(4):
        minute(story)
    predicted = 5.25 + EXTRA * turns
    for _ in range(turns - 1):
        minute(story, c=120.0 / predicted)
    with_rates(story, c=120.0 / predicted)
    members = story.state.members
    new = replace(members.here[SLOW], measured=1)
    story.state = replace(story.state, members=replace(members, here=members.here | {SLOW: new}))
    story.do("wait", ["40"])
    story.train()
    plan = story.state.round.plan
    assert plan is not None and plan.predicted == plan.expected == pytest.approx(predicted)
    assert story.contributes(SLOW) and SLOW not in story.owners()
    return story, predicted


@pytest.mark.long
@pytest.mark.parametrize("turns", [1, 2, 4])
def test_who_shows_that_its_link_is_slow_and_stands_still_in_its_turn_costs_thrice_what_that_may_add(
    turns: int,
) -> None:
    """It brings its contributions just before they are too late, and never says that it holds the chunks."""
    story, _ = in_its_turn(turns)
    plan, began, number = story.state.round.plan, story.now, story.state.round.number
    assert plan is not None
    story.do("wait", [f"{int(4 * plan.patience - 1) / 4}"])
    assert story.now - began < STAGE / 2 + 3 * EXTRA * turns
    story.do("seal", OTHERS)
    story.do("held", OTHERS)
    second = story.now
    while story.state.round.number == number:
        if story.state.round.ledger.attempt > 1:
            story.do("held", OTHERS)
        story.do("wait", ["0.25"])
    assert story.now - second < STAGE + 3 * EXTRA * turns
    assert set(story.state.conduct.strikes) == {SLOW}


@pytest.mark.parametrize("turns", [1, 3])
def test_a_link_that_carries_a_third_of_what_it_did_is_in_time_and_held_against_nobody(turns: int) -> None:
    story, predicted = in_its_turn(turns)
    plan, number = story.state.round.plan, story.state.round.number
    assert plan is not None and 3 * predicted < plan.patience
    seconds = math.ceil(3 * predicted)
    story.do("wait", [f"{seconds}"])  # its contributions take so long,
    story.do("seal", OTHERS)
    story.do("held", OTHERS)
    story.do("wait", [f"{seconds}"])  # and so do the sealed chunks
    assert (story.state.round.number, story.state.round.ledger.attempt) == (number, 1)
    story.do("held", ["c"])
    assert story.state.pending is not None and SLOW in story.state.pending.contributors
    assert not story.state.conduct.strikes
