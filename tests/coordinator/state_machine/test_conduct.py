"""What is held against members, and what follows: strikes, quarantine, evictions, bans and pardons."""

import re
from collections.abc import Sequence

import pytest
from scenario import Run

from atoll.comm.evidence import Consequence
from atoll.comm.ids import NodeId, PublicKey
from atoll.comm.replace import replace
from atoll.coordinator.service.journaled_machine import decode, encode
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.conduct import Evidence, Offence, charge
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.state import State
from atoll.coordinator.state_machine.step import step

A, B, C = NodeId("n1"), NodeId("n2"), NodeId("n3")


@pytest.fixture
def run() -> Run:
    run = Run()
    run.do("begin", ["a", "b", "c", "d"])
    return run


def charged(state: State, node: NodeId, offence: Offence, round_: int = 1) -> tuple[State, list[ev.Decision]]:
    out: list[ev.Effect] = []
    state = charge(state, node, Evidence(round_, offence, "it did", (("digest", "ab"),), B), out)
    return state, [effect for effect in out if isinstance(effect, ev.Decision)]


def many(state: State, node: NodeId, offence: Offence, rounds: Sequence[int]) -> State:
    for k in rounds:
        state, _ = charged(replace(state, committed=k), node, offence, k)
    return state


def with_key(state: State, node: NodeId, key: PublicKey) -> State:
    here = state.members.here
    return replace(state, members=replace(state.members, here=here | {node: replace(here[node], key=key)}))


def test_a_decision_carries_its_evidence_and_is_numbered(run: Run) -> None:
    state, [first] = charged(run.state, A, Offence.LATE)
    evidence = Evidence(1, Offence.LATE, "it did", (("digest", "ab"),), B)
    assert first == ev.Decision(1, A, "", 1, evidence, Consequence.STRUCK, 1.0, "a", 0)
    state, [second] = charged(state, A, Offence.SILENT, 2)
    assert (second.number, second.weight) == (2, 2.0)


def test_an_offence_counts_once_a_round(run: Run) -> None:
    state, [_] = charged(run.state, A, Offence.FALSE_NORM)
    again, decisions = charged(state, A, Offence.FALSE_NORM)
    assert again is state and not decisions
    assert charged(state, A, Offence.FALSE_NORM, 2)[1] and charged(state, A, Offence.FALSE_AUDIT)[1]


def test_what_delays_a_round_is_one_strike_at_most_whatever_it_is_called(run: Run) -> None:
    state, [_] = charged(run.state, A, Offence.LATE)
    for offence in (Offence.LATE, Offence.SILENT, Offence.ACCUSER):
        again, decisions = charged(state, A, offence)
        assert again is state and not decisions
    assert charged(state, A, Offence.SILENT, 2)[1] and charged(state, A, Offence.FALSE_NORM)[1]


def test_a_delay_weighs_what_it_cost_the_others(run: Run) -> None:
    assert conduct.strike_part(run.state, 0.5) == 1.0, "of a round whose inner time is not known"
    run.do("wait", ["10"])
    run.do("reached", ["a", "b", "c", "d"])
    assert [conduct.strike_part(run.state, s) for s in (-1.0, 0.0, 0.5, 1.0, 60.0)] == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_a_delay_is_made_up_for_in_as_many_rounds_as_it_cost_tenths_of_one(run: Run) -> None:
    run.do("wait", ["10"])
    run.do("reached", ["a", "b", "c", "d"])
    assert conduct.lend_time(run.state, A, 0.9) is run.state, "of rounds with 10 s of inner time"
    for seconds, rounds in ((1.0, 1), (1.4, 1), (1.6, 2), (5.4, 5), (600.0, 20)):
        state = conduct.lend_time(run.state, A, seconds)
        owing = [conduct.owes_time(replace(state, committed=k), A) for k in range(30)]
        assert owing == [k <= rounds for k in range(30)], "this round, and as many more"
        why = "one waited for it too long, or it sent too many reports"
        told = f"no round waits for this node before round {rounds + 2}: {why}"
        assert conduct.penalty(state, A) == told and conduct.penalty(replace(state, committed=21), A) == ""
        assert conduct.consequence(state, A) is None and conduct.may_own(state, A), "nothing is held against it"
    assert conduct.lend_time(state, A, 1.0) is state, "it owes more already"
    assert conduct.lend_time(run.state, NodeId("n99"), 9.0) is run.state


def test_who_floods_owes_the_others_the_most_and_is_named_once(run: Run) -> None:
    state, effects = step(run.state, ev.ReportsRefused(A, 1), 50.0)
    owing = [conduct.owes_time(replace(state, committed=k), A) for k in range(30)]
    assert owing == [k <= 20 for k in range(30)]
    [note] = effects
    assert isinstance(note, ev.Note) and note.node == A and "more reports than a member has to" in note.sentence
    assert conduct.consequence(state, A) is None and not conduct.owes_time(state, B)
    assert not conduct.floods_anew(state, A), "in the same round"
    assert conduct.floods_anew(state, B)
    later = replace(state, committed=1, round=replace(state.round, number=state.round.number + 1))
    assert conduct.floods_anew(later, A)
    again, effects = step(later, ev.ReportsRefused(A, 1), 60.0)
    assert conduct.owes_time(replace(again, committed=21), A) and not effects


def test_what_is_owed_is_the_keys_and_is_pardoned_with_the_rest(run: Run) -> None:
    run.do("wait", ["10"])
    run.do("reached", ["a", "b", "c", "d"])
    state = conduct.lend_time(with_key(run.state, A, PublicKey(b"k")), A, 9.0)
    assert decode(encode(state), state.config) == state
    state, _ = step(state, ev.Joined(NodeId("n5"), 1, "e", "e:1", "s", key=PublicKey(b"k")), 50.0)
    assert conduct.owes_time(state, NodeId("n5")) and not conduct.owes_time(state, B)
    state, _ = charged(replace(state, committed=3), B, Offence.LATE, 3)
    assert conduct.owes_time(state, A), "what is held against others is no reason to forget it"
    state, _ = step(state, ev.Pardoned(A, "its link was mended"), 51.0)
    assert not conduct.owes_time(state, A)


def test_who_was_never_here_is_not_charged(run: Run) -> None:
    assert charged(run.state, NodeId("n99"), Offence.FORGED_SEAL) == (run.state, [])


def test_strikes_cost_a_member_its_chunks_and_then_its_contribution(run: Run) -> None:
    assert conduct.may_own(run.state, A) and conduct.may_contribute(run.state, A)
    state = many(run.state, A, Offence.LATE, range(1, 4))
    assert not conduct.may_own(state, A) and conduct.may_contribute(state, A) and conduct.may_own(state, B)
    state = many(state, A, Offence.LATE, range(4, 7))
    assert not conduct.may_own(state, A) and not conduct.may_contribute(state, A)
    assert A in state.members.here and not conduct.refusal(state, A)
    later = replace(state, committed=100)
    assert conduct.may_own(later, A) and conduct.may_contribute(later, A)


def test_a_member_is_told_what_it_may_not_do_until_when_and_why(run: Run) -> None:
    state = many(run.state, A, Offence.LATE, range(1, 4))
    assert conduct.penalty(state, A) == "this node merges no chunks before round 9: late (round 3)"
    state = many(state, A, Offence.LATE, range(4, 7))
    told = re.fullmatch(
        r"this node's work is not taken before round (\d+): late \(round 6\)", conduct.penalty(state, A)
    )
    assert told is not None and not conduct.may_contribute(replace(state, committed=int(told[1]) - 1), A)
    assert conduct.may_contribute(replace(state, committed=int(told[1])), A) and conduct.penalty(state, B) == ""
    assert conduct.penalty(replace(state, committed=100), A) == ""


@pytest.mark.parametrize("offence", [Offence.FORGED_SEAL, Offence.FORGED_INPUT])
def test_who_forged_is_out_at_once_and_stays_out_with_its_key(run: Run, offence: Offence) -> None:
    state, [decision] = charged(with_key(run.state, A, PublicKey(b"\x02key")), A, offence)
    assert decision.consequence is Consequence.BANNED and decision.key == b"\x02key".hex()
    assert state.members.departed[A].state is MemberState.EVICTED and A not in state.round.participants
    assert conduct.refusal(state, A) == "this node is banned from the run: in round 1 it did"
    assert conduct.refusal(state, NodeId(""), b"\x02key"), "under the same key, as another node"
    assert not conduct.refusal(state, NodeId(""), b"\x03other")
    joined = ev.Joined(NodeId("n5"), 1, "e", "e:1", "s", key=PublicKey(b"\x02key"))
    assert step(state, joined, 50.0) == (state, [])
    other, _ = step(state, replace(joined, key=PublicKey(b"\x03other")), 50.0)
    assert NodeId("n5") in other.members.here


def test_nobody_else_comes_with_the_invite_of_who_is_out_until_that_may_come_back(run: Run) -> None:
    here = {n: replace(m, invite=2 if n == C else 1) for n, m in run.state.members.here.items()}
    state = replace(run.state, members=replace(run.state.members, here=here))
    assert not conduct.invite_refusal(state, 1)
    state = many(state, A, Offence.FALSE_CLAIM, [1, 2])
    assert not conduct.may_contribute(state, A) and not conduct.invite_refusal(state, 1), "it is here itself"
    state = many(state, A, Offence.FALSE_CLAIM, [3])
    assert A not in state.members.here
    assert conduct.invite_refusal(state, 1).startswith("a came with this invite too, and is out for what it said")
    assert not conduct.invite_refusal(state, 2) and not conduct.invite_refusal(state, 0)
    assert not conduct.invite_refusal(replace(state, committed=100), 1)


def test_all_members_under_a_banned_key_are_out(run: Run) -> None:
    state = with_key(with_key(run.state, A, PublicKey(b"k")), C, PublicKey(b"k"))
    state, _ = charged(state, A, Offence.FORGED_SEAL)
    assert A not in state.members.here and C not in state.members.here and B in state.members.here


def test_another_node_under_the_key_finds_the_strikes(run: Run) -> None:
    state = many(with_key(run.state, A, PublicKey(b"k")), A, Offence.LATE, range(1, 7))
    state, _ = step(state, ev.Joined(NodeId("n5"), 1, "e", "e:1", "s", key=PublicKey(b"k")), 50.0)
    assert not conduct.may_own(state, NodeId("n5")) and not conduct.may_contribute(state, NodeId("n5"))


def test_a_node_that_comes_back_keeps_its_key_and_its_strikes(run: Run) -> None:
    state = many(with_key(run.state, A, PublicKey(b"k")), A, Offence.LATE, range(1, 7))
    state, _ = step(state, ev.Leaving(A, 1, "for a minute"), 50.0)
    state, _ = step(state, ev.Joined(A, 2, "a", "a:1", "session of a"), 51.0)
    assert state.members.here[A].key == b"k" and not conduct.may_own(state, A)


def test_who_said_what_is_not_three_times_is_out_until_that_has_decayed(run: Run) -> None:
    state = many(run.state, A, Offence.FALSE_NORM, range(1, 4))
    assert A not in state.members.here and "too often" in conduct.refusal(state, A)
    back = ev.Joined(A, 2, "a", "a:1", "session of a")
    assert A not in step(state, back, 50.0)[0].members.here
    later = replace(state, committed=20)
    assert A in step(later, back, 50.0)[0].members.here and not conduct.may_contribute(later, A)


def test_who_is_out_for_a_while_may_come_back_where_the_run_has_too_few(run: Run) -> None:
    state = many(run.state, A, Offence.FALSE_NORM, range(1, 4))
    assert conduct.refusal(state, A) and len(state.members.here) == 3
    few = replace(state.config, members=replace(state.config.members, minimum=4))
    assert not conduct.refusal(replace(state, config=few), A)
    banned, _ = charged(state, A, Offence.FORGED_SEAL)
    assert conduct.refusal(replace(banned, config=few), A)


def test_nobody_is_struck_for_what_most_members_are_named_for(run: Run) -> None:
    for offence in (Offence.OUTLIER, Offence.ACCUSER):
        state, out = run.state, list[ev.Effect]()
        for node in (A, B, C):
            state, decisions = charged(state, node, offence)
            assert not decisions
        state = conduct.settle(state, 4, out)
        assert not state.conduct.strikes and not state.conduct.doubtful
        assert [type(effect) for effect in out] == [ev.Note]


def test_those_few_who_are_named_are_struck_at_the_commit(run: Run) -> None:
    state, out = run.state, list[ev.Effect]()
    for node in (A, B, A):
        state, _ = charged(state, node, Offence.OUTLIER)
    state = conduct.settle(state, 4, out)
    assert [d.node for d in out if isinstance(d, ev.Decision)] == [A, B]
    assert conduct.settle(state, 4, []) is state
    assert charged(state, A, Offence.OUTLIER) == (state, []), "it was held against it in this round"


def test_the_operator_bans_whom_nothing_is_held_against(run: Run) -> None:
    state, effects = step(with_key(run.state, A, PublicKey(b"k")), ev.Banned(A, "it is a copy"), 50.0)
    [decision] = [effect for effect in effects if isinstance(effect, ev.Decision)]
    assert (decision.consequence, decision.evidence.offence) == (Consequence.BANNED, Offence.BY_OPERATOR)
    assert A not in state.members.here and state.expulsions == run.state.expulsions + 1
    assert conduct.refusal(state, NodeId("n9"), b"k").endswith("the operator put it out: it is a copy")
    assert step(state, ev.Banned(A), 51.0) == (state, []), "it is out already"
    assert step(state, ev.Banned(NodeId("n99")), 51.0) == (state, []), "nobody knows it"
    back, _ = step(state, ev.Pardoned(A), 52.0)
    assert not conduct.refusal(back, A, b"k")


def test_the_operator_pardons(run: Run) -> None:
    state, _ = charged(with_key(run.state, A, PublicKey(b"k")), A, Offence.FORGED_SEAL)
    state, effects = step(state, ev.Pardoned(A, "its memory was broken"), 50.0)
    [decision] = [effect for effect in effects if isinstance(effect, ev.Decision)]
    assert decision.consequence is Consequence.PARDONED and decision.number == 2
    assert decision.evidence.sentence == "the operator pardons it: its memory was broken"
    assert not conduct.refusal(state, A, b"k")
    back, _ = step(state, ev.Joined(A, 2, "a", "a:1", "session of a"), 51.0)
    assert A in back.members.here and conduct.may_own(back, A)
    assert step(back, ev.Pardoned(A), 52.0) == (back, []), "there is nothing left to pardon"


def test_the_book_survives_a_snapshot(run: Run) -> None:
    state = many(with_key(run.state, A, PublicKey(b"k")), A, Offence.LATE, range(1, 7))
    state, _ = charged(state, B, Offence.FORGED_SEAL)
    state, _ = charged(state, C, Offence.OUTLIER)
    assert decode(encode(state), state.config) == state
