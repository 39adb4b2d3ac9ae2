"""Audits of the norms that owners and relays tell: who tells others than those of what it merged is found."""

import struct
from collections.abc import Iterator

import pytest
from audit_world import (
    AuditWorld,
    liar,
    nonces,
)

from atoll.comm.evidence import Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import audit, conduct
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.audit_voices import is_well

N1, N2, N3, N4, N7 = (NodeId(f"n{i}") for i in (1, 2, 3, 4, 7))
HONEST = {NodeId(f"n{i}") for i in (1, 2, 5, 6, 7, 8)}


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


@pytest.mark.long
@pytest.mark.parametrize("lie", ["sum told short", "sum of others", "late sum"])
@pytest.mark.parametrize("drawn", [True, False])
def test_a_relay_is_banned_that_told_other_norms_than_those_of_what_it_summed(lie: str, drawn: bool) -> None:
    """It alone sees its own delta. What is told of other inputs is looked into, drawn or not."""
    audit = "1000" if drawn else "1e-9"
    for nonce in nonces(0, 4):
        lies = liar(2, lie, "sum told short") if lie == "late sum" else liar(2, lie)
        world = AuditWorld(nonce, lies, audit=audit, levels=2, norms=True).run()
        if drawn or lie == "sum of others":
            assert world.convicted() == {N2} == world.charged().keys(), world.notes
            assert "told" in world.decisions[0].evidence.sentence
        else:
            assert not world.decisions and not world.audited


@pytest.mark.parametrize("mute", [(), (3, 4, 5, 6, 7, 8)])
def test_a_relay_that_tells_nothing_of_what_it_summed_sums_nothing_and_is_charged_with_the_time(
    mute: tuple[int, ...],
) -> None:
    """Silence is no proof: it is not banned. Nor does a round wait for ever of which nobody answers an audit."""
    silent: dict[NodeId, frozenset[str]] = {}
    for i in mute:
        silent |= liar(i, "mute")
    for nonce in nonces(0, 3):
        world = AuditWorld(nonce, liar(2, "sum untold") | silent, audit="1e-9", levels=2, norms=True).run()
        assert not world.convicted() and world.charged().keys() <= {N2, *silent}, world.notes
        if not mute:
            assert world.charged() == {N2: {Offence.SILENT}} and conduct.owes_time(world.state, N2)


@pytest.mark.parametrize(("seconds", "lie"), [(0.5, ""), (4.0, ""), (4.0, "sum told short")])
def test_a_relay_whose_word_comes_after_it_said_that_it_holds_all_is_not_banned_for_that(
    seconds: float, lie: str
) -> None:
    """A node's reports of sums have a queue of their own: they may be overtaken, for a moment or for long. What it
    tells then is held to what auditors find."""
    world = AuditWorld(b"0", liar(2, "sum untold"), audit="1e-9", levels=2, norms=True)
    while not audit.untold(world.state) or len(world.state.round.completions) < 8:
        for event in list(world.due()):
            world.feed(event)
    r = world.state.round
    assert r.plan is not None
    world.now += seconds
    world.feed(ev.Tick())
    world.lies = liar(2, lie)
    for c in audit.untold(world.state):
        seals = ((c, r.ledger.sealed[c].digest, r.ledger.sealed[c].inputs),)
        for event in world.sums(r.ledger.owners[c] or N1, r.plan.fence, seals):
            world.feed(event)
    if not world.state.committed:
        world.run()
    if lie:
        assert world.convicted() == {N2}, world.notes
        return
    assert not world.decisions and world.state.pending is not None
    assert world.state.pending.attempts == 1, world.notes


def test_a_chunk_is_drawn_only_when_its_relays_told_what_they_summed() -> None:
    """Who knew of the draw, by a friend that is named, could tell the truth of just that one."""
    world = AuditWorld(b"0", liar(2, "late sum"), audit="1000", levels=2, norms=True)
    waited = 0
    for event in list(world.due()):
        world.feed(event)
        untold = audit.untold(world.state)
        waited += len(untold)
        assert not world.state.round.audits.keys() & set(untold)
    assert waited and world.state.round.audits.keys() >= set(world.state.round.ledger.sealed)


def test_no_relay_is_charged_with_what_an_owner_sealed_that_it_did_not_sum() -> None:
    for nonce in nonces(0, 4):
        world = AuditWorld(nonce, liar(2, "seals unsummed"), audit="1e-9", levels=2, norms=True).run()
        assert world.charged() == {N2: {Offence.UNSHOWN}}, world.notes


def test_where_nobody_can_look_who_told_nothing_of_a_sum_and_who_sealed_it_sum_nothing_more() -> None:
    for lie in ("seals unsummed", "sum untold"):
        world = AuditWorld(b"0", liar(2, lie), audit="0", levels=2, norms=True).run()
        assert not world.decisions and world.state.pending is not None and world.state.pending.attempts > 1
        assert any("told nothing" in note for note in world.notes)


@pytest.mark.long
@pytest.mark.parametrize("lie", ["sum", "nested sum", "no sum", "seal"])
def test_liars_of_two_levels_are_convicted_where_norms_are_told_too(lie: str) -> None:
    for nonce in nonces(0, 4):
        world = AuditWorld(nonce, liar(2, lie), audit="1000", levels=2, norms=True).run()
        assert world.charged().keys() == {N2}, world.notes


@pytest.mark.long
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


def test_a_sample_of_audits_is_enough_for_a_delta_that_is_longer_than_told_in_many_chunks() -> None:
    world = AuditWorld(b"0", liar(7, "longer"), audit="1e-9", chunks=128, norms=True).run()
    assert world.charged() == {NodeId("n7"): {Offence.FALSE_NORM}}, world.notes
    assert 2 <= len(world.audited) <= 16


def test_two_that_tell_too_long_norms_have_nobody_charged_and_are_banned_one_after_the_other() -> None:
    """What both tell is beyond doubt, whoever lies, if one does: it is audited all the same."""
    world = AuditWorld(b"0", liar(6, "norm") | liar(7, "norm"), audit="1e-9", norms=True).run()
    assert len(world.convicted()) == 1
    world.go_on().run()
    assert world.convicted() == {NodeId("n6"), NodeId("n7")} == world.charged().keys(), world.notes


@pytest.mark.parametrize("levels", [1, 2])
def test_two_that_tell_too_long_norms_have_nobody_charged_though_one_leaves_before_it_is_audited(
    levels: int,
) -> None:
    """What it had told can be audited no more: it counts for nothing."""
    told, liars = NodeId("n4"), liar(3, "norm") | liar(4, "norm")
    for nonce in nonces(0, 4):
        world = AuditWorld(nonce, liars, audit="1e-9", levels=levels, norms=True)
        while len(world.state.round.completions) < 4:
            for event in list(world.due()):
                if not isinstance(event, ev.ReduceComplete) or event.node != told:
                    world.feed(event)
        world.feed(ev.Leaving(told, 1, "a test says so", 0))
        world.run()
        assert world.charged().keys() <= {N3, told}, world.notes


class Leaver(AuditWorld):
    """One whose delta is too long leaves when all but its own chunks are sealed; another is too long in these."""

    own: frozenset[int] = frozenset()
    left = False

    def norm(self, place: int, c: int, by: NodeId | None = None) -> float:
        if self.node(place) == N4 or (self.node(place) == N7 and c in self.own):
            return 3.0
        return super().norm(place, c, by)

    def due(self) -> Iterator[ev.Event]:
        r = self.state.round
        self.own = self.own or frozenset(c for c, owner in enumerate(r.ledger.owners) if owner == N4)
        yield from (event for event in super().due() if getattr(event, "node", None) != N4)
        if not self.left and self.own.issuperset(r.ledger.unsealed):
            self.left = True
            yield ev.Leaving(N4, 1, "a test says so")


@pytest.mark.parametrize("levels", [1, 2])
def test_what_was_sealed_with_the_delta_of_one_that_is_out_tells_nothing_of_another(levels: int) -> None:
    for nonce in nonces(0, 4):
        world = Leaver(nonce, {N4: frozenset(), N7: frozenset()}, audit="1e-9", levels=levels, norms=True).run()
        assert N7 in world.charged() and world.charged().keys() <= {N4, N7}, world.notes


class Blinker(AuditWorld):
    """Two tell of all others that their deltas are too long; then one of them is out of reach for a moment."""

    blinked = False

    def norm(self, place: int, c: int, by: NodeId | None = None) -> float:
        owners = self.state.round.ledger.owners
        first = next((i for i, owner in enumerate(owners) if owner == by), -1)
        if by in (N3, N4) and self.node(place) not in (N3, N4) and c == first:
            return 3.0
        return super().norm(place, c, by)

    def due(self) -> Iterator[ev.Event]:
        r = self.state.round
        others = len(r.completions) >= len(r.ledger.members) - 1
        for event in super().due():
            if self.blinked or not isinstance(event, ev.ReduceComplete) or event.node != N4:
                yield event
        if r.plan is not None and r.ledger.complete and others and not self.blinked:
            self.blinked = True
            yield from (ev.Disconnected(N4, 1), ev.PeerUnreachable(N3, 1, N4, r.plan.fence, "reset"))
            yield ev.Connected(N4, 1)
        if r.plan is not None and r.ledger.complete and self.blinked:
            for node in r.ledger.members:
                yield ev.ReduceComplete(node, 1, r.plan.fence, r.ledger.root, 1, 1)


def test_two_that_tell_too_long_norms_of_all_leave_nobody_out_where_one_of_them_is_gone_for_a_moment() -> None:
    """What it sealed, and what has its part in it, can be audited no more: it is reduced again."""
    liars = {N3: frozenset[str](), N4: frozenset[str]()}
    for nonce in nonces(0, 2):
        world = Blinker(nonce, liars, audit="1e-9", chunks=64, norms=True).run()
        assert world.state.pending is not None and world.state.pending.contributors.keys() >= HONEST
        assert world.convicted() == {N3} and world.charged().keys() <= {N3, N4}, world.notes


def test_a_round_ends_where_nobody_answers_the_audit_of_a_norm() -> None:
    silent = {NodeId(f"n{i}"): frozenset({"mute"}) for i in range(1, 9)}
    silent[N7] = frozenset({"mute", "longer"})
    world = AuditWorld(b"0", silent, audit="1e-9", norms=True).run()
    assert world.state.committed == 1 and not world.convicted()


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
