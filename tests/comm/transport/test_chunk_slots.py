import asyncio
import random
import weakref
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from atoll.comm.ids import NodeId, Round, RunId
from atoll.comm.transport import chunk_slots, fetch_client, frames
from atoll.comm.transport.connection import Link
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.frames import FrameKind

A, B, NOW = NodeId("a"), NodeId("b"), Round(7)
SIZE = 3 * fetch_client.PART_BYTES


def chunk(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)  # which no packing makes smaller


class Copy(bytearray):
    """Of a chunk; what tells when it is gone."""


class Counter:
    """A shelf that counts the copies of chunks that it gave, and how many there were at once."""

    def __init__(self) -> None:
        self.found = self.alive = self.most = 0

    async def sealed(self, round: Round, chunk: int) -> None:
        return None

    async def state(self, round: Round, number: int) -> Copy:
        self.found, self.alive = self.found + 1, self.alive + 1
        self.most = max(self.most, self.alive)
        copy = Copy(chunk(number))
        weakref.finalize(copy, self._gone)
        return copy

    def _gone(self) -> None:
        self.alive -= 1

    async def digests(self, round: Round) -> Sequence[bytes]:
        return []


@asynccontextmanager
async def a_donor(
    places: int, monkeypatch: pytest.MonkeyPatch, share: int = 0
) -> AsyncIterator[tuple[DataPlane, Counter, DataPlane]]:
    """And who asks it."""
    monkeypatch.setattr(chunk_slots, "MAX_CHUNKS", places)
    monkeypatch.setattr(chunk_slots, "MAX_CHUNKS_PER_MEMBER", share or places)
    shelf = Counter()
    a = await DataPlane.start("127.0.0.1:0", RunId("run"), A, b"k" * 32, shelf)
    b = await DataPlane.start("127.0.0.1:0", RunId("run"), B, b"k" * 32, Counter())
    try:
        yield a, shelf, b
    finally:
        await a.close()
        await b.close()


async def begin(a: DataPlane, b: DataPlane, number: int) -> Link:
    """Ask for the first part of a chunk."""
    link = await b.dial(A, a.address)
    await frames.send(link, frames.part(FrameKind.GET_STATE, NOW, number, 0, fetch_client.PART_BYTES))
    return link


async def answer(link: Link) -> bytes:
    header = await frames.receive(link, None)
    return await link.read(header.length)


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body

    asyncio.run(bounded())


def test_all_who_join_at_once_are_served_by_a_donor_that_keeps_few_chunks_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with a_donor(3, monkeypatch) as (a, shelf, b), AsyncExitStack() as opened:
            links = [await begin(a, b, number) for number in range(12)]
            for link in links:
                opened.callback(link.close)
            waiting = {asyncio.create_task(answer(link)): number for number, link in enumerate(links)}
            while waiting:
                served = dict[int, bytes]()
                while len(served) < 3:
                    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    served |= {waiting.pop(task): task.result() for task in done}
                for number, first in served.items():
                    await frames.send(
                        links[number], frames.part(FrameKind.GET_STATE, NOW, number, fetch_client.PART_BYTES, SIZE)
                    )
                    assert first + await answer(links[number]) == chunk(number)
            assert (shelf.found, shelf.most) == (12, 3)

    run(body())


def test_who_comes_when_all_places_are_taken_waits_until_one_has_its_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with a_donor(2, monkeypatch) as (a, shelf, b), AsyncExitStack() as opened:
            links = []
            for number in range(3):
                links.append(await begin(a, b, number))
                opened.callback(links[number].close)
                if number < 2:
                    await answer(links[number])
            late = asyncio.create_task(answer(links[2]))
            await frames.send(links[0], frames.part(FrameKind.GET_STATE, NOW, 0, fetch_client.PART_BYTES, SIZE))
            assert await answer(links[0]) == chunk(0)[fetch_client.PART_BYTES :]
            assert await late == chunk(2)[: fetch_client.PART_BYTES]
            links[1].close()  # which gives its place up, too
            links.append(await begin(a, b, 3))
            opened.callback(links[3].close)
            assert await answer(links[3]) == chunk(3)[: fetch_client.PART_BYTES]
            assert (shelf.found, shelf.most) == (4, 2)

    run(body())


def test_a_member_whose_connections_all_keep_a_chunk_keeps_nobody_else_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with a_donor(3, monkeypatch, share=2) as (a, _, b), AsyncExitStack() as opened:
            c = await DataPlane.start("127.0.0.1:0", RunId("run"), NodeId("c"), b"k" * 32, Counter())
            opened.push_async_callback(c.close)
            links = [await begin(a, b, number) for number in range(5)]
            for link in links:
                opened.callback(link.close)
            for link in links[:2]:
                assert await answer(link)
            other = await begin(a, c, 7)
            opened.callback(other.close)
            assert await answer(other) == chunk(7)[: fetch_client.PART_BYTES]

    run(body())


def test_digests_wait_for_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with a_donor(1, monkeypatch) as (a, _, b), AsyncExitStack() as opened:
            held = await begin(a, b, 0)
            opened.callback(held.close)
            assert await answer(held)
            link = await b.dial(A, a.address)
            opened.callback(link.close)
            await frames.send(link, frames.unfenced(FrameKind.GET_DIGESTS, NOW, 0))
            assert (await frames.receive(link, None)).kind is FrameKind.DATA

    run(body())


@pytest.mark.parametrize("limit", ["IDLE_TIMEOUT", "MAX_CHUNK_TIME"])
def test_who_dawdles_loses_its_place_and_goes_on_where_it_was(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with a_donor(1, monkeypatch) as (a, shelf, b):
            monkeypatch.setattr(chunk_slots, limit, 0.0)
            first = await begin(a, b, 1)
            assert await answer(first) == chunk(1)[: fetch_client.PART_BYTES]
            second = await begin(a, b, 2)
            assert await answer(second) == chunk(2)[: fetch_client.PART_BYTES]
            await frames.send(first, frames.part(FrameKind.GET_STATE, NOW, 1, fetch_client.PART_BYTES, SIZE))
            assert await answer(first) == chunk(1)[fetch_client.PART_BYTES :]
            assert shelf.found == 3
            first.close()
            second.close()

    run(body())
