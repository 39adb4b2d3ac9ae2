"""Who is named to audit a chunk, how long it has to answer, and what becomes of who does not."""

import pytest
from audit_world import AuditWorld, Lies, between_two_attempts, caught_at_once, liar, nonces, put_exchanged

from atoll.comm.evidence import Offence
from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.replace import replace
from atoll.coordinator.service.view import affected_nodes, view
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.audit import give_time_anew
from atoll.coordinator.state_machine.auditors import AUDITORS
from atoll.coordinator.state_machine.state import Audit

N1, N2, N3 = (NodeId(f"n{i}") for i in (1, 2, 3))


def test_a_chunk_that_is_drawn_is_looked_at_by_two_and_neither_owns_it() -> None:
    looked_at = 0
    for nonce in nonces(0, 8):
        world = AuditWorld(nonce)
        for event in list(world.due()):  # all owners seal
            world.feed(event)
        for audit in world.state.round.audits.values():
            assert len(audit.named) == AUDITORS == 2 and audit.owner not in audit.named
            looked_at += 1
    assert looked_at > 10


def test_who_came_to_an_audit_too_late_is_charged_with_nothing_and_others_are_asked() -> None:
    busy = liar(4, "busy") | liar(5, "busy")
    for nonce in nonces(0, 2):
        assert not AuditWorld(nonce, busy, audit="1000").run().decisions
        world = AuditWorld(nonce, liar(2, "seal") | busy, audit="1000").run()
        assert world.convicted() == {N2} and world.charged().keys() == {N2}, world.notes


@pytest.mark.long
def test_where_most_came_too_late_the_few_that_slander_are_no_majority() -> None:
    """Of eight two slander the first contributor, and one finds all well."""
    busy: dict[NodeId, frozenset[str]] = {}
    for i in range(4, 8):
        busy |= liar(i, "busy")
    for nonce in nonces(0, 2):
        world = AuditWorld(nonce, liar(2, "slander") | liar(3, "slander") | busy, audit="1000").run()
        assert world.charged().keys() <= {N2, N3}, world.notes


def test_what_nobody_had_the_time_to_audit_is_reduced_again_by_others() -> None:
    everybody = {NodeId(f"n{i}"): frozenset({"busy"}) for i in range(1, 9)}
    world = AuditWorld(b"0", everybody)
    while world.state.round.ledger.attempt == 1 and not world.state.committed:
        for event in list(world.due()) or [ev.Tick()]:
            world.feed(event)
    assert any("nobody had the time" in note for note in world.notes) and not world.decisions


def test_a_newcomer_audits_where_others_cannot_and_is_not_struck_for_a_slow_link() -> None:
    """Among others that were in exchanges; then where those are the owner, and one that is silent."""
    n8 = NodeId("n8")
    for nonce in nonces(0, 8):
        world = AuditWorld(nonce, liar(8, "mute"), audit="1000")
        put_exchanged(world, n8)
        world.run()
        assert world.audited and not world.decisions
    world = AuditWorld(b"nonce", liar(2, "mute") | liar(3, "mute"), count=4, leaves=1, audit="1000", chunks=1)
    assert world.state.round.ledger.owners == (N1,)
    put_exchanged(world, N3)
    world.run()
    assert world.charged() == {N2: {Offence.SILENT}} and conduct.owes_time(world.state, N3)


def test_an_auditor_that_does_not_answer_is_charged_and_another_one_named() -> None:
    for world in caught_at_once(liar(3, "mute")):
        assert world.charged() == {N3: {Offence.SILENT}}
        assert world.state.pending is not None and world.state.pending.attempts == 1


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


@pytest.mark.parametrize("lies", [{}, liar(3, "mute")])
def test_an_auditor_has_its_time_anew_after_a_pause_in_which_its_view_named_no_audit(lies: Lies) -> None:
    world = AuditWorld(b"nonce", lies, audit="1000")
    between_two_attempts(world, pause=60.0)
    assert not any(told.audits for told in views(world).values())
    world.run()
    assert world.now > 60.0 and world.charged().keys() == lies.keys() and world.state.pending is not None
