"""Who ends its part in a round while what it made is audited, or could be."""

import pytest
from audit_world import CHUNKS, AuditWorld, key_of, liar, sealed_by_all

from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine import events as ev

N1, N3, N8 = NodeId("n1"), NodeId("n3"), NodeId("n8")
GOES = (
    "begins anew",
    "says good-bye",
    "saves bytes",
    "falls silent",
    "tells another layout",
    "tells another state",
)


@pytest.mark.parametrize("how", GOES)
def test_who_goes_while_what_it_made_is_audited_owns_nothing_and_is_drawn_more_often(how: str) -> None:
    """It may know that it is, as it is asked for its receipt; and that nobody can look once it is gone."""
    goes: dict[str, ev.Event] = {
        "begins anew": ev.Joined(N3, 2, "n3", "n3:1", "another session", key=key_of(N3).public),
        "says good-bye": ev.Leaving(N3, 1, "bye"),
        "saves bytes": ev.Paused(N3, 1, saves_bytes=True),
        "falls silent": ev.Expired(N3, 1, "it was not heard"),
        "tells another layout": ev.LayoutReported(N3, 1, CHUNKS + 1, digest(b"another")),
        "tells another state": ev.StateReported(N3, 1, 0, digest(b"another")),
    }
    world = AuditWorld(b"n", liar(3, "seal"), audit="1000")
    sealed_by_all(world)
    assert conduct.may_own(world.state, N3)
    assert any(audit.owner == N3 for audit in world.state.round.audits.values())
    world.feed(goes[how])
    assert not conduct.may_own(world.state, N3) and conduct.unaudited_lately(world.state, N3)
    world.run()
    assert not world.wrong() and world.charged().keys() <= {N3} and not world.convicted()


def test_what_is_made_by_who_is_left_out_while_it_is_audited_is_drawn_more_often_and_it_is_not_charged() -> None:
    """It may be others' word that it was left out for, or its own."""
    world = AuditWorld(b"n", liar(3, "seal"), audit="1000")
    sealed_by_all(world)
    for _ in range(2):
        assert world.state.round.plan is not None and any(a.owner == N3 for a in world.state.round.audits.values())
        world.feed(ev.PeerUnreachable(N3, 1, N1, world.state.round.plan.fence, "reset"))
    assert all(e.gone for e in world.state.round.ledger.entries if e.node == N3)
    assert conduct.unaudited_lately(world.state, N3) and conduct.may_own(world.state, N3)
    world.run()
    assert not world.wrong() and not world.charged()


@pytest.mark.parametrize("by", [1, 2])
def test_what_is_made_by_whose_audit_ended_as_another_was_left_out_is_drawn_more_often(by: int) -> None:
    """It may be its own word, or a friend's: what the other contributed can be shown to no auditor any more.
    Nobody owns less for it: it may be true."""
    world = AuditWorld(b"n", liar(1, "seal"), audit="1000")
    sealed_by_all(world)
    assert any(audit.owner == N1 for audit in world.state.round.audits.values())
    for _ in range(2):
        assert world.state.round.plan is not None
        world.feed(ev.PeerUnreachable(NodeId(f"n{by}"), 1, N8, world.state.round.plan.fence, "reset"))
    assert all(e.gone for e in world.state.round.ledger.entries if e.node == N8)
    assert conduct.unaudited_lately(world.state, N1) and conduct.may_own(world.state, N1)
    world.run()
    assert not world.wrong() and not world.charged().keys() - {N1}


def test_what_is_made_by_whose_audit_ended_as_a_contributor_left_is_drawn_more_often() -> None:
    world = AuditWorld(b"n", liar(1, "seal"), audit="1000")
    sealed_by_all(world)
    world.feed(ev.Leaving(N8, 1, "bye"))
    assert conduct.unaudited_lately(world.state, N1) and conduct.may_own(world.state, N1)


def sealed_before_it_is_told(liar_: NodeId) -> AuditWorld:
    """In two levels: the liar has sealed, and no relay has told what is in the means."""
    world = AuditWorld(b"n", {liar_: frozenset({"seal"})}, audit="1000", levels=2, norms=True)
    for event in list(world.due()):
        if isinstance(event, ev.ChunksSealed) and event.node == liar_ and event.seals:
            world.feed(event)
    assert world.state.round.ledger.sealed and not world.state.round.audits
    return world


@pytest.mark.parametrize("relay", [False, True])
def test_what_is_sealed_before_its_relay_told_of_it_is_reduced_again_if_one_of_the_two_goes(relay: bool) -> None:
    """It was drawn by nobody: that takes what the relay tells."""
    world = sealed_before_it_is_told(N8)
    goes = world.node(world.relay(min(world.state.round.ledger.sealed))[0]) if relay else N8
    world.feed(ev.Joined(goes, 2, str(goes), f"{goes}:1", "another session", key=key_of(goes).public))
    world.run()
    assert not world.wrong() and world.charged().keys() <= {N8, goes}, world.notes


def test_what_is_sealed_before_its_relay_told_of_it_is_reduced_again_if_a_contributor_is_left_out() -> None:
    """By the word of who sealed it, as it may be: an auditor would have to see what the other contributed."""
    world = sealed_before_it_is_told(N1)
    sealed = dict(world.state.round.ledger.sealed)
    relays = {world.node(world.relay(c)[0]) for c in sealed}
    other = next(node for node in (NodeId(f"n{i}") for i in range(8, 1, -1)) if node not in relays)
    for _ in range(2):
        assert world.state.round.plan is not None
        world.feed(ev.PeerUnreachable(N1, 1, other, world.state.round.plan.fence, "reset"))
    ledger = world.state.round.ledger
    assert all(e.gone for e in ledger.entries if e.node == other) and not ledger.sealed
    world.run()
    assert not world.wrong() and world.charged().keys() <= {N1}, world.notes


def test_who_goes_while_others_are_audited_may_own_chunks() -> None:
    world = AuditWorld(b"n", audit="1000")
    sealed_by_all(world, besides=N3)
    assert world.state.round.audits
    world.feed(ev.Joined(N3, 2, "n3", "n3:1", "another session", key=key_of(N3).public))
    assert conduct.may_own(world.state, N3) and not conduct.unaudited_lately(world.state, N3)


def test_what_is_found_well_is_not_drawn_more_often() -> None:
    world = AuditWorld(b"n", audit="1000").run()
    assert world.audited and not world.state.conduct.unaudited
