import asyncio
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from atoll.comm.transport import connection as module
from atoll.comm.transport.connection import (
    CAPPED_PIECE_BYTES,
    ByteCounter,
    Link,
    LinkBroken,
    LinkClosed,
    RateLimiter,
    tcp_info,
)

Talk = Callable[[Link, Link], Awaitable[None]]
DEADLINE = 60.0  # seconds; nothing here takes longer than a moment on an idle machine
NOISE = bytes(range(256)) * 8192  # 2 MiB: more than a socket takes at once


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await body
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"

    asyncio.run(bounded())


def unix() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        return dialled, server.accept()[0]


Pair = Callable[[], tuple[socket.socket, socket.socket]]


def between(talk: Talk, pair: Pair = tcp, up: RateLimiter | None = None, down: RateLimiter | None = None) -> None:
    """Run `talk` with both ends of a connection, of which the first one has the caps."""

    async def body() -> None:
        ends = pair()
        for end in ends:
            end.setblocking(False)
        links = Link(ends[0], ByteCounter(), up, down), Link(ends[1], ByteCounter())
        try:
            await talk(*links)
        finally:
            for link in links:
                link.close()

    run(body())


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


class Clock:
    """A loop's time that passes by sleeping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self)
        monkeypatch.setattr(asyncio, "sleep", self.sleep)

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def spend(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run what never waits."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


def test_a_cap_lets_its_rate_through_after_a_quarter_of_a_second_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cap = Clock(monkeypatch), RateLimiter(1000.0)
    spend(cap.take(250))
    assert clock.now == 1000.0
    for _ in range(100):
        spend(cap.take(100))
    assert clock.now == pytest.approx(1010.0)
    clock.now += 60  # what was not used is not saved up
    spend(cap.take(250))
    assert clock.now == pytest.approx(1070.0)
    spend(cap.take(500))
    assert clock.now == pytest.approx(1070.5)


def test_a_cap_within_another_keeps_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    outer = RateLimiter(1000.0)
    inner = RateLimiter(0, within=outer)
    assert inner.limits and not RateLimiter(0, within=RateLimiter(0)).limits
    for _ in range(10):
        spend(inner.take(1000))
    assert clock.now == pytest.approx(1009.75)
    inner.change(100.0)
    for _ in range(10):
        spend(inner.take(100))
    assert clock.now == pytest.approx(1019.5, abs=0.25)


def test_what_waits_for_a_cap_is_let_through_when_the_cap_is_lifted() -> None:
    async def body() -> None:
        cap = RateLimiter(1.0)
        async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as group:
            waiting = [group.create_task(cap.take(1000)) for _ in range(3)]  # 3000 seconds
            await asyncio.sleep(0)
            cap.change(0)
        assert all(task.done() for task in waiting)

    asyncio.run(body())


def test_without_a_rate_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cap = Clock(monkeypatch), RateLimiter(0)
    spend(cap.take(1 << 40))
    assert clock.now == 1000.0


@pytest.mark.parametrize("side", ["up", "down"])
@pytest.mark.parametrize("pair", [unix, tcp])
def test_a_capped_link_asks_for_every_byte_once_and_in_pieces(pair: Any, side: str) -> None:
    asked: list[int] = []

    class Counting(RateLimiter):
        async def take(self, size: int) -> None:
            asked.append(size)

    async def talk(here: Link, there: Link) -> None:
        source, sink = (here, there) if side == "up" else (there, here)
        source._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # it takes a piece in many parts
        sending = asyncio.create_task(source.write(b"head", NOISE))
        assert await sink.read(4 + len(NOISE)) == b"head" + NOISE
        await sending
        assert max(asked) <= CAPPED_PIECE_BYTES and sum(asked) == 4 + len(NOISE)

    caps = {side: Counting(1.0)}
    between(talk, pair, up=caps.get("up"), down=caps.get("down"))


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


# TLS


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
    """For the server, for the client, and the server's certificate."""
    folder: Path = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=atoll"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return server, client, ssl.PEM_cert_to_DER_cert(certificate.read_text())


def test_under_tls_the_same_calls_carry_the_same_bytes_both_ways(contexts: Any) -> None:
    server, client, certificate = contexts

    async def talk(here: Link, there: Link) -> None:
        shown = await asyncio.gather(here.secure(client, False, 5), there.secure(server, True, 5))
        assert list(shown) == [certificate, b""]
        before = here._meter.up
        async with asyncio.TaskGroup() as group:
            for link in (here, there):
                group.create_task(link.write(b"head", NOISE, b"", memoryview(b"tail")))
            for link in (here, there):
                assert await link.read(8 + len(NOISE)) == b"head" + NOISE + b"tail"
        assert here._meter.up - before > len(NOISE), "records are counted as they are sent"

    between(talk)


def test_what_travels_under_tls_is_not_what_was_written(contexts: Any) -> None:
    server, client, _ = contexts
    sent: list[bytes] = []

    async def talk(here: Link, there: Link) -> None:
        await asyncio.gather(here.secure(client, False, 5), there.secure(server, True, 5))
        push = here.push

        async def recorded(rest: list[memoryview]) -> None:
            sent.extend(bytes(piece) for piece in rest)
            await push(rest)

        here.push = recorded  # type: ignore[method-assign]
        await here.write(b"a secret of this run")
        assert await there.read(20) == b"a secret of this run"
        assert sent and b"secret" not in b"".join(sent)

    between(talk)


def test_ends_are_told_apart_under_tls_too(contexts: Any) -> None:
    server, client, _ = contexts

    async def talk(here: Link, there: Link) -> None:
        await asyncio.gather(here.secure(client, False, 5), there.secure(server, True, 5))
        await there.write(b"abc")
        there.close()
        with pytest.raises(LinkBroken, match="in mid-frame"):
            await here.read(4)
        with pytest.raises(LinkClosed):
            await here.read(1)

    between(talk)


def test_a_session_that_is_ended_in_order_is_closed(contexts: Any) -> None:
    server, client, _ = contexts

    async def talk(here: Link, there: Link) -> None:
        await asyncio.gather(here.secure(client, False, 5), there.secure(server, True, 5))
        await there.write(b"abc")
        assert there._tls is not None
        with suppress(ssl.SSLWantReadError):
            there._tls._session.unwrap()  # says that nothing follows; the connection stays
        await there._tls._flush()
        with pytest.raises(LinkBroken, match="in mid-frame"):
            await here.read(4)
        with pytest.raises(LinkClosed):
            await here.read(1)

    between(talk)


def test_a_reader_that_has_a_part_of_a_record_waits_for_no_more_than_its_rest(contexts: Any) -> None:
    server, client, _ = contexts

    async def talk(here: Link, there: Link) -> None:
        await asyncio.gather(here.secure(client, False, 5), there.secure(server, True, 5))
        push, held = there.push, list[memoryview]()

        async def all_but_the_end(rest: list[memoryview]) -> None:
            whole = b"".join(rest)
            held.append(memoryview(whole)[-600:])
            await push([memoryview(whole)[:-600]])

        there.push = all_but_the_end  # type: ignore[method-assign]
        await there.write(NOISE[:20_000])  # two records; most of the second one is here at first
        reading = asyncio.create_task(here.read(20_000))
        while not here._waiting:
            await asyncio.sleep(0)
        await push(held)
        assert await reading == NOISE[:20_000]

    between(talk)


@pytest.mark.parametrize("tls_is_server", [True, False])
def test_a_peer_without_tls_is_refused_with_a_sentence(contexts: Any, tls_is_server: bool) -> None:
    server, client, _ = contexts

    async def talk(here: Link, there: Link) -> None:
        await there.write(b"ATOL\2\0\0\0" + bytes(16))
        with pytest.raises(LinkBroken, match="no TLS session: "):
            await here.secure(server if tls_is_server else client, tls_is_server, 5)

    between(talk)


def test_a_peer_that_says_nothing_ends_the_tls_handshake_at_its_deadline(contexts: Any) -> None:
    async def talk(here: Link, there: Link) -> None:
        with pytest.raises(LinkBroken, match="no TLS session within 0.02 s"):
            await here.secure(contexts[1], False, 0.02)
        there._sock.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkClosed, match="closed in the TLS handshake"):
            await here.secure(contexts[1], False, 5)

    between(talk)


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


def test_a_cap_that_is_adjusted_lets_nothing_through_that_waits() -> None:
    async def body() -> None:
        clock = asyncio.get_running_loop().time
        cap = RateLimiter(1e6, burst=0.0)
        await cap.take(1)
        began = clock()
        waiting = asyncio.create_task(cap.take(100_000))
        await asyncio.sleep(0)
        cap.adjust(1e9)
        await waiting
        assert clock() - began >= 0.09

    run(body())


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
