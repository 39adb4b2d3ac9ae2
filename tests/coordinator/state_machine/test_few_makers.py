"""Where those that made a state are gone, or say nothing of it: who names its digest then."""

import pytest
from audit_world import CHUNKS, AuditWorld, key_of, ready
from told_states import (
    BEFORE,
    NODES,
    RIGHT,
    WRONG,
    commit_next,
    joins,
    last_round,
    made_by,
    out_but,
    tells,
    told_first,
    two_tell_wrong,
    wait,
)

from atoll.comm.config.run import RunConfig
from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.comm.strikes import Strikes
from atoll.coordinator.state_machine import conduct, makers, rollback
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.state import Phase, UnnamedState


def patience(world: AuditWorld) -> float:
    return world.state.config.checkpoint.patience + rollback.SETTLE_SECONDS


@pytest.mark.parametrize("made", [2, 3, 4])
def test_a_quarter_of_the_members_that_made_nothing_does_not_name_a_state_whose_makers_are_all_put_out(
    made: int,
) -> None:
    world = two_tell_wrong(*NODES[:made])
    for node in NODES[:made]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    assert not world.state.digest and "too few are here" in rollback.wait_reason(world.state)
    for node in NODES[:made]:
        joins(world, node, 2, RIGHT)
    assert world.state.digest == RIGHT and not world.state.members.here.keys() & set(NODES[6:])


def test_nor_a_finished_runs() -> None:
    config = last_round().state.config
    world = two_tell_wrong(*NODES[:4], config=config)
    assert world.state.round.phase is Phase.FINISHED
    for node in NODES[:4]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    wait(world, config.members.stall + 2)
    assert not world.state.digest
    for node in NODES[:4]:
        joins(world, node, 2, RIGHT)
    assert world.state.digest == RIGHT


def test_who_made_nothing_names_the_state_where_all_that_did_are_gone_and_more_than_a_quarter_have_it() -> None:
    world = two_tell_wrong(*NODES[:4])
    for node in NODES[:4]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    tells(world, NODES[5], WRONG)
    assert world.state.digest == WRONG, "three of eight do not lie"


def test_of_a_quarter_of_all_are_those_too_that_fetch_a_state() -> None:
    """Two honest members were away for a round, and fetch its state in the next, of which they have no part."""
    six = [*NODES[:4], *NODES[6:]]
    world = out_but(AuditWorld(b"n").run(), *six)
    for told in (BEFORE, digest(b"2")):
        for node in six:
            tells(world, node, told)
        if told != BEFORE:
            for node in NODES[4:6]:
                world.feed(ev.Joined(node, 2, str(node), f"{node}:1", "its session", key=key_of(node).public))
                world.feed(ev.Connected(node, 2))
                world.feed(ev.LayoutReported(node, 2, CHUNKS, digest(b"layout")))
            world.state = replace(world.state, known_lately={})  # as if they were new
        commit_next(world, *six)
    for node in NODES[6:]:
        tells(world, node, WRONG)
    for node in NODES[:4]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    assert not world.state.digest
    for node in NODES[:4]:
        joins(world, node, world.state.committed, RIGHT)
    assert world.state.digest == RIGHT


@pytest.mark.parametrize("told", [(), NODES[1:2]], ids=["another is silent", "another says otherwise"])
def test_two_of_four_that_made_a_state_do_not_name_it_where_one_of_the_others_is_put_out(
    told: tuple[NodeId, ...],
) -> None:
    world = two_tell_wrong(*NODES[:2], *NODES[6:])
    for node in told:
        tells(world, node, RIGHT)
    world.feed(ev.Expired(NODES[0], 1, "it was not heard"))
    assert not world.state.digest and not world.state.tied
    joins(world, NODES[0], 2, RIGHT)
    tells(world, NODES[1], RIGHT)
    assert world.state.digest == BEFORE, "nobody can tell which two lie; who stood by has the state before"


def unawaited_by(*owing: int) -> AuditWorld:
    """The second round is committed without these, which owe time: they may have made its state all the same."""
    world = told_first()
    held = {conduct.identity(world.state, NODES[i]): Strikes(NODES[i], owes_until=9) for i in owing}
    world.state = replace(world.state, conduct=replace(world.state.conduct, strikes=held))
    for node in NODES:
        world.feed(ev.StepsReached(node, 1, 2))
    for node in NODES:
        world.feed(ready(world.state, node))
    late = {NODES[i] for i in owing}
    while world.state.committed < 2:
        for event in list(world.due()):
            if not (isinstance(event, ev.ReduceComplete) and event.node in late):
                world.feed(event)
        wait(world, 1)
    assert world.state.unawaited == late
    return world


def test_two_are_not_believed_at_last_where_others_say_otherwise_for_whom_the_commit_did_not_wait() -> None:
    world = unawaited_by(4, 5)
    for node in NODES[4:6]:
        tells(world, node, RIGHT)
    for node in NODES[6:]:
        tells(world, node, WRONG)
    for node in NODES[:4]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    wait(world, patience(world))
    assert world.state.tied and not world.state.digest
    for node in NODES[4:6]:  # as their disks have it
        world.feed(ev.StateReported(node, 1, 1, BEFORE))
    assert world.state.digest == BEFORE and {*NODES[4:6]} <= world.state.members.here.keys()


def test_nor_where_the_stream_of_who_said_otherwise_is_broken_at_that_moment() -> None:
    world = out_but(AuditWorld(b"n").run(), *NODES[:2], *NODES[6:])
    for node in NODES[:2]:
        tells(world, node, RIGHT)
    for node in NODES[6:]:
        tells(world, node, WRONG)
    wait(world, world.state.config.checkpoint.patience - 2)
    for node in NODES[:2]:
        world.feed(ev.Disconnected(node, 1))
    wait(world, 5)
    assert world.state.digest != WRONG and {*NODES[:2]} <= world.state.members.here.keys()


@pytest.mark.parametrize("others", [(), NODES[:4]], ids=["the others are away", "the others come back"])
def test_nor_are_they_where_nobody_has_the_state_before(others: list[NodeId]) -> None:
    world = unawaited_by(4, 5)
    for node in NODES[4:6]:
        tells(world, node, RIGHT)
    for node in NODES[6:]:
        tells(world, node, WRONG)
    for node in NODES[:4]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    wait(world, 3 * patience(world))
    assert world.state.tied and "nobody can tell" in rollback.wait_reason(world.state)
    for node in others:
        joins(world, node, 2, RIGHT)
    assert world.state.digest == (RIGHT if others else b"")


def of_short_stalls() -> RunConfig:
    config = AuditWorld(b"n").state.config
    return replace(config, members=replace(config.members, stall=60.0))


def of_hung_trainers(*told: NodeId) -> AuditWorld:
    """Four of eight made a state, of whom these say which."""
    world = two_tell_wrong(*NODES[:4], config=of_short_stalls())
    for node in told:
        tells(world, node, RIGHT)
    return world


@pytest.mark.parametrize("breaks", [(), NODES[:2], NODES[2:4]], ids=["heard", "its breaks", "the others' break"])
def test_who_made_a_state_and_never_says_which_does_not_keep_the_run_waiting_for_ever(
    breaks: list[NodeId],
) -> None:
    """Nobody else can say it. The heartbeats go on, of steps that it takes."""
    world = of_hung_trainers(*NODES[2:4])
    limit = world.state.config.members.stall + world.state.config.checkpoint.patience
    for _ in range(int(limit / 10)):
        assert {*NODES[:4]} <= world.state.members.here.keys()
        wait(world, 9)
        for change in (ev.Disconnected, ev.Connected):
            for node in breaks:
                world.feed(change(node, 1))
        wait(world, 1)
    wait(world, rollback.SETTLE_SECONDS)
    assert not {*NODES[:2]} & world.state.members.here.keys()
    wait(world, world.state.config.checkpoint.patience)
    assert world.state.digest == BEFORE, "the two that said it may lie, and others have the state before"


def test_who_is_put_out_for_its_silence_has_time_to_come_back_with_what_it_made() -> None:
    world = of_hung_trainers(*NODES[2:4])
    wait(world, world.state.config.members.stall + patience(world))
    assert not {*NODES[:2]} & world.state.members.here.keys() and not world.state.digest
    wait(world, world.state.config.checkpoint.patience / 2)
    for node in NODES[:2]:
        joins(world, node, 2, RIGHT)
    assert world.state.digest == RIGHT and world.state.committed == 2


def test_where_all_that_made_a_state_never_say_which_the_run_goes_back() -> None:
    """They are a quorum, as the others were paused, and all others have the state before."""
    world = made_by(*NODES[6:], config=of_short_stalls())
    wait(world, world.state.config.members.stall + world.state.config.checkpoint.patience / 2)
    assert world.state.members.here.keys() >= {*NODES[6:]}
    assert "did not say which" in rollback.wait_reason(world.state)
    wait(world, 2 * patience(world))
    assert world.state.digest == BEFORE and not world.state.members.here.keys() & {*NODES[6:]}


@pytest.mark.parametrize("state", [BEFORE, WRONG], ids=["has the state before", "says what it made"])
def test_who_is_slow_to_say_what_it_made_is_not_put_out_where_most_are(state: bytes) -> None:
    """One of those that made it is back, and says this."""
    world = made_by(*NODES, config=of_short_stalls())
    world.feed(ev.Expired(NODES[7], 1, "it was not heard"))
    joins(world, NODES[7], 1 if state == BEFORE else 2, state)
    train(world, *NODES[:7])
    assert world.state.members.here.keys() >= {*NODES[:7]}
    for node in NODES[:7]:
        tells(world, node, RIGHT)
    assert world.state.digest == RIGHT


def test_nor_where_one_that_made_it_says_it_has_the_state_before() -> None:
    """Two are slow, where the word of another is not known to be of what it made."""
    world = made_by(*NODES[4:7], config=of_short_stalls())
    for node in NODES[4:6]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    for node in (*NODES[:4], NODES[7]):
        world.feed(ev.Expired(node, 1, "it was not heard"))
    joins(world, NODES[4], 1, BEFORE)
    train(world, NODES[6])
    assert NODES[6] in world.state.members.here


def test_nor_are_two_where_all_others_are_gone() -> None:
    world = made_by(*NODES[6:], config=of_short_stalls())
    for node in NODES[:6]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    train(world, *NODES[6:])
    assert world.state.members.here.keys() == {*NODES[6:]}


def train(world: AuditWorld, *nodes: NodeId) -> None:
    """For longer than who is silent has."""
    for step in range(int((world.state.config.members.stall + 2 * patience(world)) / 10)):
        for node in nodes:
            world.feed(ev.Heartbeat(node, 1, "inner", world.state.round.number, step))
        wait(world, 10)


def test_where_nobody_has_an_older_state_those_that_made_it_are_waited_for() -> None:
    """All made it, train on, and take longer than that to say so, as their disks are slow."""
    world = made_by(*NODES, config=of_short_stalls())
    train(world, *NODES)
    assert len(world.state.members.here) == len(NODES)


@pytest.mark.parametrize("left", [1, 2])
def test_of_a_finished_run_the_words_of_those_count_that_said_good_bye_since(left: int) -> None:
    world = made_by(*NODES[:4], config=last_round().state.config)
    assert world.state.round.phase is Phase.FINISHED
    for node in NODES[:left]:
        tells(world, node, RIGHT)
        world.feed(ev.Leaving(node, 1, "the run is finished"))
    tells(world, NODES[2], RIGHT)
    assert bool(world.state.digest) is (left == 2), "three of eight do not lie"
    tells(world, NODES[3], RIGHT)
    assert world.state.digest == RIGHT


def test_nor_do_two_that_said_good_bye_name_it_alone() -> None:
    world = made_by(*NODES[:2], *NODES[6:], config=last_round().state.config)
    for node in NODES[6:]:
        tells(world, node, WRONG)
        world.feed(ev.Leaving(node, 1, "the run is finished"))
    for node in NODES[:2]:
        tells(world, node, RIGHT)
    assert not world.state.digest


def test_time_in_which_the_coordinator_was_away_is_nobodys_silence() -> None:
    world = of_hung_trainers(NODES[2])
    world.now += 2 * world.state.config.members.stall
    wait(world, world.state.config.checkpoint.patience - 5)
    assert {*NODES[:4]} <= world.state.members.here.keys()


@pytest.mark.parametrize("those", [[*NODES[:2], *NODES[6:]], NODES[:]], ids=["four", "all"])
@pytest.mark.parametrize("over", [False, True], ids=["running", "finished"])
def test_the_words_of_who_said_good_bye_are_not_added_to_a_strangers(those: list[NodeId], over: bool) -> None:
    """Which may be another name of one of them; nobody that made the state is here."""
    world = made_by(*those, config=last_round().state.config if over else None)
    for node in NODES[6:]:
        tells(world, node, WRONG)
        world.feed(ev.Leaving(node, 1, "it goes"))
    for node in NODES[:6]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    for stranger in (NodeId("n9"), NodeId("n10")):
        joins(world, stranger, 2, WRONG)
    assert not world.state.digest
    for node in NODES[:6]:
        joins(world, node, 2, RIGHT) if node in those else joins(world, node, 1, BEFORE)
    assert world.state.digest != WRONG


def test_nor_do_they_count_of_who_was_banned_since() -> None:
    world = made_by(*NODES[:2], *NODES[6:], config=last_round().state.config)
    for node in NODES[6:]:
        tells(world, node, WRONG)
        world.feed(ev.Leaving(node, 1, "it goes"))
        world.feed(ev.Banned(node, "it lies"))
    assert makers.told_digests(world.state) == {}
    tells(world, NODES[0], RIGHT)
    assert makers.told_digests(world.state) == {NODES[0]: RIGHT}


@pytest.mark.parametrize(("second", "seconds"), [(310, 16), (590, 12)], ids=["within twice", "at its end"])
def test_who_stays_is_not_believed_for_a_moment_without_the_others_after_the_patience_is_over(
    second: int, seconds: int
) -> None:
    """One of two liars comes and goes, so that nothing is settled, until the others' streams break."""
    world, lives = made_by(*NODES[:2], *NODES[6:]), dict.fromkeys(NODES, 1)
    began, liars = world.now, NODES[6:]

    def back(node: NodeId, round_: int = -1, state: bytes = b"") -> None:
        lives[node] += 1
        key = key_of(node).public
        world.feed(ev.Joined(node, lives[node], str(node), f"{node}:1", f"session {lives[node]}", key=key))
        world.feed(ev.Connected(node, lives[node]))
        if state:
            world.feed(ev.StateReported(node, lives[node], round_, state))
        world.feed(ev.LayoutReported(node, lives[node], CHUNKS, digest(b"layout")))

    for node in NODES[:2]:
        tells(world, node, RIGHT)
    for node in liars:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    while world.now < began + second and not world.state.digest:
        if int(world.now - began) % 8 == 0:
            back(liars[0])
        wait(world, 1)
    assert not world.state.digest
    for node in NODES[:6]:
        world.feed(ev.Expired(node, lives[node], "its connection broke"))
    for node in liars:
        back(node, 2, WRONG)
    wait(world, seconds)
    assert not world.state.digest
    for node in NODES[:6]:
        back(node, *((2, RIGHT) if node in NODES[:2] else (1, BEFORE)))
    wait(world, patience(world))
    assert world.state.digest == BEFORE


@pytest.mark.parametrize("told", [(), NODES[:1]], ids=["nothing said", "one had said it"])
@pytest.mark.parametrize("those", [NODES[:], [*NODES[:2], *NODES[6:]]], ids=["all", "four"])
def test_nor_where_the_others_said_good_bye_and_come_back(those: list[NodeId], told: list[NodeId]) -> None:
    """They begin anew, and nobody is known to be away that may bring the state."""
    world = made_by(*those)
    for node in told:
        tells(world, node, RIGHT)
    for node in NODES[6:]:
        tells(world, node, WRONG)
    for node in NODES[:6]:
        world.feed(ev.Leaving(node, 1, "it begins anew"))
    wait(world, world.state.config.checkpoint.patience - 5)
    assert not world.state.digest
    for node in NODES[:6]:
        joins(world, node, *((2, RIGHT) if node in those else (1, BEFORE)))
    wait(world, patience(world))
    assert world.state.digest in (RIGHT, BEFORE)


def test_who_comes_and_goes_without_a_part_in_a_round_is_none_of_all_members_then() -> None:
    world = told_first()
    for i in range(9, 20):
        joins(world, NodeId(f"n{i}"), -1, b"")
    commit_next(world, *NODES)
    assert world.state.fleet == 19, "they fetch a state"
    for i in range(9, 20):
        world.feed(ev.Leaving(NodeId(f"n{i}"), 2, "it goes"))
    for node in NODES:
        tells(world, node, digest(b"2"))
    commit_next(world, *NODES)
    assert world.state.fleet == 8


def test_who_is_alone_with_a_state_is_believed_though_another_has_one_of_long_before() -> None:
    """It is two rounds older: to go back to it would cost more than to believe those that are left."""
    world = made_by(*NODES)
    for node in NODES:
        tells(world, node, digest(b"2"))
    commit_next(world, *NODES)
    for node in NODES[:7]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    tells(world, NODES[7], RIGHT)
    joins(world, NODES[0], 1, BEFORE)
    wait(world, 2 * patience(world))
    assert world.state.digest == RIGHT


def test_nor_where_nobody_could_tell_which_of_two_states_is_right() -> None:
    world = out_but(made_by(*NODES), *NODES[:2], *NODES[6:])
    for node in NODES[:2]:
        tells(world, node, RIGHT)
    for node in NODES[6:]:
        tells(world, node, WRONG)
    wait(world, patience(world))
    for node in (*NODES[:2], *NODES[6:]):
        tells(world, node, RIGHT if node in NODES[:2] else WRONG)
    wait(world, world.state.config.checkpoint.patience - 5)
    for node in NODES[:2]:
        world.feed(ev.Expired(node, 1, "its connection broke"))
    wait(world, 20)
    assert world.state.tied and not world.state.digest
    for node in NODES[:6]:
        joins(world, node, 2, RIGHT)
    assert world.state.digest == RIGHT


def test_who_was_away_for_a_round_counts_among_all_of_whom_a_quarter_may_lie() -> None:
    world = told_first()
    world.feed(ev.Expired(NODES[0], 1, "it was not heard"))
    for told in (digest(b"2"), digest(b"3")):
        commit_next(world, *NODES[1:])
        for node in NODES[1:6] if told == digest(b"2") else ():
            tells(world, node, told)
        for node in NODES[6:]:
            tells(world, node, told if told == digest(b"2") else WRONG)
    for node in NODES[1:6]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    assert not world.state.digest
    for node in NODES[1:6]:
        joins(world, node, 3, RIGHT)
    assert world.state.digest == RIGHT


def test_but_not_for_ever() -> None:
    world = told_first()
    world.feed(ev.Leaving(NODES[0], 1, "it goes"))
    world.feed(ev.Expired(NODES[1], 1, "it was not heard"))
    joins(world, NODES[1], -1, b"")
    world.feed(ev.Expired(NODES[1], 2, "it was not heard"))
    commit_next(world, *NODES[2:])
    assert world.state.fleet == 8
    later = replace(world.state, round=replace(world.state.round, number=2 + makers.AWAY_ROUNDS))
    assert makers.known_lately(later, NODES[2:]).keys() == {*NODES[2:]}


def made_by_six(total: int = 0) -> AuditWorld:
    """The last two said good-bye for so long that they count no more, and are back just after a commit of which
    they had no part, with a state of it. `total`: the commit is the run's last."""
    world, six = told_first(), NODES[:6]
    for node in NODES[6:]:
        world.feed(ev.Leaving(node, 1, "it goes"))
    number = 2 + makers.AWAY_ROUNDS
    rounds = replace(world.state.config.rounds, total=number if total else 0)
    world.state = replace(world.state, config=replace(world.state.config, rounds=rounds))
    while world.state.committed < number:
        commit_next(world, *six)
        for node in six if world.state.committed < number else ():
            tells(world, node, digest(b"%d" % world.state.committed))
    for node in NODES[6:]:
        joins(world, node, number, WRONG)
    return world


@pytest.mark.parametrize("total", [0, 1], ids=["the run goes on", "of a finished run"])
@pytest.mark.parametrize("told", [0, 3])
def test_who_took_no_part_in_a_round_does_not_name_its_state(told: int, total: int) -> None:
    """Nobody can fetch it before its digest is known. Of whom a quarter may lie they were none at the commit."""
    world = made_by_six(total)
    number = world.state.committed
    assert world.state.fleet == 6 and (world.state.round.phase is Phase.FINISHED) == bool(total)
    for node in NODES[:told]:
        tells(world, node, RIGHT)
    for node in NODES[:6]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    assert not world.state.digest and not world.state.holders
    wait(world, 3 * patience(world))
    assert not world.state.digest
    for node in NODES[:6]:
        joins(world, node, number, RIGHT)
    assert world.state.digest == RIGHT and world.state.committed == number


def test_nor_is_it_proven_late_by_them() -> None:
    """The next round is committed before its digest is known."""
    world = made_by_six()
    number = world.state.committed
    rounds = replace(world.state.config.rounds, quorum=2 / 6)
    world.state = replace(world.state, config=replace(world.state.config, rounds=rounds))
    tells(world, NODES[0], RIGHT)
    tells(world, NODES[1], digest(b"another"))
    commit_next(world, *NODES[:2])
    before = world.state.unnamed
    assert before is not None and before.took_part == {*NODES[:6]}
    for node in NODES[6:]:
        world.feed(ev.StateReported(node, 2, number, WRONG))
    for node in NODES[:6]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    assert makers.told_late(world.state) is None and rollback.newest_proven(world.state) is None


def test_a_state_is_proven_late_by_more_than_a_quarter_that_have_it_whoever_made_it() -> None:
    world = made_by(*NODES)
    before = UnnamedState(1, 0, frozenset(NODES[:4]), frozenset(NODES), 8)
    world.state = replace(world.state, unnamed=before, past=())
    out_but(world, *NODES[4:7])
    late = makers.told_late(world.state)
    assert late is not None and late.digest == BEFORE
    world.feed(ev.Expired(NODES[4], 1, "it was not heard"))
    assert makers.told_late(world.state) is None


def test_one_alone_has_no_more_than_a_round_void_where_nobody_can_tell_which_state_is_right() -> None:
    """It says that it has an old state. Four that have it are believed."""
    world = made_by(*NODES)
    for node in NODES:
        tells(world, node, digest(b"2"))
    commit_next(world, *NODES)
    for node in NODES[2:6]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    for node in NODES[:2]:
        tells(world, node, RIGHT)
    for node in NODES[6:]:
        tells(world, node, WRONG)
    wait(world, patience(world))
    assert world.state.tied
    world.feed(ev.StateReported(NODES[6], 1, 1, BEFORE))
    wait(world, 3 * patience(world))
    assert world.state.tied and not world.state.digest
    for node in NODES[2:5]:
        joins(world, node, 1, BEFORE)
    wait(world, 3 * patience(world))
    assert world.state.digest == BEFORE


@pytest.mark.parametrize("proves", [True, False])
def test_makers_that_go_back_to_what_their_disks_have_are_waited_for(proves: bool) -> None:
    """All others are gone, and two that made up what the round came to are alone with that."""
    config = AuditWorld(b"n").state.config
    limits = replace(config.members, stall=300.0)
    world = two_tell_wrong(*NODES[:4], *NODES[6:], config=replace(config, members=limits))
    for node in NODES[2:6]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    assert "for n3, n4, n1, n2 to tell it, too" in rollback.wait_reason(world.state)
    wait(world, patience(world))
    assert world.state.tied
    wait(world, limits.stall)
    assert world.state.tied and not world.state.digest
    if proves:
        world.feed(ev.StateReported(NODES[0], 1, 1, BEFORE))
        assert world.state.digest == BEFORE
    wait(world, patience(world))
    assert world.state.digest == (BEFORE if proves else WRONG)


@pytest.mark.parametrize("seconds", [60, 290])
def test_a_round_that_makers_have_on_their_disks_is_not_void_while_they_read_it(seconds: int) -> None:
    """Of four that made two rounds two lie of the last; who was away for both has the state before, and so do
    these say, of which the digest is known to all."""
    config = AuditWorld(b"n").state.config
    config = replace(config, members=replace(config.members, stall=300.0))
    world, four = told_first(), [*NODES[:2], *NODES[6:]]
    world.state = replace(world.state, config=replace(config, rounds=replace(config.rounds, quorum=0.3)))
    for node in NODES[2:6]:
        world.feed(ev.Leaving(node, 1, "it goes"))
    commit_next(world, *four)
    for node in four:
        tells(world, node, digest(b"2"))
    commit_next(world, *four)
    for node in four:
        tells(world, node, WRONG if node in NODES[6:] else RIGHT)
    assert world.state.tied
    joins(world, NODES[3], 1, BEFORE)
    for node in NODES[6:]:
        world.feed(ev.StateReported(node, 1, 1, BEFORE))
    wait(world, seconds)
    assert world.state.tied
    world.feed(ev.StateReported(NODES[0], 1, 2, digest(b"2")))
    assert world.state.digest == digest(b"2")


def test_who_is_banned_is_not_waited_for() -> None:
    """The operator bans the two that have what they made up, and nobody else has a state of that round."""
    world = out_but(AuditWorld(b"n").run().go_on().run(), *NODES[6:])
    for node in NODES[6:]:
        tells(world, node, WRONG)
        world.feed(ev.Banned(node, "it lies"))
    for node in NODES[:6]:
        joins(world, node, world.state.committed - 1, BEFORE)
    wait(world, rollback.SETTLE_SECONDS + 2)
    assert world.state.digest == BEFORE


def test_who_tells_a_state_while_it_is_suspected_and_goes_again_does_not_begin_the_patience_anew() -> None:
    """It comes without a stream, is suspected, counts as here, and is no voter."""
    world = two_tell_wrong(*NODES[:2], *NODES[6:])
    for node in NODES[6:]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    for node in NODES[:2]:
        tells(world, node, RIGHT)
    assert not world.state.tied
    for life in range(2, 6):
        wait(world, world.state.config.checkpoint.patience - 40)
        for node in NODES[6:] if not world.state.digest else ():
            key = key_of(node).public
            world.feed(ev.Joined(node, life, str(node), f"{node}:1", f"session {life}", key=key))
            world.feed(ev.LayoutReported(node, life, CHUNKS, digest(b"layout")))
            world.feed(ev.Suspected(node, life, "it is not connected"))
            world.feed(ev.StateReported(node, life, 2, WRONG))
        wait(world, 5)
        for node in NODES[6:] if not world.state.digest else ():
            world.feed(ev.Expired(node, life, "it did not come back in time"))
    assert world.state.digest == BEFORE
