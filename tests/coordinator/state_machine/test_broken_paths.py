"""Paths between members that broke: whom they are held against, and how heavily."""

import pytest
from member_story import Story

from atoll.comm.evidence import Offence
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


def test_who_broke_with_two_more_than_a_quarter_is_to_blame_and_nobody_for_having_broken_with_it() -> None:
    story = Story(NAMES)
    story.train()

    def blamed(*pairs: tuple[int, int]) -> list[int]:
        return sorted(map(order, broken_paths.culprits(with_broken(story.state, *pairs))))

    assert blamed((1, 2), (1, 3), (1, 4)) == [], "two of these may lie, and one path may have broken"
    blinks = with_broken(story.state, (1, 2), (1, 3), (1, 4), (1, 5))
    paths = tuple(replace(path, blinks=frozenset({1})) for path in blinks.conduct.broken)
    assert not broken_paths.culprits(replace(blinks, conduct=replace(blinks.conduct, broken=paths)))
    assert blamed((1, 2), (1, 3), (1, 4), (1, 5)) == [1]
    everybody = [(1, k) for k in range(2, 9)]
    assert blamed(*everybody) == [1]
    some = (2, 3), (2, 4), (2, 5)
    assert blamed(*everybody, *some) == [1], "2 broke with four, but with three where 1 had no part in it"
    assert blamed(*everybody, *some, (2, 6)) == [1, 2]


def test_two_who_refuse_a_member_of_which_one_path_broke_once_have_its_work_left_out_twice_at_most() -> None:
    """It says so itself, truthfully: that is two of eight, and one more."""
    story, rounds = Story(NAMES), 12
    counted = 0
    for k in range(rounds):
        story.train()
        for other in "abc" if k == 0 else "ab":
            if story.state.round.plan is None:
                story.do("wait", ["1"])
            ends = {story.node("h"), story.node(other)}
            if all(map(story.contributes, ends)) and story.owners() & ends:
                story.do("wait", ["1"])
                story.do("lost", ["h", other])
        story.reduce()
        assert story.state.pending is not None
        counted += story.node("h") in story.state.pending.contributors
    assert counted >= rounds - 2 and story.node("h") not in {
        d.node for d in story.state.conduct.strikes.values() if d.trouble
    }


def test_who_go_after_they_said_that_they_cannot_reach_a_member_are_no_larger_part_of_all() -> None:
    story = Story([*NAMES, *"ijkl"])
    story.train()
    paths = with_broken(story.state, (12, 1), (12, 2), (12, 3), (12, 4))
    left = {n: at for n, at in paths.round.participants.items() if order(n) > 3}
    paths = replace(paths, round=replace(paths.round, participants=left))
    assert not broken_paths.culprits(paths)


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
    assert not story.state.conduct.strikes and [path.once for path in story.state.conduct.broken] == [{1}]


def single_words(partners: list[tuple[str, str]], rounds: int) -> tuple[Story, list[int]]:
    """In each round one says once that it cannot reach another, by turns, late in the exchange; and how many
    attempts each round took."""
    story, attempts = Story(NAMES), list[int]()
    for k in range(rounds):
        story.train()
        node, peer = partners[k % len(partners)]
        if story.state.round.plan is not None and story.contributes(story.node(node)):
            story.do("wait", ["2"])
            story.do("lost", [node, peer])
        story.reduce()
        assert story.state.pending is not None
        attempts.append(story.state.pending.attempts)
    return story, attempts


def test_who_says_once_in_each_round_that_it_cannot_reach_another_ends_two_attempts() -> None:
    """Nobody can tell who of the two it is: neither owns anything then, and they need no path."""
    story, attempts = single_words([("a", "h")], 12)
    assert attempts == [2, 2] + [1] * 10
    assert not story.state.conduct.strikes


def test_who_says_it_once_of_one_after_the_other_owns_nothing_alone_and_owes_what_it_costs() -> None:
    story, _ = single_words([("a", name) for name in "bcdefgh"], 12)
    (strikes,) = story.state.conduct.strikes.values()
    assert strikes.node == NodeId("n1") and strikes.owes_until > 12 and not strikes.latest
    story.train()
    assert {story.name(node) for node in story.owners()} == {"b", "c", "d", "e"}  # of so many chunks


@pytest.mark.parametrize(
    ("names", "liars", "every"),
    [("abcdefgh", "ab", 3), ("acdefh", "a", 1), ("acdh", "a", 2), ("abcdefgh", "ab", 4)],
)
def test_whom_liars_do_not_let_reach_them_is_not_charged_though_one_more_path_breaks_now_and_then(
    names: str, liars: str, every: int
) -> None:
    """Honest c says so, truthfully; and its path to d breaks, once in each of some rounds."""
    story = Story(list(names))
    for k in range(40):
        story.train()
        said = [("c", liar) for liar in liars] if k % every == 0 else []
        said += [("c", "d")] if k % 5 == 4 else []
        for node, peer in said:
            while story.state.round.plan is None:
                story.do("wait", ["0.25"])
            ends = [story.node(name) for name in (node, peer)]
            if all(story.contributes(end) for end in ends) and story.owners().intersection(ends):
                story.do("lost", [node, peer])
        story.reduce()
        assert story.node("c") in story.state.round.participants
    assert not any(strikes.latest for strikes in story.state.conduct.strikes.values())


def test_who_says_over_and_over_that_it_cannot_reach_one_to_blame_owes_the_time() -> None:
    story, _ = single_words([("a", name) for name in "cdefg"], 5)
    owned, attempts = list[bool](), list[int]()
    for _ in range(10):
        story.train()
        owned.append(story.node("b") in story.owners())
        story.do("wait", ["2"])
        story.do("lost", ["b", "a"])
        story.reduce()
        assert story.state.pending is not None
        attempts.append(story.state.pending.attempts)
    assert all(owned[:4]) and not any(owned[4:6]), owned
    assert attempts[:4] == [2] * 4 and attempts[4:].count(1) >= 4, "for as many rounds as it cost tenths of one"
    assert Offence.ACCUSER not in story.state.conduct.strikes["n2"].latest


def test_one_path_that_breaks_once_now_and_then_has_nobody_charged() -> None:
    """Nor do a few, each once: any link has a bad moment."""
    story, _ = single_words([("a", "h"), ("a", "g"), ("a", "f"), ("c", "d")], 4)
    assert not story.state.conduct.strikes and not broken_paths.culprits(story.state)


def blink(story: Story, name: str, accusers: str, *, back: bool = True) -> None:
    """A member has no session for a moment in the exchange, and these say that they cannot reach it."""
    attempt = str(story.state.round.ledger.attempt)
    story.do("wait", ["2"])
    story.do("disconnect", [name])
    for accuser in accusers:
        story.do("lost", [accuser, name, f"attempt={attempt}"])
    if back:
        story.do("connect", [name])


def test_who_stays_away_until_the_commit_has_ended_the_attempt_no_less() -> None:
    """Two by turns, each with one partner: each pair in two rounds."""
    story, attempts = Story(NAMES), list[int]()
    for k in range(10):
        story.train()
        name, partner = ("c", "d") if k % 2 else ("b", "e")
        if story.contributes(story.node(name)) and story.state.round.plan is not None:
            blink(story, name, partner, back=False)
        story.reduce()
        assert story.state.pending is not None
        attempts.append(story.state.pending.attempts)
        for away in "bc":
            story.do("connect" if story.node(away) in story.state.members.here else "back", [away])
    assert attempts[:4] == [2] * 4 and attempts[4:] == [1] * 6, attempts


@pytest.mark.parametrize(("accusers", "charged"), [("ab", False), ("abd", True)])
def test_two_words_do_not_have_a_member_charged_whose_session_breaks_for_a_moment(
    accusers: str, charged: bool
) -> None:
    story = Story(NAMES)
    for _ in range(4):
        story.train()
        if story.state.round.plan is not None and story.contributes(story.node("c")):
            blink(story, "c", accusers)
        story.reduce()
    latest = {node for node, strikes in story.state.conduct.strikes.items() if strikes.latest}
    assert latest == ({"n3"} if charged else set())


@pytest.mark.parametrize("how", ["leave", "expire"])
def test_two_who_leave_after_one_word_each_do_not_have_a_member_charged(how: str) -> None:
    """Of six who are left two are a third; but it takes three."""
    story = Story(NAMES)
    for _ in range(3):
        story.train()
        for name in "ab":
            story.do("wait", ["2"])
            if story.state.round.plan is not None and story.contributes(story.node("c")):
                story.do("lost", [name, "c"])
        if how == "leave":
            story.do("leave", ["a", "b"])
        else:
            story.do("disconnect", ["a", "b"])
            story.do("wait", ["15"])
        story.reduce()
        for name in "ab":
            if story.node(name) not in story.state.members.here:
                story.do("back", [name])
                story.do("state", [name, str(story.state.committed)])
    assert "n3" not in {node for node, strikes in story.state.conduct.strikes.items() if strikes.latest}


def test_who_says_of_members_without_a_session_that_it_cannot_reach_them_is_not_to_blame() -> None:
    """One is honest, as those are whose sessions broke; two in league say that they cannot reach it, either."""
    story = Story(NAMES)
    for name in "dede":
        story.train()
        if story.state.round.plan is not None and story.contributes(story.node(name)):
            blink(story, name, "c")
        story.reduce()
    story.train()
    for liar in ("a", "a", "b", "b"):
        while story.state.round.plan is None:
            story.do("wait", ["0.25"])
        if story.contributes(story.node("c")):
            story.do("lost", [liar, "c"])
    story.reduce()
    assert NodeId("n3") not in broken_paths.culprits(story.state)
    assert "n3" not in {node for node, strikes in story.state.conduct.strikes.items() if strikes.latest}


def test_only_of_whom_the_other_end_said_it_is_remembered_that_it_had_no_session() -> None:
    story = Story(NAMES)
    story.train()
    blink(story, "a", "b")
    while story.state.round.plan is None:
        story.do("wait", ["0.25"])
    blink(story, "b", "d")
    story.reduce()
    blinked = {path.pair: path.blinked for path in story.state.conduct.broken}
    a, b, d = (story.node(name) for name in "abd")
    assert blinked == {(a, b): {a}, (b, d): {b}}


def test_who_is_unreliable_for_paths_that_broke_once_is_not_charged_as_two_break_in_one_round() -> None:
    story = Story(NAMES, "h")
    story.train()
    state = with_broken(story.state, (1, 8), (2, 8), (3, 8), (4, 8))
    paths = tuple(replace(path, rounds=(1, 2), once=frozenset({1, 2})) for path in state.conduct.broken)
    lost = tuple((NodeId(f"n{k}"), story.liar) for k in (1, 2))
    said = frozenset((b, a) for a, b in lost)
    state = replace(state, conduct=replace(state.conduct, broken=paths))
    state = replace(state, round=replace(state.round, number=3, lost=lost, accused=said))
    state = broken_paths.remember(state, [])
    assert not state.conduct.doubtful and not broken_paths.culprits(state)
