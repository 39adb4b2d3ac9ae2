import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.comm.allreduce.sealing import mean_of
from atoll.comm.bitmap import bitmap
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round, RunId
from atoll.comm.plan import Plan, PlanMember
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.frames import FrameKind
from atoll.node.control.reports import Reports
from atoll.node.daemon.round import RoundParticipation
from atoll.node.outer.residual import Residual
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.state import OuterState
from atoll.node.state_machine.state import Work
from atoll.outer_opt.feedback import ErrorFeedback
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.schedule import Constant

ADA, BO = NodeId("ada"), NodeId("bo")
CODEC, CHUNKS = make_codec(CodecName.INT8, 64), Chunks(5000, 1024)
LAYOUT = (("embed.weight", (20, 100)), ("norm.weight", (3000,)))


class Nothing:
    async def sealed(self, round: Round, chunk: int) -> None: ...
    async def state(self, round: Round, chunk: int) -> None: ...
    async def digests(self, round: Round) -> None: ...


Compute = Callable[[Callable[[], Any]], Awaitable[Any]]


@pytest.fixture
def outer(tmp_path: Path) -> Iterator[OuterState]:
    vectors = SharedVectors.create(CHUNKS.numel, tmp_path, tmp_path / "shm")
    yield OuterState(vectors, CHUNKS, mean_of(CODEC), Constant(Nesterov(0.7, 0.9)))
    vectors.close()


def part_of(
    outer: OuterState,
    compute: Compute = asyncio.to_thread,
    on_unusable: Callable[[Work, str], None] = lambda work, sentence: None,
) -> RoundParticipation:
    plane = DataPlane(RunId("run"), ADA, b"", Nothing())
    tells = Reports.__new__(Reports)  # nothing is told
    return RoundParticipation(
        plane, outer, CODEC, [mean_of(CODEC)], LAYOUT, None, tells, compute, asyncio.create_task, on_unusable
    )


@pytest.mark.parametrize(("element", "name"), [(0, "embed"), (1999, "embed"), (2000, "norm"), (4999, "norm")])
def test_a_delta_that_is_not_finite_is_given_up_and_names_its_parameter(
    element: int, name: str, outer: OuterState
) -> None:
    outer.vectors.local[element] = np.nan
    unusable: list[tuple[Work, str]] = []

    async def body() -> None:
        part = part_of(outer, on_unusable=lambda work, sentence: unusable.append((work, sentence)))
        encoded = part.encode(work)
        encoding, norm = part._round.encoding, asyncio.create_task(part.norm(work))
        assert encoding is not None
        await encoding
        assert await encoded.chunk(4) is None, "whoever waits for it waits in vain"
        assert await norm is None

    work = Work(1, ((0, 1),), 1)
    asyncio.run(asyncio.wait_for(body(), 60))
    ((found, sentence),) = unusable
    assert found == work
    assert sentence == f"training diverged: the delta holds NaN or infinity in {name}.weight"


def test_nobody_waits_for_chunks_of_a_delta_that_is_forgotten(outer: OuterState) -> None:
    async def never(work: Callable[[], Any]) -> None:
        await asyncio.Event().wait()

    async def body() -> None:
        part, work = part_of(outer, never), Work(1, ((0, 1),), 1)
        members = PlanMember(ADA, "", 1.0), PlanMember(BO, "", 1.0, leaf=True)
        part.begin(Plan(Incarnation(1), Epoch(1), Round(1), 1, members, (1,) * CHUNKS.count), ADA, work)
        await asyncio.sleep(0)
        assert part.reduction is not None
        link = asyncio.create_task(part.reduction.frame(BO, (FrameKind.CONTRIBUTION, 0, 1)))
        await asyncio.sleep(0)
        part.stop()
        part.forget()
        async with asyncio.timeout(60):
            assert await link is None

    asyncio.run(body())


def test_the_norm_of_a_delta_that_is_forgotten_is_not_looked_for(outer: OuterState) -> None:
    async def body() -> None:
        part, work = part_of(outer), Work(1, ((0, 1),), 1)
        part.encode(work)
        part.forget()
        assert await part.norm(work) is None
        outer.vectors.local[:] = 1.0  # trained anew, from the front of the same lease
        assert part.encode(work).ready == 0, "it is encoded already"
        assert await part.norm(work) == pytest.approx(CHUNKS.numel**0.5)

    asyncio.run(body())


def test_the_norm_is_looked_for_once_however_often_it_is_asked_for(outer: OuterState) -> None:
    """Later there are chunks that the reduce has let go of, and others' bytes in their memory."""

    async def body() -> None:
        calls = 0

        async def compute(work: Callable[[], Any]) -> Any:
            nonlocal calls
            calls += 1
            return await asyncio.to_thread(work)

        outer.vectors.local[:] = 1.0
        part, work = part_of(outer, compute), Work(1, ((0, 1),), 1)
        encoded = part.encode(work)
        await encoded.chunk(CHUNKS.count - 1)
        calls = 0
        first, second = (asyncio.create_task(part.norm(work)) for _ in range(2))
        norm = await first
        for c in range(CHUNKS.count):
            encoded.release(c)
        assert await second == norm == await part.norm(work) == pytest.approx(CHUNKS.numel**0.5)
        assert calls == 1

    asyncio.run(body())


def test_what_a_round_has_of_a_delta_that_was_not_encoded_to_its_end_is_kept(outer: OuterState) -> None:
    """The others committed the round with its first chunks, and lack the rest."""

    async def body() -> None:
        outer.vectors.local[:] = 1.0
        residual = Residual(ErrorFeedback(1.0), outer.vectors, CHUNKS, CODEC)
        part = part_of(outer)
        part._residual = residual
        encoded = part.encode(Work(1, ((0, 1),), 1))
        await encoded.chunk(CHUNKS.count - 1)
        encoded._chunks[1:] = [None] * (CHUNKS.count - 1)
        lacking = bitmap(range(1, CHUNKS.count), CHUNKS.count)
        keep = part.residual_update(pb.View(counted=1, committed=1, lacking=lacking))
        assert keep is not None
        keep()
        assert residual.round == 1
        assert not residual.vector[: CHUNKS.size(0)].any() and (residual.vector[CHUNKS.size(0) :] == -1).all()
        residual.close()

    asyncio.run(body())
