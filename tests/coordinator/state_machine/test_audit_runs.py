"""How soon liars are caught by as many audits as a run has by itself, and that nobody honest ever is: in many runs
of the coordinator's machine, each with other draws.
"""

import os

import pytest
from audit_runs import COLLUDE, SEALS, caught, honest_convicted, long_run
from audit_world import AuditWorld, Lies, liar, nonces

from atoll.comm.ids import NodeId


@pytest.mark.long
def test_an_owner_of_eight_that_seals_something_else_is_caught_within_twenty_rounds() -> None:
    assert len(caught(SEALS, 0, 100).rounds) >= 95


@pytest.mark.long
def test_of_two_colluding_the_owner_is_caught_within_twenty_rounds_of_the_usual_audits() -> None:
    assert len(caught(COLLUDE, 1000, 50).rounds) >= 48


def test_of_honest_members_nothing_is_ever_decided() -> None:
    audited = 0
    for nonce in nonces(0, 200):
        world = AuditWorld(nonce).run()
        assert not world.decisions and not any("reduced again" in note for note in world.notes)
        audited += len(world.audited)
    assert 180 < audited < 340  # of 16 chunks, 1.3


@pytest.mark.parametrize(
    "lies",
    [
        {},
        liar(3, "mute"),
        *(pytest.param(liar(3, lie), marks=pytest.mark.long) for lie in ("audit", "slander", "alarm")),
    ],
)
def test_over_twenty_rounds_nothing_adds_up_against_honest_members(lies: Lies) -> None:
    runs = [long_run(run, lies) for run in range(3)]
    assert all(world.state.committed == 20 for world in runs)
    assert {node for world in runs for node in world.charged()} <= {NodeId("n3")}


@pytest.mark.parametrize(
    ("lies", "count"),
    [
        (liar(3, "seal", "no receipt"), 8),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (liar(3, "seal", "half receipt"), 7),
                (liar(3, "seal", "cover") | liar(5, "split shield", "busy"), 7),
                (liar(3, "seal", "cover") | liar(5, "split shield", "cover"), 7),
                (liar(3, "seal", "half receipt"), 5),
                (liar(3, "seal", "half receipt") | liar(5, "cover"), 8),
                (liar(3, "seal", "cover") | liar(5, "shield", "cover"), 8),
                (liar(3, "seal", "cover") | liar(5, "split shield", "slander"), 7),
                (liar(3, "seal", "cover") | liar(5, "split shield", "cover"), 8),
                (liar(3, "seal", "cover") | liar(5, "split shield", "cover"), 9),
            )
        ),
    ],
)
def test_of_an_owner_that_no_audit_convicts_little_gets_into_the_model_once_that_is_seen(
    lies: Lies, count: int
) -> None:
    """Silence is no proof, its own or a friend's: who is silent is struck, and what it made drawn more often."""
    for run in range(3):
        world, forged = AuditWorld(b"run %d" % run, lies, count), 0
        for _ in range(70):
            seen = bool(world.decisions)
            forged += bool(world.run().wrong()) and seen
            world.go_on()
        assert world.decisions and world.charged().keys() <= lies.keys()
        assert forged <= 3


@pytest.mark.long
def test_nobody_honest_is_convicted() -> None:
    assert honest_convicted(int(os.environ.get("ATOLL_AUDIT_RUNS", "1000"))) == 0


@pytest.mark.chaos
@pytest.mark.long
def test_nobody_honest_is_convicted_in_long_runs() -> None:
    for run in range(100, 200):
        assert not long_run(run, {}).decisions
