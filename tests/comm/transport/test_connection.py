"""A connection: bytes arrive whole and in order, waits end, and an end, a reset and a dead host are told apart."""

import asyncio
import socket
from typing import Any

import pytest
from socket_pairs import NOISE, between, tcp, unix

from atoll.comm.transport import connection as module
from atoll.comm.transport.connection import Link, LinkBroken, LinkClosed, tcp_info


@pytest.mark.parametrize("pair", [unix, tcp])
def test_a_vector_of_buffers_arrives_whole_and_in_order_however_often_the_kernel_takes_a_part(pair: Any) -> None:
    vector = [b"head", NOISE, b"", b"x", NOISE[:100_001], b"tail"]

    async def talk(here: Link, there: Link) -> None:
        sizes = []
        send = here._sock

        class Stingy:
            """A socket that takes at most a few bytes, across the buffers' borders."""

            def __getattr__(self, name: str) -> Any:
                return getattr(send, name)

            def sendmsg(self, buffers: list[memoryview]) -> int:
                whole = b"".join(buffers)
                sizes.append(len(whole))
                return send.send(whole[: 1 + len(sizes) * 7919])

        here._sock = Stingy()  # type: ignore[assignment]
        sending = asyncio.create_task(here.write(*vector))
        expected = b"".join(vector)
        assert await there.read(len(expected)) == expected
        await sending
        assert len(sizes) > 10
        assert here._meter.up == here.moved == there._meter.down == there.moved == len(expected)
        here._sock = send

    between(talk, pair)


def test_both_ways_at_once() -> None:
    async def talk(here: Link, there: Link) -> None:
        async with asyncio.TaskGroup() as group:
            for link in (here, there):
                group.create_task(link.write(NOISE))
            for link in (here, there):
                assert await link.read(len(NOISE)) == NOISE

    between(talk)


def test_bytes_land_where_they_are_wanted_and_nowhere_else() -> None:
    async def talk(here: Link, there: Link) -> None:
        place = bytearray(b"-" * 10)
        await here.write(b"abcdefgh")
        await there.read_into(memoryview(place)[3:7])
        assert place == b"---abcd---"
        assert await there.read(4) == b"efgh"
        assert await there.read(0) == b""

    between(talk)


def test_an_end_between_two_messages_differs_from_an_end_within_one() -> None:
    async def whole(here: Link, there: Link) -> None:
        here.close()
        with pytest.raises(LinkClosed, match="the connection was closed"):
            await there.read(4)

    async def half(here: Link, there: Link) -> None:
        await here.write(b"abc")
        here.close()
        with pytest.raises(LinkBroken, match="in mid-frame") as caught:
            await there.read(4)
        assert not isinstance(caught.value, LinkClosed)

    between(whole)
    between(half)


def test_a_reset_is_told_with_its_reason() -> None:
    async def talk(here: Link, there: Link) -> None:
        await there.write(b"unread")
        here._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        here.close()
        with pytest.raises(LinkBroken, match="the connection broke: connection reset by peer"):
            await there.read(1)
        with pytest.raises(LinkBroken, match="the connection broke while sending"):
            await there.write(NOISE)

    between(talk)


def test_closing_tells_whoever_waits_and_whoever_comes_later() -> None:
    async def talk(here: Link, there: Link) -> None:
        reading = asyncio.create_task(here.read(1, None))
        writing = asyncio.create_task(here.write(NOISE * 8))
        while len(here._waiting) < 2:
            await asyncio.sleep(0)
        here.close()
        here.close()
        for task in (reading, writing):
            with pytest.raises(LinkBroken, match="closed on this side"):
                await task
        with pytest.raises(LinkBroken):
            await here.read(1)
        with pytest.raises(LinkBroken):
            await here.write(b"x")

    between(talk)


def test_waits_end_at_their_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_TIMEOUT", 0.02)

    async def talk(here: Link, there: Link) -> None:
        with pytest.raises(LinkBroken, match="it sent nothing for 0.01 s"):
            await here.read(1, 0.01)
        with pytest.raises(LinkBroken, match="it took no byte for 0.02 s"):
            await here.write(NOISE * 8)

    between(talk)


def test_a_cancelled_wait_leaves_the_link_usable() -> None:
    async def talk(here: Link, there: Link) -> None:
        reading = asyncio.create_task(here.read(3, None))
        while not here._waiting:
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await there.write(b"abc")
        assert await here.read(3) == b"abc" and not here._waiting

    between(talk)


def test_last_bytes_overtake_no_reset_while_the_other_side_still_sends() -> None:
    async def talk(here: Link, there: Link) -> None:
        sending = asyncio.create_task(here.write(NOISE))
        await there.write(b"bye")
        draining = asyncio.create_task(there.drain())
        assert await here.read(3) == b"bye"
        await sending
        here.close()
        await draining

    between(talk)


def test_the_kernel_tells_round_trip_and_delivered_bytes() -> None:
    async def talk(here: Link, there: Link) -> None:
        sending = asyncio.create_task(here.write(NOISE))
        await there.read(len(NOISE))
        await sending
        path = here.path()
        assert path is not None and 0 < path.rtt < 1
        while path.acked < len(NOISE):
            await asyncio.sleep(0)
            path = here.path()
            assert path is not None
        assert path.acked <= len(NOISE) + 2  # the opening and the end of a connection may count as one each

    between(talk)


def test_what_is_no_tcp_connection_has_no_path() -> None:
    ends = unix()
    assert tcp_info(ends[0]) is None
    for end in ends:
        end.close()


def test_a_refreshed_connection_keeps_its_window_and_a_control_that_is_not_offered_changes_nothing() -> None:
    async def talk(here: Link, there: Link) -> None:
        async def send() -> None:
            await here.write(NOISE)

        sending = asyncio.create_task(send())
        await there.read(len(NOISE))
        await sending
        before, window = here.congestion_control, cwnd(here)
        here.refresh("nonesuch")
        assert here.congestion_control == before
        here.refresh("reno")
        assert here.congestion_control == "reno"
        assert cwnd(here) >= window

    between(talk)


def cwnd(link: Link) -> int:
    """Segments; tcpi_snd_cwnd of linux/tcp.h."""
    info = link._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(info[80:84], "little")


def test_a_dead_host_is_noticed_within_a_minute_whether_bytes_are_on_their_way_or_not() -> None:
    async def talk(here: Link, there: Link) -> None:
        def option(level: int, name: int) -> int:
            return here._sock.getsockopt(level, name)

        tcp = socket.IPPROTO_TCP
        assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and option(tcp, socket.TCP_NODELAY)
        idle, every, times = (
            option(tcp, name) for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert 0 < idle + every * times <= 60
        assert 0 < option(tcp, socket.TCP_USER_TIMEOUT) <= 60_000  # milliseconds

    between(talk)
