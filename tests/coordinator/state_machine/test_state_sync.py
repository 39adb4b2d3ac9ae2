"""Who names the digest of a state that was committed."""

import pytest
from audit_world import CHUNKS, AuditWorld, key_of, ready
from told_states import (
    BEFORE,
    NODES,
    RIGHT,
    WRONG,
    all_that_is_due,
    joins,
    last_round,
    out_but,
    tells,
    two_tell_wrong,
    wait,
)

from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import rollback
from atoll.coordinator.state_machine.state import Phase, RoundState


def all_streams_break_after_a_commit() -> AuditWorld:
    world = AuditWorld(b"n").run()
    for node in NODES:
        world.feed(ev.Disconnected(node, 1))
    return world


def back(world: AuditWorld, node: NodeId, state: bytes) -> None:
    world.feed(ev.Connected(node, 1))
    world.feed(ev.StateReported(node, 1, world.state.committed, state))


def test_who_is_back_first_after_all_streams_broke_does_not_name_the_state_alone() -> None:
    world = all_streams_break_after_a_commit()
    back(world, NODES[-1], WRONG)
    assert not world.state.digest
    for node in NODES[:-1]:
        back(world, node, RIGHT)
    assert world.state.digest == RIGHT
    assert world.state.members.here.keys() == set(NODES[:-1])


def test_who_stays_away_is_not_waited_for_once_it_is_put_out() -> None:
    world = all_streams_break_after_a_commit()
    for node in NODES[:3]:
        back(world, node, RIGHT)
    for node in NODES[3:]:
        assert not world.state.digest
        world.feed(ev.Expired(node, 1, "it was not heard"))
        if len(world.state.members.here) < 6:
            break
    assert world.state.digest == RIGHT


def test_who_stays_while_most_are_put_out_does_not_name_the_state_alone() -> None:
    world = out_but(AuditWorld(b"n").run(), NODES[-1])
    tells(world, NODES[-1], WRONG)
    assert not world.state.digest
    for node in NODES[:-1]:
        joins(world, node, world.state.committed, RIGHT)
    assert world.state.digest == RIGHT
    assert world.state.members.here.keys() == set(NODES[:-1])


def test_while_half_are_put_out_two_that_say_the_same_as_two_others_do_not_have_the_round_void() -> None:
    world = out_but(AuditWorld(b"n").run(), *NODES[:2], *NODES[6:])
    for node in NODES[6:]:
        tells(world, node, WRONG)
    for node in NODES[:2]:
        tells(world, node, RIGHT)
    assert not world.state.digest and not world.state.tied
    joins(world, NODES[2], world.state.committed, RIGHT)
    assert world.state.digest == RIGHT


def test_more_than_a_quarter_name_the_state_whoever_is_gone() -> None:
    world = out_but(AuditWorld(b"n").run(), *NODES[:3])
    for node in NODES[:3]:
        assert not world.state.digest
        tells(world, node, RIGHT)
    assert world.state.digest == RIGHT


@pytest.mark.parametrize("honest", [5, 6])
def test_after_a_power_cut_too_few_are_not_believed_and_what_all_others_have_is_the_runs(honest: int) -> None:
    """Of those that have the last state two may have made it up; and nobody can bring it any more."""
    world = out_but(AuditWorld(b"n").run().go_on().run(), *NODES[honest:])
    for node in NODES[honest:]:
        tells(world, node, WRONG if node in NODES[6:] else RIGHT)
    for node in NODES[:honest]:
        joins(world, node, world.state.committed - 1, BEFORE)
    wait(world, rollback.SETTLE_SECONDS - 1)
    assert not world.state.digest and "too few" in rollback.wait_reason(world.state)
    wait(world, 3)
    assert world.state.digest == BEFORE and world.state.members.here.keys() >= set(NODES[:5])
    for node in NODES[6:]:
        tells(world, node, WRONG)
    assert world.state.digest == BEFORE


def test_who_stays_names_the_state_at_last_where_the_others_do_not_come_back_and_no_disk_has_another() -> None:
    world = out_but(AuditWorld(b"n").run(), NODES[-1])
    tells(world, NODES[-1], RIGHT)
    assert not world.state.digest and not rollback.wait_reason(world.state).startswith("no living member")
    wait(world, world.state.config.checkpoint.patience + rollback.SETTLE_SECONDS)
    assert world.state.digest == RIGHT


def test_two_who_say_the_same_again_are_not_believed_before_others_are_back() -> None:
    world = out_but(AuditWorld(b"n").run().go_on().run(), *NODES[5:])
    for node, state in zip(NODES[5:], (RIGHT, WRONG, WRONG), strict=True):
        tells(world, node, state)
    wait(world, world.state.config.checkpoint.patience + rollback.SETTLE_SECONDS)
    assert world.state.tied
    for node in NODES[6:]:
        tells(world, node, WRONG)
    assert world.state.tied and not world.state.digest
    joins(world, NODES[0], world.state.committed - 1, BEFORE)
    assert world.state.digest == BEFORE


def test_who_does_not_tell_its_state_stops_no_run_for_longer_than_one_that_is_away() -> None:
    """Of three that stay two tell the right state: too few, of eight; and the third is heard, and says nothing."""
    world = out_but(AuditWorld(b"n").run().go_on().run(), *NODES[5:])
    for node in NODES[5:7]:
        tells(world, node, RIGHT)
    for node in NODES[:5]:
        joins(world, node, world.state.committed - 1, BEFORE)
    wait(world, 2 * rollback.SETTLE_SECONDS)
    assert not world.state.digest, "it may be about to say the same"
    wait(world, world.state.config.checkpoint.patience)
    assert world.state.digest == BEFORE


def test_whose_stream_breaks_now_and_then_does_not_begin_the_patience_anew() -> None:
    world = out_but(AuditWorld(b"n").run().go_on().run(), *NODES[4:])
    for node in NODES[4:]:
        tells(world, node, WRONG if node in NODES[6:] else RIGHT)
    for _ in range(int(world.state.config.checkpoint.patience / 10) + 3):
        world.feed(ev.Disconnected(NODES[6], 1))
        wait(world, 1)
        world.feed(ev.Connected(NODES[6], 1))
        wait(world, 9)
    assert world.state.tied


def test_who_has_the_state_and_goes_while_it_is_in_doubt_is_waited_for_from_then_on() -> None:
    world = out_but(AuditWorld(b"n").run().go_on().run(), *NODES[6:])
    k, patience = world.state.committed, world.state.config.checkpoint.patience
    for node in NODES[6:]:
        tells(world, node, RIGHT)
    joins(world, NODES[0], k - 1, BEFORE)
    wait(world, patience - 10)
    for node in NODES[6:]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    wait(world, patience - 10)
    assert not world.state.digest
    for node in (*NODES[1:3], *NODES[6:]):
        joins(world, node, k, RIGHT)
    assert world.state.digest == RIGHT


def test_who_holds_the_state_and_made_none_does_not_keep_the_round_from_being_void() -> None:
    """It may be one that has it of another, or says what its friend says."""
    world = out_but(AuditWorld(b"n").run().go_on().run(), NODES[-1])
    k, n9 = world.state.committed, NodeId("n9")
    tells(world, NODES[-1], WRONG)
    world.feed(ev.Joined(n9, 1, "n9", "n9:1", "its session", key=key_of(n9).public))
    world.feed(ev.Connected(n9, 1))
    world.feed(ev.StateReported(n9, 1, k, WRONG))
    world.feed(ev.LayoutReported(n9, 1, CHUNKS, digest(b"layout")))
    for node in NODES[:-1]:
        joins(world, node, k - 1, BEFORE)
    wait(world, rollback.SETTLE_SECONDS + 2)
    assert world.state.digest == BEFORE


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.INNER, Phase.COLLECTING, Phase.REDUCING])
def test_while_too_few_are_here_to_tell_which_state_is_right_no_round_is_made_from_it(phase: Phase) -> None:
    """Two of eight have made one up; wherever the round is when others go, these two do not commit it alone."""
    world = AuditWorld(b"n").run()
    if phase in (Phase.COLLECTING, Phase.REDUCING):
        for node in NODES:
            world.feed(ev.StepsReached(node, 1, 2))
    for node in NODES[6:]:
        tells(world, node, WRONG)
    stay = NODES[6:] if phase is not Phase.REDUCING else NODES[:2] + NODES[6:]
    if phase is Phase.REDUCING:
        for node in NODES[:2]:
            tells(world, node, RIGHT)
        for node in stay:
            world.feed(ready(world.state, node))
        wait(world, world.state.config.rounds.collect + 1)
    assert world.state.round.phase is (phase if phase is not Phase.WAITING else Phase.INNER)
    out_but(world, *stay)
    if phase is Phase.WAITING:
        world.state = replace(world.state, round=RoundState(number=2))
    wait(world, 1)
    for node in [n for n in NODES[6:] if n in world.state.round.participants]:
        world.feed(ev.StepsReached(node, 1, 2))
        world.feed(ready(world.state, node))
    all_that_is_due(world, world.state.config.checkpoint.patience - 5)
    assert world.state.committed == 1 and not world.state.digest
    assert world.state.round.phase is phase and "too few are here" in world.state.round.reason
    for node in NODES[2:5]:
        joins(world, node, 1, RIGHT)
    named = {p.round: p.digest for p in world.state.past} | {world.state.committed: world.state.digest}
    assert named[1] == RIGHT and not world.state.members.here.keys() & set(NODES[6:])


def two_commit_alone(told: bytes) -> AuditWorld:
    """Two tell this of the first round, and commit the second before the other six have told anything."""
    world = AuditWorld(b"n").run()
    rounds = replace(world.state.config.rounds, quorum=0.25)
    world.state = replace(world.state, config=replace(world.state.config, rounds=rounds))
    for node in NODES:
        world.feed(ev.StepsReached(node, 1, 2))
    for node in NODES[6:]:
        tells(world, node, told)
        world.feed(ready(world.state, node))
    all_that_is_due(world, 2 * rounds.collect)
    assert world.state.committed == 2
    return world


def test_what_so_few_told_that_all_may_lie_is_not_on_record_when_the_next_round_commits() -> None:
    """Six of eight are here, train from what they made, and do not say what it is."""
    world = two_commit_alone(WRONG)
    assert [(r.round, r.state_digest) for r in world.published] == [(1, "")]
    assert [p.round for p in world.state.past] == [0]


def test_a_round_of_which_too_few_had_told_is_proven_once_more_did_and_gone_back_to() -> None:
    """Two make the next round alone, and are killed before they told that one: all have the one before."""
    world = two_commit_alone(RIGHT)
    assert [p.round for p in world.state.past] == [0]
    for node in NODES[:6]:
        world.feed(ev.StateReported(node, 1, 1, RIGHT))
    out_but(world, *NODES[:6])
    for node in NODES[6:]:
        joins(world, node, 1, RIGHT)
    wait(world, rollback.SETTLE_SECONDS + 2)
    assert world.state.digest == RIGHT and world.published[-1].void


@pytest.mark.parametrize("stay", [1, 2], ids=lambda n: f"{n} of them stay")
def test_a_quarter_of_the_members_does_not_name_a_state_that_seven_of_eight_made(stay: int) -> None:
    world = two_tell_wrong(*NODES[1:])
    away = NODES[1 : 6 - stay + 1]
    if stay == 2:
        tells(world, NODES[5], RIGHT)
    for node in away:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    assert not world.state.digest and not world.state.tied
    for node in away:
        joins(world, node, 2, RIGHT)
    assert world.state.digest == RIGHT and not world.state.members.here.keys() & set(NODES[6:])


@pytest.mark.parametrize("made", [2, 4, 6])
def test_who_made_no_part_of_a_state_does_not_name_it_while_its_makers_are_away_for_a_moment(made: int) -> None:
    world = two_tell_wrong(*NODES[:made])
    for node in NODES[:made]:
        world.feed(ev.Disconnected(node, 1))
    for node in NODES[: made // 2]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
        assert not world.state.digest
    for node in NODES[made // 2 : made]:
        back(world, node, RIGHT)
    assert bool(world.state.digest) == (made > 4), "two may lie"
    for node in NODES[: made // 2]:
        joins(world, node, 2, RIGHT)
    assert world.state.digest == RIGHT


def held_reduce() -> AuditWorld:
    """Four have exchanged all, and wait for the others of those that made the state before."""
    world = AuditWorld(b"n").run()
    for node in NODES:
        world.feed(ev.StepsReached(node, 1, 2))
    for node in (*NODES[:2], *NODES[6:]):
        tells(world, node, WRONG if node in NODES[6:] else RIGHT)
        world.feed(ready(world.state, node))
    wait(world, world.state.config.rounds.collect + 1)
    out_but(world, *NODES[:2], *NODES[6:])
    all_that_is_due(world, 200)
    assert world.state.round.held and world.state.round.phase is Phase.REDUCING
    return world


def test_who_goes_while_a_commit_is_held_broke_off_nothing() -> None:
    for how in (ev.Leaving(NODES[0], 1, "good-bye"), ev.Joined(NODES[0], 2, "n1", "n1:1", "another session")):
        world = held_reduce()
        if isinstance(how, ev.Joined):
            how = replace(how, key=key_of(NODES[0]).public)
        world.feed(how)
        assert not world.decisions and not world.state.conduct.exchanges_left and not world.state.conduct.strikes


def test_the_time_for_which_a_round_is_held_is_nobodys_pace_and_no_rounds() -> None:
    world = out_but(AuditWorld(b"n").run(), *NODES[:2], *NODES[6:])
    for node in (*NODES[:2], *NODES[6:]):
        tells(world, node, WRONG if node in NODES[6:] else RIGHT)
    paces = {n: world.state.members.here[n].pace for n in NODES[:2]}
    wait(world, 200)
    assert world.state.round.phase is Phase.INNER
    for node in NODES[2:6]:
        joins(world, node, 1, RIGHT)
    for node in NODES[:2]:
        world.feed(ev.StepsReached(node, 1, 2))
        world.feed(ready(world.state, node))
    assert world.state.digest == RIGHT
    assert {n: world.state.members.here[n].pace for n in NODES[:2]} == paces
    world = held_reduce()
    known = world.state.paces
    for node in NODES[2:6]:
        joins(world, node, 1, RIGHT)
    all_that_is_due(world, 5)
    assert world.state.committed == 2 and world.state.paces == known


def test_two_of_eight_name_no_finished_runs_state_after_its_record_was_published_either() -> None:
    world = out_but(last_round().run(), *NODES[6:])
    for node in NODES[6:]:
        tells(world, node, WRONG)
    wait(world, world.state.config.members.stall + 2)
    assert world.published[-1].state_digest == "" and not world.state.digest
    for node in NODES[:3]:
        joins(world, node, 2, RIGHT)
    assert world.state.digest == RIGHT and not world.state.members.here.keys() & set(NODES[6:])


def test_two_that_differ_from_two_others_have_nothing_of_a_finished_run_void() -> None:
    world = out_but(last_round().run(), *NODES[:2], *NODES[6:])
    for node in (*NODES[:2], *NODES[6:]):
        tells(world, node, WRONG if node in NODES[6:] else RIGHT)
    wait(world, world.state.config.members.stall + 2)
    assert world.state.round.phase is Phase.FINISHED and not world.state.tied and not world.state.digest
    joins(world, NODES[2], 2, RIGHT)
    assert world.state.digest == RIGHT


def test_four_that_differ_from_four_others_have_nothing_of_a_finished_run_void() -> None:
    world = last_round().run()
    for node in NODES:
        tells(world, node, WRONG if node in NODES[4:] else RIGHT)
    wait(world, world.state.config.members.stall + 2)
    assert world.state.round.phase is Phase.FINISHED and not world.state.tied and not world.state.digest
    assert (world.published[-1].round, world.published[-1].state_digest) == (2, "")


def test_what_a_finished_run_came_to_is_not_gone_back_on() -> None:
    world = out_but(last_round().run(), *NODES[6:])
    for node in NODES[6:]:
        tells(world, node, RIGHT)
    for node in NODES[:6]:
        joins(world, node, world.state.committed - 1, BEFORE)
    assert world.state.round.phase is Phase.FINISHED
    wait(world, 2 * rollback.SETTLE_SECONDS)
    assert not world.state.tied and world.state.members.here[NODES[6]].state_round == world.state.committed
