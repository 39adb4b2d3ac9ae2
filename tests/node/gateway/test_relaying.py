"""Gateways reach each other by the first way that comes about. libp2p's streams are socket pairs here."""

import asyncio
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from atoll.comm.errors import Unreachable
from atoll.comm.rate_limits import RateLimit
from atoll.comm.strangers import StrangerLimits
from atoll.comm.transport.connection import RateLimiter
from atoll.node.gateway import local_ports, relaying
from atoll.node.gateway.local_ports import LocalPorts
from atoll.node.gateway.punching import allowed, observe
from atoll.node.gateway.relaying import Caller, Relaying
from atoll.node.gateway.splice import Stream, dial, splice
from atoll.node.gateway.stream_header import Answer, RelayLimits, Service

A, B, R, S = (b"\x12\x20" + letter * 32 for letter in (b"a", b"b", b"r", b"s"))
NOISE = bytes(range(256)) * 4096  # 1 MiB
CALLER = Caller(A, "203.0.113.1", 4001)


HOSTS = {A: "203.0.113.1", B: "203.0.113.2", R: "192.0.2.1", S: "192.0.2.2"}


class Network:
    """Streams between gateways; those pairs in `walls` cannot open one."""

    def __init__(self) -> None:
        self.gateways: dict[bytes, Relaying] = {}
        self.walls: set[tuple[bytes, bytes]] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.streams: list[Stream] = []  # as they came to whom they were opened to

    def add(self, peer: bytes, relays: tuple[bytes, ...] = (), streams: int = 0) -> Relaying:
        async def open_stream(target: bytes) -> Stream:
            if (peer, target) in self.walls or target not in self.gateways:
                raise Unreachable("no way there")
            near, far = socket.socketpair()
            stream = Stream(*await asyncio.open_connection(sock=far))
            self.streams.append(stream)
            self._spawn(self.gateways[target].accept(Caller(peer, HOSTS[peer], 4001), stream))
            return Stream(*await asyncio.open_connection(sock=near))

        self.gateways[peer] = Relaying(open_stream, relays, RelayLimits(streams=streams))
        return self.gateways[peer]

    @staticmethod
    async def nowhere(_: bytes) -> Stream:
        raise Unreachable("no way there")

    def hold(self, peer: bytes, relay: bytes) -> None:
        self._spawn(self.gateways[peer].hold(relay))

    def keep_holding(self, peer: bytes) -> None:
        self._spawn(self.gateways[peer].keep_holding())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.create_task(work))

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for stream in self.streams:
            stream.abort()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def echoed(stream: Stream) -> bytes:
    """What comes back of NOISE, up to the end that the other side says after this one has."""

    async def send() -> None:
        stream.writer.write(NOISE)
        await stream.writer.drain()
        stream.writer.write_eof()

    async with asyncio.TaskGroup() as both:
        both.create_task(send())
        back = both.create_task(stream.reader.read(-1))
    stream.writer.close()
    return back.result()


async def service() -> tuple[asyncio.Server, str]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    return server, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body

    asyncio.run(bounded())


async def until_held(gateway: Relaying, count: int) -> None:
    while len(gateway.holding) < count:
        await asyncio.sleep(0)


def test_who_cannot_be_dialled_is_reached_through_a_relay_and_then_through_it_first() -> None:
    async def body() -> None:
        network, (server, address) = Network(), await service()
        asking, served, relay = network.add(A, (R,)), network.add(B, (R,)), network.add(R, streams=2)
        served.served[Service.DATA] = address
        assert await echoed(await asking.reach(B, Service.DATA)) == NOISE
        network.walls = {(A, B), (B, A)}
        with pytest.raises(Unreachable, match="relayed: it is not connected to that relay"):
            await asking.reach(B, Service.DATA)
        network.hold(B, R)
        await until_held(served, 1)
        for _ in range(2):
            assert await echoed(await asking.reach(B, Service.DATA)) == NOISE
        assert asking.opened == {"direct": 1, "punched": 0, "relayed": 2}
        while relay.book.count:  # what ended makes room
            await asyncio.sleep(0)
        streams = [await asking.reach(B, Service.DATA) for _ in range(2)]
        with pytest.raises(Unreachable, match="relayed: that relay is full"):
            await asking.reach(B, Service.DATA)
        for stream in streams:
            stream.abort()
        server.close()
        await network.close()

    run(body())


def test_when_a_relay_is_gone_the_other_is_used() -> None:
    async def body() -> None:
        network, (server, address) = Network(), await service()
        asking, served = network.add(A, (R, S)), network.add(B, (R, S))
        network.add(R, streams=4)
        network.add(S, streams=4)
        served.served[Service.DATA] = address
        network.walls = {(A, B)}
        for relay in (R, S):
            network.hold(B, relay)
        await until_held(served, 2)
        assert await echoed(await asking.reach(B, Service.DATA)) == NOISE
        del network.gateways[R]
        assert await echoed(await asking.reach(B, Service.DATA)) == NOISE
        server.close()
        await network.close()

    run(body())


def test_nothing_but_what_is_served_can_be_reached() -> None:
    async def body() -> None:
        network, (server, address) = Network(), await service()
        asking, served = network.add(A), network.add(B)
        served.served[Service.DATA] = address
        with pytest.raises(Unreachable, match="its gateway does not serve that"):
            await asking.reach(B, Service.COORDINATOR)
        server.close()
        await server.wait_closed()
        with pytest.raises(Unreachable, match="what is behind its gateway does not answer"):
            await asking.reach(B, Service.DATA)
        await network.close()

    run(body())


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n", b"AGS1\x01\x01\xff" + bytes(255), b"AGS1\x02\x01\x00"]
)
def test_a_stream_that_says_what_it_should_not_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "HEADER_SECONDS", 0.2)

    async def body() -> None:
        near, far = socket.socketpair()
        accepted = asyncio.create_task(
            Network().add(B).accept(CALLER, Stream(*await asyncio.open_connection(sock=far)))
        )
        reader, writer = await asyncio.open_connection(sock=near)
        writer.write(said)
        assert await reader.read(1) == b""
        await accepted
        writer.close()

    run(body())


def test_a_port_leads_to_one_place_and_what_cannot_be_reached_is_closed() -> None:
    async def body() -> None:
        server, address = await service()
        ports, places = LocalPorts(), list[str]()

        async def connect() -> Stream:
            places.append(address)
            return await dial(address)

        async def nowhere() -> Stream:
            raise Unreachable("it is gone")

        port = await ports.address("there", connect)
        assert await ports.address("there", nowhere) == port  # opened once
        streams = [await dial(port) for _ in range(3)]
        assert list(await asyncio.gather(*map(echoed, streams))) == [NOISE] * 3
        assert len(places) == 3
        gone = await dial(await ports.address("gone", nowhere))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await gone.reader.readexactly(1)
        ports.close()
        with pytest.raises(OSError):
            await dial(port)
        server.close()

    run(body())


def test_no_more_ports_are_open_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ports, "MAX_PORTS", 2)

    async def body() -> None:
        server, address = await service()
        ports = LocalPorts()
        first, second = [await ports.address(place, lambda: dial(address)) for place in ("1", "2")]
        in_use = await dial(first)
        in_use.writer.write(b"x")
        await in_use.reader.readexactly(1)
        await ports.address("3", lambda: dial(address))
        with pytest.raises(OSError):  # the second, idle, made room
            await dial(second)
        in_use.abort()
        ports.close()
        server.close()

    run(body())


class Counting(RateLimiter):
    passed = 0

    async def take(self, size: int) -> None:
        self.passed += size
        await super().take(size)


def test_all_that_a_relay_passes_on_counts_against_its_rate() -> None:
    async def body() -> None:
        limiter = Counting(1e9)
        one, far = [Stream(*await asyncio.open_connection(sock=s)) for s in socket.socketpair()]
        other, end = [Stream(*await asyncio.open_connection(sock=s)) for s in socket.socketpair()]
        task = asyncio.create_task(splice(far, other, limiter))
        one.writer.write(NOISE)
        one.writer.write_eof()
        assert await end.reader.readexactly(len(NOISE)) == NOISE
        assert limiter.passed == len(NOISE)
        end.abort()
        one.abort()
        await task

    run(body())


def test_the_coordinator_is_told_where_who_comes_by_its_gateway_comes_from(tmp_path: Path) -> None:
    async def body() -> None:
        network, came = Network(), list[str]()

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.append(str(writer.get_extra_info("peername")).rpartition("/")[2].partition(",")[2])
            await echo(reader, writer)

        server = await asyncio.start_unix_server(meet, tmp_path / "gateway")
        asking, served = network.add(A, (R,)), network.add(B, (R,))
        network.add(R, streams=2)
        served.served[Service.COORDINATOR] = str(tmp_path / "gateway")
        network.hold(B, R)
        await until_held(served, 1)
        assert await echoed(await asking.reach(B, Service.COORDINATOR)) == NOISE
        network.walls = {(A, B)}
        assert await echoed(await asking.reach(B, Service.COORDINATOR)) == NOISE
        assert came == ["203.0.113.1,4001", "192.0.2.1.relayed,4001"]
        assert not [path for path in tmp_path.iterdir() if path.name != "gateway"]
        server.close()
        await network.close()

    run(body())


def test_a_relay_that_agrees_and_brings_nothing_is_tried_after_the_others() -> None:
    async def body() -> None:
        network, (server, address) = Network(), await service()
        asking, served = network.add(A, (R, S)), network.add(B, (R, S))
        served.served[Service.DATA] = address
        network.add(S, streams=4)
        network.walls = {(A, B)}

        class Liar(Relaying):
            async def accept(self, caller: Caller, stream: Stream) -> None:
                stream.writer.write(bytes([Answer.YES]))
                await stream.reader.read(-1)
                stream.writer.close()

        network.gateways[R] = Liar(network.nowhere, (), RelayLimits())
        network.hold(B, S)
        await until_held(served, 1)

        async def through() -> int:
            """Bytes that come back by a port, as a member uses it."""
            ports = LocalPorts()
            stream = await dial(await ports.address("b", lambda: asking.reach(B, Service.DATA)))
            stream.writer.write(NOISE)
            stream.writer.write_eof()
            back = len(await stream.reader.read(-1))
            stream.abort()
            ports.close()
            return back

        assert [await through() for _ in range(3)] == [0, len(NOISE), len(NOISE)]
        server.close()
        await network.close()

    run(body())


def test_relays_that_come_and_go_are_held_and_let_go() -> None:
    async def body() -> None:
        network = Network()
        gateway = network.add(B)
        for relay in (R, S):
            network.add(relay, streams=4)
        network.keep_holding(B)
        gateway.use([R])
        await until_held(gateway, 1)
        gateway.use([S, R])
        await until_held(gateway, 2)
        gateway.use([S])
        for stream in network.streams[:1]:  # R's
            stream.abort()
        while R in gateway.holding:
            await asyncio.sleep(0)
        assert gateway.holding == {S}
        await network.close()

    run(body())


def test_one_network_that_opens_streams_and_says_nothing_keeps_nobody_else_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaying, "HEADERS", StrangerLimits(8, 4, RateLimit(1e-9, 50)))
    monkeypatch.setattr(relaying, "MAX_STREAMS", 20)
    monkeypatch.setattr(relaying, "MAX_STREAMS_OF_NETWORK", 10)

    async def body() -> None:
        network, (server, address) = Network(), await service()
        asking, served = network.add(A), network.add(B)
        served.served[Service.DATA] = address
        idle = list[socket.socket]()
        for number in range(100):
            near, far = socket.socketpair()
            idle.append(near)
            flood = Caller(bytes([number]), f"198.51.100.{number}", 4001)  # of one network
            network._spawn(served.accept(flood, Stream(*await asyncio.open_connection(sock=far))))
            await asyncio.sleep(0)
        assert await echoed(await asking.reach(B, Service.DATA)) == NOISE
        for sock in idle:
            sock.close()
        server.close()
        await network.close()

    run(body())


def test_a_relay_whose_owner_wants_bytes_saved_passes_nothing_on_any_more() -> None:
    async def body() -> None:
        network, (server, address) = Network(), await service()
        asking, served, relay = network.add(A, (R, S)), network.add(B, (R, S)), network.add(R, streams=4)
        network.add(S, streams=4)
        served.served[Service.DATA] = address
        network.walls = {(A, B)}
        network.keep_holding(B)
        await until_held(served, 2)
        stream = await asking.reach(B, Service.DATA)
        stream.writer.write(b"x")
        assert await stream.reader.readexactly(1) == b"x" and relay.limiter.passed == 2
        relay.limit(0, 0.0)
        with pytest.raises((EOFError, ConnectionError)):
            await stream.reader.readexactly(1)
        assert await echoed(await asking.reach(B, Service.DATA)) == NOISE and relay.limiter.passed == 2
        while R in served.holding:
            await asyncio.sleep(0)
        server.close()
        await network.close()

    run(body())


@pytest.mark.long
def test_two_that_cannot_be_dialled_are_joined_by_a_hole_where_their_relay_observes_and_else_by_the_relay() -> (
    None
):
    async def body() -> None:
        network, (server, address) = Network(), await service()
        observer = await observe(("127.0.0.1", 0))
        asking, served, relay = network.add(A, (R,)), network.add(B, (R,)), network.add(R, streams=8)
        relay.observer = observer.sockets[0].getsockname()[1]
        for gateway in (asking, served):
            gateway.host_of = lambda relay: "127.0.0.1"
            gateway.may_punch = allowed(private=True)
        served.served[Service.DATA] = address
        network.walls = {(A, B), (B, A)}
        for peer in (A, B):
            network.hold(peer, R)
        await until_held(asking, 1)
        await until_held(served, 1)
        while not (asking._observers and served._observers):
            await asyncio.sleep(0)
        passed = relay.limiter.passed
        assert await echoed(await asking.reach(B, Service.DATA)) == NOISE
        assert asking.opened == {"direct": 0, "punched": 1, "relayed": 0}
        assert relay.limiter.passed - passed < 1000  # addresses and nonces
        served.may_punch = allowed(private=False)  # it would not dial this machine's addresses
        assert await echoed(await asking.reach(B, Service.DATA)) == NOISE
        assert await echoed(await asking.reach(B, Service.DATA)) == NOISE
        assert asking.opened == {"direct": 0, "punched": 1, "relayed": 2}
        observer.close()
        server.close()
        await network.close()

    run(body())
