"""The next attempt of a reduce: after deaths, with those who come later or back, and after links that broke."""

import pytest
from reduce_plans import A, B, C, D, begun, contribute, entered, plan_of, sends

from atoll.comm.allreduce.effects import (
    FrameVerdict,
    FreeContributions,
    FreeSealed,
    MergeChunk,
    ReportComplete,
    ReportOrphans,
)
from atoll.comm.allreduce.protocol import ReduceProtocol
from atoll.comm.bitmap import bitmap
from atoll.comm.digest import root
from atoll.comm.ids import NodeId
from atoll.comm.plan import NOBODY
from atoll.comm.transport.frames import FrameKind


def test_what_who_is_not_in_the_plan_says_after_a_break_is_answered_once_it_is() -> None:
    none, e = bitmap([], 1), NodeId("e")
    assert ReduceProtocol(A, 1, 1).resync(B, 1, none, none, none) == []
    x = begun(A, [0])
    contribute(x, 0, B, C, D)
    x.chunk_merged(0, 1, range(4), b"digest")
    assert x.resync(e, 2, none, none, none) == []
    x.replan(entered(plan_of(2, [0], since=(1,), kept=1), e))
    assert sends(x.resync(e, 2, none, none, none), FrameKind.SEALED) == [(e, 0)]


def test_after_a_death_only_its_unsealed_chunks_are_sent_again() -> None:
    n, chunks = 4, 36
    before = [c % n for c in range(chunks)]
    x = begun(A, before, window=chunks)
    dead = [c for c in range(chunks) if before[c] == 3]
    after, since = list(before), [1] * chunks
    for i, c in enumerate(dead):
        after[c], since[c] = i % 3, 2
    again = sends(x.replan(plan_of(2, after, gone="d", since=tuple(since))), FrameKind.CONTRIBUTION)
    assert again == [(node, c) for node, i in ((B, 1), (C, 2)) for c in dead if after[c] == i]
    # d's share is 1 / n of the chunks, and 1 / (n - 1) of it is this member's own now
    assert len(again) == chunks * (n - 2) / (n * (n - 1))
    assert len(again) <= chunks * (n - 1) / n * (n - 2) / (n - 1) ** 2


def test_what_had_arrived_of_the_dead_counts() -> None:
    x = begun(A, [0, 0])
    assert contribute(x, 0, B, D) == [] == contribute(x, 1, B, C)
    out = x.replan(plan_of(2, [0, 0], gone="d", since=(1, 1)))
    assert out == [MergeChunk(1, 1, (0, 1, 2))]
    assert contribute(x, 0, C) == [MergeChunk(0, 1, (0, 1, 2, 3))]


def test_a_merge_that_ends_after_its_chunk_was_given_to_another_is_void() -> None:
    x = begun(A, [0])
    contribute(x, 0, B, C, D)
    assert x.replan(plan_of(2, [1], since=(2,)))[0] == FreeContributions(0)
    assert x.chunk_merged(0, 1, (0, 1, 2, 3), b"digest") == []
    x.replan(plan_of(3, [0], since=(3,)))
    for node in (B, C, D):
        x.contribution_arrived(node, 0)
    assert x.chunk_merged(0, 1, (0, 1, 2, 3), b"digest") == [], "it is merging again"


def test_orphans_are_told_with_their_digests_and_fetched_from_their_new_owner() -> None:
    x, y = begun(A, [3, 3]), begun(B, [3, 3])
    x.sealed_arrived(0, b"digest")
    orphaned = plan_of(2, [NOBODY, 2], gone="d", since=(2, 2), kept=1)
    assert ReportOrphans(((0, b"digest"),)) in x.replan(orphaned)
    assert ReportOrphans(()) in y.replan(orphaned)
    assert y.dues() == [(C, "1 of its chunks")], "nobody is waited for with the orphan"
    adopted = plan_of(3, [0, 2], gone="d", since=(3, 2), kept=1)
    assert x.replan(adopted) == []
    assert sends(y.replan(adopted), FrameKind.WANT) == [(A, 0)]


def test_a_chunk_that_is_opened_again_is_forgotten() -> None:
    x = begun(A, [3])
    x.sealed_arrived(0, b"digest")
    assert FreeSealed(0) in x.replan(plan_of(2, [1], gone="d", since=(2,)))
    assert x.digests == [None]


def test_after_a_break_what_the_other_side_has_is_not_sent_again() -> None:
    x, owner = begun(A, [1, 1, 1]), begun(B, [1, 1, 1])
    contribute(owner, 0, A, C, D)
    owner.chunk_merged(0, 1, (0, 1, 2, 3), b"digest")
    contribute(owner, 1, A)
    assert sends(x.resync(B, 1, *owner.resync_state(A)), FrameKind.CONTRIBUTION) == [(B, 2)]
    assert sends(owner.resync(A, 1, *x.resync_state(B)), FrameKind.SEALED) == [(A, 0)]


def test_who_came_back_is_not_who_it_was_and_brings_its_contribution_anew() -> None:
    x = begun(A, [0])
    contribute(x, 0, B, D)
    x.replan(entered(plan_of(2, [0], gone="d", since=(1,)), D))
    assert x.verdict(D, 3, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD
    assert contribute(x, 0, C) == []
    assert x.verdict(D, 4, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.TAKE
    assert x.contribution_arrived(D, 0) == [MergeChunk(0, 1, (0, 1, 2, 4))]


def test_who_was_left_out_begins_anew_with_what_was_not_given_to_another_meanwhile() -> None:
    x = begun(A, [1, 1, 2])
    x.sealed_arrived(1, b"digest")
    x.sealed_arrived(2, b"void")
    out = x.replan(entered(plan_of(3, [1, 1, 3], gone="a", since=(1, 1, 2)), A))
    assert sends(out, FrameKind.CONTRIBUTION) == [(B, 0), (D, 2)] and FreeSealed(2) in out
    assert x.digests == [None, b"digest", None]


@pytest.mark.parametrize(("attempt", "late"), [(2, [1]), (3, [0, 1])])
def test_who_comes_later_is_sent_what_it_cannot_know_to_be_sealed(attempt: int, late: list[int]) -> None:
    """It asks for what its first plan kept. Which chunks these are is not known if that plan was skipped."""
    x = begun(A, [0, 0])
    for c in range(2):
        contribute(x, c, B, C, D)
        x.chunk_merged(c, 1, range(4), b"digest")
    e = NodeId("e")
    out = x.replan(entered(plan_of(attempt, [0, 0], since=(1, 1), kept=1), e))
    assert sends(out, FrameKind.SEALED) == [(e, c) for c in late]


def test_that_all_is_held_is_said_in_each_attempt() -> None:
    x = begun(A, [1])
    assert (
        x.sealed_arrived(0, b"digest")[-1]
        == x.replan(plan_of(2, [1], since=(1,)))[-1]
        == ReportComplete(root([b"digest"]))
    )


def test_contributions_to_one_owner_go_in_the_order_in_which_it_got_the_chunks() -> None:
    x = begun(A, [1, 2, 2], window=1)
    x.replan(plan_of(3, [1, 1, 1], gone="c", since=(1, 3, 2)))
    assert sends(x.peer_merged(B, 0), FrameKind.CONTRIBUTION) == [(B, 2)]


def test_a_contribution_that_is_refused_is_not_waited_for_once_its_sender_is_gone() -> None:
    x = begun(A, [0])
    contribute(x, 0, B, C, D)
    x.replan(plan_of(2, [0], gone="d", since=(1,)))
    assert x.contribution_refused(0, 1, 3) == [MergeChunk(0, 1, (0, 1, 2))]


def test_what_an_owner_says_of_before_it_got_the_chunk_or_this_member_came_back_is_not_believed() -> None:
    none, all_ = bitmap([], 1), bitmap([0], 1)
    x, d = begun(A, [2]), ReduceProtocol(D, 1, 8)
    x.replan(plan_of(2, [1], gone="c", since=(2,)))
    d.replan(entered(plan_of(2, [1], gone="d", since=(1,)), D))
    for y in (x, d):
        assert sends(y.resync(B, 1, all_, none, none), FrameKind.CONTRIBUTION) == [(B, 0)]
        assert sends(y.resync(B, 1, none, all_, none), FrameKind.CONTRIBUTION) == [(B, 0)]
        assert sends(y.resync(B, 2, all_, none, none), FrameKind.CONTRIBUTION) == []
        assert sends(y.resync(B, 2, none, all_, none), FrameKind.CONTRIBUTION) == []


def test_after_a_break_who_was_asked_last_is_asked_again() -> None:
    x, none = begun(A, [1]), bitmap([], 1)
    asked = [sends(x.pull(0), FrameKind.WANT)[0][0]]
    asked += [node for node, _ in sends(x.chunk_lacked(asked[0], 0), FrameKind.WANT)]
    assert [sends(x.resync(node, 1, none, none, none), FrameKind.WANT) for node in asked] == [[], [(asked[1], 0)]]
    x.sealed_arrived(0, b"digest")
    assert sends(x.resync(asked[1], 1, none, none, none), FrameKind.WANT) == [] == x.pull(0)


def test_a_sealed_chunk_is_sent_again_to_who_has_only_what_was_sealed_before_it() -> None:
    x, none, all_ = begun(A, [1]), bitmap([], 1), bitmap([0], 1)
    x.replan(plan_of(2, [0], gone="d", since=(2,)))
    x.contribution_arrived(B, 0)
    x.contribution_arrived(C, 0)
    x.chunk_merged(0, 2, range(3), b"digest")
    assert sends(x.resync(B, 1, none, none, all_), FrameKind.SEALED) == [(B, 0)]
    assert x.resync(B, 2, none, none, all_) == []
