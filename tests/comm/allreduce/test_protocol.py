"""The protocol of a reduce, rule by rule: contributions, merges, windows, late chunks, and who brings nothing."""

from dataclasses import replace

from reduce_plans import A, B, C, D, begun, contribute, plan_of, sends

from atoll.comm.allreduce.effects import (
    FrameVerdict,
    FreeContributions,
    MergeChunk,
    ReportComplete,
    ReportSeal,
    SendFrame,
)
from atoll.comm.allreduce.protocol import ReduceProtocol
from atoll.comm.digest import root
from atoll.comm.ids import NodeId
from atoll.comm.transport.frames import FrameKind


def test_a_chunk_is_merged_in_plan_order_once_everybody_has_contributed_and_sent_to_all() -> None:
    x = begun(B, [1])
    assert contribute(x, 0, D, A) == []
    assert contribute(x, 0, C) == [MergeChunk(0, 1, (0, 1, 2, 3))]
    out = x.chunk_merged(0, 1, (0, 1, 2, 3), b"digest")
    assert out[0] == ReportSeal(0, 1, b"digest", (0, 1, 2, 3)) and FreeContributions(0) in out
    assert out[-1] == ReportComplete(root([b"digest"]))
    assert sends(out, FrameKind.SEALED) == [(A, 0), (C, 0), (D, 0)]


def test_contributors_hear_of_a_merge_while_contributions_may_wait_for_room() -> None:
    x = begun(B, [1, 1, 1, 1], window=2)
    told = []
    for c in range(4):
        contribute(x, c, A, C, D)
        told.append(sends(x.chunk_merged(c, 1, (0, 1, 2, 3), b"digest"), FrameKind.MERGED))
    everybody = [(A, 0), (C, 0), (D, 0)]
    assert told == [everybody, [(n, 1) for n, _ in everybody], [], []]


def test_a_late_frame_is_known_by_the_attempt_in_which_its_chunk_got_its_owner() -> None:
    x = begun(A, [1])
    assert x.verdict(B, 1, FrameKind.SEALED, 0, 1) is FrameVerdict.TAKE
    x.replan(plan_of(2, [2], gone="b", since=(2,)))
    x.pull(0)
    for node, place in ((B, 1), (C, 2), (D, 3)):
        assert x.verdict(node, place, FrameKind.SEALED, 0, 1) is FrameVerdict.DISCARD
    assert x.verdict(C, 2, FrameKind.SEALED, 0, 2) is FrameVerdict.TAKE


def test_a_frame_of_a_newer_attempt_or_of_a_member_not_known_yet_is_held() -> None:
    x = ReduceProtocol(A, 1, 1)
    assert x.verdict(B, 1, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.HOLD
    x.replan(plan_of(1, [0]))
    assert x.verdict(B, 1, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.TAKE
    assert x.verdict(B, 1, FrameKind.CONTRIBUTION, 0, 2) is FrameVerdict.HOLD
    assert x.verdict(NodeId("e"), 4, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.HOLD
    assert x.verdict(B, 4, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.HOLD, "b came back"


def test_what_comes_twice_is_taken_once() -> None:
    x = begun(A, [0, 1])
    contribute(x, 0, B)
    assert x.verdict(B, 1, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD
    x.sealed_arrived(1, b"digest")
    assert x.verdict(B, 1, FrameKind.SEALED, 1, 1) is FrameVerdict.DISCARD
    assert x.verdict(C, 2, FrameKind.CONTRIBUTION, 1, 1) is FrameVerdict.DISCARD, "a does not own it"


def test_a_sealed_chunk_is_taken_from_where_it_should_come_from_and_from_whoever_was_asked() -> None:
    x = begun(A, [1])
    assert x.verdict(B, 1, FrameKind.SEALED, 0, 1) is FrameVerdict.TAKE
    assert [x.verdict(n, i, FrameKind.SEALED, 0, 1) for n, i in ((C, 2), (D, 3))] == [FrameVerdict.DISCARD] * 2
    ((asked, _),) = sends(x.pull(0), FrameKind.WANT)
    taken = {n: x.verdict(n, i, FrameKind.SEALED, 0, 1) for n, i in ((B, 1), (C, 2), (D, 3))}
    assert {n for n, verdict in taken.items() if verdict is FrameVerdict.TAKE} == {B, asked}


def test_who_has_no_weight_contributes_nothing() -> None:
    x = ReduceProtocol(A, 1, 1)
    plan = plan_of(1, [0])
    members = (*plan.members[:2], replace(plan.members[2], weight=0.0), *plan.members[3:])
    x.replan(replace(plan, members=members))
    assert x.verdict(B, 1, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.TAKE
    assert x.verdict(C, 2, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD
    assert list(x.contributors_due()) == [B, D]


def test_who_has_no_weight_merges_what_it_owns_and_waits_for_nothing_else() -> None:
    x, plan = ReduceProtocol(C, 2, 1), plan_of(1, [2, 1])
    members = (*plan.members[:2], replace(plan.members[2], weight=0.0), *plan.members[3:])
    assert x.replan(replace(plan, members=members)) == []
    assert (x.chunks_to_seal, x.missing()) == (1, [])
    assert contribute(x, 0, A, B, D) == [MergeChunk(0, 1, (0, 1, 3))]
    to_all = [SendFrame(node, FrameKind.SEALED, 0, 1) for node in (A, B, D)]
    assert x.chunk_merged(0, 1, (0, 1, 3), b"digest") == [
        ReportSeal(0, 1, b"digest", (0, 1, 3)),
        FreeContributions(0),
        *to_all,
    ]
    assert (x.chunks_to_seal, x.dues()) == (0, [])
    assert ReduceProtocol(C, 2, 1).replan(replace(plan, members=members, kept=frozenset({1}))) == [], (
        "nor asks for it"
    )


def test_a_chunk_that_is_late_is_asked_for_at_one_after_another_and_at_nobody_twice() -> None:
    x = begun(A, [1])
    asked = [sends(x.pull(0), FrameKind.WANT)[0][0]]
    while found := sends(x.chunk_lacked(asked[-1], 0), FrameKind.WANT):
        asked.append(found[0][0])
    assert sorted(asked) == [B, C, D]
    assert x.pull(0) == [] and x.chunk_lacked(asked[0], 0) == []


def test_who_is_asked_sends_what_it_has_or_says_that_it_lacks_it() -> None:
    x = begun(A, [1])
    assert x.chunk_wanted(C, 0) == [SendFrame(C, FrameKind.LACK, 0, 1)]
    x.sealed_arrived(0, b"digest")
    assert x.chunk_wanted(C, 0) == [SendFrame(C, FrameKind.SEALED, 0, 1)]


def test_at_most_a_window_of_contributions_is_under_way_to_an_owner() -> None:
    x = ReduceProtocol(A, 4, 2)
    assert sends(x.replan(plan_of(1, [1, 1, 1, 2])), FrameKind.CONTRIBUTION) == [(B, 0), (B, 1), (C, 3)]
    assert sends(x.peer_merged(B, 0), FrameKind.CONTRIBUTION) == [(B, 2)]


def test_members_that_owe_contributions_are_those_whose_windows_are_not_full() -> None:
    x = begun(A, [0, 0, 0, 1], window=2)
    contribute(x, 0, B)
    contribute(x, 1, B, C)
    assert list(x.contributors_due()) == [C, D]
    assert x.dues() == [(C, "contributions"), (D, "contributions"), (B, "1 of its chunks")]


def test_who_holds_up_a_merge_is_who_is_missing_where_most_others_are_there() -> None:
    x = begun(A, [0, 0, 0, 1], window=2)
    assert x.holding_up() == [], "nobody is there yet"
    contribute(x, 0, B)
    contribute(x, 1, B, C, D)
    assert x.holding_up() == [], "C and D are as many as are there"
    contribute(x, 0, C)
    assert x.holding_up() == [D]
    contribute(x, 0, D)
    assert x.holding_up() == [], "all is there of the first, which is being merged"
    assert begun(B, [0, 0]).holding_up() == [], "it owns nothing"


def test_a_contribution_that_was_refused_is_due_though_those_behind_it_are_here() -> None:
    """Else nobody would ever bring it: its sender takes it for being there, and for no more than late."""
    x = begun(A, [0, 0, 0], window=1)
    contribute(x, 0, B, C, D)
    assert list(x.contributors_due()) == []
    x.contribution_refused(0, 1, 1)
    contribute(x, 1, B)
    contribute(x, 2, B)
    assert list(x.contributors_due()) == [B]


def test_a_chunk_that_is_sealed_makes_room_for_the_next_contribution() -> None:
    assert sends(begun(A, [1, 1], window=1).sealed_arrived(0, b"digest"), FrameKind.CONTRIBUTION) == [(B, 1)]
