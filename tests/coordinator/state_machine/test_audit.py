"""Audits of sealed chunks, as the coordinator's machine decides on them: who lies is found, nobody else is."""

import pytest
from audit_world import (
    AuditWorld,
    between_two_attempts,
    caught_at_once,
    key_of,
    liar,
    nonces,
    put_exchanged,
    sealed_by_all,
)

from atoll.comm.digest import digest
from atoll.comm.evidence import Offence
from atoll.comm.ids import NodeId, Round
from atoll.comm.receipts import sign_input, sign_receipt
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.changes import fail_attempt

N1, N2, N3 = (NodeId(f"n{i}") for i in (1, 2, 3))


@pytest.mark.parametrize("lie", ["seal", "bad receipt", "two receipts"])
def test_an_owner_that_lies_is_banned_and_nothing_of_it_is_committed(lie: str) -> None:
    for world in caught_at_once(liar(3, lie)):
        assert world.convicted() == {N3} and world.charged() == {N3: {Offence.FORGED_SEAL}}
        assert N3 not in world.state.members.here
        assert not world.wrong()


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
@pytest.mark.parametrize("count", [4, 5, *(pytest.param(count, marks=pytest.mark.long) for count in (6, 8, 9))])
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
    for nonce in nonces(0, 3):
        world = AuditWorld(nonce, liar(2, "audit") | liar(3, "audit"), audit="1000")
        unlikely = [NodeId(f"n{i}") for i in range(5, 9)]
        if why == "newcomers":
            put_exchanged(world, *unlikely)
        for node in unlikely if why == "owe time" else ():
            world.state = conduct.lend_time(world.state, node, 60.0)
        world.run()
        assert world.charged().keys() <= {N2, N3}, world.notes


@pytest.mark.long
def test_two_that_lie_convict_no_owner_where_most_others_do_not_answer() -> None:
    silent = {node: frozenset({"mute"}) for node in (NodeId(f"n{i}") for i in range(5, 9))}
    for nonce in nonces(0, 3):
        world = AuditWorld(nonce, liar(2, "audit") | liar(3, "audit") | silent, audit="1000").run()
        assert world.charged().keys() <= {N2, N3, *silent} and not world.convicted()


def test_a_relay_that_says_as_an_auditor_that_its_lie_is_well_has_nobody_else_banned_for_it() -> None:
    for nonce in nonces(0, 3):
        world = AuditWorld(nonce, liar(3, "sum", "cover"), audit="1000", levels=2).run()
        assert world.convicted() == {N3} == world.charged().keys(), world.notes
        assert not world.wrong()


@pytest.mark.long
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


@pytest.mark.long
def test_a_contributor_that_shows_half_of_the_auditors_nothing_is_struck() -> None:
    """Of seven, as itself it says that another one shows nothing: no majority says anything."""
    world = AuditWorld(b"0", liar(8, "half input", "slander"))
    for _ in range(40):
        world.run().go_on()
    assert world.charged().keys() == {NodeId("n8")} and not world.convicted()


@pytest.mark.parametrize("say_so", [(N2, NodeId("n4")), (N2, NodeId("n4"), NodeId("n5"))])
def test_whose_audit_ends_as_a_friend_hides_from_so_few_that_no_side_is_a_majority_is_drawn_more_often(
    say_so: tuple[NodeId, ...],
) -> None:
    """It and its friend say that an honest owner's chunk is something else: so the audit of what it sealed itself
    ends, too. Two could say so of an honest member; it is struck where half of the others do."""
    n7, n8 = NodeId("n7"), NodeId("n8")
    world = AuditWorld(b"nonce", liar(7, "seal") | liar(8, "audit"), audit="1000")
    sealed_by_all(world)
    audit = next(a for a in world.state.round.audits.values() if a.owner == N1)
    while (found := world.state.round.audits.get(audit.chunk)) is not None:
        for node in sorted(found.named.keys() - found.voices.keys()):
            said = world.finding(node, found)
            if node in say_so:
                said = replace(said, digest=b"", silent=(world.place(n8),))
            elif node == n7:
                said = replace(said, digest=digest(b"something else"))
            world.feed(said)
        world.feed(ev.Tick())
    assert world.charged() == ({n8: {Offence.SILENT}} if len(say_so) > 2 else {})
    assert conduct.unaudited_lately(world.state, n7)


def test_two_who_say_that_another_shows_nothing_have_nobody_charged_where_they_are_more_than_a_quarter() -> None:
    """One of eight is just back, and has no part in the round. The two say so of one who shows everybody what it
    has, and each hides its own part from one other: nobody is a majority."""
    n6, n7, n8 = NodeId("n6"), NodeId("n7"), NodeId("n8")
    world = AuditWorld(b"nonce", audit="1000").run()
    for node in tuple(world.state.members.here):
        world.feed(ev.StateReported(node, 1, world.state.committed, digest(b"1")))
    world.feed(ev.Joined(n6, 2, "n6", "n6:1", "another session", key=key_of(n6).public))
    world.go_on()
    assert len(world.state.round.participants) == 7
    sealed_by_all(world)
    audit = next(a for a in world.state.round.audits.values() if a.owner == N1)
    hides = {n7: N2, n8: N2, N3: n7, NodeId("n4"): n8}
    while (found := world.state.round.audits.get(audit.chunk)) is not None:
        for node in sorted(found.named.keys() - found.voices.keys()):
            said = world.finding(node, found)
            if node in hides:
                said = replace(said, digest=b"", silent=(world.place(hides[node]),))
            world.feed(said)
        world.feed(ev.Tick())
    assert not world.charged()


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


@pytest.mark.long
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
