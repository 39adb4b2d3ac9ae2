"""Who ends its part in a round while what it made is audited, or could be."""

import pytest
from audit_world import CHUNKS, AuditWorld, key_of, liar, sealed_by_all

from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine import events as ev

N1, N3 = NodeId("n1"), NodeId("n3")
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


@pytest.mark.parametrize("relay", [False, True])
def test_what_is_sealed_before_its_relay_told_of_it_is_reduced_again_if_one_of_the_two_goes(relay: bool) -> None:
    """It was drawn by nobody: that takes what the relay tells."""
    world = AuditWorld(b"n", liar(8, "seal"), audit="1000", levels=2, norms=True)
    for event in list(world.due()):
        if isinstance(event, ev.ChunksSealed) and event.node == "n8" and event.seals:
            world.feed(event)
    ledger = world.state.round.ledger
    assert ledger.sealed and not world.state.round.audits
    goes = world.node(world.relay(min(ledger.sealed))[0]) if relay else NodeId("n8")
    world.feed(ev.Joined(goes, 2, str(goes), f"{goes}:1", "another session", key=key_of(goes).public))
    world.run()
    assert not world.wrong() and world.charged().keys() <= {NodeId("n8"), goes}, world.notes


def test_who_goes_while_others_are_audited_may_own_chunks() -> None:
    world = AuditWorld(b"n", audit="1000")
    sealed_by_all(world, besides=N3)
    assert world.state.round.audits
    world.feed(ev.Joined(N3, 2, "n3", "n3:1", "another session", key=key_of(N3).public))
    assert conduct.may_own(world.state, N3) and not conduct.unaudited_lately(world.state, N3)
