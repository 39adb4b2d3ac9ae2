"""Strangers at the data plane: without the key, with garbage, silent or trickling, they cost members nothing."""

import asyncio
import socket
import tracemalloc
from contextlib import suppress

import pytest
from serving_planes import KEY, NEW, NOISE, SEALED, A, B, run, still_serves, two_planes

from atoll.comm.ids import NodeId
from atoll.comm.transport import data_plane, frames
from atoll.comm.transport.connection import LinkBroken
from atoll.comm.transport.fetch_client import DonorLost, FetchItem
from atoll.comm.transport.frames import FrameKind


def test_a_stranger_without_the_key_is_refused() -> None:
    async def body() -> None:
        async with two_planes(key_of_b=b"x" * 32) as (a, b):
            with pytest.raises(DonorLost, match="it refused: it does not know the run's key"):
                await still_serves(a, b)

    run(body())


def test_before_it_has_joined_a_node_accepts_nobody() -> None:
    async def body() -> None:
        async with two_planes(key_of_b=b"") as (a, b):
            a.identify(A, b"")
            with pytest.raises(DonorLost, match="it refused: this node has not joined its run yet"):
                await still_serves(a, b)
            a.identify(A, KEY)
            b.identify(B, KEY)
            assert await still_serves(a, b)

    run(body())


def test_a_node_that_took_anothers_address_is_not_mistaken_for_it() -> None:
    async def body() -> None:
        async with two_planes() as (a, b):
            with pytest.raises(DonorLost, match="it looks for c, this is a"):
                await b.fetch(NodeId("c"), a.address, FetchItem.SEALED, NEW, 0, len(SEALED))

    run(body())


@pytest.mark.parametrize(
    "garbage", [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"ATOL\x02\xff\xff\xff" + bytes(2000), NOISE]
)
def test_garbage_from_a_stranger_closes_its_connection_only(garbage: bytes) -> None:
    async def body() -> None:
        async with two_planes() as (a, b):
            reader, writer = await asyncio.open_connection(*frames.parse_address(a.address))
            writer.write(garbage)
            writer.write_eof()
            try:
                await reader.read()
            except ConnectionError:
                pass
            writer.close()
            assert await still_serves(a, b)

    run(body())


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        (bytes([99]) + bytes(frames.HEADER.size - 1), "unknown kind 99"),
        (frames.unfenced(FrameKind.GET_STATE, NEW, 0, 0xFFFFFFFF).pack(), "a request with a payload"),
        (frames.unfenced(FrameKind.SEALED, NEW, 0, 0xFFFFFFFF).pack(), "a request with a payload"),
        (frames.unfenced(FrameKind.DATA).pack(), "kind DATA where a stream or a request begins"),
        (frames.unfenced(FrameKind.RESYNC).pack(), "kind RESYNC where a stream or a request begins"),
        (bytes([FrameKind.GET_STATE]) + bytes(20), ""),
    ],
)
def test_a_members_bad_first_frame_closes_its_connection_and_allocates_nothing(
    frame: bytes, sentence: str
) -> None:
    async def body() -> None:
        async with two_planes() as (a, b):
            link = await b.dial(A, a.address)
            tracemalloc.start()
            await link.write(frame)
            if sentence:
                answer = await frames.receive(link, 5)
                assert answer.kind is FrameKind.REFUSED and sentence in await frames.sentence(link, answer)
            link.close()
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
            tracemalloc.stop()
            assert await still_serves(a, b)

    run(body())


@pytest.mark.parametrize(
    ("greeting", "sentence"),
    [
        (frames.GREETING.pack(frames.MAGIC, 1, bytes(16)), f"data plane, this node speaks {frames.VERSION}"),
        (b"HTTP/1.1 400 Bad Request\r\n", "no data plane of this software"),
        (b"", "connection was closed"),
    ],
)
def test_what_listens_at_a_peers_address_and_is_no_peer_is_said_in_a_sentence(
    greeting: bytes, sentence: str
) -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            async with two_planes() as (a, _):
                server.setblocking(False)
                address = frames.format_address(*server.getsockname())
                fetching = asyncio.create_task(a.fetch(B, address, FetchItem.SEALED, NEW, 0, 10))
                accepted, _ = await asyncio.get_running_loop().sock_accept(server)
                with accepted:
                    accepted.sendall(greeting)
                    accepted.shutdown(socket.SHUT_WR)
                    with pytest.raises(DonorLost, match=sentence):
                        await fetching

    run(body())


def test_more_connections_than_a_node_can_serve_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "MAX_LINKS", 1)

    async def body() -> None:
        async with two_planes() as (a, b):
            link = await b.dial(A, a.address)
            with pytest.raises(LinkBroken):
                await b.dial(A, a.address)
            link.close()

    run(body())


def test_a_stranger_that_trickles_is_put_out_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "HANDSHAKE_TIMEOUT", 0.1)

    async def body() -> None:
        async with two_planes() as (a, _):
            reader, writer = await asyncio.open_connection(*frames.parse_address(a.address))

            async def trickle() -> None:
                for byte in frames.HELLO.pack(frames.MAGIC, frames.VERSION, 255, 255, 255) + bytes(797):
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.02)

            trickling = asyncio.create_task(trickle())
            try:
                assert b"did not say hello within 0.1 s" in await reader.read()
            except ConnectionError:
                pass
            assert not trickling.done(), "its bytes did not win it time"
            trickling.cancel()
            await asyncio.gather(trickling, return_exceptions=True)
            writer.close()

    run(body())


def test_what_listens_at_a_peers_address_and_trickles_costs_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "HANDSHAKE_TIMEOUT", 0.1)

    async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            for byte in frames.GREETING.pack(frames.MAGIC, frames.VERSION, bytes(16)):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.03)
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(trickle, "127.0.0.1", 0)
        async with server, two_planes() as (a, _):
            with pytest.raises(LinkBroken, match="did not say hello within 0.1 s"):
                await a.dial(B, frames.format_address(*server.sockets[0].getsockname()))
            while len(asyncio.all_tasks()) > 3:  # two planes and this test
                await asyncio.sleep(0)

    run(body())


def test_silent_strangers_take_no_places_from_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "MAX_LINKS", 3)
    monkeypatch.setattr(data_plane, "MAX_STRANGERS", 2)

    async def body() -> None:
        async with two_planes() as (a, b):
            silent = [await asyncio.open_connection(*frames.parse_address(a.address)) for _ in range(8)]
            assert await still_serves(a, b)
            for _, writer in silent:
                writer.close()
            while a._accepted:
                await asyncio.sleep(0)
            assert not a._strangers

    run(body())


def test_a_place_is_free_again_when_its_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "MAX_LINKS", 1)

    async def body() -> None:
        async with two_planes() as (a, b):
            for _ in range(3):
                assert await still_serves(a, b)
                while a._accepted:
                    await asyncio.sleep(0)

    run(body())
