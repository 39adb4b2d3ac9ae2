"""What a reduce holds in memory is bounded, given back, and used again only when nothing reads it any more."""

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import psutil
import pytest
from reduce_members import (
    CHUNKS,
    ENCODED,
    SIZE,
    Member,
    fleet,
    name,
    plan_for,
    plane_of,
    reducing,
    reference,
    run,
    survive,
)

from atoll.comm.allreduce import merge_executor as merge_module
from atoll.comm.digest import digest
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.frames import FrameKind, Header

CHURN = int(os.environ.get("ATOLL_CHURN_ROUNDS", "300"))


def test_what_an_owner_holds_of_others_is_bounded_and_freed() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            members = [Member(p, ENCODED[i], plan_for(planes)) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                for member in members:
                    await member.reports.until(lambda reports: len(reports.seals) >= 3)
                    others = len(members) - 1
                    assert member.reduction._exchange.window * others <= CHUNKS.count / 2
                    assert not len(member.reduction._executor.inbox)

    run(body())


def test_what_a_member_brought_makes_room_for_what_is_sealed_and_is_made_again_for_a_chunk_that_starts_anew() -> (
    None
):
    async def body() -> None:
        async with fleet(3) as planes:
            plan, expected = plan_for(planes), [reference(c, range(3), [1.0] * 3) for c in range(10)]
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    assert await member.holds_all() == expected
                    assert member.vector is not None and not any(p is not None for p in member.vector._chunks)
                    assert len(member.plane.peers.buffers) >= 1
                    member.reports.root = b""
                anew = replace(
                    plan_for(planes, owners=[2, *plan.owners[1:]], attempt=2, since=(2, *[1] * 9)),
                    kept=frozenset(range(1, 10)),
                )
                for member in members:
                    member.reduction.replan(anew)
                    assert member.reduction._sealed[0] is None
                for member in members:
                    assert await member.holds_all() == expected

    run(body())


@pytest.mark.parametrize(
    ("sent", "attempts", "giver", "used_again"),
    [(1, 1, 1, True), (2, 1, 1, False), (1, 2, 1, False), (1, 1, 2, False)],
)
def test_what_may_still_be_on_its_way_when_a_chunk_is_sealed_is_let_go_of_and_not_used_again(
    sent: int, attempts: int, giver: int, used_again: bool
) -> None:
    """As when the link broke, the plan is another, or somebody gives what was never sealed."""

    async def body() -> None:
        async with fleet(3) as planes:
            peers, plan = planes[0].peers, plan_for(planes, owners=[1] * 10)
            member = Member(planes[0], ENCODED[0], plan)
            async with reducing(member):
                await asyncio.sleep(0)  # it has begun
                reduction = member.reduction
                for _ in range(sent):
                    assert await reduction.frame(name(1), (FrameKind.CONTRIBUTION, 0, 1)) is not None
                if attempts == 2:
                    reduction.replan(replace(plan, attempt=2, since=(1,) * 10))
                if giver != 1:
                    reduction._do(reduction._exchange.pull(0, name(1)))
                result = np.frombuffer(reference(0, (0, 1), (1.0, 1.0)), np.uint8)
                reduction.arrived(name(giver), Header(FrameKind.SEALED, plan.fence, 0, SIZE, place=giver), result)
                assert reduction._sealed[0] is result
                assert member.vector is not None and member.vector.chunks[0] is None
                assert len(peers.buffers) == used_again

    run(body())


def test_what_a_void_merge_still_reads_is_not_used_again_before_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end, merge = threading.Event(), threading.Event(), merge_module.seal_chunk

    def slowly(*work: Any) -> tuple[bytes, tuple[float, ...]]:
        begun.set()
        assert may_end.wait(60)
        return merge(*work)

    monkeypatch.setattr(merge_module, "seal_chunk", slowly)

    async def body() -> None:
        async with fleet(2) as planes:
            peers, plan = planes[0].peers, plan_for(planes, owners=[0] * 10)
            member = Member(planes[0], ENCODED[0], plan)
            reduction = member.reduction

            def contribute(attempt: int) -> None:
                fence = plan.fence._replace(attempt=attempt)
                payload = peers.buffers.take(SIZE, SIZE)
                payload[:] = ENCODED[1][0]
                reduction.arrived(name(1), Header(FrameKind.CONTRIBUTION, fence, 0, SIZE, place=1), payload)

            async with reducing(member):
                await asyncio.sleep(0)  # it has begun
                contribute(1)
                await asyncio.to_thread(begun.wait, 20)
                reduction.replan(plan_for(planes, owners=[0] * 10, attempt=2, since=(2, *[1] * 9)))
                assert not len(peers.buffers)
                contribute(2)
                may_end.set()
                while reduction._merges:
                    await asyncio.sleep(0)
                assert reduction._fault is None and member.reports.seals[0][1].since == 2
                assert reduction._exchange.digests[0] == digest(reference(0, (0, 1), (1.0, 1.0)))
                assert len(peers.buffers), "what the one read that is not void is used again"

    run(body())


def usage() -> tuple[int, int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())


async def round_of(number: int, planes: Sequence[DataPlane], kill: bool) -> DataPlane | None:
    """One round among these planes; returns the one that died in it."""
    plan = plan_for(planes, round=number)
    members = [Member(p, ENCODED[int(p.node[1:]) % 6], plan) for p in planes]
    async with reducing(*members):
        dead: DataPlane | None = None
        if kill:
            *members, victim = members
            await victim.stop()
            await victim.plane.close()
            dead = victim.plane
            ledger = {c: s for m in members for c, (_, s) in m.reports.seals.items()}
            for member in members:
                member.reports.root = b""
                member.reduction.replan(survive(plan, len(planes) - 1, ledger))
        held = [await member.holds_all() for member in members]
        assert all(chunks == held[0] for chunks in held)
        return dead


@pytest.mark.long
def test_hundreds_of_rounds_with_members_that_come_and_go_leave_nothing_behind() -> None:
    async def body() -> None:
        random = Random(1)
        planes = [await plane_of(name(i), streams=2) for i in range(4)]
        process, began, memory = psutil.Process(), (0, 0, 0), (0, 0)
        born = 4
        for number in range(1, CHURN + 1):
            dead = await round_of(number, planes, kill=number % 4 == 0)
            if dead is not None:
                planes.remove(dead)
                replacement = name(born) if random.random() < 0.5 else dead.node
                planes.insert(random.randrange(len(planes) + 1), await plane_of(replacement, streams=2))
                born += 1
            if number == CHURN // 3 or number == CHURN:
                gc.collect()
                now, used = usage(), (sys.getallocatedblocks(), process.memory_info().rss)
                if number == CHURN:
                    assert all(n <= b + 12 for n, b in zip(now, began, strict=True)), (began, now)
                    assert used[0] < memory[0] + 3000, (memory, used)
                    assert used[1] < memory[1] + (24 << 20), (memory, used)
                began, memory = now, used
        for plane in planes:
            await plane.close()

    run(body(), seconds=60 + CHURN / 2)
