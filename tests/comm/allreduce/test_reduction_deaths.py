"""Members that die, and links that break, in the middle of a reduce over loopback TCP."""

import asyncio
from random import Random

import pytest
from reduce_members import (
    CHUNKS,
    CODEC,
    ENCODED,
    GATHERED,
    SPARSE,
    SPARSE_CODEC,
    Member,
    fleet,
    gathered,
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
from atoll.comm.plan import Plan, PlanMember
from atoll.comm.transport.link_policy import LinkTimes


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_after_a_death_the_survivors_hold_what_the_seals_say(after: int, gathers: bool) -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            plan = plan_for(planes)
            encoded, codec, sealing = (SPARSE, SPARSE_CODEC, GATHERED) if gathers else (ENCODED, CODEC, None)
            members = [Member(p, encoded[i], plan, codec, sealing) for i, p in enumerate(planes)]
            async with reducing(*members):
                await members[0].reports.until(lambda reports: len(reports.seals) >= min(after, 3))
                await members[3].stop()
                await planes[3].close()
                ledger = {c: s for m in members[:3] for c, (_, s) in m.reports.seals.items()}
                second = survive(plan, 3, ledger)
                for member in members[:3]:
                    member.reports.root = b""
                    member.reduction.replan(second)
                held = [await member.holds_all() for member in members[:3]]
                seals = {c: s for m in members[:3] for c, (_, s) in m.reports.seals.items()}
                for c in range(CHUNKS.count):
                    inputs = seals[c].inputs
                    assert set(inputs) >= {0, 1, 2}
                    expected = (gathered if gathers else reference)(c, inputs, [1.0] * len(inputs))
                    assert [chunks[c] for chunks in held] == [expected] * 3
                    assert seals[c].digest == digest(expected)

    run(body())


def test_orphans_are_told_and_come_from_whoever_holds_them() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            plan = plan_for(planes)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                whole = [await member.holds_all() for member in members][0]
                await members[3].stop()
                await planes[3].close()
                newcomer = await plane_of(name(4))
                try:
                    ledger = {c: s for m in members for c, (_, s) in m.reports.seals.items()}
                    # n3's chunks belong to n0 now, which holds them; n4 has missed everything
                    second = survive(plan, 3, ledger)
                    entered = (*second.members, PlanMember(name(4), newcomer.address, 1.0))
                    second = Plan(
                        *(plan.incarnation, plan.epoch, plan.round, 2, entered),
                        *(second.owners, second.since, second.kept),
                    )
                    for member in members[:3]:
                        member.reduction.replan(second)
                    late = Member(newcomer, ENCODED[4], second)
                    async with reducing(late):
                        assert await late.holds_all() == whole
                finally:
                    await newcomer.close()

    run(body())


@pytest.mark.parametrize("piece", [0, 500])
@pytest.mark.parametrize("seed", range(4))
def test_links_that_break_in_mid_reduce_cost_nothing_but_time(
    seed: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.comm.transport.link_policy.LINK_TIMES", LinkTimes(redial=(0.001,)))
    monkeypatch.setattr("atoll.comm.transport.reassembly.MIN_PIECE_BYTES", 500)  # else they are refused

    async def body() -> None:
        random = Random(seed)
        async with fleet(3, streams=2) as planes:
            plan = plan_for(planes)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for _ in range(12):
                    until = planes[0].bytes_down + random.randrange(6000)
                    while planes[0].bytes_down < until and not members[0].reports.root:
                        await asyncio.sleep(0)
                    for plane in planes:
                        for peer in plane.peers._peers.values():
                            peer.queue.piece_size = piece
                    if links := random.choice(planes).peers.links():
                        random.choice(links)[1].close()
                for member in members:
                    assert await member.holds_all() == [reference(c, range(3), [1.0] * 3) for c in range(10)]
                assert not any(member.reports.blamed for member in members)

    run(body())


def test_a_member_that_cannot_be_reached_is_named() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes)
            await planes[1].close()
            member = Member(planes[0], ENCODED[0], plan)
            async with reducing(member):
                await member.reports.until(lambda reports: bool(reports.blamed))
                node, sentence = member.reports.blamed[0]
                assert node == name(1) and "connection refused" in sentence

    run(body())


def test_a_fault_of_this_node_in_a_merge_ends_its_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(merge_module, "seal_chunk", broken)

    async def body() -> None:
        async with fleet(1) as planes:
            member = Member(planes[0], ENCODED[0], plan_for(planes))
            with pytest.raises(ZeroDivisionError):
                await member.task

    run(body())
