"""Encrypted data planes: who is in between learns nothing and is named, strangers are refused cheaply."""

import asyncio
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.comm.ids import NO_PIN, NodeId, Round, RunId
from atoll.comm.plan import PlanMember
from atoll.comm.transport import frames
from atoll.comm.transport.certificates import load_or_make
from atoll.comm.transport.connection import ByteCounter, Link, LinkBroken
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import DonorLost, FetchClient, FetchItem
from atoll.comm.transport.peer_links import PeerLinks
from atoll.comm.transport.tls import TlsContexts

RUN, A, B, KEY = RunId("run"), NodeId("a"), NodeId("b"), b"k" * 32
SEALED = b"a sealed chunk that nobody else may read" * 1000


class Books:
    async def sealed(self, round: Round, chunk: int) -> bytes | None:
        return SEALED

    async def state(self, round: Round, chunk: int) -> bytes | None:
        return None

    async def digests(self, round: Round) -> None:
        return None


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"

    asyncio.run(bounded())


def sessions(folder: Path, name: str) -> TlsContexts:
    (folder / name).mkdir(exist_ok=True)
    return TlsContexts(load_or_make(folder / name))


@asynccontextmanager
async def planes(folder: Path) -> AsyncIterator[tuple[DataPlane, DataPlane]]:
    a = await DataPlane.start("127.0.0.1:0", RUN, A, KEY, Books(), tls=sessions(folder, "a"))
    b = await DataPlane.start("127.0.0.1:0", RUN, B, KEY, Books(), tls=sessions(folder, "b"))
    try:
        yield a, b
    finally:
        await a.close()
        await b.close()


@asynccontextmanager
async def wire_tap(to: DataPlane) -> AsyncIterator[tuple[str, bytearray]]:
    """An address that leads to the plane, and every byte that passes there, both ways."""
    seen, relays = bytearray(), set[asyncio.Task[None]]()

    async def one_way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                seen.extend(data)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection(*frames.parse_address(to.address))
        for pair in ((reader, onward[1]), (onward[0], writer)):
            relays.add(asyncio.create_task(one_way(*pair)))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield frames.format_address(*server.sockets[0].getsockname()), seen
    finally:
        server.close()
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def fetched(plane: DataPlane, address: str, pin: Any) -> bytes:
    async with FetchClient(plane, A, address, pin) as fetcher:
        return await fetcher.fetch(FetchItem.SEALED, Round(1), 0, len(SEALED))


def test_what_is_fetched_arrives_and_nobody_on_the_way_reads_it(tmp_path: Path) -> None:
    async def body() -> None:
        async with planes(tmp_path) as (a, b), wire_tap(a) as (address, seen):
            assert await fetched(b, address, a.pin) == SEALED
            assert len(seen) > len(SEALED)
            for secret in (b"sealed chunk", frames.MAGIC, RUN.encode()):
                assert secret not in seen

    run(body())


def test_the_tap_of_these_tests_reads_what_is_not_encrypted() -> None:
    async def body() -> None:
        a = await DataPlane.start("127.0.0.1:0", RUN, A, KEY, Books())
        b = await DataPlane.start("127.0.0.1:0", RUN, B, KEY, Books())
        async with wire_tap(a) as (address, seen):
            assert await fetched(b, address, NO_PIN) == SEALED
            assert SEALED in seen and frames.MAGIC in seen
        await a.close()
        await b.close()

    run(body())


def test_links_carry_frames_both_ways(tmp_path: Path) -> None:
    async def body() -> None:
        async with planes(tmp_path) as (a, b):
            link = await b.dial(A, a.address, a.pin)
            assert link.encrypted
            await frames.send(link, frames.unfenced(frames.FrameKind.GET_SEALED, 1))
            answer = await frames.receive(link, 5)
            assert await link.read(answer.length) == SEALED
            link.close()

    run(body())


def test_a_man_in_the_middle_is_refused_by_name_and_hears_no_hello(tmp_path: Path) -> None:
    """It has everything but the node's key: the port that the plan names, and a certificate of its own."""

    async def body() -> None:
        async def in_between(sock: socket.socket) -> None:
            link = Link((await asyncio.get_running_loop().sock_accept(sock))[0], ByteCounter())
            await sessions(tmp_path, "m").accept(link, 5)
            with pytest.raises(LinkBroken):
                await link.write(frames.GREETING.pack(frames.MAGIC, frames.VERSION, bytes(16)))
                await link.read(1)
            link.close()

        async with planes(tmp_path) as (a, b):
            with socket.create_server(("127.0.0.1", 0)) as sock:
                sock.setblocking(False)
                man = asyncio.create_task(in_between(sock))
                address = frames.format_address(*sock.getsockname())
                with pytest.raises(DonorLost, match="^a: it shows another certificate .* is in between") as lost:
                    await fetched(b, address, a.pin)
                assert lost.value.node == A
                await man

    run(body())


def test_a_reduce_is_told_who_shows_another_certificate_and_links_to_the_right_one(tmp_path: Path) -> None:
    class Told:
        round = Round(1)

        def __init__(self) -> None:
            self.sentences, self.at = list[str](), asyncio.Event()

        def lost(self, node: NodeId, sentence: str) -> None:
            self.sentences.append(f"{node}: {sentence}")
            self.at.set()

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    async def linked(peers: PeerLinks) -> None:
        while not peers.peer(A).links:
            await asyncio.sleep(0)

    async def body() -> None:
        async with planes(tmp_path) as (a, b):
            told: Any = Told()
            b.peers.begin(told)
            b.peers.expect([(PlanMember(A, a.address, 1.0, pin=b.pin), True)])
            await told.at.wait()
            assert told.sentences[0].startswith("a: it shows another certificate")
            b.peers.expect([(PlanMember(A, a.address, 1.0, pin=a.pin), True)])  # it had joined again
            await linked(b.peers)
            assert all(link.encrypted for _, link in b.peers.links())
            b.peers.end(told)

    run(body())


def test_a_node_whose_certificate_nobody_named_is_not_dialled(tmp_path: Path) -> None:
    async def body() -> None:
        async with planes(tmp_path) as (a, b):
            with pytest.raises(DonorLost, match="a: the coordinator named no certificate of it"):
                await fetched(b, a.address, NO_PIN)
            assert a.bytes_down == 0

    run(body())


def test_a_plane_without_tls_is_not_talked_to(tmp_path: Path) -> None:
    async def body() -> None:
        async with planes(tmp_path) as (a, b):
            plain = await DataPlane.start("127.0.0.1:0", RUN, A, KEY, Books())
            with pytest.raises(DonorLost, match="a: no TLS session: wrong version number"):
                await fetched(b, plain.address, a.pin)
            await plain.close()

    run(body())


@pytest.mark.parametrize(
    "garbage", [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 20), b"\x16\x03\x01\xff\xff"]
)
def test_a_stranger_with_a_plain_socket_reads_nothing_and_costs_nothing(garbage: bytes, tmp_path: Path) -> None:
    async def body() -> None:
        async with planes(tmp_path) as (a, b):
            tracemalloc.start()
            reader, writer = await asyncio.open_connection(*frames.parse_address(a.address))
            writer.write(garbage)
            writer.write_eof()
            answer = b""
            try:
                answer = await reader.read()
            except ConnectionError:
                pass
            writer.close()
            assert tracemalloc.get_traced_memory()[1] < 4 << 20  # the garbage itself included
            tracemalloc.stop()
            assert len(answer) in (0, 7) and frames.MAGIC not in answer  # 7: an alert
            assert await fetched(b, a.address, a.pin) == SEALED

    run(body())


@pytest.mark.parametrize("garbage", [b"\x17\x03\x03\x00\x20" + bytes(32), b"GARBAGE GARBAGE GARBAGE"])
def test_a_stranger_whose_session_breaks_costs_nobody_else_anything(garbage: bytes, tmp_path: Path) -> None:
    """After the handshake, for which nobody needs a key. A session that is broken carries no last words either."""

    async def body() -> None:
        async with planes(tmp_path) as (a, b):
            stranger = socket.create_connection(frames.parse_address(a.address))
            stranger.setblocking(False)
            link = Link(stranger, ByteCounter())
            await sessions(tmp_path, "s").dial(link, a.pin, 5)
            await link.push([memoryview(garbage)])
            with pytest.raises(LinkBroken):
                while True:
                    await link.read(1, 5)
            link.close()
            assert await fetched(b, a.address, a.pin) == SEALED

    run(body())


def test_a_stranger_that_trickles_is_put_out_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "HANDSHAKE_TIMEOUT", 0.1)

    async def body() -> None:
        async with planes(tmp_path) as (a, _):
            reader, writer = await asyncio.open_connection(*frames.parse_address(a.address))

            async def trickle() -> None:
                for byte in b"\x16\x03\x01\x02\x00" + bytes(512):
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.02)

            trickling = asyncio.create_task(trickle())
            try:
                assert await reader.read() == b""
            except ConnectionError:
                pass
            assert not trickling.done(), "its bytes did not win it time"
            trickling.cancel()
            await asyncio.gather(trickling, return_exceptions=True)
            writer.close()

    run(body())


def test_a_member_that_speaks_an_older_tls_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        async with planes(tmp_path) as (a, _):
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises(ssl.SSLError, match="(?i)version"):
                await asyncio.open_connection(*frames.parse_address(a.address), ssl=old, server_hostname="a")

    run(body())


def test_a_handshake_does_not_hold_the_others_up(tmp_path: Path) -> None:
    async def body() -> None:
        async with planes(tmp_path) as (a, b):
            silent = [await asyncio.open_connection(*frames.parse_address(a.address)) for _ in range(50)]
            assert await fetched(b, a.address, a.pin) == SEALED
            for _, writer in silent:
                writer.close()

    run(body())
