from dataclasses import replace

import pytest

from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import NOBODY, InvalidPlan, Plan, PlanMember

A, B = PlanMember(NodeId("a"), "127.0.0.1:1", 1.0), PlanMember(NodeId("b"), "127.0.0.1:2", 3.0)
PLAN = Plan(Incarnation(1), Epoch(2), Round(3), 4, (A, B), (0, 1, 0))
C = PlanMember(NodeId("c"), "127.0.0.1:3", 1.0)
TWO = replace(PLAN, regions=(0, 1), relays=((0, 0, 0), (1, 1, 1)), layered=frozenset({0, 1, 2}))


def test_a_sound_plan_passes_and_says_who_owns_what() -> None:
    PLAN.validate()
    assert PLAN.owned(0) == [0, 2] and PLAN.owned(1) == [1]
    assert PLAN.index(NodeId("b")) == 1


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (replace(PLAN, members=(), owners=()), "no members"),
        (replace(PLAN, members=(A, A)), "a is in it 2 times"),
        (replace(PLAN, owners=(0, 2, 0)), "owner of chunk 1 is 2"),
        (replace(PLAN, owners=(0, 1, -1)), "owner of chunk 2 is -1"),
        (
            replace(PLAN, members=(replace(A, weight=0.0), replace(B, weight=0.0))),
            "no member has a weight above 0",
        ),
        (replace(PLAN, members=(replace(A, gone=True), replace(B, weight=0.0))), "no member has a weight above 0"),
        (replace(PLAN, members=(replace(A, gone=True), replace(B, gone=True))), "no members"),
        (replace(PLAN, members=(A, replace(B, gone=True))), "owner of chunk 1 is b, which is gone"),
        (replace(PLAN, owners=(0, NOBODY, 0)), "owner of chunk 1 is 4294967295"),
        (replace(PLAN, since=(4, 4)), "3 owners and 2 attempts of theirs"),
        (replace(PLAN, members=(A, replace(B, weight=-1.0))), "weight of b is -1.0"),
        (replace(PLAN, members=(A, replace(B, weight=float("nan")))), "weight of b is nan"),
        (replace(PLAN, members=(A, replace(B, weight=float("inf")))), "weight of b is inf"),
        (replace(PLAN, regions=(0, 1, 1)), "its regions are not those of its members"),
        (replace(PLAN, regions=(0, -1)), "its regions are not those of its members"),
        (replace(PLAN, length=0.0), "its length is 0.0"),
        (replace(PLAN, length=float("inf")), "its length is inf"),
        (replace(PLAN, members=(A, replace(B, scale=0.0))), "scale of b is 0.0"),
        (replace(PLAN, members=(A, replace(B, scale=1.5))), "scale of b is 1.5"),
        (replace(TWO, relays=((0, 0, 0),)), "relays for 1 regions and members in 2"),
        (replace(TWO, relays=((0, 0, 0), (1, 1))), "does not have a relay for each of 3 chunks"),
        (replace(TWO, layered=frozenset({3})), "does not have a relay for each of 3 chunks"),
        (replace(TWO, relays=((0, 0, 0), (1, 1, 0))), "the relay of chunk 2 in region 1 is 0"),
        (
            replace(TWO, members=(A, B, replace(C, gone=True)), regions=(0, 0, 1)),
            "the relay of chunk 0 in region 1",
        ),
        (replace(TWO, members=(A, B, C), regions=(0, 1, 1), relays=((0, 0, 0), (1, 2, 1))), "its region's relay"),
        (replace(TWO, regions=(0,), relays=((0, 0, 0),)), "the owner of chunk 1 has no region"),
        (replace(PLAN, members=(replace(A, weight=1e308), replace(B, weight=1e308))), "sum of the weights"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_with_a_sentence(plan: Plan, sentence: str) -> None:
    with pytest.raises(InvalidPlan, match=sentence):
        plan.validate()


def test_a_plan_may_have_members_without_weight_members_that_are_gone_and_kept_chunks_without_an_owner() -> None:
    replace(PLAN, members=(A, replace(B, weight=0.0))).validate()
    back = replace(PLAN, members=(replace(A, gone=True), B, A), owners=(2, 1, NOBODY), kept=frozenset({2}))
    back.validate()
    assert back.index(A.node) == 2


def test_in_two_levels_everything_goes_by_way_of_the_own_regions_relay() -> None:
    plan = replace(TWO, members=(A, B, C), regions=(0, 1, 1))
    plan.validate()
    assert [plan.destination(0, i) for i in range(3)] == [0, 0, 1], "b relays for c"
    assert [plan.relays_for(0, i) for i in range(3)] == [False, True, False]
    flat = replace(plan, layered=frozenset({1}))
    assert [flat.destination(0, i) for i in range(3)] == [0, 0, 0] and not flat.relays_for(0, 1)


def test_a_node_that_is_gone_has_no_index() -> None:
    with pytest.raises(InvalidPlan, match="a is not one of its members"):
        replace(PLAN, members=(replace(A, gone=True), B)).index(A.node)


def test_a_node_outside_the_plan_has_no_index() -> None:
    with pytest.raises(InvalidPlan, match="c is not one of its members"):
        PLAN.index(NodeId("c"))


def test_a_newer_attempt_has_a_greater_fence() -> None:
    assert PLAN.fence < replace(PLAN, attempt=5).fence < replace(PLAN, round=Round(4), attempt=0).fence
    assert replace(PLAN, attempt=9).fence < replace(PLAN, incarnation=Incarnation(2), attempt=0).fence


def test_of_what_a_member_receives_others_have_parts_that_follow_from_what_each_owns() -> None:
    four = tuple(PlanMember(NodeId(n), f"127.0.0.1:{i}", 1.0) for i, n in enumerate("abcd", 1))
    equal = replace(PLAN, members=four, owners=(0, 1, 2, 3))
    assert equal.receive_shares(0) == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    # d owns nothing, and has the sealed chunks of their owners; a has three contributions to each of its two
    # chunks, and c's sealed one
    uneven = replace(PLAN, members=four, owners=(0, 0, 2))
    assert uneven.receive_shares(0)[3] == pytest.approx(2 / 3) and uneven.receive_shares(2)[3] == pytest.approx(
        1 / 3
    )
    assert uneven.receive_shares(1)[3] == 0.0 and uneven.receive_shares(1)[0] == pytest.approx(2 / 7)
    for to in range(4):
        assert sum(uneven.receive_shares(place)[to] for place in range(4)) == pytest.approx(1)


def test_of_a_lost_member_comes_nothing_and_to_a_reducer_only_contributions() -> None:
    gone = replace(PLAN, members=(A, B, replace(C, gone=True)))
    assert gone.receive_shares(0)[1] == pytest.approx(1)
    reducer = replace(PLAN, members=(A, B, replace(C, weight=0.0)), owners=(2, 2, 2))
    assert reducer.receive_shares(2) == pytest.approx([1, 1, 0]) and reducer.receive_shares(0) == pytest.approx(
        [0, 0, 0.5]
    )


def test_in_two_levels_a_sealed_chunk_comes_from_one_and_sums_from_as_many_as_there_are_other_regions() -> None:
    three = replace(TWO, members=(A, B, C), regions=(0, 1, 2), relays=((0, 0, 0), (1, 1, 1), (2, 2, 2)))
    assert TWO.receive_shares(0) == [1.0, 1.0] and three.receive_shares(0) == [0.5, 0.5, 0.5]
