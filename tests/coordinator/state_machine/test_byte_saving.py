"""Members that exchange nothing to save bytes: what is remembered of it, and who is left out of what."""

from audit_world import AuditWorld
from scenario import Run

from atoll.comm.ids import NodeId, PublicKey
from atoll.comm.replace import replace
from atoll.coordinator.service.journaled_machine import decode, encode
from atoll.coordinator.service.view import view
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.changes import fail_attempt, with_round
from atoll.coordinator.state_machine.conduct import EXCHANGE_MEMORY_ROUNDS, left_exchange_lately, may_own
from atoll.coordinator.state_machine.state import State

A, B, C = NodeId("n1"), NodeId("n2"), NodeId("n3")


def without(node: NodeId, names: str = "a b c d") -> Run:
    """A run in whose exchange the node has begun to save bytes."""
    run = Run()
    run.do("reducing", names.split())
    run.feed(ev.Paused(node, 1, saves_bytes=True))
    return run


def after(state: State, rounds: int) -> State:
    return replace(state, committed=state.committed + rounds)


def test_that_an_exchange_was_left_is_remembered_for_so_many_rounds_and_by_key() -> None:
    state = without(C).state
    assert left_exchange_lately(state, C) and not left_exchange_lately(state, B)
    assert not may_own(state, C) and may_own(state, B) and not state.conduct.strikes
    assert not may_own(after(state, EXCHANGE_MEMORY_ROUNDS), C), "it left the exchange of round 1, not of 0"
    assert may_own(after(state, EXCHANGE_MEMORY_ROUNDS + 1), C)
    keyed, key = Run(), PublicKey(b"k" * 32)
    keyed.do("reducing", ["a", "b", "c"])
    member = replace(keyed.state.members.here[C], key=key)
    members = replace(keyed.state.members, here=keyed.state.members.here | {C: member})
    keyed.state = replace(keyed.state, members=members)
    keyed.feed(ev.Paused(C, 1, saves_bytes=True))
    assert list(keyed.state.conduct.exchanges_left) == [key.hex()], "who comes back under another id is the same"


def test_only_who_takes_part_in_an_exchange_leaves_one() -> None:
    run = Run()
    run.do("begin", ["a", "b", "c"])
    run.feed(ev.Paused(C, 1, saves_bytes=True))
    assert not run.state.conduct.exchanges_left
    run.do("resume", ["c"])
    run.do("wait", ["10"])
    run.do("reached", ["a", "b"])
    run.do("wait", ["8"])
    run.do("ready", ["a", "b"])
    run.do("wait", ["8"])
    assert run.state.round.ledger.members == (A, B)
    run.feed(ev.Paused(C, 1))
    run.feed(ev.Paused(C, 1, saves_bytes=True))
    assert not run.state.conduct.exchanges_left and run.state.round.ledger.attempt == 1


def test_what_is_remembered_is_bounded_and_in_the_journal() -> None:
    run = Run()
    run.do("reducing", ["a", "b", "c"])
    many = {str(i): 1 for i in range(conduct.MAX_REMEMBERED)}
    run.state = replace(run.state, conduct=replace(run.state.conduct, exchanges_left=many))
    run.feed(ev.Paused(C, 1, saves_bytes=True))
    assert decode(encode(run.state), run.config) == run.state
    left = run.state.conduct.exchanges_left
    assert len(left) == conduct.MAX_REMEMBERED and list(left)[-1] == str(C) and "0" not in left


def test_an_auditor_that_leaves_to_save_bytes_is_not_charged_and_another_one_named() -> None:
    world = AuditWorld(b"nonce", audit="1000")
    for event in list(world.due()):
        world.feed(event)
    assert any(C in audit.named for audit in world.state.round.audits.values())
    world.feed(ev.Paused(C, 1, saves_bytes=True))
    assert all(C not in audit.named for audit in world.state.round.audits.values())
    world.run()
    assert world.audited and not world.decisions


def test_a_link_that_breaks_with_who_left_to_save_bytes_costs_no_attempt_and_nothing_is_remembered_of_it() -> None:
    run = without(C)
    assert run.state.round.plan is not None
    fence = run.state.round.plan.fence._replace(attempt=1)
    for one, other in ((A, C), (C, B)):
        run.feed(ev.PeerUnreachable(one, 1, other, fence, "broke"))
    assert not run.state.round.lost and run.state.round.ledger.attempt == 2


def test_who_begins_to_save_bytes_between_two_attempts_is_not_in_the_next() -> None:
    run = Run()
    run.do("reducing", ["a", "b", "c"])
    state = fail_attempt(run.state, "a test says so", run.now)
    run.state = with_round(state, replace(state.round, paused_until=run.now + 2))
    run.do("pause", ["c", "bytes"])
    run.do("wait", ["5"])
    assert run.state.round.ledger.attempt == 2 and run.state.round.ledger.members == (A, B)
    assert not run.state.conduct.exchanges_left, "it left none"


def test_who_saves_bytes_does_not_enter_a_round_that_has_too_few() -> None:
    run = Run()
    run.do("begin", ["a", "b"])
    run.do("join", ["c"])
    run.do("state", ["c", "0"])
    run.feed(ev.Paused(C, 1, saves_bytes=True))
    run.do("leave", ["b"])
    assert list(run.state.round.participants) == [A]
    run.feed(ev.Resumed(C, 1))
    assert list(run.state.round.participants) == [A, C]


def test_the_view_says_that_the_word_was_heard_and_names_nobody_silent_as_a_source() -> None:
    run = Run()
    run.do("begin", ["a", "b"])
    run.do("commit", [])
    assert not view(run.state, A).saves_bytes
    run.feed(ev.Paused(A, 1, saves_bytes=True))
    assert view(run.state, A).saves_bytes and not view(run.state, B).saves_bytes
    run.do("join", ["c"])
    assert [d.node_id for d in view(run.state, C).donors] == [B]
    run.feed(ev.Paused(A, 1))
    assert not view(run.state, A).saves_bytes and view(run.state, A).plan == view(run.state, B).plan
    assert {d.node_id for d in view(run.state, C).donors} == {A, B}


def test_where_only_silent_members_hold_the_first_state_everybody_makes_it() -> None:
    run = Run()
    run.do("knock", ["a", "b"])
    for name in ("a", "b"):
        run.do("connect", [name])
        run.do("layout", [name, "layout"])
    run.do("state", ["a", "0"])
    assert not view(run.state, B).initialise or not run.state.digest
    run.feed(ev.Paused(A, 1, saves_bytes=True))
    found = view(run.state, B)
    assert not found.donors and found.initialise
