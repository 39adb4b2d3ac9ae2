"""A node's owner limits its data plane while an exchange runs: rates, amounts, and silence."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from encoders import at_once
from reduce_members import Reports, first, fleet, plan_for, pooled_vector, reducing, run
from serving_planes import NEW, NOISE, SEALED, A, two_planes
from serving_planes import run as run_served

from atoll.comm.allreduce.delta_encoder import DeltaEncoder
from atoll.comm.allreduce.reduction import Reduction
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.transport import frames
from atoll.comm.transport.connection import LinkBroken
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import DonorLost, FetchClient, FetchItem

CODEC = make_codec(CodecName.INT8, 96)
MEGABYTE = 1e6
SETTLED = 0.5  # seconds after a change of the rates, in which what was let through at once has passed
WITHIN = 1.05  # times a cap that may pass


class Side:
    """A member of a reduce of two, with a vector of its own."""

    def __init__(self, plane: DataPlane, planes: list[DataPlane], chunks: Chunks) -> None:
        self.plane, self.reports = plane, Reports()
        vector = np.random.default_rng(planes.index(plane)).standard_normal(chunks.numel, dtype=np.float32)
        encoded = at_once(DeltaEncoder(vector, np.zeros_like(vector), CODEC, chunks)).whole
        plan = plan_for(planes, owners=[c % 2 for c in range(chunks.count)])
        mine = pooled_vector(encoded, plane.peers.buffers)
        self.reduction = Reduction(plane.peers, plane.node, mine, CODEC, chunks, plan, self.reports)
        self.task = asyncio.create_task(self.reduction.run())

    @property
    def passed(self) -> tuple[int, int]:
        return self.plane.bytes_up, self.plane.bytes_down

    async def all_held(self) -> None:
        await first(self.reports.until(lambda reports: bool(reports.root)), self.task)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def exchange(chunks: Chunks) -> AsyncIterator[tuple[Side, Side]]:
    """Two that reduce a vector of these chunks; the first one is slow until it is told otherwise."""
    async with fleet(2, streams=2) as planes:
        planes[0].limit(1000, 1000)
        sides = Side(planes[0], planes, chunks), Side(planes[1], planes, chunks)
        async with reducing(*sides):  # type: ignore[arg-type]
            yield sides


@pytest.mark.long
def test_rates_that_are_changed_in_an_exchange_are_kept_to_from_then_on() -> None:
    """Measured over seconds, for the bytes that may pass at once; the exchange is long enough for all of it."""
    chunks = Chunks(30_000_000, 524_160)

    async def body() -> None:
        clock = asyncio.get_running_loop().time
        async with exchange(chunks) as (a, b):
            for up, down in ((2.0, 1.0), (0.5, 2.0), (1.0, 0.4)):  # MB/s
                a.plane.limit(up * MEGABYTE, down * MEGABYTE)
                await asyncio.sleep(SETTLED)
                began, before = clock(), a.passed
                await asyncio.sleep(6.0)
                seconds, after = clock() - began, a.passed
                for way, cap, was, now in zip(("up", "down"), (up, down), before, after, strict=True):
                    rate = (now - was) / seconds / MEGABYTE
                    print(f"{way}: {rate:.3f} MB/s of {cap:.3f}, {100 * rate / cap:.1f} %")
                    assert rate <= WITHIN * cap, way
                    assert now > was, "the exchange goes on"
            assert not a.reports.root, "it was long enough"
            a.plane.limit(0, 0)
            await a.all_held()
            await b.all_held()
            assert a.reports.root == b.reports.root

    run(body(), 120.0)


@pytest.mark.parametrize("numel", [400_000, pytest.param(30_000_000, marks=pytest.mark.long)])
def test_not_a_byte_passes_beyond_an_amount_and_the_exchange_goes_on_when_there_is_more(numel: int) -> None:
    chunks = Chunks(numel, 524_160 if numel > 1_000_000 else 4_096)
    whole = 2 * CODEC.size(numel)
    amount = [0.3 * whole]

    async def body() -> None:
        async with exchange(chunks) as (a, b):
            a.plane.budget(lambda: amount[0] - sum(a.passed))
            a.plane.limit(0, 0)
            while amount[0] - sum(a.passed) >= 1:
                await asyncio.sleep(0.01)
            for _ in range(20):
                await asyncio.sleep(0.01)
                assert sum(a.passed) <= amount[0]
            print(f"{sum(a.passed)} bytes of {amount[0]:.0f}, chunks of {CODEC.size(chunks.largest)}")
            assert a.plane.is_closed and not a.reports.root
            amount[0] = 1e12
            await a.all_held()
            await b.all_held()
            assert a.reports.root == b.reports.root

    run(body(), 120.0)


def test_a_node_that_is_silent_sends_those_who_fetch_away_at_once_and_lets_nobody_in() -> None:
    async def body() -> None:
        async with two_planes() as (a, b), FetchClient(b, A, a.address) as fetcher:
            await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED))
            a.budget(lambda: 0)
            waiting = asyncio.create_task(fetcher.fetch(FetchItem.STATE, NEW, 0, len(NOISE)))
            await asyncio.sleep(0.05)
            before = a.bytes_up, a.bytes_down
            a.hush()
            with pytest.raises(DonorLost):
                await waiting
            with pytest.raises(DonorLost):
                await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED))
            with pytest.raises(LinkBroken):
                await b.dial(A, a.address)
            assert (a.bytes_up, a.bytes_down) == before
            a.budget(None)
            assert await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED)) == SEALED
            assert a.bytes_down > before[1] + frames.HEADER.size

    run_served(body())
