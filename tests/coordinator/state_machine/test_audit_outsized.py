"""Sealed chunks that are said to be longer than any delta: they are audited, drawn or not."""

import pytest
from audit_world import AuditWorld, liar, nonces, sealed_by_all

from atoll.comm.bitmap import bitmap
from atoll.comm.evidence import Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.audit import DOUBTS
from atoll.coordinator.state_machine.changes import fail_attempt

N1, N2, N3 = (NodeId(f"n{i}") for i in (1, 2, 3))


def test_who_seals_what_is_longer_than_any_delta_is_banned_though_nothing_is_drawn() -> None:
    for nonce in nonces(0, 20):
        world = AuditWorld(nonce, liar(3, "seal", "vast"), audit="0.000001").run()
        assert world.convicted() == {N3} and world.charged() == {N3: {Offence.FORGED_SEAL}}
        assert not world.wrong()


@pytest.mark.long
def test_of_two_that_seal_what_is_too_long_nothing_is_committed_though_each_covers_the_other() -> None:
    lies = liar(2, "seal", "vast", "cover", "alarm") | liar(3, "seal", "vast", "cover", "alarm")
    for nonce in nonces(0, 20):
        world = AuditWorld(nonce, lies, audit="0.000001").run()
        assert world.convicted() and world.charged().keys() == lies.keys() and not world.wrong()


def test_who_says_of_everything_that_it_is_too_long_has_two_chunks_audited_that_are_well() -> None:
    for nonce in nonces(0, 20):
        world = AuditWorld(nonce, liar(3, "alarm"), audit="0.000001").run()
        assert len(world.audited) == DOUBTS and not world.decisions
        assert sum("times as long" in note for note in world.notes) == DOUBTS


def test_who_has_found_a_chunk_well_is_not_asked_again_when_somebody_says_that_it_is_too_long() -> None:
    """Its view may never have shown that the audit was over: it would not look at the same order again."""
    world = AuditWorld(b"0", audit="1000")
    for event in list(world.due()):
        world.feed(event)
    [audit, *_] = world.state.round.audits.values()
    c, looked = audit.chunk, audit.named.keys()
    for node in looked:
        world.feed(world.finding(node, audit))
    assert c not in world.state.round.audits
    liar_ = next(node for node in world.state.round.ledger.members if node not in {audit.owner, *looked})
    world.feed(word(world, liar_, c, audit.digest))
    again = world.state.round.audits[c]
    assert len(again.named) == 3 and again.voices.keys() == looked
    world.run()
    assert not world.decisions


def test_what_is_too_long_is_said_where_nothing_is_audited() -> None:
    world = AuditWorld(b"0", liar(1, "seal", "vast"), audit="0").run()
    assert not world.audited and any("nothing is audited" in note for note in world.notes)


def test_a_word_on_the_length_of_a_chunk_counts_before_its_seal_is_known_and_not_by_its_owner() -> None:
    for early in (False, True):
        world = AuditWorld(b"0", audit="0.000001")
        owner = world.state.round.ledger.owners[0]
        assert world.state.round.plan is not None and owner is not None
        fence, other = world.state.round.plan.fence, N1 if owner != N1 else N2
        sealed = world.mean(0, list(range(8))), bitmap(range(8), 8)
        words: list[ev.Event] = [
            ev.SealOutsized(other, 1, fence, 0, sealed[0], 3.0),
            ev.ChunksSealed(owner, 1, fence, ((0, *sealed),)),
        ]
        for node, at, c in ((owner, 1, 0), (other, 2, 0), (other, 1, 99)):
            world.feed(ev.SealOutsized(node, 1, fence._replace(attempt=at), c, sealed[0], 3.0))
        assert not world.state.round.outsized
        for word in words if early else reversed(words):
            assert not world.state.round.audits
            world.feed(word)
        assert world.state.round.audits.keys() == {0} and len(world.state.round.audits[0].named) == 3


def test_what_is_too_long_is_reduced_again_where_who_sealed_it_has_left() -> None:
    """Its chunk is nobody's, or another one's that has the bytes and no receipt."""
    for nonce in nonces(0, 10):
        world = AuditWorld(nonce, liar(3, "seal"), audit="0.000001")
        r = world.state.round
        mine = [c for c, owner in enumerate(r.ledger.owners) if owner == N3]
        for event in list(world.due()):
            if isinstance(event, ev.ChunksSealed):
                world.feed(event)
        world.feed(ev.Leaving(N3, 1, "done"))
        assert world.state.round.plan is not None and world.state.round.ledger.orphans == tuple(mine)
        fence = world.state.round.plan.fence._replace(attempt=world.state.round.ledger.since[mine[0]])
        for node in (N1, N2):
            world.feed(ev.SealOutsized(node, 1, fence, mine[0], world.lie(mine[0]), 9.0))
        world.run()
        assert not world.wrong() and not world.decisions


def word(world: AuditWorld, node: NodeId, c: int, digest: bytes | None = None) -> ev.SealOutsized:
    """That a chunk, as it is sealed or with this digest, is too long."""
    r = world.state.round
    assert r.plan is not None
    fence = r.plan.fence._replace(attempt=r.ledger.since[c])
    return ev.SealOutsized(node, 1, fence, c, r.ledger.sealed[c].digest if digest is None else digest, 9.0)


def test_words_on_what_was_not_sealed_keep_nobody_from_a_word_on_what_was() -> None:
    """A liar gives others what it did not seal, which they tell of, and then what it did."""
    world = AuditWorld(b"0", liar(3, "seal"), audit="0.000001")
    ledger = world.state.round.ledger
    mine = [c for c, owner in enumerate(ledger.owners) if owner == N3]
    others = [c for c, owner in enumerate(ledger.owners) if owner not in (N1, N3)][:2]
    for c in others:  # before their owners have said what they sealed
        world.feed(word(world, N1, c, b"another" + bytes(9)))
    assert len(world.state.round.outsized) == 2
    sealed_by_all(world)
    for c in others:
        world.feed(word(world, N1, c, b"a third" + bytes(9)))
    assert not world.state.round.audits
    world.feed(word(world, N1, mine[0]))
    assert world.state.round.audits.keys() == {mine[0]}
    assert world.run().convicted() == {N3} and not world.wrong()


def moved() -> tuple[AuditWorld, list[int]]:
    """A world in whose second attempt, a flat one, owners have their sealed chunks anew; and those of n3."""
    world = AuditWorld(b"0", audit="0.000001", levels=2)
    sealed_by_all(world)
    ledger = book.flatten(world.state.round.ledger)
    flat = replace(world.state, round=replace(world.state.round, ledger=ledger))
    world.state = fail_attempt(flat, "somebody is late", world.now)
    world.feed(ev.Tick())
    ledger = world.state.round.ledger
    mine = [c for c, owner in enumerate(ledger.owners) if owner == N3]
    assert ledger.complete and all(ledger.since[c] == 2 > ledger.sealed[c].since for c in mine)
    return world, mine


def test_an_honest_owner_is_not_asked_for_receipts_of_an_attempt_in_which_it_sealed_nothing() -> None:
    """It has none, and would be charged for it; and one word alone has nothing undone."""
    world, mine = moved()
    world.feed(word(world, N1, mine[0]))
    r = world.state.round
    assert not r.audits and r.ledger.attempt == 2 and r.ledger.complete
    assert not world.run().decisions


def test_a_word_between_two_attempts_has_nothing_audited_that_may_be_of_another_owner_by_then() -> None:
    """That could not be, and be undone for it; members say it again in the next attempt."""
    world = AuditWorld(b"0", audit="0.000001", levels=2)
    sealed_by_all(world)
    said = word(world, N1, 2)
    failed = fail_attempt(world.state, "two broke", world.now)
    flat = replace(failed.round, ledger=book.flatten(failed.round.ledger), paused_until=world.now + 1.0)
    world.state = replace(failed, round=flat)
    world.feed(said)
    assert world.state.round.plan is None and not world.state.round.outsized
    world.now += 1.0
    world.feed(ev.Tick())
    assert world.state.round.ledger.complete and not world.run().decisions


def test_what_cannot_be_audited_is_reduced_again_where_two_say_that_it_is_too_long() -> None:
    world, mine = moved()
    for node in (N1, N2):
        world.feed(word(world, node, mine[0]))
    ledger = world.state.round.ledger
    assert ledger.attempt == 3 and not ledger.sealed.keys() & set(mine)
    assert not world.run().decisions


def test_where_nobody_can_audit_what_two_say_is_too_long_others_reduce_it_again_once() -> None:
    """Two of eight can be dialled; or three, of which one lies and two are silent."""
    silent = liar(2, "mute") | liar(3, "mute")
    for leaves, lies in ((6, {}), (5, silent)):
        world = AuditWorld(b"0", liar(1, "seal", "vast") | lies, leaves=leaves, audit="0.000001").run()
        assert not world.wrong() and N1 not in world.charged()
        world = AuditWorld(b"0", liar(7, "alarm") | liar(8, "alarm") | lies, leaves=leaves, audit="0.000001").run()
        attempts = sum("attempt" in note for note in world.notes)
        assert attempts <= 8 - leaves and not world.charged().keys() - lies.keys()


def test_what_is_told_and_sealed_with_the_work_of_one_that_is_gone_is_reduced_again() -> None:
    """The seals of one report, of which the first has all the others undone."""
    world = AuditWorld(b"0", liar(3, "seal"), audit="0.000001")
    sealed_by_all(world, besides=N3)
    mine = [c for c, owner in enumerate(world.state.round.ledger.owners) if owner == N3]
    told = [event for event in world.due() if isinstance(event, ev.ChunksSealed) and event.node == N3]
    world.feed(ev.Leaving(NodeId("n8"), 1, "done"))
    assert world.state.round.ledger.attempt == 2 and len(mine) > 1
    for node in (N1, N2):
        world.feed(word(world, node, mine[0], world.lie(mine[0])))
    seals = tuple(seal for event in told for seal in event.seals)
    world.feed(replace(told[0], seals=seals))
    assert world.state.round.ledger.attempt == 3 and not world.state.round.ledger.sealed.keys() & set(mine)
