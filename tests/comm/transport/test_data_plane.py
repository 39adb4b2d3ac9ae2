import asyncio
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest

from atoll.comm.codecs import zstd
from atoll.comm.digest import digest
from atoll.comm.errors import ResourceError
from atoll.comm.ids import NO_PIN, NodeId, Round, RunId
from atoll.comm.transport import data_plane, frames, leaf_relay
from atoll.comm.transport.connection import Link, LinkBroken
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import DonorLost, FetchClient, FetchItem, NotAvailable
from atoll.comm.transport.frames import FrameKind

DEADLINE = 60.0  # seconds; nothing here takes longer than a moment on an idle machine
RUN, A, B, KEY = RunId("run"), NodeId("a"), NodeId("b"), b"k" * 32
SEALED, NOISE, ZEROS = os.urandom(1000), os.urandom(100_000), bytes(100_000)
NEW, OLD = Round(7), Round(6)


class Books:
    """A shelf that holds round 7 and has moved on from round 6."""

    async def sealed(self, round: Round, chunk: int) -> bytes | None:
        return SEALED if round == NEW else None

    async def state(self, round: Round, chunk: int) -> bytes | None:
        if chunk == 13:
            raise RuntimeError("a bug of the node's")
        return (NOISE, ZEROS)[chunk] if round == NEW else None

    async def digests(self, round: Round) -> Sequence[bytes] | None:
        return [digest(NOISE), digest(ZEROS)] if round == NEW else None


class Nothing:
    """An empty shelf."""

    async def sealed(self, round: Round, chunk: int) -> None:
        return None

    async def state(self, round: Round, chunk: int) -> None:
        return None

    async def digests(self, round: Round) -> None:
        return None


@asynccontextmanager
async def two_planes(
    key_of_b: bytes = KEY, up: float = 0, down: float = 0
) -> AsyncIterator[tuple[DataPlane, DataPlane]]:
    """Bytes a second: `a` sends `up` at most, and `b` takes in `down`."""
    a = await DataPlane.start("127.0.0.1:0", RUN, A, KEY, Books(), (up, 0))
    b = await DataPlane.start("127.0.0.1:0", RUN, B, key_of_b, Books(), (0, down))
    try:
        yield a, b
    finally:
        await a.close()
        await b.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left after close"


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await body

    asyncio.run(bounded())


async def still_serves(a: DataPlane, b: DataPlane) -> bool:
    """`b` can fetch from `a`."""
    return await b.fetch(A, a.address, FetchItem.SEALED, NEW, 0, len(SEALED)) == SEALED


def test_what_is_on_the_shelf_is_fetched_over_one_connection() -> None:
    async def body() -> None:
        async with two_planes() as (a, b), FetchClient(b, A, a.address) as fetcher:
            assert await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED)) == SEALED
            first = fetcher._link
            assert await fetcher.fetch(FetchItem.STATE, NEW, 0, len(NOISE)) == NOISE
            assert await fetcher.fetch(FetchItem.STATE, NEW, 1, len(ZEROS)) == ZEROS
            assert await fetcher.fetch(FetchItem.DIGESTS, NEW, 0, 32) == digest(NOISE) + digest(ZEROS)
            assert fetcher._link is first

    run(body())


def test_state_is_packed_only_when_that_is_smaller() -> None:
    async def body() -> None:
        async with two_planes(up=10e6) as (a, b), FetchClient(b, A, a.address) as fetcher:
            await fetcher.fetch(FetchItem.STATE, NEW, 0, len(NOISE))
            after_noise = b.bytes_down
            await fetcher.fetch(FetchItem.STATE, NEW, 1, len(ZEROS))
            assert after_noise == frames.GREETING.size + frames.HEADER.size + len(NOISE)
            assert b.bytes_down - after_noise < 200
            assert (a.bytes_up, a.bytes_down) == (b.bytes_down, b.bytes_up)

    run(body())


@pytest.mark.parametrize(
    "fast, on, packed", [(60e6, True, True), (60e6, False, False), (1.0, True, False)]
)  # fast: bytes a second from which a path is
def test_state_is_packed_for_slow_paths_and_where_the_run_packs_at_all(
    fast: float, on: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plane, "FAST_PATH_RATE", fast)

    async def body() -> None:
        async with two_planes(up=10e6) as (a, b), FetchClient(b, A, a.address) as fetcher:
            a.peers.compressor.enabled = on
            before = b.bytes_down
            assert await fetcher.fetch(FetchItem.STATE, NEW, 1, len(ZEROS)) == ZEROS
            assert (b.bytes_down - before < 200 + frames.GREETING.size) == packed

    run(body())


def test_a_nodes_download_cap_holds_for_links_that_it_dials_and_for_those_that_it_accepts() -> None:
    async def body() -> None:
        clock = asyncio.get_running_loop().time
        async with two_planes(down=200e3) as (a, b), FetchClient(b, A, a.address) as fetcher:
            began = clock()
            for _ in range(2):  # a second's worth; of which a quarter may come at once
                await fetcher.fetch(FetchItem.STATE, NEW, 0, len(NOISE))
            assert clock() - began >= 0.7
        async with two_planes(down=1000) as (a, b), FetchClient(a, B, b.address) as fetcher:
            began = clock()
            for _ in range(1000 // frames.HEADER.size):
                await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED))
            assert clock() - began >= 0.7

    run(body())


def test_a_peer_that_moved_on_is_missing_the_chunk_and_not_lost() -> None:
    async def body() -> None:
        async with two_planes() as (a, b), FetchClient(b, A, a.address) as fetcher:
            for item in FetchItem:
                with pytest.raises(NotAvailable, match="a does not have .* of round 6"):
                    await fetcher.fetch(item, OLD, 0, 1000)
            first = fetcher._link
            assert await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED)) == SEALED
            assert fetcher._link is first

    run(body())


def test_a_chunk_of_the_state_comes_in_parts_from_where_it_is_asked_for() -> None:
    async def body() -> None:
        async with two_planes() as (a, b), FetchClient(b, A, a.address) as fetcher:

            def asking(*parts: tuple[int, int]) -> Callable[[], tuple[int, int] | None]:
                left = iter(parts)
                return lambda: next(left, None)

            came: list[tuple[int, bytes]] = []
            parts = asking((50_000, 100_000), (0, 4), (4, 50_000))
            await fetcher.fetch_state(NEW, 0, parts, lambda *part: came.append(part))
            assert came == [(50_000, NOISE[50_000:]), (0, NOISE[:4]), (4, NOISE[4:50_000])]
            with pytest.raises(DonorLost, match="a request for bytes 0 to 100004 of 100000"):
                await fetcher.fetch_state(NEW, 0, asking((0, len(NOISE) + 4)), lambda at, part: None)
            with pytest.raises(NotAvailable):
                await fetcher.fetch_state(OLD, 0, asking((0, len(NOISE))), lambda at, part: None)
            await fetcher.fetch_state(NEW, 0, asking(), lambda at, part: None)
            assert await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED)) == SEALED

    run(body())


def test_an_answer_of_another_size_is_not_read() -> None:
    async def body() -> None:
        async with two_planes() as (a, b), FetchClient(b, A, a.address) as fetcher:
            with pytest.raises(DonorLost, match="offers 1000 bytes where 10 were expected") as caught:
                await fetcher.fetch(FetchItem.SEALED, NEW, 0, 10)
            assert caught.value.node == A
            assert await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED)) == SEALED  # on a new connection

    run(body())


def test_a_zip_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = zstd.pack(bytes(1 << 26))
    monkeypatch.setattr(zstd, "pack", lambda data: bomb)

    async def body() -> None:
        async with two_planes(up=10e6) as (a, b):
            tracemalloc.start()
            with pytest.raises(DonorLost, match="declares 67108864 bytes, expected 25000"):
                await b.fetch(A, a.address, FetchItem.STATE, NEW, 0, len(NOISE))
            assert tracemalloc.get_traced_memory()[1] < 1 << 23
            tracemalloc.stop()

    run(body())


def test_a_peer_that_is_gone_is_lost_with_a_sentence() -> None:
    async def body() -> None:
        async with two_planes() as (a, b), FetchClient(b, A, a.address) as fetcher:
            assert await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED)) == SEALED
            await a.close()
            with pytest.raises(DonorLost, match="a: .*connection"):
                await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED))
            with pytest.raises(DonorLost, match="connection refused"):
                await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED))

    run(body())


def test_a_peer_that_accepts_and_says_nothing_is_lost_at_the_deadline() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with two_planes() as (_, b):
                address = frames.format_address(*silent.getsockname())
                with pytest.raises(DonorLost, match="did not answer within 0.05 s"):
                    await b.fetch(A, address, FetchItem.SEALED, NEW, 0, 10, deadline=0.05)

    run(body())


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


def test_a_connection_that_begins_with_link_is_one_of_the_peers() -> None:
    async def body() -> None:
        async with two_planes() as (a, b):
            link = await b.dial(A, a.address)
            await frames.send(link, frames.unfenced(FrameKind.LINK))
            while not a.peers.links():
                await asyncio.sleep(0)
            assert [node for node, _ in a.peers.links()] == [B]
            link.close()
            while a.peers.links():
                await asyncio.sleep(0)

    run(body())


def test_a_request_on_a_link_ends_it() -> None:
    async def body() -> None:
        async with two_planes() as (a, b):
            link = await b.dial(A, a.address)
            await frames.send(link, frames.unfenced(FrameKind.LINK))
            await frames.send(link, frames.unfenced(FrameKind.REFUSED, length=1000))
            with pytest.raises(LinkBroken):
                await frames.receive(link, 5)
            link.close()

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


def test_a_fault_of_the_shelf_does_not_take_the_plane_down(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with two_planes() as (a, b):
            with pytest.raises(DonorLost):
                await b.fetch(A, a.address, FetchItem.STATE, NEW, 13, 10)
            assert await still_serves(a, b)

    run(body())
    assert "a bug of the node's" in caplog.text


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


@pytest.mark.parametrize("address", ["nonsense", "host", "127.0.0.1:99999", "::1:4000"])
def test_a_peers_address_that_is_none_is_said_in_a_sentence(address: str) -> None:
    async def body() -> None:
        async with two_planes() as (a, _):
            with pytest.raises(DonorLost, match="is no address"):
                await a.fetch(B, address, FetchItem.SEALED, NEW, 0, 10)

    run(body())


def test_a_connection_that_comes_when_nobody_waits_for_it_any_more_is_closed() -> None:
    async def body() -> None:
        async with two_planes() as (ada, bo):
            fetcher = FetchClient(ada, bo.node, bo.address)
            fetcher.dial()
            assert (dialling := fetcher._dialling) is not None
            fetching = asyncio.create_task(fetcher.fetch(FetchItem.SEALED, Round(1), 0, 4))
            dialling.add_done_callback(lambda _: fetching.cancel())  # before it has gone on
            await asyncio.wait([fetching])
            assert fetching.cancelled() and dialling.result()._closed

    run(body())


def test_nothing_is_left_open_after_close() -> None:
    async def body() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            async with two_planes() as (a, b):
                link = await b.dial(A, a.address)
                await frames.send(link, frames.unfenced(FrameKind.LINK))
                assert await still_serves(a, b)
                link.close()
        assert len(os.listdir("/proc/self/fd")) <= before  # fewer, where what others left was freed meanwhile

    run(body())


def test_a_port_in_use_is_said_in_a_sentence() -> None:
    async def body() -> None:
        async with two_planes() as (a, _):
            port = frames.parse_address(a.address)[1]
            with pytest.raises(ResourceError) as caught:
                await DataPlane.start(a.address, RUN, B, KEY, Books())
            assert str(caught.value) == f"port {port} on 127.0.0.1 is in use: choose another with --listen"

    run(body())


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:99999", "192.0.2.1:0"])
def test_an_address_that_cannot_be_listened_on_is_said_in_a_sentence(listen: str) -> None:
    async def body() -> None:
        with pytest.raises(ResourceError, match="cannot listen"):
            await DataPlane.start(listen, RUN, B, KEY, Books())

    run(body())


def test_ipv6_literals_work_as_addresses_or_are_refused_with_a_sentence() -> None:
    async def body() -> None:
        if not os.path.exists("/proc/net/if_inet6"):
            with pytest.raises(ResourceError, match="cannot listen"):
                await DataPlane.start("[::1]:0", RUN, A, KEY, Books())
            return
        a = await DataPlane.start("[::1]:0", RUN, A, KEY, Books())
        assert a.address.startswith("[::1]:")
        b = await DataPlane.start("[::1]:0", RUN, B, KEY, Books())
        assert await still_serves(a, b)
        await b.close()
        await a.close()

    run(body())


@asynccontextmanager
async def offered(to: DataPlane, by: DataPlane) -> AsyncIterator[None]:
    """`by`, which nobody dials, answers what is asked at `to`."""
    by.offering.offer_to([(to.node, to.address, NO_PIN)])
    async with asyncio.timeout(DEADLINE):
        while len(to.offers._free) < leaf_relay.LINKS_PER_TARGET:
            await asyncio.sleep(0)
    yield
    by.offering.offer_to([])


def test_what_a_leaf_offers_is_fetched_where_it_dialled() -> None:
    async def body() -> None:
        async with two_planes() as (a, b), offered(to=b, by=a):
            async with FetchClient(b, B, "") as fetcher:
                assert await fetcher.fetch(FetchItem.STATE, NEW, 0, len(NOISE)) == NOISE
                with pytest.raises(NotAvailable):
                    await fetcher.fetch(FetchItem.STATE, OLD, 0, len(NOISE))
                assert await fetcher.fetch(FetchItem.DIGESTS, NEW, 0, 32) == digest(NOISE) + digest(ZEROS)
            assert len(b.offers._free) == leaf_relay.LINKS_PER_TARGET  # it was given back

    run(body())


def test_a_node_passes_on_what_leaves_offer_it() -> None:
    async def body() -> None:
        c = NodeId("c")
        async with two_planes() as (a, b):
            third = await DataPlane.start("127.0.0.1:0", b.run, c, KEY, Nothing())
            async with offered(to=third, by=a), FetchClient(b, c, third.address) as fetcher:
                assert await fetcher.fetch(FetchItem.STATE, NEW, 0, len(NOISE)) == NOISE
                assert await fetcher.fetch(FetchItem.STATE, NEW, 1, len(ZEROS)) == ZEROS
                assert await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED)) == SEALED
                with pytest.raises(NotAvailable):
                    await fetcher.fetch(FetchItem.SEALED, OLD, 0, len(SEALED))
            await third.close()

    run(body())


def test_an_offer_that_broke_is_one_less_and_is_made_again() -> None:
    async def body() -> None:
        async with two_planes() as (a, b), offered(to=b, by=a):
            for gone in list(b.offers._free):
                gone.link.close()
            with pytest.raises(DonorLost):
                await b.fetch(B, "", FetchItem.STATE, NEW, 0, len(NOISE))
            async with asyncio.timeout(DEADLINE):
                while True:
                    try:
                        assert await b.fetch(B, "", FetchItem.STATE, NEW, 0, len(NOISE)) == NOISE
                        break
                    except DonorLost:
                        await asyncio.sleep(0.01)

    run(body())


def test_of_one_leafs_connections_the_latest_are_kept() -> None:
    class Closes:
        closed = False

        def close(self) -> None:
            self.closed = True

    async def body() -> None:
        kept, links = leaf_relay.OfferPool(), [Closes() for _ in range(leaf_relay.MAX_LINKS_PER_LEAF + 1)]
        keeping = [asyncio.create_task(kept.keep(A, cast(Link, link))) for link in links]
        await asyncio.sleep(0)
        assert [link.closed for link in links] == [True] + [False] * leaf_relay.MAX_LINKS_PER_LEAF
        for task in keeping:
            task.cancel()
        await asyncio.wait(keeping)

    run(body())


def test_where_nobody_offers_anything_nothing_is_fetched() -> None:
    async def body() -> None:
        async with two_planes() as (_, b):
            with pytest.raises(DonorLost, match="no leaf has dialled this node yet"):
                await b.fetch(B, "", FetchItem.STATE, NEW, 0, len(NOISE))

    run(body())
