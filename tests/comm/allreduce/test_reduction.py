"""Whole reduces: real planes in one process, over loopback TCP."""

import asyncio
import gc
import os
import struct
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import pytest
from encoders import at_once

from atoll.comm.allreduce import merge_executor as merge_module
from atoll.comm.allreduce import reduction as reduce_module
from atoll.comm.allreduce.delta_encoder import DeltaEncoder, EncodedVector, encoded_norm
from atoll.comm.allreduce.listener import SealReport
from atoll.comm.allreduce.reduction import Reduction
from atoll.comm.allreduce.sealing import EncodedSeal, GatheredSeal, SealFormat, TimedSeal, WeightedMean
from atoll.comm.buffers import BufferPool
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs import zstd
from atoll.comm.codecs.codec import F32, ByteShuffle, Codec, Malformed
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest, root
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round, RunId
from atoll.comm.plan import InvalidPlan, Plan, PlanMember
from atoll.comm.transport import frames, link_policy
from atoll.comm.transport.certificates import load_or_make
from atoll.comm.transport.connection import Link, LinkBroken
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.frames import FrameKind, Header
from atoll.comm.transport.link_policy import LinkTimes
from atoll.comm.transport.tls import TlsContexts

CHUNKS = Chunks(10_000, 1024)  # 10 chunks, the last one shorter
CODEC = make_codec(CodecName.INT8, 128)
VECTORS = [np.random.default_rng(i).standard_normal(CHUNKS.numel, dtype=np.float32) for i in range(6)]
CHURN = int(os.environ.get("ATOLL_CHURN_ROUNDS", "300"))


class Empty:
    async def sealed(self, round: Round, chunk: int) -> None: ...
    async def state(self, round: Round, chunk: int) -> None: ...
    async def digests(self, round: Round) -> None: ...


def encode(x: F32, codec: Codec = CODEC) -> tuple[U8, ...]:
    return at_once(DeltaEncoder(np.asarray(x), np.zeros_like(x), codec, CHUNKS)).whole


def brought(payloads: Sequence[U8], buffers: BufferPool) -> EncodedVector:
    """An encoded vector in memory that is used again, as a node's is."""

    def copy(c: int) -> U8:
        part = buffers.take(payloads[c].size, payloads[0].size)
        part[:] = payloads[c]
        return part

    async def again(c: int) -> U8:
        return copy(c)

    return EncodedVector([copy(c) for c in range(len(payloads))], len(payloads), again)


ENCODED = [encode(x) for x in VECTORS]


def name(i: int) -> NodeId:
    return NodeId(f"n{i}")


def reference(
    c: int, inputs: Sequence[int], weights: Sequence[float], codec: Codec = CODEC, scales: Sequence[float] = ()
) -> bytes:
    """The sealed bytes of a chunk, as reduce.py's docstring defines them; `inputs` are numbers of vectors."""
    span, n = CHUNKS.span(c), CHUNKS.size(c)
    mean, x, payload = np.zeros(n, np.float32), np.empty(n, np.float32), np.empty(codec.size(n), np.uint8)
    for i, weight, scale in zip(inputs, weights, scales or [1.0] * len(inputs), strict=True):
        codec.encode(np.ascontiguousarray(VECTORS[i][span]), payload)
        codec.decode(payload, x)
        mean = mean + np.float32(weight / sum(weights) * scale) * x
    codec.encode(mean, payload)
    return payload.tobytes()


FEW = make_codec(CodecName.SPARSE, 128)
SPARSE = [encode(x, FEW) for x in VECTORS]
GATHERED = GatheredSeal(FEW, WeightedMean(FEW))
GATHERED_NONE = bytes(4)


def gathered(c: int, inputs: Sequence[int], weights: Sequence[float]) -> bytes:
    """The sealed bytes of a chunk of sparse vectors, as sealing.py's docstring defines them."""
    shares = [weight / sum(weights) for weight in weights]
    head = struct.pack(f"<I{len(inputs)}d", len(inputs), *shares)
    return head + b"".join(SPARSE[i][c].tobytes() for i in inputs)


class Heard:
    """What the coordinator would be told by one member."""

    def __init__(self) -> None:
        self.seals: dict[int, tuple[Plan, SealReport]] = {}
        self.orphaned: dict[int, bytes] | None = None
        self.blamed: list[tuple[NodeId, str]] = []
        self.root, self.proven = b"", False
        self.forgers: list[tuple[NodeId, int]] = []
        self.lacks: tuple[int, ...] = ()
        self.changed = asyncio.Event()

    def sealed(self, plan: Plan, seal: SealReport, more: bool) -> None:
        self.seals[seal.chunk] = plan, seal
        self.changed.set()

    def orphans(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None:
        self.orphaned = dict(here)
        self.changed.set()

    def lost(self, plan: Plan, node: NodeId, sentence: str) -> None:
        self.blamed.append((node, sentence))
        self.changed.set()

    def held(self, plan: Plan, root: bytes, proven: bool) -> None:
        self.root, self.proven = root, proven
        self.changed.set()

    def forged(self, plan: Plan, node: NodeId, chunk: int) -> None:
        self.forgers.append((node, chunk))
        self.changed.set()

    def lacking(self, plan: Plan, chunks: tuple[int, ...]) -> None:
        self.lacks = chunks
        self.changed.set()

    async def until(self, condition: Callable[["Heard"], bool]) -> None:
        while not condition(self):
            self.changed.clear()
            await self.changed.wait()


class Member:
    """A reduction that runs, and what it told."""

    def __init__(
        self,
        plane: DataPlane,
        encoded: Sequence[U8] | None,
        plan: Plan,
        codec: Codec = CODEC,
        sealing: SealFormat | None = None,
    ) -> None:
        self.plane, self.heard = plane, Heard()
        self.came: dict[int, U8] = {}  # the latest of each sealed chunk
        terms = codec, CHUNKS, plan, self.heard, sealing, self.came.__setitem__
        self.brings = None if encoded is None else brought(encoded, plane.peers.buffers)
        self.reduction = Reduction(plane.peers, plane.node, self.brings, *terms)
        self.task = asyncio.create_task(self.reduction.run())

    async def holds_all(self) -> list[bytes]:
        """The sealed bytes, when they are here."""
        await first(self.heard.until(lambda heard: bool(heard.root)), self.task)
        result = self.reduction.result
        assert root(result.digests) == self.heard.root
        assert self.reduction.holds(self.heard.root) and not self.reduction.holds(root(result.digests[:-1]))
        assert [digest(chunk) for chunk in result.chunks] == list(result.digests)
        assert all(self.came[c] is chunk for c, chunk in enumerate(result.chunks))
        return [chunk.tobytes() for chunk in result.chunks]

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


async def first(wanted: Coroutine[Any, Any, None], task: "asyncio.Task[None]") -> None:
    """Wait for `wanted`; `task` is not to end before."""
    waiting = asyncio.ensure_future(wanted)
    await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        task.result()
    await waiting


async def plane_of(node: NodeId, streams: int = 1, tls: TlsContexts | None = None) -> DataPlane:
    return await DataPlane.start("127.0.0.1:0", RunId("run"), node, b"k" * 32, Empty(), streams=streams, tls=tls)


@asynccontextmanager
async def fleet(n: int, streams: int = 1, tls: TlsContexts | None = None) -> AsyncIterator[list[DataPlane]]:
    planes = [await plane_of(name(i), streams, tls) for i in range(n)]
    try:
        yield planes
    finally:
        for plane in planes:
            await plane.close()


@asynccontextmanager
async def reducing(*members: Member) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for member in members:
            await member.stop()


def plan_for(
    planes: Sequence[DataPlane],
    weights: Sequence[float] | None = None,
    owners: Sequence[int] | None = None,
    attempt: int = 1,
    round: int = 1,
    **rest: Any,
) -> Plan:
    weights = weights or [1.0] * len(planes)
    members = tuple(PlanMember(p.node, p.address, w, pin=p.pin) for p, w in zip(planes, weights, strict=True))
    owners = owners or [c % len(planes) for c in range(CHUNKS.count)]
    return Plan(Incarnation(1), Epoch(1), Round(round), attempt, members, tuple(owners), **rest)


def run(body: Coroutine[Any, Any, None], seconds: float = 60.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await body
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"

    asyncio.run(bounded())


@pytest.mark.parametrize(
    "codec", [make_codec(codec, 128) for codec in CodecName], ids=[c.value for c in CodecName]
)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_a_reduce_equals_the_reference_bit_for_bit_on_every_member(n: int, codec: Codec) -> None:
    async def body() -> None:
        async with fleet(n, streams=2) as planes:
            plan = plan_for(planes)
            members = [Member(p, encode(VECTORS[i], codec), plan, codec) for i, p in enumerate(planes)]
            async with reducing(*members):
                expected = [reference(c, range(n), [1.0] * n, codec) for c in range(CHUNKS.count)]
                for member in members:
                    assert await member.holds_all() == expected
                for c, owner in enumerate(plan.owners):
                    seal = SealReport(c, 1, digest(expected[c]), tuple(range(n)))
                    assert members[owner].heard.seals[c] == (plan, seal)
                assert not any(member.heard.blamed for member in members)

    run(body())


def test_over_encrypted_links_it_is_the_same(tmp_path: Path) -> None:
    async def body() -> None:
        async with fleet(3, streams=2, tls=TlsContexts(load_or_make(tmp_path))) as planes:
            plan = plan_for(planes)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    assert await member.holds_all() == [reference(c, range(3), [1.0] * 3) for c in range(10)]
                links = [link for plane in planes for _, link in plane.peers.links()]
                assert len(links) >= 6 and all(link.encrypted for link in links)

    run(body())


@pytest.mark.parametrize("owners", [[0] * 10, [2] * 10, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1], [2, 1, 0] * 3 + [2]])
def test_weights_and_owners_may_be_unequal(owners: list[int]) -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            weights = [100.0, 33.3, 0.001]
            plan = plan_for(planes, weights, owners)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    assert await member.holds_all() == [reference(c, range(3), weights) for c in range(10)]

    run(body())


def test_a_delta_of_1000_times_the_norm_is_scaled_by_its_owner_and_divided_by_the_whole_weight() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            weights, scales = [1.0, 2.0, 1.0], [1.0, 0.001, 1.0]
            plan = plan_for(planes, weights)
            scaled = (replace(m, scale=s) for m, s in zip(plan.members, scales, strict=True))
            plan = replace(plan, members=tuple(scaled))
            outsized = encode(VECTORS[1] * np.float32(1000))
            members = [Member(p, outsized if i == 1 else ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                mean = [np.frombuffer(b"".join(await m.holds_all()), np.uint8) for m in members]
                assert all((other == mean[0]).all() for other in mean)
                x = np.empty(CHUNKS.size(0), np.float32)
                CODEC.decode(members[0].reduction.result.chunks[0], x)
                exact = (VECTORS[0] + 2 * VECTORS[1] + VECTORS[2])[CHUNKS.span(0)] / 4
                assert np.abs(x - exact).max() < 0.02

    run(body())


def test_a_contribution_beyond_the_norm_that_its_sender_told_is_refused_and_its_sender_named() -> None:
    told = [encoded_norm(CODEC, CHUNKS, ENCODED[i]) for i in range(3)]

    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes, owners=[0] * 10)
            bounded = (replace(m, norm=norm) for m, norm in zip(plan.members, told, strict=True))
            plan = replace(plan, members=tuple(bounded))
            outsized = encode(VECTORS[2] * np.float32(1000))
            members = [Member(p, outsized if i == 2 else ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                await members[0].heard.until(lambda heard: bool(heard.blamed))
                ((node, sentence), *_) = members[0].heard.blamed
                assert node == name(2) and "its norm is" in sentence
                assert not members[0].heard.seals
                second = survive(plan, 2, {})
                for member in members[:2]:
                    member.reduction.replan(second)
                expected = [reference(c, range(2), [1.0] * 2) for c in range(10)]
                for member in members[:2]:
                    assert await member.holds_all() == expected

    run(body())


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


def test_scales_are_part_of_the_reference() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes, [1.0, 3.0])
            plan = replace(plan, members=(plan.members[0], replace(plan.members[1], scale=0.25)))
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                expected = [reference(c, range(2), [1.0, 3.0], scales=[1.0, 0.25]) for c in range(10)]
                for member in members:
                    assert await member.holds_all() == expected

    run(body())


def test_the_rounds_length_is_sealed_with_every_chunk_where_it_is_asked_for() -> None:
    async def body() -> None:
        sealing = TimedSeal(EncodedSeal(CODEC, WeightedMean(CODEC)))
        async with fleet(3) as planes:
            plan = plan_for(planes, length=0.75)
            members = [Member(p, ENCODED[i], plan, sealing=sealing) for i, p in enumerate(planes)]
            async with reducing(*members):
                length = np.float64(0.75).tobytes()
                expected = [reference(c, range(3), [1.0] * 3) + length for c in range(10)]
                for member in members:
                    assert await member.holds_all() == expected
        x = np.empty(CHUNKS.size(3), np.float32)
        assert sealing.decode(3, expected[3], x) == 0.75
        for wrong in (expected[3][:-1], expected[3][:-8] + np.float64(np.nan).tobytes(), b"1234567"):
            with pytest.raises(Malformed):
                sealing.decode(3, wrong, x)

    run(body())


def test_sparse_deltas_are_gathered_and_everybody_merges_them_alike() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            weights = [3.0, 1.0, 2.0, 0.0]
            plan = plan_for(planes, weights)
            given = [*SPARSE[:3], None]
            members = [Member(p, given[i], plan, FEW, GATHERED) for i, p in enumerate(planes)]
            async with reducing(*members):
                for plane in planes:
                    plane.peers.estimator._up._before = 1000.0  # where other sealed chunks would be packed
                expected = [gathered(c, range(3), weights[:3]) for c in range(CHUNKS.count)]
                for member in members[:3]:
                    assert await member.holds_all() == expected
        for c in range(CHUNKS.count):
            merged, by_hand = np.empty((2, CHUNKS.size(c)), np.float32)
            GATHERED.decode(c, expected[c], merged)
            by_hand[:] = 0.0
            for i, weight in enumerate(weights[:3]):
                x = np.empty_like(by_hand)
                FEW.decode(SPARSE[i][c], x)
                by_hand += np.float32(weight / 6.0) * x
            assert merged.tobytes() == by_hand.tobytes()

    run(body())


def test_gathered_bytes_that_cannot_be_are_refused() -> None:
    n = CHUNKS.size(0)
    good = gathered(0, range(3), [1.0, 1.0, 1.0])
    GATHERED.check(good, n)
    assert GATHERED.fits(len(good), n, 3) and not GATHERED.fits(len(good), n, 2)
    nan, more = struct.pack("<d", np.nan), struct.pack("<d", 0.7)
    broken = [b"", good[:3], good[:-1], good + b"x", b"\x02" + good[1:], GATHERED_NONE]
    broken += [good[:4] + nan + good[12:], good[:4] + more + good[12:], good[:-200] + bytes(200)]
    broken += [good[:4] + struct.pack("<d", -0.1) + good[12:]]
    for wrong in broken:
        with pytest.raises(Malformed):
            GATHERED.decode(0, wrong, np.empty(n, np.float32))
        with pytest.raises(Malformed):
            GATHERED.check(wrong, n)


def test_a_member_without_weight_owns_chunks_and_is_sent_no_others() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes, [1.0, 2.0, 0.0], [2] * 8 + [0, 1])
            members = [Member(p, ENCODED[i] if i < 2 else None, plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members[:2]:
                    assert await member.holds_all() == [reference(c, range(2), [1.0, 2.0]) for c in range(10)]
                assert not members[2].heard.root and sorted(members[2].heard.seals) == list(range(8))
                assert not members[2].reduction.holds(members[0].heard.root)
                with pytest.raises(RuntimeError, match="not every sealed chunk is here"):
                    _ = members[2].reduction.result

    run(body())


def test_the_plans_order_and_not_the_order_of_arrival_decides_the_sum() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            order = (3, 1, 0, 2)
            plan = plan_for([planes[i] for i in order])
            members = [Member(planes[i], ENCODED[i], plan) for i in (2, 0, 3, 1)]
            async with reducing(*members):
                for member in members:
                    assert await member.holds_all() == [reference(c, order, [1.0] * 4) for c in range(10)]

    run(body())


def test_one_member_needs_no_socket() -> None:
    async def body() -> None:
        async with fleet(1) as planes:
            member = Member(planes[0], ENCODED[0], plan_for(planes))
            async with reducing(member):
                assert await member.holds_all() == [reference(c, [0], [1.0]) for c in range(10)]
            assert planes[0].bytes_up == planes[0].bytes_down == 0

    run(body())


def test_each_byte_crosses_twice_less_the_own_share() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            members = [Member(p, ENCODED[i], plan_for(planes)) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                payload = sum(chunk.size for chunk in ENCODED[0])
                for plane in planes:
                    assert payload <= plane.bytes_up <= payload + 20 * frames.HEADER.size + 200

    run(body())


def test_what_an_owner_holds_of_others_is_bounded_and_freed() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            members = [Member(p, ENCODED[i], plan_for(planes)) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                for member in members:
                    await member.heard.until(lambda heard: len(heard.seals) >= 3)
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
                    assert member.brings is not None and not any(p is not None for p in member.brings._chunks)
                    assert len(member.plane.peers.buffers) >= 1
                    member.heard.root = b""
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


def test_members_may_learn_of_the_plan_one_after_another() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes)
            early = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes[:2])]
            await early[0].heard.until(lambda _: True)
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
    monkeypatch.setattr(link_policy, "LINK_TIMES", LinkTimes(redial=(0.001,)))
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


# Two levels


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


def mean_of(terms: Sequence[tuple[bytes | F32, float]], c: int, codec: Codec = CODEC) -> bytes:
    """The encoded mean of encoded chunks or vectors' chunks with these weights, by reduce.py's docstring."""
    span, n = CHUNKS.span(c), CHUNKS.size(c)
    mean, x, payload = np.zeros(n, np.float32), np.empty(n, np.float32), np.empty(codec.size(n), np.uint8)
    for term, weight in terms:
        if isinstance(term, bytes):
            payload[:] = np.frombuffer(term, np.uint8)
        else:
            codec.encode(np.ascontiguousarray(term[span]), payload)
        codec.decode(payload, x)
        mean = mean + np.float32(weight / sum(w for _, w in terms)) * x
    codec.encode(mean, payload)
    return payload.tobytes()


def layered_reference(plan: Plan, c: int, inputs: Sequence[int], codec: Codec = CODEC) -> bytes:
    """The sealed bytes of a chunk in two levels, of these places, whose vectors have the same numbers."""
    home = plan.region(plan.owners[c])
    terms: list[tuple[int, bytes | F32, float]] = []
    for g in sorted({plan.region(i) for i in inputs}):
        mine = [(i, VECTORS[i], plan.members[i].weight) for i in inputs if plan.region(i) == g]
        if g == home:
            terms += mine
        else:
            mean = mean_of([(x, weight) for _, x, weight in mine], c, codec)
            terms.append((plan.relays[g][c], mean, sum(weight for _, _, weight in mine)))
    return mean_of([(x, weight) for _, x, weight in sorted(terms, key=lambda term: term[0])], c, codec)


def layered_plan(
    planes: Sequence[DataPlane], regions: Sequence[int], weights: Sequence[float], **rest: Any
) -> Plan:
    plan = plan_for(planes, weights, **rest)
    places: dict[int, list[int]] = {}
    for i, g in enumerate(regions):
        places.setdefault(g, []).append(i)
    relays = tuple(
        tuple(o if regions[o] == g else places[g][c % len(places[g])] for c, o in enumerate(plan.owners))
        for g in sorted(places)
    )
    return replace(plan, regions=tuple(regions), relays=relays, layered=frozenset(range(CHUNKS.count)))


@pytest.mark.parametrize(
    "codec", [make_codec(codec, 128) for codec in CodecName], ids=[c.value for c in CodecName]
)
@pytest.mark.parametrize("regions", [(0, 0, 1, 1), (0, 1, 0, 1, 2), (0, 0, 0, 0, 1), (0, 0, 0)])
def test_two_levels_equal_their_reference_bit_for_bit_on_every_member(
    regions: tuple[int, ...], codec: Codec
) -> None:
    async def body() -> None:
        async with fleet(len(regions)) as planes:
            weights = [1.0, 2.0, 3.5, 0.25, 7.0][: len(regions)]
            plan = layered_plan(planes, regions, weights)
            everybody = tuple(range(len(regions)))
            members = [Member(p, encode(VECTORS[i], codec), plan, codec) for i, p in enumerate(planes)]
            async with reducing(*members):
                expected = [layered_reference(plan, c, everybody, codec) for c in range(CHUNKS.count)]
                for member in members:
                    assert await member.holds_all() == expected
                for c, owner in enumerate(plan.owners):
                    assert members[owner].heard.seals[c] == (
                        plan,
                        SealReport(c, 1, digest(expected[c]), everybody),
                    )
                assert not any(member.heard.blamed for member in members)

    run(body())


def test_a_chunk_crosses_between_regions_once_each_way() -> None:
    async def body() -> None:
        async with fleet(6) as planes:
            plan = layered_plan(planes, (0, 0, 0, 1, 1, 1), [1.0] * 6, owners=[0] * 10)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                payload = sum(chunk.size for chunk in ENCODED[0])
                far = (link.moved for i in range(3) for n, link in planes[i].peers.links() if n > name(2))
                assert 2 * payload <= sum(far) <= 2 * payload + 9 * 40 * frames.HEADER.size

    run(body())


def test_a_relay_and_an_owner_may_bring_no_delta() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            weights = [0.0, 1.0, 0.0, 2.0]
            plan = layered_plan(planes, (0, 0, 1, 1), weights, owners=[0] * 10)
            plan = replace(plan, relays=((0,) * 10, (2,) * 10))
            members = [Member(p, ENCODED[i] if weights[i] else None, plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in (members[1], members[3]):
                    assert await member.holds_all() == [layered_reference(plan, c, (1, 3)) for c in range(10)]

    run(body())


@pytest.mark.parametrize("victim", [1, 3, 4])
@pytest.mark.parametrize("after", [0, 2, 5])
def test_after_the_death_of_a_member_a_relay_or_an_owner_the_survivors_hold_what_the_seals_say(
    victim: int, after: int
) -> None:
    """Of two regions; 4 is neither owner nor relay."""

    async def body() -> None:
        async with fleet(5) as planes:
            plan = layered_plan(planes, (0, 0, 1, 1, 1), [1.0, 2.0, 3.0, 4.0, 5.0], owners=[0, 1, 2, 3, 0] * 2)
            far = tuple(o if o > 1 else 2 + c % 2 for c, o in enumerate(plan.owners))
            plan = replace(plan, relays=(plan.relays[0], far))
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                await members[0].heard.until(lambda heard: len(heard.seals) >= min(after, 4))
                await members[victim].stop()
                await planes[victim].close()
                living = [m for i, m in enumerate(members) if i != victim]
                ledger = {c: s for m in living for c, (_, s) in m.heard.seals.items()}
                second = survive(plan, victim, ledger)
                for member in living:
                    member.heard.root = b""
                    member.reduction.replan(second)
                held = [await member.holds_all() for member in living]
                seals = {c: s for m in living for c, (p, s) in m.heard.seals.items() if c in ledger or p is second}
                for c in range(CHUNKS.count):
                    inputs = seals[c].inputs
                    assert set(inputs) >= set(range(5)) - {victim}
                    two = c in (plan if c in ledger else second).layered
                    flat = reference(c, inputs, [plan.members[i].weight for i in inputs])
                    expected = layered_reference(plan, c, inputs) if two else flat
                    assert [chunks[c] for chunks in held] == [expected] * 4
                    assert seals[c].digest == digest(expected)

    run(body())


def test_a_relay_that_claims_others_than_its_region_is_named() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            plan = layered_plan(planes, (0, 0, 1, 1), [1.0] * 4, owners=[0] * 10)
            plan = replace(plan, relays=((0,) * 10, (2,) * 10))
            member = Member(planes[0], ENCODED[0], plan)
            async with reducing(member):
                link = await linked(planes[2], planes[0])
                size = CODEC.size(CHUNKS.size(0))
                header = Header(FrameKind.PARTIAL, plan.fence, 0, size + 1, place=2)
                await frames.send(link, header, ENCODED[2][0].tobytes() + bytes([0b1110]))
                await member.heard.until(lambda heard: any("claims" in s for _, s in heard.blamed))
                node, sentence = member.heard.blamed[-1]
                assert node == name(2) and "region's mean of chunk 0 was refused" in sentence
                link.close()

    run(body())


def test_the_error_of_two_levels_is_that_of_one_quantisation_more() -> None:
    rng, n, codec = np.random.default_rng(7), 1 << 16, make_codec(CodecName.INT8, 128)
    vectors = [rng.standard_normal(n, dtype=np.float32) for _ in range(8)]
    payload = np.empty(codec.size(n), np.uint8)

    def through(x: F32) -> F32:
        y = np.empty_like(x)
        codec.encode(x, payload)
        codec.decode(payload, y)
        return y

    exact = np.mean(vectors, axis=0, dtype=np.float64)
    sent = [through(x) for x in vectors]
    flat = through(np.mean(sent, axis=0))
    two = through(np.mean([np.mean(sent[:4], axis=0), through(np.mean(sent[4:], axis=0))], axis=0))
    errors = [float(np.linalg.norm(x - exact) / np.linalg.norm(exact)) for x in (flat, two)]
    assert errors[0] < errors[1] < 1.25 * errors[0] < 0.0125


# Deaths


def survive(plan: Plan, gone: int, ledger: dict[int, SealReport], attempt: int = 2) -> Plan:
    """What the coordinator makes of a death, by what it had been told."""
    members = tuple(
        PlanMember(m.node, m.address, m.weight, gone=m.gone or i == gone) for i, m in enumerate(plan.members)
    )
    here = [i for i, m in enumerate(members) if not m.gone]
    owners, since = list(plan.owners), list(plan.since or [plan.attempt] * len(plan.owners))
    for c, owner in enumerate(plan.owners):
        if owner == gone:
            owners[c] = here[c % len(here)]
            since[c] = attempt
    lost = {c for c in plan.layered if owners[c] != plan.owners[c] or any(row[c] == gone for row in plan.relays)}
    for c in lost:
        since[c] = attempt
    kept = frozenset(ledger)
    plan = replace(plan, attempt=attempt, members=members, owners=tuple(owners), since=tuple(since), kept=kept)
    return replace(plan, layered=plan.layered - lost)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_after_a_death_the_survivors_hold_what_the_seals_say(after: int, gathers: bool) -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            plan = plan_for(planes)
            encoded, codec, sealing = (SPARSE, FEW, GATHERED) if gathers else (ENCODED, CODEC, None)
            members = [Member(p, encoded[i], plan, codec, sealing) for i, p in enumerate(planes)]
            async with reducing(*members):
                await members[0].heard.until(lambda heard: len(heard.seals) >= min(after, 3))
                await members[3].stop()
                await planes[3].close()
                ledger = {c: s for m in members[:3] for c, (_, s) in m.heard.seals.items()}
                second = survive(plan, 3, ledger)
                for member in members[:3]:
                    member.heard.root = b""
                    member.reduction.replan(second)
                held = [await member.holds_all() for member in members[:3]]
                seals = {c: s for m in members[:3] for c, (_, s) in m.heard.seals.items()}
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
                    ledger = {c: s for m in members for c, (_, s) in m.heard.seals.items()}
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
    monkeypatch.setattr(link_policy, "LINK_TIMES", LinkTimes(redial=(0.001,)))

    async def body() -> None:
        random = Random(seed)
        async with fleet(3, streams=2) as planes:
            plan = plan_for(planes)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for _ in range(12):
                    until = planes[0].bytes_down + random.randrange(6000)
                    while planes[0].bytes_down < until and not members[0].heard.root:
                        await asyncio.sleep(0)
                    for plane in planes:
                        for peer in plane.peers._peers.values():
                            peer.queue.piece_size = piece
                    if links := random.choice(planes).peers.links():
                        random.choice(links)[1].close()
                for member in members:
                    assert await member.holds_all() == [reference(c, range(3), [1.0] * 3) for c in range(10)]
                assert not any(member.heard.blamed for member in members)

    run(body())


def test_a_member_that_cannot_be_reached_is_named() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes)
            await planes[1].close()
            member = Member(planes[0], ENCODED[0], plan)
            async with reducing(member):
                await member.heard.until(lambda heard: bool(heard.blamed))
                node, sentence = member.heard.blamed[0]
                assert node == name(1) and "connection refused" in sentence

    run(body())


def test_a_contributor_of_malformed_bytes_is_named_and_the_others_go_on_without_it() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes, owners=[0] * 10)
            poison = tuple(np.full_like(chunk, 0xFF) for chunk in ENCODED[2])
            inputs = [ENCODED[0], ENCODED[1], poison]
            members = [Member(p, inputs[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                await members[0].heard.until(lambda heard: bool(heard.blamed))
                node, sentence = members[0].heard.blamed[0]
                assert node == name(2) and "its contribution to chunk" in sentence and "scale" in sentence
                second = survive(plan, 2, {})
                for member in members[:2]:
                    member.reduction.replan(second)
                for member in members[:2]:
                    assert await member.holds_all() == [reference(c, range(2), [1.0] * 2) for c in range(10)]

    run(body())


def test_an_owner_of_malformed_bytes_is_named() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes, owners=[1] * 10)
            member = Member(planes[0], ENCODED[0], plan)
            async with reducing(member):
                link = await linked(planes[1], planes[0])
                size = CODEC.size(CHUNKS.size(0))
                header = Header(FrameKind.SEALED, plan.fence, 0, size, place=1)
                await frames.send(link, header, b"\xff" * size)
                await member.heard.until(lambda heard: any("refused" in s for _, s in heard.blamed))
                assert "chunk 0 as it sent it was refused" in member.heard.blamed[-1][1]
                link.close()

    run(body())


def test_a_sealed_chunk_that_is_not_the_ledgers_comes_again_from_another_member() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes, owners=[2] * 10)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                expected = [reference(c, range(3), [1.0] * 3) for c in range(10)]
                assert [await member.holds_all() for member in members] == [expected] * 3
                victim, right = members[0], members[2].reduction.result
                ledger = right.digests
                forged = Header(FrameKind.SEALED, plan.fence, 4, SIZE, place=2)
                exchange = victim.reduction._exchange  # as if the owner had sent it other bytes
                exchange._give_up(4, [])
                victim.reduction.arrived(name(2), forged, ENCODED[5][4].copy())
                victim.heard.root = b""
                victim.reduction.prove(ledger)
                assert await victim.holds_all() == expected and victim.heard.proven
                assert victim.heard.forgers == [(name(2), 4)] and not victim.heard.blamed
                assert not members[1].heard.proven and not members[1].heard.forgers

    run(body())


def test_a_sealed_chunk_that_everybody_has_otherwise_than_the_ledger_is_lacking_everywhere() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes, owners=[2] * 10)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                ledger = list(members[2].reduction.result.digests)
                ledger[4] = digest(b"what nobody has")
                for member in members:
                    member.reduction.prove(ledger)
                for member in members:
                    await member.heard.until(lambda heard: heard.lacks == (4,))
                    assert not member.heard.blamed

    run(body())


async def linked(plane: DataPlane, to: DataPlane) -> Link:
    """A link that the test speaks on."""
    link = await plane.dial(to.node, to.address)
    await frames.send(link, frames.unfenced(FrameKind.LINK))
    return link


FENCE = Plan(Incarnation(1), Epoch(1), Round(1), 1, (), ()).fence
SIZE = CODEC.size(1024)


@pytest.mark.parametrize(
    "header",
    [
        Header(FrameKind.CONTRIBUTION, FENCE, 0, 0xFFFFFFFF),
        Header(FrameKind.CONTRIBUTION, FENCE, 0, SIZE - 1),
        Header(FrameKind.CONTRIBUTION, FENCE, 0, SIZE + 1, packed=True),
        Header(FrameKind.CONTRIBUTION, FENCE, 9, SIZE),
        Header(FrameKind.CONTRIBUTION, FENCE, 10, SIZE),
        Header(FrameKind.SEALED, FENCE, 0xFFFFFFFF, SIZE),
        Header(FrameKind.MERGED, FENCE, 0, 1),
        Header(FrameKind.WANT, FENCE, 10),
        Header(FrameKind.LACK, FENCE, 0xFFFFFFFF),
        Header(FrameKind.RESYNC, FENCE, 0, 0xFFFFFFFF),
        Header(FrameKind.RESYNC, FENCE, 0, 5),
        Header(FrameKind.DATA, FENCE),
        Header(FrameKind.LINK, FENCE),
        Header(FrameKind.GET_STATE, FENCE),
        Header(FrameKind.REFUSED, FENCE, 0, 0xFFFFFFFF),
    ],
    ids=lambda h: f"{h.kind.name}-{h.chunk}-{h.length}",
)
def test_a_frame_that_none_should_send_ends_its_link_only(header: Header) -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            stranger, planes = planes[2], planes[:2]
            members = [Member(p, ENCODED[i], plan_for(planes)) for i, p in enumerate(planes)]
            async with reducing(*members):
                link = await linked(stranger, planes[0])
                tracemalloc.start()
                await link.write(header.pack())
                with suppress(LinkBroken):
                    while True:  # its RESYNC may be on the way
                        await link.read(1, 5.0)
                assert tracemalloc.get_traced_memory()[1] < 1 << 22
                tracemalloc.stop()
                link.close()
                for member in members:
                    assert await member.holds_all() == [reference(c, range(2), [1.0] * 2) for c in range(10)]

    run(body())


def test_what_was_spoiled_on_its_way_comes_again_over_another_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.comm.transport.peer_links.LONG_PATH_RTT", 0.0)
    spoiled, right = list[int](), zstd.unpack_shuffled

    def unpack(frame: memoryview, payload: U8, apart: ByteShuffle) -> None:
        if len(spoiled) < 2:
            spoiled.append(payload.size)
            raise Malformed("a bit of it changed on the way")
        right(frame, payload, apart)

    monkeypatch.setattr(zstd, "unpack_shuffled", unpack)

    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes, owners=[0] * 10)
            planes[1].peers.estimator._up._before = 1000.0
            codec = make_codec(CodecName.FP32, 1)
            encoded = [encode(np.zeros(CHUNKS.numel, np.float32), codec) for _ in planes]
            members = [Member(p, encoded[i], plan, codec) for i, p in enumerate(planes)]
            async with reducing(*members):
                assert [len(await member.holds_all()) for member in members] == [10, 10]
                assert len(spoiled) == 2 and members[0].heard.blamed

    run(body())


def test_packed_frames_carry_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the node's link is so slow that zstandard pays, and the path so long that it is tried."""
    monkeypatch.setattr("atoll.comm.transport.peer_links.LONG_PATH_RTT", 0.0)
    compressible = [np.where(np.arange(CHUNKS.numel) % 7 < 5, 0, x).astype(np.float32) for x in VECTORS]

    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes)
            encoded = [encode(x, make_codec(CodecName.FP32, 1)) for x in compressible]
            codec = make_codec(CodecName.FP32, 1)
            for plane in planes:
                plane.peers.estimator._up._before = 1000.0
            members = [Member(p, encoded[i], plan, codec) for i, p in enumerate(planes)]
            async with reducing(*members):
                held = [await member.holds_all() for member in members]
                mean = np.zeros(CHUNKS.numel, np.float32)
                for x in compressible[:3]:
                    mean += np.float32(1 / 3) * x
                assert [b"".join(chunks) for chunks in held] == [mean.tobytes()] * 3
                whole = 3 * 4 * 4 * CHUNKS.numel * 2 / 3 / 3  # what would have gone up without
                assert all(plane.bytes_up < 0.8 * whole for plane in planes)
                for member, plane in zip(members, planes, strict=True):
                    buffers = plane.peers.buffers
                    free = len(buffers)
                    for chunk in member.reduction.result.chunks:
                        buffers.give(chunk)
                    assert len(buffers) == free + CHUNKS.count, "all of it is memory for the next round"
                    assert free <= CHUNKS.count

    run(body())


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
                        brought(ENCODED[0], planes[0].peers.buffers),
                        CODEC,
                        CHUNKS,
                        plan,
                        Heard(),
                    )
            with pytest.raises(InvalidPlan, match="a weight for n0, which brings no delta"):
                Reduction(planes[0].peers, name(0), None, CODEC, CHUNKS, plan_for(planes), Heard())

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
                assert member.brings is not None and member.brings.chunks[0] is None
                assert len(peers.buffers) == used_again

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
                assert member.reduction._fault is None and not member.heard.seals

    run(body())


def test_what_a_void_merge_still_reads_is_not_used_again_before_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end, merge = threading.Event(), threading.Event(), merge_module.seal_chunk

    def slowly(*work: Any) -> bytes:
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
                assert reduction._fault is None and member.heard.seals[0][1].since == 2
                assert reduction._exchange.digests[0] == digest(reference(0, (0, 1), (1.0, 1.0)))
                assert len(peers.buffers), "what the one read that is not void is used again"

    run(body())


# Many rounds


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
            ledger = {c: s for m in members for c, (_, s) in m.heard.seals.items()}
            for member in members:
                member.heard.root = b""
                member.reduction.replan(survive(plan, len(planes) - 1, ledger))
        held = [await member.holds_all() for member in members]
        assert all(chunks == held[0] for chunks in held)
        return dead


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
