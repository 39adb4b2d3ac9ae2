"""Plans that come early, late, or in the middle of a reduce over loopback TCP, and plans that are refused."""

import asyncio
from dataclasses import replace

import pytest
from reduce_members import (
    CHUNKS,
    CODEC,
    ENCODED,
    SIZE,
    Member,
    Reports,
    fleet,
    name,
    plan_for,
    pooled_vector,
    reducing,
    reference,
    run,
    survive,
)

from atoll.comm.allreduce import reduction as reduce_module
from atoll.comm.allreduce.reduction import Reduction
from atoll.comm.plan import InvalidPlan
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.frames import FrameKind, Header
from atoll.comm.transport.link_policy import LinkTimes


def test_a_plan_that_comes_before_the_reduce_has_begun_is_the_one_it_begins_under() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes[:2])]
            async with reducing(*members):
                for member in members:  # the third one was lost meanwhile
                    member.reduction.replan(survive(plan, 2, {}))
                expected = [reference(c, range(2), [1.0] * 2) for c in range(10)]
                for member in members:
                    assert await member.holds_all() == expected

    run(body())


def test_members_may_learn_of_the_plan_one_after_another() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes)
            early = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes[:2])]
            await early[0].reports.until(lambda _: True)
            while not planes[2].bytes_down:
                await asyncio.sleep(0)
            members = [*early, Member(planes[2], ENCODED[2], plan)]
            async with reducing(*members):
                for member in members:
                    assert await member.holds_all() == [reference(c, range(3), [1.0] * 3) for c in range(10)]

    run(body())


@pytest.mark.parametrize("late", ["round", "plan"])
def test_what_was_held_in_vain_comes_again(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator died that had told only some of a plan, and was away for longer than their frames are held."""
    monkeypatch.setattr("atoll.comm.transport.peer_links.ROUND_BEGINS_WITHIN", 0)
    monkeypatch.setattr("atoll.comm.transport.link_policy.LINK_TIMES", LinkTimes(redial=(0.001,)))
    monkeypatch.setattr(reduce_module, "PLAN_WITHIN", 0)

    async def given_up(plane: DataPlane) -> None:
        while not (links := plane.peers.links()):
            await asyncio.sleep(0)
        while links[0] in plane.peers.links():
            await asyncio.sleep(0)

    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes, owners=[1] * 10)
            early = Member(planes[0], ENCODED[0], plan)
            if late == "plan":
                other = Member(planes[1], ENCODED[1], replace(plan, attempt=0, owners=(0,) * 10))
            await given_up(planes[1])
            if late == "plan":
                other.reduction.replan(plan)
            else:
                other = Member(planes[1], ENCODED[1], plan)
            async with reducing(early, other):
                for member in (early, other):
                    assert await member.holds_all() == [reference(c, range(2), [1.0] * 2) for c in range(10)]

    run(body())


def test_a_frame_that_waits_for_a_plan_holds_its_link_up_no_longer_than_the_reduce_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reduce_module, "PLAN_WITHIN", 120.0)

    async def body() -> None:
        async with fleet(2) as planes:
            member = Member(planes[0], ENCODED[0], plan := plan_for(planes))
            early = Header(FrameKind.CONTRIBUTION, plan.fence._replace(attempt=2), 0, SIZE, place=1)
            await asyncio.sleep(0)
            waiting = asyncio.create_task(member.reduction.buffer_for(name(1), early))
            await asyncio.sleep(0)
            await member.stop()
            assert await waiting is None

    run(body(), reduce_module.PLAN_WITHIN / 2)


def test_a_plan_for_other_chunks_or_without_this_node_is_refused() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            for plan, sentence in (
                (plan_for(planes, owners=[0, 1, 0]), "owners for 3 chunks, there are 10"),
                (plan_for(planes[1:]), "n0 is not one of its members"),
            ):
                with pytest.raises(InvalidPlan, match=sentence):
                    Reduction(
                        planes[0].peers,
                        name(0),
                        pooled_vector(ENCODED[0], planes[0].peers.buffers),
                        CODEC,
                        CHUNKS,
                        plan,
                        Reports(),
                    )
            with pytest.raises(InvalidPlan, match="a weight for n0, which brings no delta"):
                Reduction(planes[0].peers, name(0), None, CODEC, CHUNKS, plan_for(planes), Reports())

    run(body())


def test_a_plan_that_comes_before_a_merge_has_begun_makes_it_void() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes, owners=[0] * 10)
            member = Member(planes[0], ENCODED[0], plan)
            async with reducing(member):
                await asyncio.sleep(0)  # it has begun
                contribution = Header(FrameKind.CONTRIBUTION, plan.fence, 0, SIZE, place=1)
                member.reduction.arrived(name(1), contribution, ENCODED[1][0].copy())
                since = (2, *[1] * 9)
                member.reduction.replan(plan_for(planes, owners=[1] + [0] * 9, attempt=2, since=since))
                while member.reduction._merges:
                    await asyncio.sleep(0)
                assert member.reduction._fault is None and not member.reports.seals

    run(body())
