"""Whose word counts in audits: that of all of the round that said nothing false lately."""

import pytest
from audit_world import AuditWorld, liar, nonces, sealed_by_all

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.comm.strikes import Strikes
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine.auditors import electorate, name_auditors

N1, N2, N3 = (NodeId(f"n{i}") for i in (1, 2, 3))


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
