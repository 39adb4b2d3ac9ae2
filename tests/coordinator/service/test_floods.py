"""Strangers at the public ports with as much as they can send: members notice nothing of it.

Strangers come from 127.0.0.2 and so on, where members come from 127.0.0.1; the numbers are small, so that a test
takes a moment. `test_flood` has the same for a minute, at full rate.
"""

import asyncio
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from control_nodes import CONFIG, SOON, Code, Coordinator, Node, coordinator, until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from atoll.comm.config.run import MembersConfig
from atoll.comm.descriptors import raise_limit
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.rate_limits import RateLimit
from atoll.comm.replace import replace
from atoll.comm.strangers import StrangerLimits
from atoll.comm.transport.certificates import load_or_make
from atoll.coordinator.door.ports import CONTROL
from atoll.coordinator.service import control_plane, health, rpc

QUICK = replace(CONTROL, deadline=0.3)
STRANGER = "127.0.0.2"


def dialled(c: Coordinator, source: str = STRANGER) -> socket.socket:
    """A connection to the control port from another address of this machine."""
    host, port = c.address.split(":")
    return socket.create_connection((host, int(port)), SOON, (source, 0))


@contextmanager
def idle(c: Coordinator, count: int, source: str = STRANGER) -> Iterator[list[socket.socket]]:
    """Connections that say nothing; some may have been refused."""
    with ExitStack() as opened:
        found = list[socket.socket]()
        for _ in range(count):
            with suppress(ConnectionError):
                found.append(opened.enter_context(dialled(c, source)))
        yield found


def own_channel(c: Coordinator) -> grpc.aio.Channel:
    """A connection of its own."""
    return grpc.aio.insecure_channel(c.address, [("grpc.use_local_subchannel_pool", 1)])


async def ended(sock: socket.socket) -> bytes:
    """What still came until the other side closed, or reset."""
    sock.setblocking(False)
    got, loop = b"", asyncio.get_running_loop()
    async with asyncio.timeout(SOON):
        with suppress(ConnectionError):
            while data := await loop.sock_recv(sock, 1 << 16):
                got += data
    return got


def descriptors(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def test_streams_of_health_are_not_to_be_had(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join()
            async with own_channel(c) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                streams = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(500)]
                codes = {await asyncio.wait_for(stream.code(), SOON) for stream in streams}
                assert codes <= {Code.UNIMPLEMENTED, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE}
            assert (await ada.heartbeat()).known

    asyncio.run(story())


def test_idle_connections_take_few_descriptors_and_no_members_place(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join()
            before = descriptors(os.getpid())
            with idle(c, 60), idle(c, 60, "127.0.0.3"), idle(c, 60, "127.0.0.4") as strangers:
                bo = Node(own_channel(c), c.token)
                await bo.join()
                assert (await ada.heartbeat()).known and (await bo.heartbeat()).known
                places = CONTROL.strangers.places
                assert descriptors(os.getpid()) - before < 180 + places + 10  # its own 180, and the door's
                [door] = c.plane.door.process_ids
                assert descriptors(door) < 2 * places + 30
                del strangers

    asyncio.run(story())


def test_1100_idle_connections_keep_nobody_from_joining(tmp_path: Path) -> None:
    """More than the 1,024 descriptors that most shells give a process."""
    raise_limit()  # of this process, which has the other ends, too

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, before = c.node(), descriptors(os.getpid())
            await ada.join()
            with ExitStack() as opened:
                strangers = [s for i in range(11) for s in opened.enter_context(idle(c, 100, f"127.0.0.{2 + i}"))]
                assert len(strangers) > 1024
                for _ in range(3):
                    async with own_channel(c) as channel:
                        await Node(channel, c.token).join()
                assert (await ada.heartbeat()).known
                assert descriptors(os.getpid()) - before < len(strangers) + CONTROL.strangers.places + 10

    asyncio.run(story())


@pytest.mark.parametrize("encrypted", [False, True])
def test_who_trickles_is_put_out_at_the_deadline(
    encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "CONTROL", QUICK)
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" * 100
    if encrypted:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(incoming, outgoing, server_hostname="atoll")
        with suppress(ssl.SSLWantReadError):
            session.do_handshake()
        hello = outgoing.read()

    async def story() -> None:
        async with coordinator(tmp_path, tls=load_or_make(tmp_path) if encrypted else None) as c:
            with dialled(c) as sock:
                began, over = time.monotonic(), asyncio.create_task(ended(sock))
                for byte in hello:
                    with suppress(ConnectionError):
                        sock.send(bytes([byte]))
                    if over.done():
                        break
                    await asyncio.sleep(0.02)
                await over
                assert QUICK.deadline * 0.9 < time.monotonic() - began < len(hello) * 0.02

    asyncio.run(story())


def test_more_than_a_join_is_not_read_from_a_stranger(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            async with own_channel(c) as channel:
                stranger = Node(channel, "wrong")
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stranger.join(name="x" * (3 << 20))
                assert error.value.code() is Code.UNAVAILABLE  # it was cut off before all of it was read
            async with own_channel(c) as channel:
                ada = Node(channel, c.token)
                await ada.join()
                report = pb.LayoutReported(numel=40, digest=b"x" * (3 << 20))  # a member may
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await ada.report(layout_reported=report)
                assert error.value.code() is Code.INVALID_ARGUMENT

    asyncio.run(story())


def test_an_address_that_calls_too_often_is_shut_out_for_a_while_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "STRANGER_LIMIT", RateLimit(1e-3, 5))

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join()
            async with own_channel(c) as channel:
                stranger = Node(channel, "wrong")
                codes = list[grpc.StatusCode]()
                while Code.UNAVAILABLE not in codes:
                    with pytest.raises(grpc.aio.AioRpcError) as error:
                        await stranger.join()
                    codes.append(error.value.code())
                assert codes[:6] == [Code.PERMISSION_DENIED] * 5 + [Code.RESOURCE_EXHAUSTED]
            assert (await ada.heartbeat()).known  # from the same address, over a connection that is proven
            with idle(c, 1, "127.0.0.1") as refused:
                assert [await ended(sock) for sock in refused] in ([b""], [])
            with dialled(c) as sock:  # another address
                sock.setblocking(False)
                assert await asyncio.get_running_loop().sock_recv(sock, 9)  # the service's settings

    asyncio.run(story())


def test_one_member_has_few_connections(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join()
            channels = [own_channel(c) for _ in range(6)]
            for channel in channels:
                twin = Node(channel, c.token)
                twin.session = ada.session
                assert (await twin.heartbeat()).known
            await until(lambda: len(c.plane.door._owners) == CONTROL.member_connections)
            for channel in channels:
                await channel.close()
            await until(lambda: not c.plane.door._owners)

    asyncio.run(story())


def test_who_is_no_member_any_more_is_a_stranger_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "CONTROL", QUICK)

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            await c.node().join()
            async with own_channel(c) as channel:
                ada = Node(channel, c.token)
                await ada.join()
                assert c.plane.door.nodes == {"n1", "n2"}
                assert (await ada.report(leave=pb.Leave(reason="done"))).known
                assert c.plane.door.nodes == {"n1"}
                state = channel.get_state()
                while state is grpc.ChannelConnectivity.READY:
                    await asyncio.wait_for(channel.wait_for_state_change(state), SOON)
                    state = channel.get_state()

    asyncio.run(story())


def test_who_showed_a_token_has_time_until_the_journal_took_its_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_plane, "CONTROL", QUICK)

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada = c.node()
            async with c.plane._service._joining:
                joining = asyncio.create_task(ada.join())
                await asyncio.sleep(3 * QUICK.deadline)
                assert not joining.done()
            await joining

    asyncio.run(story())


@pytest.mark.long
def test_another_address_joins_while_one_takes_all_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(CONTROL, strangers=StrangerLimits(8, 4, RateLimit(1e-3, 1000)))
    monkeypatch.setattr(control_plane, "CONTROL", limits)

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            flooding, opened = True, 0

            async def flood(source: str) -> None:
                nonlocal opened
                while flooding:
                    with idle(c, 20, source):
                        opened += 20
                        await asyncio.sleep(0)

            floods = [asyncio.create_task(flood(f"127.0.0.{i}")) for i in (2, 3)]
            for _ in range(3):
                async with own_channel(c) as channel:
                    await Node(channel, c.token).join()
            flooding = False
            await asyncio.gather(*floods)
            assert opened >= 40

    asyncio.run(story())


def test_when_the_doors_process_ends_another_one_opens_and_nobody_is_lost(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = await c.pair()
            [door] = c.plane.door.process_ids
            os.kill(door, signal.SIGKILL)
            await until(lambda: c.plane.door.process_ids not in ((), (door,)))
            for node in (ada, bo):
                call = node.stub.Heartbeat(
                    pb.HeartbeatRequest(session=node.session), timeout=SOON, wait_for_ready=True
                )
                assert (await call).known
            assert len(c.event_loop.state.members.here) == 2

    asyncio.run(story())


def test_nobody_is_judged_while_the_port_answers_no_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_plane, "MAX_DOOR_SILENCE", 0.4)
    monkeypatch.setattr("atoll.coordinator.door.front_door.PING_INTERVAL", 0.1)
    monkeypatch.setattr("atoll.coordinator.state_machine.members.RECONNECT_GRACE_SECONDS", 1.0)
    config = replace(CONFIG, members=MembersConfig(start=2, minimum=2, lease=1.2, reconnect=60.0))

    async def story() -> None:
        async with coordinator(tmp_path, config) as c:
            ada = c.node()
            await ada.join()
            await until(lambda: c.plane.door._heard_at is not None)
            members = c.event_loop.state.members
            [door] = c.plane.door.process_ids
            os.kill(door, signal.SIGSTOP)  # its members can say nothing
            try:
                await until(lambda: c.event_loop.refusing())
                since = time.monotonic()
                await until(lambda: time.monotonic() - since > 3 * config.members.lease)
                members = c.event_loop.state.members
                assert ada.node in members.here and members.here[ada.node].suspected is None
            finally:
                os.kill(door, signal.SIGCONT)
            assert (await ada.heartbeat()).known
            await until(lambda: ada.node not in c.event_loop.state.members.here)  # now it is its own silence

    asyncio.run(story())


def test_calls_that_the_service_does_not_answer_are_noticed_by_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("PROBE_INTERVAL", 0.05), ("PROBE_TIMEOUT", 0.1), ("MAX_PROBE_SILENCE", 0.5)):
        monkeypatch.setattr(health, name, seconds)

    async def story() -> None:
        async with coordinator(tmp_path, tls=load_or_make(tmp_path)) as c:
            guard, answered, stuck = c.plane.health._guard, asyncio.Event(), asyncio.Event()

            async def hang(context: Any) -> None:
                stuck.set()
                await answered.wait()

            async def note(context: Any) -> None:
                answered.set()

            c.plane.health._guard = note
            await asyncio.wait_for(answered.wait(), SOON)
            assert not c.event_loop.refusing()
            answered.clear()
            c.plane.health._guard = hang
            await asyncio.wait_for(stuck.wait(), SOON)
            await until(lambda: c.event_loop.refusing())
            c.plane.health._guard = guard
            answered.set()
            await until(lambda: not c.event_loop.refusing())

    asyncio.run(story())
