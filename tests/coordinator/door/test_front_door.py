"""The door's process before a service of the test's own: what it lets through arrives whole, and what it keeps out
costs the service nothing."""

import asyncio
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest
from few_descriptors import FEW, few_descriptors

from atoll.comm.descriptors import MAX_DESCRIPTORS
from atoll.comm.errors import ResourceError
from atoll.comm.ids import NodeId
from atoll.comm.rate_limits import RateLimit
from atoll.comm.strangers import StrangerLimits
from atoll.coordinator.door.front_door import FrontDoor, Origin, bound_address, listening_socket
from atoll.coordinator.door.ports import CONTROL, PAGE, PortLimits

SOON = 60.0  # seconds
OPEN = replace(CONTROL, address_bytes=RateLimit(1e9, 1 << 30), stranger_bytes=RateLimit(1e9, 1 << 30))
WIDE = replace(OPEN, connection_bytes=1 << 30)


@dataclass
class Service:
    """What listens behind the door: it sends everything back, and knows who came."""

    door: FrontDoor
    port: int
    came: list[str] = field(default_factory=list)  # peers, in gRPC's words

    def dial(self, source: str = "127.0.0.2") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), SOON, (source, 0))
        sock.setblocking(False)
        return sock

    async def said(self, sock: socket.socket, words: bytes = b"hello") -> bytes:
        """What the service sends back; empty: the connection was closed."""
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            await loop.sock_sendall(sock, words)
            return await asyncio.wait_for(loop.sock_recv(sock, len(words)), SOON)
        return b""

    async def met(self, source: str = "127.0.0.2") -> tuple[socket.socket, Origin]:
        """A connection, and its origin as the service sees it."""
        sock = self.dial(source)
        assert await self.said(sock) == b"hello"
        return sock, self.door.origin(self.came[-1])


@asynccontextmanager
async def behind(limits: PortLimits) -> AsyncIterator[Service]:
    door = FrontDoor()
    sock = listening_socket("127.0.0.1:0", "--listen")
    service = Service(door, sock.getsockname()[1])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        service.came.append(f"unix:{peer if isinstance(peer, str) else ''}")
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, door.open(sock, limits))
    running = asyncio.create_task(door.run())
    try:
        async with asyncio.timeout(SOON):
            yield service
    finally:
        server.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        door.close()


def run(story: Callable[[Service], Awaitable[None]], limits: PortLimits) -> None:
    async def told() -> None:
        async with behind(limits) as service:
            await story(service)

    asyncio.run(told())


def test_a_door_raises_its_limit_on_descriptors_by_itself() -> None:
    wanted = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], MAX_DESCRIPTORS)
    assert wanted > FEW, "this machine's hard limit shows nothing"

    async def story(service: Service) -> None:
        await service.met()  # it is there
        (door,) = service.door.process_ids
        assert resource.prlimit(door, resource.RLIMIT_NOFILE)[0] == wanted

    with few_descriptors():
        run(story, OPEN)


async def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


async def ends(sock: socket.socket) -> None:
    """Return when the other side has closed, or reset."""
    with suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
            pass


def test_what_goes_through_arrives_whole_both_ways_though_each_side_reads_late() -> None:
    sent = os.urandom(5 << 20)

    async def story(service: Service) -> None:
        loop, got = asyncio.get_running_loop(), bytearray()
        sock = service.dial()

        async def send() -> None:
            await loop.sock_sendall(sock, sent)
            sock.shutdown(socket.SHUT_WR)  # and still reads

        sending = asyncio.create_task(send())
        await asyncio.sleep(0.1)  # all buffers are full
        while data := await loop.sock_recv(sock, 1 << 20):
            got += data
        await sending
        assert bytes(got) == sent
        sock.close()

    run(story, WIDE)


def test_the_service_knows_where_a_connection_came_from() -> None:
    async def story(service: Service) -> None:
        sock, origin = await service.met("127.0.0.9")
        assert origin.peer == f"ipv4:127.0.0.9:{sock.getsockname()[1]}" and origin.number
        sock.close()

    run(story, CONTROL)


def test_a_call_past_the_door_or_without_one_has_an_origin_too() -> None:
    door = FrontDoor()
    assert door.origin("unix:") == Origin("", "127.0.0.1", "0")
    assert door.origin("ipv4:192.0.2.7:50").peer == "ipv4:192.0.2.7:50"
    assert door.origin("ipv6:%5B2001:db8::1%5D:50").peer == "ipv6:[2001:db8::1]:50"
    six = door.origin("unix:/tmp/atoll-x/1.17,2001:db8::1,50")
    assert six == Origin("1.17", "2001:db8::1", "50") and six.peer == "ipv6:[2001:db8::1]:50"
    door.prove(Origin("", "127.0.0.1", "0"), NodeId("n1"))
    assert not door.nodes
    door.close()


@pytest.mark.parametrize("limits", [CONTROL, PAGE])
def test_whoever_trickles_or_says_nothing_is_put_out_at_the_deadline(limits: PortLimits) -> None:
    async def story(service: Service) -> None:
        silent, slow = service.dial(), service.dial()
        over = asyncio.gather(ends(silent), ends(slow))
        while not over.done():
            with suppress(ConnectionError):
                slow.send(b"x")
            await asyncio.sleep(0.02)
        silent.close()
        slow.close()

    run(story, replace(limits, deadline=0.3))


def test_a_stranger_that_sends_more_than_it_may_is_closed_and_a_member_is_not() -> None:
    async def story(service: Service) -> None:
        stranger, _ = await service.met()
        member, origin = await service.met()
        service.door.prove(origin, NodeId("n1"))
        loop, words = asyncio.get_running_loop(), bytes(1 << 16)
        with pytest.raises(ConnectionError):
            while True:
                await loop.sock_sendall(stranger, words)
        for _ in range(5):
            await loop.sock_sendall(member, words)
            left = len(words)
            while left:
                left -= len(await loop.sock_recv(member, left))
        stranger.close()
        member.close()

    run(story, OPEN)


def test_strangers_bytes_wait_for_their_address_and_a_proof_gives_them_back() -> None:
    limits = replace(CONTROL, address_bytes=RateLimit(1e-3, 100), connection_bytes=1 << 20)

    async def story(service: Service) -> None:
        first, origin = await service.met()
        assert await service.said(first, bytes(96)) == bytes(96)  # that was all the address has for now
        waiting = asyncio.create_task(service.said(first, b"later"))
        other, _ = await service.met("127.0.0.3")  # another one has its own
        await asyncio.sleep(0.2)
        assert not waiting.done()
        service.door.prove(origin, NodeId("n1"))
        assert await waiting == b"later"
        second, _ = await service.met()
        for sock in (first, second, other):
            sock.close()

    run(story, limits)


def test_addresses_share_the_places_and_members_have_none_of_them() -> None:
    limits = replace(CONTROL, strangers=StrangerLimits(4, 4, RateLimit(1e-3, 100)))

    async def story(service: Service) -> None:
        members = list[socket.socket]()
        for i in range(6):
            sock, origin = await service.met()
            service.door.prove(origin, NodeId(f"n{i}"))
            members.append(sock)
        quiet, _ = await service.met("127.0.0.3")
        crowd = [service.dial("127.0.0.4") for _ in range(20)]
        await asyncio.gather(*(ends(sock) for sock in crowd[:16]))
        for sock in (*members, quiet, crowd[-1]):
            assert await service.said(sock, b"here") == b"here"
        for sock in (*members, quiet, *crowd):
            sock.close()

    run(story, limits)


def test_where_members_came_from_places_are_held() -> None:
    none = StrangerLimits(4, 4, RateLimit(1e-3, 1))

    async def story(service: Service) -> None:
        sock, origin = await service.met()
        service.door.prove(origin, NodeId("n1"))
        again, _ = await service.met()  # as one that returns
        stranger, _ = await service.met("127.0.0.3")
        with suppress(ConnectionError):
            refused = service.dial("127.0.0.3")
            assert await service.said(refused) == b""
            refused.close()
        for each in (sock, again, stranger):
            each.close()

    run(story, replace(CONTROL, strangers=none))


def test_what_a_member_sends_too_fast_is_read_later() -> None:
    limits = replace(OPEN, member_bytes=RateLimit(1_000_000, 10_000))

    async def story(service: Service) -> None:
        sock, origin = await service.met()
        service.door.prove(origin, NodeId("n1"))
        began, left, loop = time.monotonic(), 400_000, asyncio.get_running_loop()
        sending = asyncio.create_task(loop.sock_sendall(sock, bytes(left)))
        while left:
            left -= len(await loop.sock_recv(sock, left))
        await sending
        assert time.monotonic() - began > 0.2
        sock.close()

    run(story, limits)


def test_connections_that_end_are_forgotten_on_both_sides() -> None:
    async def story(service: Service) -> None:
        socks = list[socket.socket]()
        for i in range(5):
            sock, origin = await service.met()
            service.door.prove(origin, NodeId(f"n{i}"))
            socks.append(sock)
        assert len(service.door.nodes) == 5
        [process] = service.door.process_ids
        most = len(os.listdir(f"/proc/{process}/fd"))
        for sock in socks:
            sock.close()
        await until(lambda: not service.door.nodes)
        await until(lambda: len(os.listdir(f"/proc/{process}/fd")) == most - 10)

    run(story, CONTROL)


def test_a_port_that_is_taken_or_not_there_is_said() -> None:
    with listening_socket("127.0.0.1:0", "--listen") as sock:
        with pytest.raises(ResourceError, match="is in use: give another with --listen"):
            listening_socket(bound_address(sock), "--listen")
    with pytest.raises(ResourceError, match="cannot be used"):
        listening_socket("192.0.2.1:0", "--http")


def test_the_doors_process_ends_with_its_service() -> None:
    async def story() -> None:
        process: int | None = None
        async with behind(CONTROL) as service:
            sock, _ = await service.met()
            [process] = service.door.process_ids
            sock.close()
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)

    asyncio.run(story())


def test_bytes_that_the_service_wants_are_let_pass_and_those_behind_them_count_again() -> None:
    small = replace(OPEN, connection_bytes=1000)

    async def story(service: Service) -> None:
        sock, origin = await service.met()
        service.door.allow(origin, 5000)
        assert await service.said(sock, b"?" * 900) == b"?" * 900  # by then the door has heard it
        for _ in range(4):
            assert await service.said(sock, b"?" * 900) == b"?" * 900
        assert await service.said(sock, b"?" * 1600) == b""

    run(story, small)


def test_what_is_left_of_the_bytes_that_were_wanted_can_be_taken_back() -> None:
    small = replace(OPEN, connection_bytes=1000)

    async def story(service: Service) -> None:
        sock, origin = await service.met()
        service.door.allow(origin, 1 << 20)
        service.door.allow(origin, 0)
        assert await service.said(sock, b"?" * 500) == b"?" * 500
        assert await service.said(sock, b"?" * 600) == b""

    run(story, small)


def test_who_comes_by_this_machines_gateway_comes_from_where_that_says() -> None:
    async def told() -> None:
        door, came = FrontDoor(), list[str]()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.append(f"unix:{writer.get_extra_info('peername')}")
            writer.write(await reader.read(5))
            writer.close()

        sock = listening_socket("127.0.0.1:0", "--listen")
        path = door.open(sock, WIDE)
        entrance = door.open_to_gateway(path, replace(WIDE, strangers=StrangerLimits(9, 9, RateLimit(1e-9, 2))))
        server = await asyncio.start_unix_server(answer, path)
        running = asyncio.create_task(door.run())

        async def said(host: str) -> bytes:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            client.setblocking(False)
            client.bind(f"{os.path.dirname(entrance)}/g1,{host},4700")
            os.unlink(client.getsockname())
            client.connect(entrance)
            loop = asyncio.get_running_loop()
            with suppress(ConnectionError), client:
                await loop.sock_sendall(client, b"hello")
                return await asyncio.wait_for(loop.sock_recv(client, 5), SOON)
            return b""

        try:
            async with asyncio.timeout(SOON):
                hosts = ("203.0.113.7", "2001:db8::7", "203.0.113.9.relayed")
                for host in hosts:
                    assert await said(host) == b"hello"
                origins = [door.origin(peer) for peer in came]
                assert [origin.host for origin in origins] == list(hosts) and origins[0].port == "4700"
                assert await said(hosts[0]) == b"hello" and await said(hosts[0]) == b""  # one's share is its own
                assert await said("198.51.100.1") == b"hello"
        finally:
            server.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            door.close()

    asyncio.run(told())
