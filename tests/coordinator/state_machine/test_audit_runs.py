"""How soon liars are caught by as many audits as a run has by itself, and that nobody honest ever is: in many runs
of the coordinator's machine, each with other draws.
"""

import os

import pytest
from audit_world import AuditWorld, Lies, liar, nonces


def rounds_until_caught(lies: Lies, run: int, most: int = 20) -> int | None:
    """The round in which somebody is charged, of runs whose every round is drawn anew. Only liars may be."""
    for round_ in range(most):
        world = AuditWorld(b"%d %d" % (run, round_), lies).run()
        assert world.charged().keys() <= lies.keys(), world.notes
        if world.convicted():
            assert not world.wrong()
            return round_
    return None


def test_an_owner_of_eight_that_seals_something_else_is_caught_within_twenty_rounds() -> None:
    runs = [rounds_until_caught(liar(3, "seal"), run) for run in range(100)]
    assert sum(found is not None for found in runs) >= 95


def test_of_two_colluding_the_owner_is_caught_within_twenty_rounds_of_the_usual_audits() -> None:
    lies = liar(2, "seal") | liar(3, "cover", "audit")
    runs = [rounds_until_caught(lies, run) for run in range(1000, 1040)]
    assert sum(found is not None for found in runs) >= 37


def test_of_honest_members_nothing_is_ever_decided() -> None:
    audited = 0
    for nonce in nonces(0, 200):
        world = AuditWorld(nonce).run()
        assert not world.decisions and not any("reduced again" in note for note in world.notes)
        audited += len(world.audited)
    assert 200 < audited < 400  # of 16 chunks, one and a half


@pytest.mark.long
def test_nobody_honest_is_convicted() -> None:
    for nonce in nonces(int(os.environ.get("ATOLL_AUDIT_RUNS", "200")), 20_000):
        assert not AuditWorld(nonce).run().decisions
