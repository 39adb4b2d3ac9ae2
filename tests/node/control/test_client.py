"""The client against a coordinator of a few lines: what the pure classes decide happens on a real connection."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from atoll.comm.errors import Refused
from atoll.comm.ids import NodeId
from atoll.comm.invite import Invite
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import atoll_pb2_grpc as rpc
from atoll.comm.proto.packed_plan import pack_plan
from atoll.comm.roster import RosterMember
from atoll.coordinator.service.roster import Roster as Told
from atoll.node.control import client as control_client
from atoll.node.control import freshness
from atoll.node.control.client import ControlClient, NodeIdentity
from atoll.node.control.outbox import SessionLost

ADA = NodeId("n1")
Context = grpc.aio.ServicerContext[Any, Any]


class Coordinator(rpc.CoordinatorServicer):
    """Answers as it is set to, and remembers what it was told."""

    def __init__(self) -> None:
        self.lives = self.streams = 0
        self.rosters: list[bytes] = []  # the digest that each stream was opened by
        self.views: list[pb.View] = []  # of the next streams; where there are none, empty ones
        self.reports: list[pb.ReportRequest] = []
        self.failures: list[grpc.StatusCode] = []  # of the next reports of states
        self.answering = asyncio.Event()  # reports of states
        self.answering.set()
        self.ack = pb.Ack(known=True)
        self._reading: list[asyncio.Task[None]] = []

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        self.lives += 1
        return pb.JoinReply(session=f"secret.{self.lives}")

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.View]:
        self.streams += 1
        self.rosters.append(request.roster)
        view = self.views.pop(0) if self.views else pb.View()
        view.incarnation, view.version = 1, self.streams
        yield view
        await asyncio.Event().wait()  # and says no more

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.Ack:
        return self.ack

    async def Report(self, requests: AsyncIterator[pb.ReportRequest], context: Context) -> AsyncIterator[pb.Ack]:
        read = asyncio.Queue[pb.ReportRequest]()
        self._reading.append(asyncio.create_task(self._read(requests, read)))
        while True:
            request = await read.get()
            if request.HasField("state_reported"):
                await self.answering.wait()
                if self.failures:
                    status: int = self.failures.pop(0).value[0]
                    yield pb.Ack(status=status, reason="its disk is full")
                    continue
            yield self.ack

    async def _read(
        self, requests: AsyncIterator[pb.ReportRequest], read: asyncio.Queue[pb.ReportRequest]
    ) -> None:
        """Note the reports as they come, before those ahead of them are answered."""
        async for request in requests:
            self.reports.append(request)
            read.put_nowait(request)


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await body

    asyncio.run(bounded())


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Coordinator, str]]:
    """A coordinator, and its address."""
    server, coordinator = grpc.aio.server(), Coordinator()
    rpc.add_CoordinatorServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield coordinator, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[Coordinator, ControlClient]]:
    """A client that has joined a coordinator."""
    async with serving() as (coordinator, address):
        client = ControlClient(Invite(address, "reef", "token"))
        try:
            await client.join(NodeIdentity("ada", ":7"), 10.0)
            yield coordinator, client
        finally:
            await client.close()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def state(round_: int) -> pb.ReportRequest:
    return pb.ReportRequest(state_reported=pb.StateReported(round=round_))


def seal(chunk: int) -> pb.ReportRequest:
    return pb.ReportRequest(chunks_sealed=pb.ChunksSealed(seals=[pb.Seal(chunk=chunk)]))


def test_a_report_is_said_until_it_is_acknowledged_and_seals_do_not_wait_for_it() -> None:
    async def body() -> None:
        async with joined() as (coordinator, client):
            coordinator.failures = [grpc.StatusCode.UNAVAILABLE]
            coordinator.answering.clear()
            sending = asyncio.create_task(client.send_reports())
            client.report(state(1))
            client.report(state(2))
            client.report(seal(0), more=True)
            await until(lambda: len(coordinator.reports) == 2)
            client.report(seal(1), more=True)
            client.report(seal(2))
            coordinator.answering.set()
            await until(lambda: len(coordinator.reports) == 5)
            states = [r.state_reported.round for r in coordinator.reports if r.HasField("state_reported")]
            sealed = [[s.chunk for s in r.chunks_sealed.seals] for r in coordinator.reports]
            assert states == [1, 1, 2] and [chunks for chunks in sealed if chunks] == [[0], [1, 2]]
            assert {r.session for r in coordinator.reports} == {"secret.1"}
            sending.cancel()

    run(body())


def test_a_lost_session_is_told_and_the_next_one_begins_with_nothing() -> None:
    async def body() -> None:
        async with joined() as (coordinator, client):
            coordinator.ack = pb.Ack(known=False, reason="it was silent")
            client.report(state(1))
            client.report(state(2))
            with pytest.raises(SessionLost, match="it was silent"):
                await client.send_reports()
            with pytest.raises(SessionLost, match="it was silent"):
                await client.heartbeat(pb.HeartbeatRequest())
            coordinator.ack = pb.Ack(known=True)
            await client.join(NodeIdentity("ada", ":7"), 10.0)
            client.report(state(3))
            sending = asyncio.create_task(client.send_reports())
            await until(lambda: len(coordinator.reports) == 2)
            said = [(r.session, r.state_reported.round) for r in coordinator.reports]
            assert said == [("secret.1", 1), ("secret.2", 3)]
            sending.cancel()
            await client.join(NodeIdentity("ada", ":7"), 10.0)
            coordinator.failures = [grpc.StatusCode.FAILED_PRECONDITION]
            client.report(state(4))
            with pytest.raises(Refused, match="its disk is full"):
                await client.send_reports()

    run(body())


def test_a_report_of_the_next_session_waits_for_none_of_the_one_before() -> None:
    async def body() -> None:
        async with joined() as (coordinator, client):
            coordinator.answering.clear()
            client.report(state(1))
            sending = asyncio.create_task(client.send_reports())
            await until(lambda: len(coordinator.reports) == 1)
            sending.cancel()
            await client.join(NodeIdentity("ada", ":7"), 10.0)
            sending = asyncio.create_task(client.send_reports())
            client.report(seal(0))
            client.report(seal(1))
            await until(lambda: len(coordinator.reports) == 2)
            client.report(seal(2))
            await until(lambda: len(coordinator.reports) == 3)  # after the answer to the first
            sending.cancel()

    run(body())


def test_heartbeats_tell_how_far_the_clock_is_off_and_how_long_nobody_answered() -> None:
    async def body() -> None:
        async with joined() as (coordinator, client):
            began = time.monotonic()
            coordinator.ack = pb.Ack(known=True, now=time.time() - 3600)
            await client.heartbeat(pb.HeartbeatRequest())
            assert client.clock.seconds == pytest.approx(3600, abs=10)
            assert client.longest_outage(began, time.monotonic()) == 0
            client._note_silence("it is away")
            assert 0 < client.longest_outage(began, time.monotonic()) < 20, "it lasts"
            await client.heartbeat(pb.HeartbeatRequest())
            ended = time.monotonic()
            lasted = client.longest_outage(began, ended)
            assert 0 < lasted == client.longest_outage(began, ended + 60) <= ended - began
            assert client.longest_outage(ended, ended + 60) == 0

    run(body())


def test_a_stream_that_fell_behind_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freshness, "STALE_STREAM_SECONDS", 0.05)

    async def body() -> None:
        async with joined() as (coordinator, client):
            seen: list[int] = []

            async def watch() -> None:
                async for view in client.watch():
                    seen.append(view.version)

            watching = asyncio.create_task(watch())
            await until(lambda: seen == [1])
            coordinator.ack = pb.Ack(known=True, incarnation=1, version=2)
            while len(seen) < 2:
                await client.heartbeat(pb.HeartbeatRequest())
            assert seen == [1, 2] and coordinator.streams == 2
            watching.cancel()

    run(body())


def test_a_plan_that_goes_by_other_members_is_not_shown_and_all_of_the_roster_is_asked_for() -> None:
    async def body() -> None:
        async with joined() as (coordinator, client):
            here, there = (Told({ADA: RosterMember(address=f"{host}:7")}, 0, b"key") for host in "ab")
            plan = pb.Plan(round=3, members=[pb.PlanMember(node_id=ADA, address="b:7")])
            first = pb.View.FromString(here.encode(None))
            stale, whole = (pb.View.FromString(told.encode(None)) for told in (here, there))
            stale.packed_plan = whole.packed_plan = pack_plan(plan)
            coordinator.views = [first, stale, whole]
            views = client.watch()
            assert not (await anext(views)).HasField("plan")
            client._reopen_stream()
            seen = await anext(views)
            assert seen.plan == plan and client.roster.members == there.members
            assert coordinator.rosters == [b"", here.digest, b""]

    run(body())


def test_a_client_that_moves_goes_on_with_its_session_and_says_again_what_was_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_client, "CALL_SECONDS", 0.5)

    async def body() -> None:
        async with joined() as (before, client), serving() as (after, address):
            seen = list[int]()

            async def watch() -> None:
                async for view in client.watch():
                    seen.append(view.version)

            after.streams = 10
            tasks = [asyncio.create_task(work) for work in (watch(), client.send_reports())]
            before.answering.clear()
            client.report(state(1))
            await until(lambda: seen == [1] and len(before.reports) == 1)
            beating = asyncio.create_task(client.heartbeat(pb.HeartbeatRequest()))
            await client.move(address)
            client.report(state(2))
            await until(lambda: seen == [1, 11] and len(after.reports) == 2)
            said = [(r.session, r.state_reported.round) for r in after.reports]
            assert said == [("secret.1", 1), ("secret.1", 2)] and client.invite.address == address
            await beating
            await client.move(address)
            assert await client.heartbeat(pb.HeartbeatRequest())
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()

    run(body())
