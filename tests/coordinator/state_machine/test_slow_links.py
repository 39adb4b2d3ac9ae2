"""Members with slow links: in which rounds they take part, and what that costs the others."""

from member_story import Story

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace

NAMES = ["a", "b", "c", "d", "e", "f", "g", "h"]
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
