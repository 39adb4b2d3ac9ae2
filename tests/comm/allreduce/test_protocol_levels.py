"""The protocol of a reduce in two levels: a and b are a region, c and d another; a owns chunks, c relays them."""

from dataclasses import replace

import pytest
from reduce_plans import A, B, C, D, contribute, plan_of, sends

from atoll.comm.allreduce.effects import (
    Effect,
    FrameVerdict,
    FreeContributions,
    MergeChunk,
    ReportSeal,
    SendFrame,
    SumRegion,
)
from atoll.comm.allreduce.protocol import ReduceProtocol
from atoll.comm.ids import NodeId
from atoll.comm.plan import Plan, PlanMember
from atoll.comm.transport.frames import FrameKind


def levels(attempt: int = 1, chunks: int = 1, gone: str = "", since: int = 1, flat: bool = False) -> Plan:
    plan = plan_of(attempt, [0] * chunks, gone, (since,) * chunks)
    layered = frozenset[int]() if flat else frozenset(range(chunks))
    return replace(plan, regions=(0, 0, 1, 1), relays=((0,) * chunks, (2,) * chunks), layered=layered)


def layered(me: NodeId, chunks: int = 1, window: int = 8) -> tuple[ReduceProtocol, list[Effect]]:
    x = ReduceProtocol(me, chunks, window)
    return x, x.replan(levels(chunks=chunks))


def test_members_of_another_region_send_to_its_relay_which_sums_and_passes_on() -> None:
    assert sends(layered(B)[1], FrameKind.CONTRIBUTION) == [(A, 0)]
    assert sends(layered(D)[1], FrameKind.CONTRIBUTION) == [(C, 0)]
    relay, out = layered(C)
    assert out == []
    assert contribute(relay, 0, D) == [SumRegion(0, 1, (2, 3))]
    assert relay.region_summed(0, 1, (2, 3)) == [FreeContributions(0), SendFrame(A, FrameKind.PARTIAL, 0, 1)]
    assert relay.verdict(D, 3, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD
    assert relay.peer_merged(D, 0) == [] and relay.peer_merged(A, 0) == [FreeContributions(0)]
    assert relay.sealed_arrived(0, b"digest")[0] == SendFrame(D, FrameKind.SEALED, 0, 1)


def test_the_owner_merges_its_region_and_the_others_sums_and_seals_who_is_in_them() -> None:
    x, _ = layered(A)
    assert contribute(x, 0, B) == []
    assert x.region_sum_arrived(C, 0, (2, 3)) == [MergeChunk(0, 1, (0, 1, 2, 3), ((2, (2, 3)),))]
    out = x.chunk_merged(0, 1, (0, 1, 2, 3), b"digest")
    assert out[0] == ReportSeal(0, 1, b"digest", (0, 1, 2, 3))
    assert sends(out, FrameKind.SEALED) == [(B, 0), (C, 0)]


def test_relay_and_owner_tell_those_that_wait_for_room() -> None:
    x, relay = layered(A, 2, 1)[0], layered(C, 2, 1)[0]
    contribute(x, 0, B)
    x.region_sum_arrived(C, 0, (2, 3))
    assert sends(x.chunk_merged(0, 1, (0, 1, 2, 3), b"digest"), FrameKind.MERGED) == [(B, 0), (C, 0)]
    contribute(relay, 0, D)
    assert sends(relay.region_summed(0, 1, (2, 3)), FrameKind.MERGED) == [(D, 0)]


def test_a_contribution_counts_on_one_way_only() -> None:
    x, relay = layered(A)[0], layered(C)[0]
    assert x.verdict(D, 3, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD, "d's comes in c's sum"
    assert x.verdict(C, 2, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD, "so does c's"
    assert x.verdict(D, 3, FrameKind.PARTIAL, 0, 1) is FrameVerdict.DISCARD, "d is no relay"
    assert relay.verdict(B, 1, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD, "b is of another region"
    assert relay.verdict(A, 0, FrameKind.PARTIAL, 0, 1) is FrameVerdict.DISCARD, "c owns nothing"
    assert x.verdict(C, 2, FrameKind.PARTIAL, 0, 1) is FrameVerdict.TAKE
    x.region_sum_arrived(C, 0, (2, 3))
    assert x.verdict(C, 2, FrameKind.PARTIAL, 0, 1) is FrameVerdict.DISCARD, "it comes twice"


def test_a_sum_with_a_contribution_that_has_come_by_itself_is_refused() -> None:
    x, _ = layered(A)
    x.contribution_arrived(D, 0)  # though its verdict forbids it: nothing counts twice
    assert x.region_sum_arrived(C, 0, (2, 3)) is None


@pytest.mark.parametrize("claimed", [(), (1,), (0, 2, 3), (2, 3, 4), (2, 3, 9)])
def test_a_sum_of_others_than_its_region_is_refused(claimed: tuple[int, ...]) -> None:
    x, _ = layered(A)
    assert x.region_sum_arrived(C, 0, claimed) is None
    contribute(x, 0, B)
    assert x.region_sum_arrived(C, 0, (2, 3)) == [MergeChunk(0, 1, (0, 1, 2, 3), ((2, (2, 3)),))]


def test_a_sum_that_is_refused_counts_no_more() -> None:
    x, _ = layered(A)
    contribute(x, 0, B)
    x.region_sum_arrived(C, 0, (2, 3))
    assert x.contribution_refused(0, 1, 2) == []
    assert x.replan(levels(2, gone="cd")) == [MergeChunk(0, 1, (0, 1))]


def test_a_sum_waits_for_those_of_the_chunks_before_it() -> None:
    x, _ = layered(C, 2)
    contribute(x, 0, D)
    contribute(x, 1, D)
    assert sends(x.region_summed(1, 1, (2, 3)), FrameKind.PARTIAL) == []
    assert sends(x.region_summed(0, 1, (2, 3)), FrameKind.PARTIAL) == [(A, 0), (A, 1)]


def test_a_region_whose_members_are_gone_is_waited_for_by_nobody() -> None:
    x, relay = layered(A)[0], ReduceProtocol(C, 1, 8)
    contribute(x, 0, B)
    assert x.replan(levels(2, gone="cd")) == [MergeChunk(0, 1, (0, 1))]
    weightless = replace(levels(2, gone="d"), members=(*levels().members[:2], PlanMember(C, "c:1", 0.0)))
    members = (*weightless.members, PlanMember(D, "d:1", 1.0, gone=True))
    assert relay.replan(replace(weightless, members=members)) == []


def test_a_chunk_that_was_sealed_without_a_region_is_over_there() -> None:
    x, _ = layered(C)
    contribute(x, 0, D)
    assert x.verdict(A, 0, FrameKind.SEALED, 0, 1) is FrameVerdict.TAKE
    assert x.sealed_arrived(0, b"digest")[:2] == [FreeContributions(0), SendFrame(D, FrameKind.SEALED, 0, 1)]
    assert x.region_summed(0, 1, (2, 3)) == []


def test_without_its_relay_a_chunk_starts_anew_and_is_flat() -> None:
    x, d = layered(A)[0], layered(D)[0]
    contribute(x, 0, B)
    after = levels(2, gone="c", since=2, flat=True)
    assert x.replan(after) == [FreeContributions(0)]
    assert sends(d.replan(after), FrameKind.CONTRIBUTION) == [(A, 0)]
    assert x.verdict(D, 3, FrameKind.CONTRIBUTION, 0, 2) is FrameVerdict.TAKE


def test_who_was_a_relay_contributes_to_a_flat_chunk() -> None:
    relay = layered(C)[0]
    assert sends(relay.replan(levels(2, since=2, flat=True)), FrameKind.CONTRIBUTION) == [(A, 0)]


def test_a_relay_without_weight_has_the_sealed_chunk_to_pass_on() -> None:
    x, plan = ReduceProtocol(A, 1, 8), levels()
    x.replan(replace(plan, members=(*plan.members[:2], replace(plan.members[2], weight=0.0), plan.members[3])))
    contribute(x, 0, B)
    assert x.region_sum_arrived(C, 0, (2, 3)) is None, "it has nothing to bring itself"
    x.region_sum_arrived(C, 0, (3,))
    assert sends(x.chunk_merged(0, 1, (0, 1, 3), b"digest"), FrameKind.SEALED) == [(B, 0), (C, 0)]


def test_a_member_that_comes_later_has_no_region_and_deals_with_the_owner() -> None:
    entered = (*levels(2).members, PlanMember(NodeId("e"), "e:1", 1.0))
    plan = replace(levels(2), members=entered)
    x, e = layered(A)[0], ReduceProtocol(NodeId("e"), 1, 8)
    assert sends(e.replan(plan), FrameKind.CONTRIBUTION) == [(A, 0)]
    x.replan(plan)
    contribute(x, 0, B)
    assert x.region_sum_arrived(C, 0, (2, 3)) == []
    assert x.verdict(NodeId("e"), 4, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.TAKE
    assert x.contribution_arrived(NodeId("e"), 0) == [MergeChunk(0, 1, (0, 1, 2, 3, 4), ((2, (2, 3)),))]
    assert sends(x.chunk_merged(0, 1, (0, 1, 2, 3, 4), b"d"), FrameKind.SEALED) == [
        (B, 0),
        (C, 0),
        (NodeId("e"), 0),
    ]


def test_after_a_break_neither_what_was_summed_nor_a_sum_that_is_here_is_sent_again() -> None:
    x, relay, d = layered(A)[0], layered(C)[0], layered(D)[0]
    contribute(relay, 0, D)
    assert sends(d.resync(C, 1, *relay.resync_state(D)), FrameKind.CONTRIBUTION) == []
    relay.region_summed(0, 1, (2, 3))
    assert sends(d.resync(C, 1, *relay.resync_state(D)), FrameKind.CONTRIBUTION) == []
    assert sends(relay.resync(A, 1, *x.resync_state(C)), FrameKind.PARTIAL) == [(A, 0)]
    x.region_sum_arrived(C, 0, (2, 3))
    assert sends(relay.resync(A, 1, *x.resync_state(C)), FrameKind.PARTIAL) == []
    relay.sealed_arrived(0, b"digest")
    assert sends(relay.resync(D, 1, *d.resync_state(C)), FrameKind.SEALED) == [(D, 0)]


def test_a_late_chunk_in_two_levels_is_not_asked_for_in_other_regions() -> None:
    d, c = layered(D)[0], layered(C)[0]
    assert sends(d.pull(0), FrameKind.WANT) == [(C, 0)] and d.chunk_lacked(C, 0) == []
    b = layered(B)[0]
    assert sends(b.pull(0), FrameKind.WANT) == [(A, 0)] and b.chunk_lacked(A, 0) == []
    flat = ReduceProtocol(D, 1, 1)
    flat.replan(levels(flat=True))
    assert len([c for _ in range(3) for c in flat.pull(0)]) == 3, "a flat one is asked for everywhere"
    assert d.dues() == [(C, "1 of its chunks")]
    assert c.dues() == [(D, "contributions")]
    assert layered(A)[0].dues() == [(B, "contributions"), (C, "region's sums")]
