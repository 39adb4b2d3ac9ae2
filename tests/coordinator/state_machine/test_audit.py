"""Audits of sealed chunks, as the coordinator's machine decides on them: who lies is found, nobody else is."""

import struct

import pytest
from audit_world import AuditWorld, Lies, key_of, liar, nonces

from atoll.comm.bitmap import bitmap
from atoll.comm.digest import digest
from atoll.comm.evidence import Offence
from atoll.comm.ids import NodeId, Round
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.receipts import sign_input, sign_receipt
from atoll.comm.replace import replace
from atoll.coordinator.service.view import affected_nodes, view
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.audit import DOUBTS, give_time_anew
from atoll.coordinator.state_machine.audit_voices import is_well
from atoll.coordinator.state_machine.auditors import AUDITORS
from atoll.coordinator.state_machine.members import put
from atoll.coordinator.state_machine.state import Audit, fail_attempt

N1, N2, N3 = (NodeId(f"n{i}") for i in (1, 2, 3))


def caught_at_once(lies: Lies, count: int = 8, leaves: int = 0) -> list[AuditWorld]:
    """Worlds in which every chunk is audited."""
    worlds = [AuditWorld(nonce, lies, count, leaves, "1000").run() for nonce in nonces(0, 3)]
    for world in worlds:
        assert world.charged().keys() <= lies.keys(), (world.charged(), world.notes)
    return worlds


@pytest.mark.parametrize("lie", ["seal", "bad receipt", "two receipts"])
def test_an_owner_that_lies_is_banned_and_nothing_of_it_is_committed(lie: str) -> None:
    for world in caught_at_once(liar(3, lie)):
        assert world.convicted() == {N3} and world.charged() == {N3: {Offence.FORGED_SEAL}}
        assert N3 not in world.state.members.here
        assert not world.wrong()


def test_a_chunk_that_is_drawn_is_looked_at_by_two_and_neither_owns_it() -> None:
    looked_at = 0
    for nonce in nonces(0, 20):
        world = AuditWorld(nonce)
        for event in list(world.due()):  # all owners seal
            world.feed(event)
        for audit in world.state.round.audits.values():
            assert len(audit.named) == AUDITORS == 2 and audit.owner not in audit.named
            looked_at += 1
    assert looked_at > 10


def test_who_seals_what_is_longer_than_any_delta_is_banned_though_nothing_is_drawn() -> None:
    for nonce in nonces(0, 20):
        world = AuditWorld(nonce, liar(3, "seal", "vast"), audit="0.000001").run()
        assert world.convicted() == {N3} and world.charged() == {N3: {Offence.FORGED_SEAL}}
        assert not world.wrong()


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


def sealed_by_all(world: AuditWorld, besides: NodeId | None = None) -> None:
    """Feed what owners seal."""
    for event in list(world.due()):
        if isinstance(event, ev.ChunksSealed) and event.node != besides:
            world.feed(event)


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


def test_an_owner_that_gives_no_receipt_loses_its_chunks_and_owns_none_for_some_rounds() -> None:
    for world in caught_at_once(liar(3, "seal", "no receipt")):
        assert world.charged() == {N3: {Offence.UNSHOWN}} and not world.convicted()
        assert world.state.pending is not None and N3 not in world.state.pending.shares
        assert conduct.consequence(world.state, N3) is conduct.Consequence.NO_OWNER


def test_of_who_showed_no_receipt_chunks_are_drawn_more_often() -> None:
    drawn = dict[bool, int]()
    for unshown in (False, True):
        drawn[unshown] = 0
        for nonce in nonces(0, 20):
            world = AuditWorld(nonce)
            if unshown:
                world.state = conduct.remember_unaudited(world.state, [N3])
            for event in list(world.due()):
                world.feed(event)
            drawn[unshown] += sum(audit.owner == N3 for audit in world.state.round.audits.values())
    assert 4 * drawn[False] < drawn[True]


def test_a_contributor_that_shows_other_bytes_than_it_sent_is_banned() -> None:
    for world in caught_at_once(liar(3, "input")):
        assert world.charged() == {N3: {Offence.FORGED_INPUT}} and world.convicted() == {N3}
        facts = dict(world.decisions[0].evidence.facts)
        assert facts["sent"] != facts["shown"] and bytes.fromhex(facts["salt"])


def test_a_contributor_that_shows_nothing_is_left_out_and_remembered() -> None:
    for world in caught_at_once(liar(3, "no input")):
        assert world.charged() == {N3: {Offence.SILENT}}
        assert world.state.pending is not None and N3 not in world.state.makers


@pytest.mark.parametrize("others", [(), ("audit",), ("slander",)])
@pytest.mark.parametrize("count", [4, 5, 6, 8, 9])
def test_a_contributor_that_shows_some_what_it_does_not_show_others_does_not_hold_the_round(
    count: int, others: tuple[str, ...]
) -> None:
    for world in caught_at_once(liar(3, "half input", *others), count):
        may_be = {Offence.SILENT, Offence.UNSHOWN, Offence.FALSE_AUDIT}
        assert world.charged().get(N3, set()) <= may_be and not world.convicted()
        assert world.state.pending is not None and world.state.pending.attempts <= 4


@pytest.mark.parametrize("lie", ["sum", "nested sum", "no sum"])
def test_a_relay_that_lies_is_banned_and_no_owner_that_believed_it(lie: str) -> None:
    for nonce in nonces(0, 3):
        world = AuditWorld(nonce, liar(3, lie), audit="1000", levels=2).run()
        assert world.charged() == {N3: {Offence.FORGED_SEAL}} and world.convicted() == {N3}, world.notes
        assert not world.wrong()


def test_a_relay_is_left_out_of_which_one_of_two_auditors_says_that_it_shows_no_receipt() -> None:
    """Of three that can be dialled, where the other auditor is the relay, which says that its mean is well."""
    world = AuditWorld(b"0", liar(3, "sum", "cover"), count=6, leaves=3, audit="1000")
    r, region = world.state.round, {NodeId(f"n{i}"): int(i in (3, 5, 6)) for i in range(1, 7)}
    near = [
        [owner if region[owner] == g else far for owner in r.ledger.owners if owner]
        for g, far in enumerate((N1, N3))
    ]
    world.state = replace(world.state, round=replace(r, ledger=book.divide(r.ledger, region, near)))
    for event in list(world.due()):
        world.feed(event)
    by_relay = 0
    for audit in list(world.state.round.audits.values()):
        relay, summed = world.relay(audit.chunk)
        if not summed or world.node(relay) != N3 or world.state.round.ledger.attempt > 1:
            continue
        by_relay += 1
        for node in audit.named:
            said = world.finding(node, audit)
            silent = replace(said, relay=None, receipts=said.receipts[:1], silent=(relay,))
            world.feed(said if node == N3 else silent)
        world.feed(ev.Tick())
    assert by_relay == 1 and world.state.round.ledger.attempt == 2 and not world.decisions
    assert N3 in world.state.round.distrusted


@pytest.mark.parametrize("why", ["newcomers", "owe time"])
def test_two_that_lie_convict_no_owner_where_half_of_the_others_are_unlikely_auditors(why: str) -> None:
    for nonce in nonces(0, 10):
        world = AuditWorld(nonce, liar(2, "audit") | liar(3, "audit"), audit="1000")
        unlikely = [NodeId(f"n{i}") for i in range(5, 9)]
        if why == "newcomers":
            put_exchanged(world, *unlikely)
        for node in unlikely if why == "owe time" else ():
            world.state = conduct.lend_time(world.state, node, 60.0)
        world.run()
        assert world.charged().keys() <= {N2, N3}, world.notes


def test_two_that_lie_convict_no_owner_where_most_others_do_not_answer() -> None:
    silent = {node: frozenset({"mute"}) for node in (NodeId(f"n{i}") for i in range(5, 9))}
    for nonce in nonces(0, 10):
        world = AuditWorld(nonce, liar(2, "audit") | liar(3, "audit") | silent, audit="1000").run()
        assert world.charged().keys() <= {N2, N3, *silent} and not world.convicted()


@pytest.mark.parametrize("liars", [(), (N2,)])
def test_an_owner_is_banned_that_told_other_norms_than_those_of_what_it_merged(liars: tuple[NodeId, ...]) -> None:
    """Or who says so, if nobody else does. The owner alone sees its own delta: it told that it is short."""
    world = AuditWorld(b"0", audit="1000")
    for event in list(world.due()):
        world.feed(event)
    c, drawn = next((c, a) for c, a in world.state.round.audits.items() if N2 in a.named)
    told, found = (struct.pack("<8f", *(1.0,) * 7, last) for last in (1.0, 24.0))
    audits = world.state.round.audits | {c: replace(drawn, norms=told)}
    world.state = replace(world.state, round=replace(world.state.round, audits=audits))
    while (audit := world.state.round.audits.get(c)) is not None and not world.decisions:
        for node in audit.named.keys() - audit.voices.keys():
            other = node in liars if liars else True
            world.feed(replace(world.finding(node, audit), norms=found if other else told))
        world.feed(ev.Tick())
    (decision,) = world.decisions
    if liars:
        assert (decision.node, decision.evidence.offence) == (N2, Offence.FALSE_AUDIT)
    else:
        assert world.convicted() == {drawn.owner} and "other norms" in decision.evidence.sentence


@pytest.mark.parametrize("lie", ["sum told short", "sum of others", "sum untold", "late sum"])
@pytest.mark.parametrize("drawn", [True, False])
def test_a_relay_is_banned_that_told_other_norms_than_those_of_what_it_summed(lie: str, drawn: bool) -> None:
    """It alone sees its own delta. What is not told, or of other inputs, is looked into, drawn or not."""
    audit = "1000" if drawn else "1e-9"
    for nonce in nonces(0, 4):
        lies = liar(2, lie, "sum told short") if lie == "late sum" else liar(2, lie)
        world = AuditWorld(nonce, lies, audit=audit, levels=2, norms=True).run()
        if drawn or lie in ("sum of others", "sum untold"):
            assert world.convicted() == {N2} == world.charged().keys(), world.notes
            assert "told" in world.decisions[0].evidence.sentence
        else:
            assert not world.decisions and not world.audited


def test_no_relay_is_charged_with_what_an_owner_sealed_that_it_did_not_sum() -> None:
    for nonce in nonces(0, 4):
        world = AuditWorld(nonce, liar(2, "seals unsummed"), audit="1e-9", levels=2, norms=True).run()
        assert world.charged() == {N2: {Offence.UNSHOWN}}, world.notes


def test_where_nobody_can_look_who_told_nothing_of_a_sum_and_who_sealed_it_sum_nothing_more() -> None:
    for lie in ("seals unsummed", "sum untold"):
        world = AuditWorld(b"0", liar(2, lie), audit="0", levels=2, norms=True).run()
        assert not world.decisions and world.state.pending is not None and world.state.pending.attempts > 1
        assert any("told nothing" in note for note in world.notes)


@pytest.mark.parametrize("lie", ["sum", "nested sum", "no sum", "seal"])
def test_liars_of_two_levels_are_convicted_where_norms_are_told_too(lie: str) -> None:
    for nonce in nonces(0, 4):
        world = AuditWorld(nonce, liar(2, lie), audit="1000", levels=2, norms=True).run()
        assert world.charged().keys() == {N2}, world.notes


def test_in_two_levels_nobody_honest_is_charged_for_norms() -> None:
    for nonce in nonces(0, 10):
        world = AuditWorld(nonce, audit="1000", levels=2, norms=True).run()
        assert not world.decisions and world.audited


@pytest.mark.parametrize("levels", [1, 2])
def test_who_tells_too_long_a_norm_of_another_is_banned_and_nothing_is_reduced_for_it(levels: int) -> None:
    """Of one chunk of 16, which is not drawn: it is audited, as somebody lies there."""
    for nonce in nonces(0, 4):
        world = AuditWorld(nonce, liar(3, "norm"), audit="1e-9", levels=levels, norms=True).run()
        assert world.convicted() == {N3} == world.charged().keys(), world.notes


@pytest.mark.parametrize("levels", [1, 2])
def test_whose_delta_is_longer_than_told_where_one_owner_sees_it_is_known_by_an_audit_of_that(levels: int) -> None:
    for nonce in nonces(0, 4):
        world = AuditWorld(nonce, liar(7, "long"), audit="1e-9", levels=levels, norms=True).run()
        assert world.charged() == {NodeId("n7"): {Offence.FALSE_NORM}}, world.notes
        pending = world.state.pending
        assert pending is not None and pending.attempts == 2 and NodeId("n7") not in pending.contributors


def test_two_that_tell_too_long_norms_have_nobody_charged_and_are_banned_one_after_the_other() -> None:
    """What both tell is beyond doubt, whoever lies, if one does: it is audited all the same."""
    world = AuditWorld(b"0", liar(6, "norm") | liar(7, "norm"), audit="1e-9", norms=True).run()
    assert len(world.convicted()) == 1
    world.go_on().run()
    assert world.convicted() == {NodeId("n6"), NodeId("n7")} == world.charged().keys(), world.notes


def test_who_came_to_an_audit_too_late_is_charged_with_nothing_and_others_are_asked() -> None:
    busy = liar(4, "busy") | liar(5, "busy")
    for nonce in nonces(0, 6):
        assert not AuditWorld(nonce, busy, audit="1000").run().decisions
        world = AuditWorld(nonce, liar(2, "seal") | busy, audit="1000").run()
        assert world.convicted() == {N2} and world.charged().keys() == {N2}, world.notes


def test_where_most_came_too_late_the_few_that_slander_are_no_majority() -> None:
    """Of eight two slander the first contributor, and one finds all well."""
    busy: dict[NodeId, frozenset[str]] = {}
    for i in range(4, 8):
        busy |= liar(i, "busy")
    for nonce in nonces(0, 6):
        world = AuditWorld(nonce, liar(2, "slander") | liar(3, "slander") | busy, audit="1000").run()
        assert world.charged().keys() <= {N2, N3}, world.notes


def test_what_nobody_had_the_time_to_audit_is_reduced_again_by_others() -> None:
    everybody = {NodeId(f"n{i}"): frozenset({"busy"}) for i in range(1, 9)}
    world = AuditWorld(b"0", everybody)
    while world.state.round.ledger.attempt == 1 and not world.state.committed:
        for event in list(world.due()) or [ev.Tick()]:
            world.feed(event)
    assert any("nobody had the time" in note for note in world.notes) and not world.decisions


def test_norms_may_differ_as_machines_sum_them_in_another_order() -> None:
    world = AuditWorld(b"0", audit="1000")
    for event in list(world.due()):
        world.feed(event)
    audit = replace(next(iter(world.state.round.audits.values())), norms=struct.pack("<2f", 1.0, 0.0))
    said = world.finding(next(iter(audit.named)), audit)
    for norms, well in (
        ((1.00001, 0.0), True),
        ((1.1, 0.0), False),
        ((1.0, 1e-9), False),
        ((1.0, 2e-45), True),
        ((1.0,), False),
    ):
        assert is_well(audit, replace(said, norms=struct.pack(f"<{len(norms)}f", *norms))) is well
    assert is_well(audit, said) and is_well(replace(audit, norms=b""), replace(said, norms=b"1234"))


def test_a_relay_that_says_as_an_auditor_that_its_lie_is_well_has_nobody_else_banned_for_it() -> None:
    for nonce in nonces(0, 3):
        world = AuditWorld(nonce, liar(3, "sum", "cover"), audit="1000", levels=2).run()
        assert world.convicted() == {N3} == world.charged().keys(), world.notes
        assert not world.wrong()


@pytest.mark.parametrize("role", ["as owner", "only as relay"])
@pytest.mark.parametrize("lie", ["deceive first", "deceive last"])
def test_who_gives_one_auditor_another_receipt_is_banned_and_that_one_not_charged(lie: str, role: str) -> None:
    """What it sealed, or summed for its region, is right: it wants an honest auditor charged for what it says."""
    for nonce in nonces(0, 3):
        levels = 1 if role == "as owner" else 2
        world = AuditWorld(nonce, liar(3, lie, role), audit="1000", levels=levels).run()
        assert world.charged() == {N3: {Offence.FORGED_SEAL}} and world.convicted() == {N3}, world.notes


def test_no_auditor_is_charged_that_was_given_what_no_other_one_shows() -> None:
    """The majority says that the chunk is well, and shows nothing that it was given."""
    world = AuditWorld(b"nonce", liar(3, "deceive first"), audit="1000")
    for event in list(world.due()):
        world.feed(event)
    c = next(c for c, a in world.state.round.audits.items() if a.owner == N3)
    victim, _ = world.state.round.audits[c].named
    list(world.due())  # everybody looks who is named
    while (audit := world.state.round.audits.get(c)) is not None:
        for node in audit.named.keys() - audit.voices.keys():
            said = world.finding(node, audit)
            world.feed(said if node == victim else replace(said, receipts=()))
        world.feed(ev.Tick())
    assert not world.charged()


def test_a_round_in_two_levels_of_honest_members_is_found_well() -> None:
    world = AuditWorld(b"nonce", audit="1000", levels=2).run()
    assert len(world.audited) == world.chunks and not world.decisions
    assert world.state.pending is not None and world.state.pending.attempts == 1


@pytest.mark.parametrize("lie", ["audit", "invention"])
def test_an_auditor_that_lies_is_charged_and_what_it_slanders_stands(lie: str) -> None:
    for world in caught_at_once(liar(3, lie)):
        assert world.charged() == {N3: {Offence.FALSE_AUDIT}}
        assert world.state.pending is not None and world.state.pending.attempts == 1


def test_a_contributor_that_shows_half_of_the_auditors_nothing_is_struck_and_no_owner_is_audited_more_for_it() -> (
    None
):
    """Of seven, as itself it says that another one shows nothing: no majority says anything."""
    world = AuditWorld(b"0", liar(8, "half input", "slander"))
    for _ in range(40):
        world.run().go_on()
    assert world.charged().keys() == {NodeId("n8")} and not world.convicted()
    honest = [NodeId(f"n{i}") for i in range(1, 8)]
    assert sum(conduct.unaudited_lately(world.state, node) for node in honest) <= 3


def test_an_auditor_that_slanders_a_contributor_harms_nobody() -> None:
    for world in caught_at_once(liar(3, "slander")):
        assert not world.charged()
        assert world.state.pending is not None and world.state.pending.attempts == 1


def test_of_three_that_can_be_dialled_one_word_leaves_out_nobody_that_shows_the_other_what_it_has() -> None:
    """Five more are leaves, which are asked, and ask nobody."""
    n7 = NodeId("n7")
    for nonce in nonces(0, 3):
        world = AuditWorld(nonce, count=8, leaves=5, audit="1000")
        for event in list(world.due()):
            world.feed(event)
        while audits := [a for a in world.state.round.audits.values() if a.named.keys() - a.voices.keys()]:
            for audit in audits:
                for node in audit.named.keys() - audit.voices.keys():
                    said = world.finding(node, audit)
                    slandered = replace(said, digest=b"", silent=(world.place(n7),))
                    world.feed(slandered if node == N2 else said)
        world.run()
        assert world.state.pending is not None and world.state.pending.attempts == 1
        assert n7 in world.state.pending.contributors and not world.decisions


def test_a_newcomer_audits_where_others_cannot_and_is_not_struck_for_a_slow_link() -> None:
    """Among others that were in exchanges; then where those are the owner, and one that is silent."""
    n8 = NodeId("n8")
    for nonce in nonces(0, 20):
        world = AuditWorld(nonce, liar(8, "mute"), audit="1000")
        put_exchanged(world, n8)
        world.run()
        assert world.audited and not world.decisions
    world = AuditWorld(b"nonce", liar(2, "mute") | liar(3, "mute"), count=4, leaves=1, audit="1000", chunks=1)
    assert world.state.round.ledger.owners == (N1,)
    put_exchanged(world, N3)
    world.run()
    assert world.charged() == {N2: {Offence.SILENT}} and conduct.owes_time(world.state, N3)


def put_exchanged(world: AuditWorld, *besides: NodeId) -> None:
    """Make all but these members that were in exchanges before."""
    here = world.state.members.here
    new = (replace(member, exchanged=node not in besides) for node, member in here.items())
    world.state = replace(world.state, members=put(world.state.members, *new))


def test_of_three_members_two_words_charge_nobody_that_they_say_shows_nothing() -> None:
    world = AuditWorld(b"nonce", count=3, audit="1000")
    for event in list(world.due()):
        world.feed(event)
    audit = next(a for a in world.state.round.audits.values() if a.owner == N3)
    for node in audit.named:
        world.feed(replace(world.finding(node, audit), digest=b"", silent=(audit.parties.owner,)))
    world.feed(ev.Tick())
    assert world.state.round.number == 1 and not world.decisions
    assert N3 in world.state.round.distrusted


def test_of_three_members_one_word_charges_nobody_that_it_says_shows_nothing() -> None:
    """Not the other auditor either, which does not speak of itself."""
    world = AuditWorld(b"nonce", count=3, audit="1000")
    for event in list(world.due()):
        world.feed(event)
    audit = next(a for a in world.state.round.audits.values() if a.owner != N3)
    (fellow,) = audit.named.keys() - {N3}
    for node in (fellow, N3):
        said = world.finding(node, audit)
        world.feed(said if node == fellow else replace(said, digest=b"", silent=(world.place(fellow),)))
    world.feed(ev.Tick())
    assert world.state.round.number == 1 and not world.decisions


def test_an_auditor_that_does_not_answer_is_charged_and_another_one_named() -> None:
    for world in caught_at_once(liar(3, "mute")):
        assert world.charged() == {N3: {Offence.SILENT}}
        assert world.state.pending is not None and world.state.pending.attempts == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("seal", "cover"), ("seal", "cover")),
        (("seal",), ("cover",)),
        (("seal",), ("audit", "cover")),
        (("seal",), ("no input", "cover")),
        (("seal",), ("input", "cover")),
        (("seal", "no receipt"), ("slander", "cover")),
        (("seal",), ("mute",)),
        (("two receipts", "seal"), ("cover",)),
    ],
)
def test_of_two_of_eight_that_collude_nobody_honest_is_charged_and_what_they_sealed_is_not_committed(
    first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    for world in caught_at_once(liar(2, *first) | liar(3, *second)):
        assert world.charged() and not world.wrong()


def test_leaves_are_audited_and_audit_nobody() -> None:
    for world in caught_at_once(liar(2, "seal"), leaves=3):
        assert world.convicted() == {N2}


def test_fewer_than_three_that_can_be_dialled_are_not_audited() -> None:
    for count, leaves in ((2, 0), (4, 2)):
        world = AuditWorld(b"nonce", liar(1, "seal"), count=count, leaves=leaves, audit="1000").run()
        assert not world.audited and not world.decisions


def test_of_three_members_two_take_the_third_its_chunks_and_convict_nobody() -> None:
    for world in caught_at_once(liar(3, "seal"), count=3):
        assert not world.charged() and not world.wrong()
        assert world.state.pending is not None and N3 not in world.state.pending.shares
        assert world.state.pending.attempts == 2


def test_a_run_without_audits_signs_nothing() -> None:
    world = AuditWorld(b"nonce", audit="0").run()
    assert not world.audited and not world.state.round.salt


def test_a_seal_that_leaves_a_contributor_out_is_not_taken() -> None:
    world = AuditWorld(b"nonce")
    r = world.state.round
    assert r.plan is not None
    owner, fence = r.ledger.owners[0], r.plan.fence
    assert owner is not None
    for inputs in (b"\x01", b"\x7f", b"\xfe"):
        world.feed(ev.ChunksSealed(owner, 1, fence, ((0, world.lie(0), inputs),)))
        assert not world.state.round.ledger.sealed
    world.feed(ev.ChunksSealed(owner, 1, fence, ((0, world.lie(0), b"\xff"),)))
    assert world.state.round.ledger.sealed.keys() == {0}


def test_an_owner_that_goes_while_it_is_audited_leaves_nothing_behind() -> None:
    world = AuditWorld(b"nonce", audit="1000")
    for event in list(world.due()):
        world.feed(event)
    assert len(world.state.round.audits) == world.chunks
    owner = world.state.round.ledger.owners[0]
    assert owner is not None
    world.feed(ev.Leaving(owner, 1, "it has had enough"))
    assert all(o != owner for o in world.state.round.ledger.owners)
    world.run()
    assert not world.decisions and world.state.pending is not None and owner not in world.state.pending.shares


def views(world: AuditWorld) -> dict[NodeId, pb.View]:
    return {node: view(world.state, node) for node in world.state.members.here}


def test_auditors_are_told_what_to_recompute_until_they_have_and_leaves_whom_to_show_it() -> None:
    world = AuditWorld(b"nonce", leaves=2, audit="1000")
    before = world.state
    first = next(iter(world.due()))
    world.feed(first)
    (audit,) = world.state.round.audits.values()
    assert len(audit.named) == 2 and audit.owner not in audit.named
    assert affected_nodes(before, world.state) == {*audit.named, NodeId("n7"), NodeId("n8")}
    for node, told in views(world).items():
        wanted = [(c.chunk, c.since, c.inputs, c.seconds) for c in told.audits]
        expected = [(audit.chunk, 1, b"\xff", audit.seconds)] if node in audit.named else []
        assert wanted == expected
        leaf = node in ("n7", "n8")
        assert {d.node_id for d in told.auditors} == (set(audit.named) if leaf else set())
        assert told.plan.salt == world.state.round.salt and len(told.plan.salt) == 16
    auditor = next(iter(audit.named))
    world.feed(world.finding(auditor, audit))
    assert not view(world.state, auditor).audits
    assert auditor not in {d.node_id for d in view(world.state, NodeId("n8")).auditors}


def test_an_audit_is_what_it_was_when_the_coordinator_comes_back() -> None:
    world = AuditWorld(b"nonce", liar(3, "seal"), audit="1000")
    for event in list(world.due()):
        world.feed(event)
    salt, audits = world.state.round.salt, timeless(world)
    world.feed(ev.Started(2, b"another nonce"))
    assert (world.state.round.salt, timeless(world)) == (salt, audits) and audits
    world.run()
    assert world.convicted() == {N3}


def timeless(world: AuditWorld) -> list[Audit]:
    """The audits under way, without the times since which they wait, and until which."""
    return [replace(a, named=dict.fromkeys(a.named, 0.0), asked={}) for a in world.state.round.audits.values()]


@pytest.mark.parametrize("event", [ev.Started(2, b"another nonce"), ev.HeardNobody(60.0)])
def test_an_auditor_has_its_time_anew_when_the_coordinator_was_away(event: ev.Event) -> None:
    world = AuditWorld(b"nonce", audit="1000")
    for sealed in list(world.due()):
        world.feed(sealed)
    assert len(world.state.round.audits) == world.chunks
    world.now += 60.0
    world.feed(event)
    world.run()
    assert not world.decisions and not world.wrong()


@pytest.mark.parametrize("how", ["it falls silent", "its connection breaks"])
def test_an_auditor_that_is_waited_for_in_vain_owes_that_time_however_it_ends(how: str) -> None:
    world = AuditWorld(b"0", audit="1000")
    for event in list(world.due()):  # all owners seal
        world.feed(event)
    [audit, *_] = world.state.round.audits.values()
    prompt, slow = audit.named
    for each in list(world.state.round.audits.values()):
        for node in each.named.keys() - {slow}:
            world.feed(world.finding(node, each))
    world.now = audit.named[slow] + (0.5 if how == "it falls silent" else -0.5)
    ends: dict[str, ev.Event] = {"it falls silent": ev.Tick(), "its connection breaks": ev.Disconnected(slow, 1)}
    world.feed(ends[how])
    world.feed(ev.Tick())
    assert conduct.owes_time(world.state, slow) and not conduct.owes_time(world.state, prompt)
    assert world.charged() == ({slow: {Offence.SILENT}} if how == "it falls silent" else {})
    world.run()
    world.go_on()
    for event in list(world.due()):
        world.feed(event)
    assert all(slow not in each.named for each in world.state.round.audits.values())


def test_who_owes_the_others_time_is_not_named_where_others_can_audit() -> None:
    world = AuditWorld(b"0", audit="1000")
    world.state = conduct.lend_time(world.state, N3, 60.0)
    for event in list(world.due()):
        world.feed(event)
    audits = world.state.round.audits.values()
    assert len(audits) == world.chunks and all(N3 not in audit.named for audit in audits)


def test_an_auditor_that_answers_at_the_last_moment_owes_nothing_as_others_may_have_kept_it_waiting() -> None:
    """Who contributed, or sealed, chooses whom it shows at once what it has, and whom in the last moment."""
    world = AuditWorld(b"0", audit="1000")
    for event in list(world.due()):
        world.feed(event)
    audits = list(world.state.round.audits.values())
    slow = max(audits[0].named)
    for each in audits:
        for node in each.named.keys() - {slow}:
            world.feed(world.finding(node, each))
    world.now = audits[0].named[slow] - 0.1
    for each in audits:
        if slow in each.named:
            world.feed(world.finding(slow, each))
    world.run()
    assert not conduct.owes_time(world.state, slow) and not world.decisions
    assert world.state.pending is not None and world.state.pending.attempts == 1


def test_the_time_for_an_answer_doubles_twice_at_most_though_one_has_answered() -> None:
    world = AuditWorld(b"0")
    for event in list(world.due()):
        world.feed(event)
    [audit, *_] = world.state.round.audits.values()
    for each in list(world.state.round.audits.values()):
        world.feed(world.finding(min(each.named), each))
    for _ in range(world.count):
        if audit.chunk in world.state.round.audits:
            world.now = max(world.state.round.audits[audit.chunk].named.values()) + 0.5
            world.feed(ev.Tick())
            assert world.state.round.audits.get(audit.chunk, audit).seconds <= 4 * audit.seconds
    assert audit.chunk not in world.state.round.audits, "the others were silent, too, one after the other"


def test_who_is_named_just_after_the_coordinator_was_away_has_time_to_come_back_first() -> None:
    world = AuditWorld(b"nonce", audit="1000")
    world.feed(ev.Started(2, b"another nonce"))
    for sealed in list(world.due()):
        world.feed(sealed)
    audits, patient_until = world.state.round.audits.values(), world.state.round.patient_until
    assert audits and patient_until > world.now
    assert all(until > patient_until + audit.seconds for audit in audits for until in audit.named.values())
    world.now += 1.0
    again = give_time_anew(world.state, world.now).round.audits.values()  # as another attempt opens
    assert all(until > patient_until + audit.seconds for audit in again for until in audit.named.values())


def test_what_is_said_of_another_audit_or_by_somebody_who_was_not_asked_changes_nothing() -> None:
    world = AuditWorld(b"nonce", audit="1000")
    world.feed(next(iter(world.due())))
    (audit,) = world.state.round.audits.values()
    asked = next(iter(audit.named))
    others = [n for n in world.state.members.here if n not in audit.named]
    right = replace(world.finding(asked, audit), digest=b"w" * 16)
    before = world.state
    for event in (
        *(replace(right, node=node) for node in others),
        replace(right, chunk=audit.chunk + 1),
        replace(right, fence=right.fence._replace(attempt=2)),
        replace(right, fence=right.fence._replace(round=Round(2))),
        replace(right, life=2),
    ):
        world.feed(event)
        assert world.state == before


def test_an_owner_that_goes_between_two_attempts_leaves_nothing_behind_either() -> None:
    world = AuditWorld(b"nonce", liar(3, "seal"), audit="1000")
    for event in list(world.due()):
        world.feed(event)
    assert len(world.state.round.audits) == world.chunks
    world.state = fail_attempt(world.state, "a test says so", world.now)
    world.feed(ev.Leaving(N3, 1, "it has had enough"))
    world.run()
    assert not world.wrong() and not world.decisions


def test_a_mute_auditor_holds_a_round_up_for_a_few_seconds_and_is_not_named_again_soon() -> None:
    for world in caught_at_once(liar(3, "mute")):
        assert world.now - 10.0 <= 8.0
        again = AuditWorld(b"later", audit="1000")
        (who, record), *_ = world.state.conduct.strikes.items()
        strikes = {who: replace(record, owes_until=0)}  # it owes no time any more
        again.state = replace(again.state, conduct=replace(again.state.conduct, strikes=strikes))
        for event in list(again.due()):
            again.feed(event)
        audits = again.state.round.audits.values()
        assert len(audits) == again.chunks and all(N3 not in a.named and len(a.named) == 2 for a in audits)


def test_who_is_too_slow_for_an_audit_is_not_named_where_there_are_others() -> None:
    for slow, up, down in (
        (["n3"], 100.0, 1.0),  # 8 bytes take it 8 s
        (["n3"], 1.0, 100.0),  # what it asks with waits for a byte, a second
        (["n3", "n4", "n5", "n6", "n7", "n8"], 1.0, 1.0),
    ):
        world = AuditWorld(b"nonce", audit="1000")
        rates = dict.fromkeys(world.state.members.here, (100.0, 100.0))
        rates |= dict.fromkeys(map(NodeId, slow), (up, down))
        here = {
            n: replace(m, up=rates[n][0], down=rates[n][1], seen_up=rates[n][0], seen_down=rates[n][1])
            for n, m in world.state.members.here.items()
        }
        world.state = replace(world.state, members=replace(world.state.members, here=here))
        for event in list(world.due()):
            world.feed(event)
        audits = world.state.round.audits.values()
        assert any(n in audit.named for audit in audits for n in slow) is (len(slow) > 1)
        assert all(len(audit.named) == 2 for audit in audits)


def test_a_mute_auditor_is_not_named_where_another_can_audit_and_is_where_nobody_else_can() -> None:
    world = AuditWorld(b"nonce", count=3, audit="1000")
    strikes = AuditWorld(b"nonce", liar(3, "mute"), audit="1000").run().state.conduct
    world.state = replace(world.state, conduct=strikes)
    for event in list(world.due()):
        world.feed(event)
    for audit in world.state.round.audits.values():
        assert set(audit.named) == {N1, N2} - {audit.owner}
    world = AuditWorld(b"nonce", count=3, audit="1000")
    for node in (N1, N2, N3):
        mute = AuditWorld(b"nonce", liar(int(node[1:]), "mute"), audit="1000").run().state.conduct.strikes
        strikes = replace(strikes, strikes=strikes.strikes | mute)
    world.state = replace(world.state, conduct=strikes)
    for event in list(world.due()):
        world.feed(event)
    for audit in world.state.round.audits.values():
        assert len(audit.named) == 1 and audit.owner not in audit.named


def test_an_auditor_has_the_time_that_the_exchange_shows_it_to_need() -> None:
    def seconds(elapsed: float, predicted: float) -> float:
        world = AuditWorld(b"nonce", audit="1000")
        plan = world.state.round.plan
        assert plan is not None
        plan = replace(plan, predicted=predicted)
        world.state = replace(world.state, round=replace(world.state.round, plan=plan))
        world.now += elapsed
        world.feed(next(iter(world.due())))
        (audit,) = world.state.round.audits.values()
        (until,) = set(audit.named.values())
        assert until == world.now + audit.seconds + 1.0  # for the way there and back
        return audit.seconds

    assert seconds(0.0, 0.0) == 3.0
    assert seconds(1.5, 0.0) == 9.0
    assert seconds(0.0, 4.0) == 7.0  # a quarter of it moves what comes to one chunk of 16 from 8
    assert 10.0 < seconds(1000.0, 0.0) < 10.1  # as one that fetches its inputs slowly needs it


def test_who_is_named_in_the_place_of_a_mute_auditor_has_more_time() -> None:
    world = AuditWorld(b"nonce", audit="1000")
    world.feed(next(iter(world.due())))
    (before,) = world.state.round.audits.values()
    world.now = max(before.named.values())
    world.feed(ev.Tick())
    (audit,) = world.state.round.audits.values()
    assert audit.silent == before.named.keys() and len(audit.named) == 2
    assert audit.seconds == 2 * before.seconds
    assert set(audit.named.values()) == {world.now + audit.seconds + 1.0}


Reports = dict[int, list[ev.AuditReported]]


def between_two_attempts(world: AuditWorld, pause: float = 1.0) -> Reports:
    """Have every chunk sealed, and the attempt fail; the next one follows after so many seconds. Returns what
    auditors found, by chunk: it is on its way."""
    sealed_by_all(world)
    audits = world.state.round.audits.items()
    assert len(audits) == world.chunks
    found = {c: [world.finding(node, audit) for node in audit.named] for c, audit in audits}
    failed = fail_attempt(world.state, "a test says so", world.now)
    world.state = replace(failed, round=replace(failed.round, paused_until=world.now + pause))
    return found


def of_owner(world: AuditWorld, owner: NodeId) -> int:
    """A chunk of this owner that is audited."""
    return next(c for c, audit in world.state.round.audits.items() if audit.owner == owner)


@pytest.mark.parametrize("lie", ["no input", "input", "seal", "bad receipt", "no receipt", "sum", "no sum"])
@pytest.mark.parametrize("gone", [N3, N1, NodeId("n6")])
def test_what_an_honest_auditor_says_is_not_false_as_somebody_left_before_it_came(lie: str, gone: NodeId) -> None:
    """The liar that it tells of, or another party."""
    world = AuditWorld(b"nonce", liar(3, lie), audit="1000", levels=2 if "sum" in lie else 1)
    found = between_two_attempts(world)
    world.feed(ev.Leaving(gone, 1, "it has had enough"))
    left = world.state
    told = [report for reports in found.values() for report in reports if report.node not in (N3, gone)]
    assert any(report.silent or report.receipts for report in told)
    for report in told:
        world.state = left
        world.feed(report)
    assert world.charged().keys() <= {N3}


@pytest.mark.parametrize("lies", [{}, liar(3, "mute")])
def test_an_auditor_has_its_time_anew_after_a_pause_in_which_its_view_named_no_audit(lies: Lies) -> None:
    world = AuditWorld(b"nonce", lies, audit="1000")
    between_two_attempts(world, pause=60.0)
    assert not any(told.audits for told in views(world).values())
    world.run()
    assert world.now > 60.0 and world.charged().keys() == lies.keys() and world.state.pending is not None


def test_an_auditor_that_says_nothing_of_one_that_is_gone_is_charged_all_the_same() -> None:
    """Neither a place that nobody has, nor a receipt that nobody signed, is a word on who has left."""
    world = AuditWorld(b"nonce", liar(3, "seal"), audit="1000")
    found = between_two_attempts(world)
    one, other = found[of_owner(world, N3)]
    world.feed(ev.Leaving(N3, 1, "it has had enough"))
    world.feed(replace(one, receipts=(), silent=(8,)))
    world.feed(replace(other, receipts=(one.receipts[0][:-1] + b"!",)))
    assert world.charged() == {one.node: {Offence.FALSE_AUDIT}, other.node: {Offence.FALSE_AUDIT}}


def test_an_owner_that_leaves_is_convicted_of_what_it_signed() -> None:
    world = AuditWorld(b"nonce", liar(3, "bad receipt"), audit="1000")
    found = between_two_attempts(world)
    c = of_owner(world, N3)
    world.feed(ev.Leaving(N3, 1, "it has had enough"))
    world.feed(found[c][0])
    assert world.charged() == {N3: {Offence.FORGED_SEAL}} and world.convicted() == {N3}


def test_no_receipt_of_more_than_what_is_audited_is_kept_as_evidence() -> None:
    """An owner and an auditor in league could have megabytes of it remembered for ever."""
    world = AuditWorld(b"nonce", liar(3, "seal"), audit="1000")
    sealed_by_all(world)
    c = of_owner(world, N3)
    audit, salt = world.state.round.audits[c], world.state.round.salt
    records = tuple(world.record(0, c, digest(b"%d" % k)) for k in range(200))
    receipt = sign_receipt(key_of(N3), salt, c, audit.since, world.place(N3), records, audit.digest)
    asked = next(n for n in audit.named if n != N2)
    world.feed(replace(world.finding(asked, audit), digest=b"", receipts=(receipt.pack(),), silent=()))
    assert world.charged() == {asked: {Offence.FALSE_AUDIT}}


def test_an_owner_may_not_say_that_another_party_than_a_relay_summed_for_it() -> None:
    """No plan asks it for that: it could show no receipt, and the owner would not be held to its own."""
    world = AuditWorld(b"nonce", liar(3, "seal"), audit="1000")
    sealed_by_all(world)
    c = of_owner(world, N3)
    audit = world.state.round.audits[c]
    summed = sign_input(key_of(N2), world.state.round.salt, c, 1, digest(b"a sum"), (1, 4))
    others = (world.record(place, c, world.sent(place, c)) for place in (0, 2, 3, 5, 6, 7))
    records = tuple(sorted((*others, summed), key=lambda record: record.place))
    salt, place = world.state.round.salt, world.place(N3)
    receipt = sign_receipt(key_of(N3), salt, c, audit.since, place, records, audit.digest)
    asked = next(n for n in audit.named if n != N2)
    world.feed(replace(world.finding(asked, audit), digest=b"", receipts=(receipt.pack(),), silent=()))
    assert world.charged() == {N3: {Offence.FORGED_SEAL}} and world.convicted() == {N3}
