"""Whose word counts in audits: that of all of the round that said nothing false lately."""

import pytest
from audit_world import AuditWorld, liar, nonces, ready, sealed_by_all

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


def test_who_is_away_and_never_out_is_waited_for_no_longer_than_any_may_be_silent_and_owes_that_time() -> None:
    """It is heard now and then, for a moment."""
    world = next_round()
    limits = replace(world.state.config.members, lease=20.0)
    world.state = replace(world.state, config=replace(world.state.config, members=limits))
    nodes, number = tuple(world.state.round.participants), world.state.round.number
    for node in nodes:
        world.feed(ev.StepsReached(node, 1, number))
    for node in nodes[:5]:
        world.feed(ready(world.state, node))
    for node in nodes[5:]:
        world.feed(ev.Disconnected(node, 1))
    began = world.now
    while world.state.round.plan is None:
        world.now += 1.0
        world.feed(ev.Tick())
    most = world.state.config.rounds.collect + limits.lease
    assert most <= world.now - began <= most + 10.0
    assert all(conduct.owes_time(world.state, node) for node in nodes[5:])
