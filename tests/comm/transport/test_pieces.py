"""Large payloads in pieces over several links: whole on arrival, bounded in memory; and a fetch that gives way."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import pytest
from linked_pair import LARGE, NOISE, A, B, EmptyStore, Notes, meet, pair, post, run, until

from atoll.comm.ids import Epoch, Incarnation, Round, RunId
from atoll.comm.plan import Fence
from atoll.comm.transport import frames
from atoll.comm.transport import peer_links as module
from atoll.comm.transport.connection import LinkBroken
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import FetchItem
from atoll.comm.transport.frames import FrameKind, Header
from atoll.comm.transport.reassembly import MAX_FORMS

# Pieces: over a long path several links carry one payload.


def in_pieces(planes: Sequence[DataPlane], size: int) -> None:
    for plane in planes:
        for peer in plane.peers._peers.values():
            peer.queue.piece_size = size


def test_a_payload_in_pieces_travels_over_all_links_and_arrives_whole() -> None:
    async def body() -> None:
        async with pair(streams=4) as (a, b):
            payloads = {0: LARGE, 1: LARGE[1:], 2: b"short"}
            here, there = Notes(1, payloads), Notes()
            meet(a, b, here, there)
            await until(lambda: len(a.peers.links()) == len(b.peers.links()) == 4)
            in_pieces([a, b], 1 << 16)
            post(a, B, *payloads)
            await there.until(lambda: len(there.arrivals) == 3)
            assert {c: data for _, c, data in there.arrivals} == payloads
            assert all(link.moved > 1 << 16 for _, link in a.peers.links())
            assert a.bytes_up < 2 * len(LARGE) * 1.01, "a piece was sent twice"

    run(body())


@pytest.mark.parametrize("then", [0, 3 << 15, 1 << 16])
def test_pieces_that_were_lost_with_a_link_come_again_even_if_they_are_cut_otherwise(then: int) -> None:
    async def body() -> None:
        async with pair(streams=2) as (a, b):
            here, there = Notes(1, {0: LARGE}), Notes()
            meet(a, b, here, there)
            await until(lambda: len(a.peers.links()) == len(b.peers.links()) == 2)
            in_pieces([a, b], 1 << 16)
            post(a, B, 0)
            links = [link for _, link in a.peers.links()]
            await until(lambda: any(link.moved > 1 << 20 for link in links))  # one of them may carry nearly all
            max(links, key=lambda link: link.moved).close()
            await there.until(lambda: bool(there.rejoined))
            in_pieces([a, b], then)
            while not there.arrivals:
                post(a, B, 0)
                await until(lambda: a.peers.peer(B).queue.empty)
                await asyncio.sleep(0.001)
            assert all(data == LARGE for _, _, data in there.arrivals)

    run(body())


def test_nobody_makes_a_node_take_memory_by_first_pieces_of_ever_other_lengths() -> None:
    async def body() -> None:
        async with pair() as (a, b):
            there = Notes(1)
            b.peers.begin(there)
            link = await a.dial(B, b.address)
            await frames.send(link, frames.unfenced(FrameKind.LINK))
            fence = Fence(Incarnation(1), Epoch(1), Round(1), 1)
            with pytest.raises(LinkBroken):
                for whole in range(2 * len(NOISE), 2 * len(NOISE) + 100):
                    header = Header(FrameKind.SEALED, fence, 0, len(NOISE), packed=True, whole=whole)
                    await frames.send(link, header, NOISE)
                await link.read(1, 5.0)
            await until(lambda: not b.peers.links())
            assert len(b.peers._reassembly) == MAX_FORMS
            link.close()
            b.peers.end(there)

    run(body())


@pytest.mark.parametrize(
    ("kind", "length", "offset", "whole"),
    [
        (FrameKind.SEALED, 1, 0, 1 << 20),
        (FrameKind.SEALED, 0, 1 << 19, 1 << 20),
        (FrameKind.SEALED, 0, 1 << 20, 1 << 20),
        (FrameKind.RESYNC, 1, 2, 3),
        (FrameKind.RESYNC, 1 << 16, 0, 1 << 20),
    ],
)
def test_a_piece_that_none_would_cut_is_refused(kind: FrameKind, length: int, offset: int, whole: int) -> None:
    """A million pieces of a byte would take a hundred times the memory of their payload, and look for each other
    a million times; every attempt and chunk that a RESYNC names would be a payload of its own."""

    async def body() -> None:
        async with pair() as (a, b):
            there = Notes(1)
            b.peers.begin(there)
            link = await a.dial(B, b.address)
            await frames.send(link, frames.unfenced(FrameKind.LINK))
            fence = Fence(Incarnation(1), Epoch(1), Round(1), 1)
            with suppress(LinkBroken):
                await link.write(Header(kind, fence, 7, length, offset=offset, whole=whole).pack() + bytes(length))
            with pytest.raises(LinkBroken):
                await link.read(1, 5.0)
            assert not there.headers and not b.peers._reassembly
            await until(lambda: not b.peers.links())
            link.close()
            b.peers.end(there)

    run(body())


class Full(EmptyStore):
    async def state(self, round: Round, chunk: int) -> bytes:  # type: ignore[override]
        return NOISE


def test_a_fetch_gives_way_to_a_reduce_and_goes_on_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_SPARE_RATE", 1000.0)  # bytes a second: hours

    async def body() -> None:
        start = partial(DataPlane.start, "127.0.0.1:0", RunId("run"))
        a, b = await start(A, b"k" * 32, Full()), await start(B, b"k" * 32, Full())
        here = Notes()
        a.peers.begin(here)
        slow = asyncio.create_task(b.fetch(A, a.address, FetchItem.STATE, Round(1), 0, len(NOISE)))
        for _ in range(20):
            assert await a.fetch(B, b.address, FetchItem.STATE, Round(1), 0, len(NOISE)) == NOISE
        assert not slow.done()
        a.peers.end(here)
        assert await slow == NOISE
        await a.close()
        await b.close()

    run(body())
