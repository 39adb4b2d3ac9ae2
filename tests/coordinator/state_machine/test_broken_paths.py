"""Paths between members that broke: whom they are held against, and how heavily."""

from member_story import Story

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import broken_paths
from atoll.coordinator.state_machine.members import RECONNECT_GRACE_SECONDS
from atoll.coordinator.state_machine.state import BrokenPath, Phase, State, order

NAMES = ["a", "b", "c", "d", "e", "f", "g", "h"]
ROUNDS = 20


def with_broken(state: State, *pairs: tuple[int, int]) -> State:
    """Paths between these members, by number, that broke in the round under way."""
    paths = tuple(BrokenPath((NodeId(f"n{a}"), NodeId(f"n{b}")), (1,)) for a, b in pairs)
    return replace(state, conduct=replace(state.conduct, broken=paths))


def test_who_broke_with_a_third_is_to_blame_and_nobody_for_having_broken_with_it() -> None:
    story = Story(NAMES)
    story.train()

    def blamed(*pairs: tuple[int, int]) -> list[int]:
        return sorted(map(order, broken_paths.culprits(with_broken(story.state, *pairs))))

    assert blamed((1, 2), (1, 3)) == []
    assert blamed((1, 2), (1, 3), (1, 4)) == [1]
    everybody = [(1, k) for k in range(2, 9)]
    assert blamed(*everybody) == [1]
    assert blamed(*everybody, (2, 3), (2, 4)) == [1], "2 broke with three, but with two where 1 had no part in it"
    assert blamed(*everybody, (2, 3), (2, 4), (2, 5)) == [1, 2]


def sleep(story: Story, name: str, seconds: str) -> None:
    """The member is out of reach in the reduce under way for so long, which the others notice; then it is back."""
    others = [n for n in NAMES if n != name]
    for _ in range(2):
        story.do("wait", [seconds])
        if story.state.round.phase is Phase.REDUCING and story.contributes(story.node(name)):
            for other in others:
                story.do("lost", [other, name])


def test_who_is_out_of_reach_for_a_moment_is_charged_with_what_that_cost() -> None:
    story = Story(NAMES, "c")
    for k in range(2 * ROUNDS):
        story.train()
        if k % 2:
            sleep(story, "c", "0.25")
        story.reduce()
    strikes = story.state.conduct.strikes["n3"]
    assert 1.0 < sum(strikes.weights(2 * ROUNDS)) < 5.0, "it costs 2 % of the others' time in every other round"
    assert set(story.state.conduct.strikes) == {"n3"}, "those that could not reach it are not to blame"


def to_blame() -> Story:
    """Three rounds after a first one, in each of which c alone says that it cannot reach two others."""
    story = Story(NAMES, "c")
    story.train()
    story.reduce()
    for two in (["a", "b"], ["d", "e"], ["f", "g"]):
        story.train()
        for name in two:
            story.do("lost", ["c", name])
        story.reduce()
    return story


def test_who_alone_says_that_it_reaches_nobody_has_a_whole_strike_for_each_round() -> None:
    story = to_blame()
    assert sum(story.state.conduct.strikes["n3"].weights(3)) > 1.9, "of the rounds since it broke with a third"
    assert set(story.state.conduct.strikes) == {"n3"}


def test_one_word_about_who_broke_with_others_is_no_strike_for_who_was_to_blame_before() -> None:
    story = to_blame()
    before = story.state.conduct.strikes["n3"].latest
    story.train()
    for name in ("d", "e", "c"):
        while story.state.round.phase is not Phase.REDUCING:
            story.do("wait", ["0.25"])
        story.do("lost", [name, "h"])
    assert (NodeId("n3"), NodeId("n8")) in story.state.round.lost
    story.reduce()
    assert story.state.conduct.strikes["n3"].latest == before


def test_what_is_said_of_attempts_whose_plan_some_may_not_have_had_is_held_against_nobody() -> None:
    """The coordinator gave the plan to one member, and stood still before it gave it to the others, who so did
    nothing; nor are all connected at once when it is back."""
    story, others = Story(NAMES), [n for n in NAMES if n != "c"]
    story.train()
    story.do("deaf", ["40"])
    for attempt in (1, 2):
        for other in others:
            story.do("lost", ["c", other, f"attempt={attempt}"])
    assert story.state.round.ledger.attempt == 3, "such a word costs the attempt"
    assert not story.state.round.lost
    story.do("wait", [str(RECONNECT_GRACE_SECONDS)])
    story.do("lost", ["c", "a"])
    assert story.state.round.ledger.attempt == 4 and not story.state.round.lost
    story.do("lost", ["c", "a"])
    assert story.state.round.lost == ((NodeId("n1"), NodeId("n3")),), "all had time to have this plan"
    story.reduce()
    assert not story.state.conduct.strikes and not story.state.conduct.broken
