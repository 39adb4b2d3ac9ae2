"""Whose word counts in audits: that of all of the round that said nothing false lately."""

import pytest
from audit_world import AuditWorld, key_of, liar, nonces, ready, sealed_by_all

from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.comm.strikes import Strikes
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.auditors import electorate, name_auditors

N1, N2, N3, N7, N8 = (NodeId(f"n{i}") for i in (1, 2, 3, 7, 8))


@pytest.mark.parametrize("trouble", [False, True])
def test_whose_exchange_ended_early_or_who_was_late_lately_audits_all_the_same(trouble: bool) -> None:
    """Else the two of eight that are left would audit each other, and convict who they like."""
    liars = liar(7, "seal", "cover", "audit") | liar(8, "seal", "cover", "audit")
    world = AuditWorld(b"n", liars, audit="1000")
    who = [conduct.identity(world.state, NodeId(f"n{i}")) for i in range(1, 7)]
    held = world.state.conduct
    if trouble:
        strikes = {key: Strikes(NodeId(f"n{i}"), trouble=4.0) for i, key in enumerate(who, 1)}
        held = replace(held, strikes=strikes)
    else:
        held = replace(held, exchanges_left=dict.fromkeys(who, 0))
    world.state = replace(world.state, conduct=held)
    assert not conduct.may_own(world.state, N1)
    world.run()
    assert not world.wrong() and world.convicted() and world.charged().keys() <= liars.keys(), world.notes


def test_who_said_what_is_not_has_no_word_on_others() -> None:
    world = AuditWorld(b"n", audit="1000")
    strikes = {conduct.identity(world.state, N3): Strikes(N3, lies=4.0)}
    world.state = replace(world.state, conduct=replace(world.state.conduct, strikes=strikes))
    assert N3 not in electorate(world.state) and N1 in electorate(world.state)


def test_two_of_four_that_can_be_dialled_and_show_nothing_keep_no_round_from_its_end() -> None:
    """Who is charged for it has its vote all the same: else there would be too few for any audit to end."""
    for nonce in nonces(0, 4):
        world = AuditWorld(nonce, liar(1, "no input") | liar(2, "no input"), leaves=4, audit="1000").run()
        assert world.charged().keys() <= {N1, N2}, world.notes


def test_all_are_to_repeat_an_audit_though_all_are_likely_to_be_late() -> None:
    world = AuditWorld(b"n", audit="1000")
    sealed_by_all(world)
    held = {conduct.identity(world.state, n): Strikes(n, owes_until=9) for n in world.state.members.here}
    state = replace(world.state, conduct=replace(world.state.conduct, strikes=held))
    audit = replace(state.round.audits[0], named={}, wide=True)
    assert len(name_auditors(state, audit, 8, world.now).named) == 7


def next_round() -> AuditWorld:
    """After a commit, when all have its state and have trained for a while."""
    world = AuditWorld(b"n", audit="1000").run()
    for node in tuple(world.state.members.here):
        world.feed(ev.StateReported(node, 1, world.state.committed, digest(b"1")))
    world.now += 10.0
    return world


@pytest.mark.parametrize("reached", [False, True])
def test_who_is_back_first_before_an_attempt_does_not_make_the_round_alone(reached: bool) -> None:
    """All streams break as contributions are awaited, or steps; of four that are back at once two lie."""
    world, first = next_round(), (N1, N2, N7, N8)
    nodes, number = tuple(world.state.members.here), world.state.round.number
    for node in nodes:
        if reached or node not in (N7, N8):
            world.feed(ev.StepsReached(node, 1, number))
    for node in nodes if reached else ():
        if node not in (N7, N8):
            world.feed(ready(world.state, node))
    world.lies = {n: frozenset({"audit", "alarm"}) for n in (N7, N8)}
    for node in nodes:
        world.feed(ev.Disconnected(node, 1))
    for node in first:
        world.feed(ev.Connected(node, 1))
        world.feed(ev.StepsReached(node, 1, number))
    for node in first:
        world.feed(ready(world.state, node))
    for _ in range(30):
        world.now += 1.0
        world.feed(ev.Tick())
    assert world.state.round.plan is None
    for node in nodes:
        world.feed(ev.Connected(node, 1))
    for node in nodes:
        world.feed(ready(world.state, node))
    world.run()
    assert not world.convicted() and world.charged().keys() <= {N7, N8}, world.notes
    assert world.state.pending is not None and len(world.state.pending.contributors) > len(first)


@pytest.mark.parametrize("why", ["it is late", "it is paused", "it saves bytes"])
def test_who_takes_part_in_the_round_has_its_vote_before_it_contributes_unless_it_will_not(why: str) -> None:
    """Else those who do would be a majority sooner; and else a few who have no part in any attempt would keep all
    others from convicting anybody."""
    world = next_round()
    nodes, number = tuple(world.state.round.participants), world.state.round.number
    if why != "it is late":
        world.feed(ev.Paused(N8, 1, saves_bytes=why == "it saves bytes"))
    for node in nodes:
        if node != N8:
            world.feed(ev.StepsReached(node, 1, number))
    while world.state.round.plan is None:
        world.now += 1.0
        world.feed(ev.Tick())
        for node in nodes:
            if node != N8:
                world.feed(ready(world.state, node))
    assert N8 not in world.state.round.ledger.members and N8 in world.state.round.participants
    assert (N8 in electorate(world.state)) == (why == "it is late")


def closed(world: AuditWorld, late: tuple[NodeId, ...], lease: float = 20.0) -> tuple[NodeId, ...]:
    """The round's participants, of whom all but the late have contributed."""
    limits = replace(world.state.config.members, lease=lease)
    world.state = replace(world.state, config=replace(world.state.config, members=limits))
    nodes, number = tuple(world.state.round.participants), world.state.round.number
    for node in nodes:
        world.feed(ev.StepsReached(node, 1, number))
    for node in nodes:
        if node not in late:
            world.feed(ready(world.state, node))
    return nodes


def wait_a_while(world: AuditWorld, seconds: int) -> None:
    for _ in range(seconds):
        world.now += 1.0
        world.feed(ev.Tick())


def breaks_off_now_and_then(world: AuditWorld, nodes: tuple[NodeId, ...], seconds: float) -> None:
    """Two seconds of three, until an attempt opens."""
    for second in range(int(seconds)):
        if world.state.round.plan is not None:
            return
        for node in nodes:
            world.feed(ev.Disconnected(node, 1) if second % 3 == 0 else ev.Tick())
            if second % 3 == 2:
                world.feed(ev.Connected(node, 1))
        world.now += 1.0
        world.feed(ev.Tick())


def test_who_is_away_and_never_out_is_waited_for_no_longer_than_any_may_be_silent_and_owes_that_time() -> None:
    """It is heard now and then, for a moment."""
    world = next_round()
    nodes = closed(world, late=tuple(world.state.round.participants)[5:])
    for node in nodes[5:]:
        world.feed(ev.Disconnected(node, 1))
    began = world.now
    while world.state.round.plan is None:
        world.now += 1.0
        world.feed(ev.Tick())
    most = world.state.config.rounds.collect + world.state.config.members.lease
    assert most <= world.now - began <= most + 10.0
    assert all(conduct.owes_time(world.state, node) for node in nodes[5:])


def test_who_is_away_again_and_again_and_back_in_time_owes_what_the_round_waited_for_it() -> None:
    world = next_round()
    nodes = closed(world, late=tuple(world.state.round.participants)[5:])
    breaks_off_now_and_then(world, nodes[5:], 30.0)
    assert world.state.round.plan is None
    for node in nodes[5:]:
        world.feed(ev.Connected(node, 1))
        world.feed(ready(world.state, node))
    world.feed(ev.Tick())
    assert set(world.state.round.ledger.members) == set(nodes)
    assert {n for n in nodes if conduct.owes_time(world.state, n)} == set(nodes[5:])


def test_two_of_eight_that_are_away_again_and_again_hold_up_no_round_of_seven() -> None:
    """One is not in it for what is held against it, or as it began anew: it is one of all the same."""
    world = next_round()
    world.feed(ev.Joined(N1, 2, "n1", "n1:1", "another session", key=key_of(N1).public))
    world.feed(ev.Connected(N1, 2))
    assert N1 not in world.state.round.participants
    closed(world, late=(N7, N8))
    began = world.now
    breaks_off_now_and_then(world, (N7, N8), 60.0)
    assert world.state.round.plan is not None and world.now - began <= 10.0


def test_who_is_away_for_a_moment_owes_nothing_however_long_the_round_stood_still_before() -> None:
    """For members, of which it had too few."""
    world = next_round()
    nodes = closed(world, late=(few := tuple(world.state.round.participants)[7:]))
    config = world.state.config
    world.state = replace(world.state, config=replace(config, members=replace(config.members, minimum=9)))
    for node in few:
        world.feed(ready(world.state, node))
    world.now += 600.0
    world.feed(ev.Tick())
    for node in nodes[5:]:
        world.feed(ev.Disconnected(node, 1))
    world.state = replace(world.state, config=config)
    for _ in range(3):
        world.feed(ev.Tick())
        world.now += 0.2
    assert world.state.round.plan is None
    for node in nodes[5:]:
        world.feed(ev.Connected(node, 1))
    world.feed(ev.Tick())
    assert world.state.round.plan is not None and not any(conduct.owes_time(world.state, n) for n in nodes)


def test_where_most_are_away_nobody_owes_time_for_it() -> None:
    world = next_round()
    nodes = closed(world, late=tuple(world.state.round.participants)[3:])
    for node in nodes[3:]:
        world.feed(ev.Disconnected(node, 1))
    wait_a_while(world, 15)
    for node in nodes[3:]:
        world.feed(ev.Connected(node, 1))
        world.feed(ready(world.state, node))
    world.feed(ev.Tick())
    assert world.state.round.plan is not None and not any(conduct.owes_time(world.state, n) for n in nodes)


def test_where_others_went_two_that_are_heard_do_not_make_the_round_without_two_that_are_away_for_a_moment() -> (
    None
):
    world = next_round()
    nodes = tuple(world.state.round.participants)
    for node in nodes[:6]:
        world.feed(ev.Disconnected(node, 1))
    for node in nodes[:4]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    closed(world, late=())
    wait_a_while(world, 3)
    assert world.state.round.plan is None
    for node in nodes[4:6]:
        world.feed(ev.Connected(node, 1))
        world.feed(ready(world.state, node))
    wait_a_while(world, 3)
    assert set(nodes[4:]) <= set(world.state.round.ledger.members)


def test_time_in_which_the_round_waited_for_something_else_is_owed_by_nobody() -> None:
    """For more members, between two moments in which many are away."""
    world = next_round()
    late = tuple(world.state.round.participants)[7:]
    nodes = closed(world, late, lease=1e6)
    config = world.state.config
    for k in range(2):
        for node in nodes[4:7]:
            world.feed(ev.Disconnected(node, 1))
        world.state = replace(world.state, config=config)
        world.now += 0.3
        world.feed(ev.Tick())
        assert world.state.round.plan is None and world.state.round.away.keys() == set(nodes[4:7])
        if k == 0:
            world.state = replace(world.state, config=replace(config, members=replace(config.members, minimum=9)))
        for node in nodes[4:7]:
            world.feed(ev.Connected(node, 1))
        if k == 0:
            world.now += 600.0
    for node in late:
        world.feed(ready(world.state, node))
    world.feed(ev.Tick())
    assert world.state.round.plan is not None
    assert not any(conduct.owes_time(world.state, node) for node in nodes[4:7])
