"""Strangers at the data plane: without the key, with garbage, silent or trickling, they cost members nothing."""

import asyncio
import socket
import tracemalloc
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from serving_planes import KEY, NEW, NOISE, RUN, SEALED, A, B, Nothing, run, still_serves, two_planes

from atoll.comm.ids import NO_PIN, NodeId
from atoll.comm.rate_limits import RateLimit
from atoll.comm.transport import data_plane, frames
from atoll.comm.transport.certificates import load_or_make
from atoll.comm.transport.connection import ByteCounter, Link, LinkBroken
from atoll.comm.transport.fetch_client import DonorLost, FetchItem
from atoll.comm.transport.frames import FrameKind
from atoll.comm.transport.key_ring import KeyRing, RunKey
from atoll.comm.transport.tls import TlsContexts


def test_a_stranger_without_the_key_is_refused() -> None:
    async def body() -> None:
        async with two_planes(key_of_b=b"x" * 32) as (a, b):
            with pytest.raises(DonorLost, match="it refused: it does not know the run's key"):
                await still_serves(a, b)

    run(body())


def test_in_a_public_run_no_peers_address_leads_into_a_nodes_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the coordinator tells: neither an address nor a name, nor a name that changes its address."""

    async def body() -> None:
        async with two_planes() as (a, b):
            _, port = frames.parse_address(a.address)
            b.private_addresses = False
            for host in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "127.1"):
                with pytest.raises(LinkBroken, match="leads into a private network"):
                    await b.dial(A, f"{host}:{port}")
            loop, answers = asyncio.get_running_loop(), ["127.0.0.1", "8.8.8.8"]

            def lookup(host: str, port: int, **options: object) -> list[object]:
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(), port))]

            async def connect(sock: socket.socket, address: tuple[str, int]) -> None:
                assert address == ("8.8.8.8", 7), "what was looked at is dialled"
                raise ConnectionRefusedError

            monkeypatch.setattr(socket, "getaddrinfo", lookup)
            monkeypatch.setattr(loop, "sock_connect", connect, raising=False)
            with pytest.raises(LinkBroken, match="no connection"):
                await b.dial(A, "rebinds.example.org:7")
            assert answers == ["127.0.0.1"], "it was resolved once"

    run(body())


def test_before_it_has_joined_a_node_accepts_nobody() -> None:
    async def body() -> None:
        async with two_planes(key_of_b=b"") as (a, b):
            a.identify(A, RunKey(0, b""))
            with pytest.raises(DonorLost, match="it refused: this node has not joined its run yet"):
                await still_serves(a, b)
            a.identify(A, RunKey(0, KEY))
            b.identify(B, RunKey(0, KEY))
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
                for byte in frames.HELLO.pack(frames.MAGIC, frames.VERSION, 255, 255, 255, 0) + bytes(861):
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
        with closing(server):
            async with two_planes() as (a, _):
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


def from_address(address: str, port: str) -> socket.socket:
    """A connection to a plane from another address of this machine."""
    sock = socket.create_connection(frames.parse_address(port), 10, (address, 0))
    sock.setblocking(False)
    return sock


def test_a_flood_from_one_address_takes_no_handshake_from_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "MAX_STRANGERS", 8)
    monkeypatch.setattr(data_plane, "MAX_STRANGERS_PER_ADDRESS", 4)

    async def body() -> None:
        async with two_planes() as (a, b):
            with ExitStack() as flood:
                link = Link(from_address("127.0.0.1", a.address), ByteCounter())
                magic, version, nonce = frames.GREETING.unpack(await link.read(frames.GREETING.size, 10))
                for i in range(40):  # while it is in its handshake, which takes it a moment
                    with suppress(ConnectionError):
                        flood.enter_context(from_address(f"127.0.0.{2 + i % 2}", a.address))
                    await asyncio.sleep(0)
                while len(a._strangers) > 8 or not a._strangers.count("127.0.0.2"):
                    await asyncio.sleep(0)
                hello = frames.HELLO.pack(magic, version, 3, 1, 1, 0) + b"runba"
                await link.write(hello + KeyRing(None, KEY).prove(nonce, hello, NO_PIN))
                await frames.send(link, frames.unfenced(FrameKind.GET_SEALED, NEW, 0))
                assert (await frames.receive(link, 10)).kind is FrameKind.DATA
                link.close()

    run(body())


def test_an_address_that_proves_nothing_again_and_again_is_not_even_greeted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_plane, "STRANGER_RATE", RateLimit(1e-6, 10))

    async def body() -> None:
        async with two_planes() as (a, b):
            loop, greeted = asyncio.get_running_loop(), 0
            for _ in range(20):
                with suppress(ConnectionError), from_address("127.0.0.2", a.address) as sock:
                    greeted += bool(await loop.sock_recv(sock, 1))
            assert greeted == 10
            for _ in range(20):  # who proves itself may come as often as it likes
                assert await still_serves(a, b)

    run(body())


def test_links_of_one_address_give_way_to_another_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "MAX_LINKS", 6)

    async def body() -> None:
        async with two_planes() as (a, b):
            invented = [await as_member(f"n{i}", "127.0.0.2", a.address) for i in range(8)]
            assert await still_serves(a, b)
            await asyncio.sleep(0)
            assert sum(not link._closed for link in a._accepted) <= 6
            for link in invented:
                link.close()

    run(body())


async def as_member(name: str, address: str, port: str) -> Link:
    """A link under a name of one's own, from one's own address, by one who knows the run's key."""
    link = Link(from_address(address, port), ByteCounter())
    with suppress(LinkBroken):
        await frames.greet(link, RUN, NodeId(name), A, KeyRing(None, KEY))
        await frames.send(link, frames.unfenced(FrameKind.LINK))
    return link


def test_who_trickles_in_the_tls_handshake_and_then_in_the_hello_has_one_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(frames, "HANDSHAKE_TIMEOUT", 1.0)

    async def body() -> None:
        loop = asyncio.get_running_loop()
        tls = TlsContexts(load_or_make(tmp_path))
        plane = await data_plane.DataPlane.start("127.0.0.1:0", RUN, A, KEY, Nothing(), tls=tls)
        link = Link(from_address("127.0.0.2", plane.address), ByteCounter())
        began = loop.time()
        await asyncio.sleep(0.7)
        await tls.dial(link, plane.pin, 10)
        await link.read(frames.GREETING.size, 10)
        await link.write(frames.MAGIC)  # and no more of its hello
        refusal = await frames.receive(link, 10)
        assert "did not say hello within 1 s" in await frames.sentence(link, refusal)
        assert loop.time() - began < 1.5
        link.close()
        await plane.close()

    run(body())
