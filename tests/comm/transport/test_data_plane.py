"""The data plane: what a node serves is fetched, over capped and packed links; what goes wrong is a sentence."""

import asyncio
import os
import socket
import tracemalloc
from collections.abc import Callable

import pytest
from serving_planes import KEY, NEW, NOISE, OLD, RUN, SEALED, ZEROS, A, B, Books, run, still_serves, two_planes

from atoll.comm.codecs import zstd
from atoll.comm.digest import digest
from atoll.comm.errors import ResourceError, Unreachable
from atoll.comm.ids import Round
from atoll.comm.peer_names import host_of_peer
from atoll.comm.transport import fetch_server, frames
from atoll.comm.transport.connection import LinkBroken
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import DonorLost, FetchClient, FetchItem, NotAvailable
from atoll.comm.transport.frames import FrameKind


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


def test_a_peer_behind_a_gateway_is_dialled_where_this_machines_gateway_says() -> None:
    host = host_of_peer(b"\x12\x20" + b"a" * 32)

    async def body() -> None:
        async with two_planes() as (a, b):

            async def reach(asked: str) -> tuple[str, int]:
                if asked != host:
                    raise Unreachable("its gateway does not answer")
                return frames.parse_address(a.address)

            async def fetched(of: str) -> bytes:
                return await b.fetch(A, f"{of}:1", FetchItem.SEALED, NEW, 0, len(SEALED))

            with pytest.raises(DonorLost, match="there is none here: join by a URL that names one"):
                await fetched(host)
            b.reach = reach
            b.private_addresses = False  # the way there is this machine's own
            assert await fetched(host) == SEALED
            with pytest.raises(DonorLost, match="its gateway does not answer"):
                await fetched("gone.p2p")

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
    monkeypatch.setattr(fetch_server, "FAST_PATH_RATE", fast)

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


def test_a_fault_of_the_shelf_does_not_take_the_plane_down(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with two_planes() as (a, b):
            with pytest.raises(DonorLost):
                await b.fetch(A, a.address, FetchItem.STATE, NEW, 13, 10)
            assert await still_serves(a, b)

    run(body())
    assert "a bug of the node's" in caplog.text


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
