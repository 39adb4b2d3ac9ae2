"""The contributions at an owner: which a merge reads, and which memory may be used again."""

from atoll.comm.allreduce.effects import MergeChunk
from atoll.comm.allreduce.inbox import ContributionInbox
from atoll.comm.allreduce.routes import links
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.peer_names import host_of_peer
from atoll.comm.plan import Plan, PlanMember

A, B, C, D = (NodeId(name) for name in "abcd")
PLAN = Plan(
    Incarnation(1),
    Epoch(1),
    Round(1),
    1,
    (PlanMember(A, "a:1", 1.0), PlanMember(B, "b:1", 1.0), PlanMember(C, "c:1", 2.0, scale=0.5)),
    (0,),
)
ORDER = MergeChunk(0, 1, (0, 1, 2))


def full() -> ContributionInbox[str]:
    inbox = ContributionInbox[str](A)
    inbox.put(0, 1, "b")
    inbox.put(0, 2, "c")
    inbox.put(1, 1, "b of another chunk")
    return inbox


def test_the_terms_of_a_merge_are_in_plan_order_and_weighed() -> None:
    terms = [(t.place, t.inputs, t.share, t.payload) for t in full().begin(ORDER, PLAN)]
    assert terms == [(0, (0,), 0.25, None), (1, (1,), 0.25, "b"), (2, (2,), 0.25, "c")]


def test_a_regions_mean_is_one_term_that_is_not_scaled_again() -> None:
    terms = full().begin(MergeChunk(0, 1, (0, 1, 2), ((2, (1, 2)),)), PLAN)
    assert [(t.place, t.inputs, t.share, t.payload) for t in terms] == [
        (0, (0,), 0.25, None),
        (2, (1, 2), 0.75, "c"),
    ]


def test_memory_is_used_again_unless_a_merge_may_still_read_it() -> None:
    inbox = full()
    inbox.begin(ORDER, PLAN)
    assert inbox.free(0) == [] and len(inbox) == 1
    inbox.put(0, 1, "b again")
    inbox.end(0)
    assert inbox.free(0) == ["b again"]
    assert inbox.free(0) == [] and inbox.free(1) == ["b of another chunk"]


def test_what_was_refused_is_gone_and_its_memory_with_it() -> None:
    inbox = full()
    inbox.drop(0, 1)
    assert inbox.free(0) == ["c"]


def test_who_came_first_dials_and_leaves_dial_all_but_leaves() -> None:
    members = (
        PlanMember(A, "a:1", 1.0),
        PlanMember(B, "", 1.0, leaf=True),
        PlanMember(C, "", 1.0, leaf=True),
        PlanMember(D, "d:1", 1.0),
        PlanMember(A, "a:2", 1.0),
    )
    gone = PlanMember(A, "a:1", 1.0, gone=True)
    plan = Plan(Incarnation(1), Epoch(1), Round(1), 1, members[:4], (0,))
    dialled = {me: [(m.node, first) for m, first in links(plan, me)] for me in (A, B, C, D)}
    assert dialled == {
        A: [(B, False), (C, False), (D, True)],
        B: [(A, True), (D, True)],
        C: [(A, True), (D, True)],
        D: [(A, False), (B, False), (C, False)],
    }
    back = Plan(Incarnation(1), Epoch(1), Round(1), 2, (gone, *members[1:]), (3,))
    assert [(m.node, first) for m, first in links(back, D)] == [(B, False), (C, False), (A, True)]


def test_who_is_behind_a_gateway_dials_those_who_may_have_none() -> None:
    behind = host_of_peer(b"\x12\x20" + bytes(32)) + ":1"
    members = (
        PlanMember(A, "a:1", 1.0),
        PlanMember(B, behind, 1.0),
        PlanMember(C, behind, 1.0),
        PlanMember(D, "", 1.0, leaf=True),
    )
    plan = Plan(Incarnation(1), Epoch(1), Round(1), 1, members, (0,))
    dialled = {me: {m.node for m, first in links(plan, me) if first} for me in (A, B, C, D)}
    assert dialled == {A: set(), B: {A, C}, C: {A}, D: {A, B, C}}
