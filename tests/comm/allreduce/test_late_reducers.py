"""Who is late in a reduce: real planes in one process, on a loop whose clock is put forward."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
from encoders import at_once

from atoll.comm.allreduce.control_frames import Resync
from atoll.comm.allreduce.delta_encoder import DeltaEncoder, EncodedVector
from atoll.comm.allreduce.late_peers import DEADLINES, LATE_SPREADS, late_after
from atoll.comm.allreduce.listener import SealReport
from atoll.comm.allreduce.reduction import Reduction
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round, RunId
from atoll.comm.plan import Plan, PlanMember
from atoll.comm.transport import connection as link_module
from atoll.comm.transport import frames
from atoll.comm.transport.connection import Link
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.frames import FrameKind, Header

LOST_AFTER = DEADLINES.lost_after
CHUNKS = Chunks(8192, 1024)
CODEC = make_codec(CodecName.INT8, 128)


class Ahead(asyncio.SelectorEventLoop):
    """A loop whose clock can be put forward."""

    ahead = 0.0  # seconds

    def time(self) -> float:
        return super().time() + self.ahead


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):  # the most that a test puts the clock forward by is part of it
            await body

    with asyncio.Runner(loop_factory=Ahead) as runner:
        runner.run(bounded())


def later(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Ahead)
    loop.ahead += seconds


class Told:
    """What the coordinator would be told by one member."""

    def __init__(self) -> None:
        self.blamed: list[tuple[NodeId, str]] = []
        self.root = b""

    def sealed(self, plan: Plan, seal: SealReport, more: bool) -> None: ...
    def summed(self, plan: Plan, sum_: SealReport, more: bool) -> None: ...
    def orphans(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None: ...
    def forged(self, plan: Plan, node: NodeId, chunk: int) -> None: ...
    def spoiled(self, plan: Plan, node: NodeId, sentence: str) -> None: ...
    def outsized(self, plan: Plan, chunk: int, since: int, digest: bytes, times: float) -> None: ...
    def lacking(self, plan: Plan, chunks: tuple[int, ...]) -> None: ...

    def lost(self, plan: Plan, node: NodeId, sentence: str) -> None:
        self.blamed.append((node, sentence))

    def held(self, plan: Plan, root: bytes, proven: bool) -> None:
        self.root = root


class Empty:
    async def sealed(self, round: Round, chunk: int) -> None: ...
    async def state(self, round: Round, chunk: int) -> None: ...
    async def digests(self, round: Round) -> None: ...


def encoded(seed: int) -> EncodedVector:
    x = np.random.default_rng(seed).standard_normal(CHUNKS.numel, dtype=np.float32)
    encoder = DeltaEncoder(x, np.zeros_like(x), CODEC, CHUNKS)
    return at_once(encoder)


@asynccontextmanager
async def fleet(n: int, streams: int = 1) -> AsyncIterator[list[DataPlane]]:
    names = [NodeId(f"n{i}") for i in range(n)]
    planes = [
        await DataPlane.start("127.0.0.1:0", RunId("run"), name, b"k" * 32, Empty(), streams=streams)
        for name in names
    ]
    try:
        yield planes
    finally:
        for plane in planes:
            await plane.close()


def plan_for(planes: Sequence[DataPlane], owner: int) -> Plan:
    members = tuple(PlanMember(p.node, p.address, 1.0) for p in planes)
    return Plan(Incarnation(1), Epoch(1), Round(1), 1, members, (owner,) * CHUNKS.count)


@asynccontextmanager
async def member(plane: DataPlane, plan: Plan, vector: EncodedVector) -> AsyncIterator[tuple[Reduction, Told]]:
    reduction = Reduction(plane.peers, plane.node, vector, CODEC, CHUNKS, plan, told := Told())
    task = asyncio.create_task(reduction.run())
    try:
        yield reduction, told
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def linked(plane: DataPlane, to: DataPlane) -> Link:
    """A link that the test speaks on."""
    link = await plane.dial(to.node, to.address)
    await frames.send(link, frames.unfenced(FrameKind.LINK))
    return link


def test_a_peer_that_is_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "tcp_info", lambda _: None)  # the kernel has a clock of its own

    async def body() -> None:
        async with fleet(2) as planes, member(planes[0], plan_for(planes, 0), encoded(0)) as (_, told):
            while not planes[0].peers.links():  # to a peer that takes no part
                await asyncio.sleep(0)
            later(LOST_AFTER - 1)
            before = planes[0].bytes_up
            while planes[0].bytes_up == before:  # it is asked
                await asyncio.sleep(0)
            assert not told.blamed
            later(1.5)
            while not told.blamed:
                await asyncio.sleep(0)
            node, sentence = told.blamed[0]
            assert node == planes[1].node and "it has been silent for" in sentence

    run(body())


async def answering(link: Link, plan: Plan) -> None:
    """Say that nothing is here, whenever that is asked."""
    nothing = bytes(3 * -(-CHUNKS.count // 8))
    while True:
        header = await frames.receive(link, None)
        await link.read(header.length)
        if header.kind is FrameKind.RESYNC:
            await frames.send(link, Header(FrameKind.RESYNC, plan.fence, Resync.PONG, len(nothing)), nothing)


def test_a_contributor_that_answers_and_sends_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "tcp_info", lambda _: None)

    async def body() -> None:
        async with fleet(2) as planes:
            plan, link = plan_for(planes, 1), await linked(planes[0], planes[1])
            answers = asyncio.create_task(answering(link, plan))
            async with member(planes[1], plan, encoded(1)) as (_, told):
                passed = 0.0  # seconds
                while not told.blamed:
                    later(LOST_AFTER - 1.5)
                    passed += LOST_AFTER - 1.5
                    before = planes[1].bytes_down
                    while planes[1].bytes_down == before and not told.blamed:  # it is asked, and answers
                        await asyncio.sleep(0)
                assert passed > DEADLINES.chunk_time / 2  # the machine may have been busy for some of it
                node, sentence = told.blamed[0]
                assert node == planes[0].node and "its contributions did not come for 2" in sentence
            answers.cancel()
            link.close()

    run(body())


def test_chunks_of_a_late_owner_are_pulled_from_others_that_have_them() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan, sealed = plan_for(planes, 2), encoded(2)
            contributors = (member(planes[i], plan, encoded(i)) for i in range(2))
            async with next(contributors) as (reduction, told), next(contributors) as (_, other):
                owner = await linked(planes[2], planes[1])
                for c, payload in enumerate(sealed.whole):
                    await frames.send(
                        owner, Header(FrameKind.SEALED, plan.fence, c, payload.size, place=2), payload
                    )
                while not other.root:
                    await asyncio.sleep(0)
                while not told.root:
                    later(0.005)
                    await asyncio.sleep(0)
                assert not told.blamed
                assert [chunk.tobytes() for chunk in reduction.result.chunks] == [
                    c.tobytes() for c in sealed.whole
                ]
                owner.close()

    run(body())


def test_a_chunk_is_late_a_multiple_of_the_spread_beyond_the_median() -> None:
    assert late_after([0.1] * 7, LOST_AFTER) == LOST_AFTER  # too little is known
    assert late_after([0.5] * 8, LOST_AFTER) == 0.5
    assert late_after([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 100.0, 1.5], 5.0) == 4.0 + LATE_SPREADS * 2.0
