"""When a peer is dialled, and asked what was lost: `LinkPolicy` is told the number of links."""

import pytest

from atoll.comm.ids import Round
from atoll.comm.transport.frame_handler import RoundOrder, round_order
from atoll.comm.transport.link_policy import Dial, LeafMissing, LinkPolicy, LinkTimes, Pause, Rest

TIMES = LinkTimes(other_side=1.5, leaf=20.0, redial=(0.2, 0.5), min_life=2.0)


def policy(primary: bool = True, leaf: bool = False, target: int = 1) -> LinkPolicy:
    made = LinkPolicy(TIMES)
    made.link_target = target
    made.expect(primary, leaf, True)
    return made


def test_the_first_side_dials_at_once_and_opens_all_links() -> None:
    p = policy(target=3)
    assert [p.next_step(links) for links in (0, 1, 3)] == [Dial(3), Dial(2), Rest()]


def test_the_other_side_dials_one_link_when_none_came() -> None:
    p = policy(primary=False, target=3)
    assert [p.next_step(0), p.next_step(0), p.next_step(1)] == [Pause(1.5), Dial(1), Rest()]
    assert [p.next_step(0), p.next_step(1), p.next_step(0)] == [Pause(1.5), Rest(), Pause(1.5)], "it came in time"


def test_tries_in_vain_come_at_growing_intervals_until_a_link_lives() -> None:
    p, said = policy(), []
    for _ in range(3):
        said += [p.next_step(0)]
        p.dial_failed()
        said += [p.next_step(0)]
    assert said == [Dial(1), Pause(0.2), Dial(1), Pause(0.5), Dial(1), Pause(0.5)]
    p.link_broke(TIMES.min_life / 2)
    assert (p.failed_dials, p.next_step(0)) == (4, Dial(1))
    p.link_broke(TIMES.min_life + 1)
    assert p.next_step(0) == Dial(1)


def test_another_process_is_dialled_as_if_none_had_failed() -> None:
    p = policy()
    p.dial_failed()
    p.expect(True, False, False)
    assert p.next_step(0) == Pause(0.2)
    p.expect(True, False, True)
    assert p.next_step(0) == Dial(1)


def test_a_leaf_is_waited_for_and_then_missing_and_then_waited_for() -> None:
    p = policy(primary=False, leaf=True)
    assert [p.next_step(0) for _ in range(3)] == [Pause(20.0), LeafMissing(20.0), Pause(20.0)]
    assert p.next_step(1) == Rest()


@pytest.mark.parametrize("links", [1, 0])
def test_what_was_on_a_broken_link_is_asked_for_over_the_next_that_there_is(links: int) -> None:
    p = policy()
    assert not p.link_opened(), "nothing was lost yet"
    assert p.link_closed(links) == (links > 0)
    assert p.link_opened() == (links == 0)
    assert not p.link_opened(), "once is enough"


def test_what_was_lost_of_the_round_before_is_asked_of_nobody() -> None:
    p = policy()
    p.link_closed(0)
    p.begin_reduce()
    assert not p.link_opened()


def test_a_frame_is_held_until_its_round_begins_and_dropped_when_that_is_over() -> None:
    assert [round_order(now, Round(5)) for now in (None, Round(4), Round(5), Round(6))] == [
        RoundOrder.AHEAD,
        RoundOrder.AHEAD,
        RoundOrder.CURRENT,
        RoundOrder.OVER,
    ]
