"""Nodes by hand before a real coordinator: a gRPC server in this process, its journal on a real disk."""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from atoll.comm.config.run import MembersConfig, ReduceConfig, RoundsConfig, RunConfig
from atoll.comm.config.security import SecurityConfig
from atoll.comm.digest import root
from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import atoll_pb2_grpc as pb_grpc
from atoll.comm.proto.join_proof import prove_join
from atoll.comm.proto.packed_plan import unpack_plan
from atoll.comm.proto.report_stream import ReportStream
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport.certificates import NAME, Certificate
from atoll.comm.transport.frames import PROTOCOL
from atoll.coordinator.monitor.http import app
from atoll.coordinator.service.control_plane import ControlPlane
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.run_records import RunRecords
from atoll.coordinator.state_machine.events import Effect, Publish
from atoll.node.control.roster import Roster

Code = grpc.StatusCode
CONFIG = RunConfig(
    name="reef",
    rounds=RoundsConfig(inner_steps=4, grace=1.0),
    members=MembersConfig(start=2, minimum=2, lease=60.0, reconnect=60.0),
    reduce=ReduceConfig(block=1, chunk=10),
    security=SecurityConfig(own_models=True),  # forty parameters
)
SOON = 60.0  # seconds; nothing here takes longer than a moment on an idle machine


def digest(word: object) -> bytes:
    return hashlib.blake2b(str(word).encode(), digest_size=16).digest()


class Node:
    """What a node daemon says and hears, by hand."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self.stub, self.token = pb_grpc.CoordinatorStub(channel), token
        self.session, self.node, self.seen = "", NodeId(""), list[pb.View]()
        self.key, self.roster = PrivateKey.generate(), Roster()
        self._watching: asyncio.Task[None] | None = None
        self._reports: ReportStream | None = None

    async def join(self, session: str = "", **changes: Any) -> pb.JoinReply:
        fields: dict[str, Any] = {
            "protocol": PROTOCOL,
            "run": "reef",
            "token": self.token,
            "name": "ada",
            "address": ":7",
        } | changes
        request = pb.JoinRequest(session=session, **fields)
        prove_join(request, self.key)
        reply = await self.stub.Join(request, timeout=SOON)
        self.session, self.node = reply.session, NodeId(reply.node_id)
        return reply

    async def report(self, fence: pb.Fence | None = None, **report: Any) -> pb.Ack:
        request = pb.ReportRequest(session=self.session, fence=fence, **report)
        return await self.send(request)

    async def send(self, request: pb.ReportRequest) -> pb.Ack:
        if self._reports is None or self._reports.ended:
            self._reports = ReportStream(self.stub)
        return await self._reports.send(request, SOON)

    async def heartbeat(self, **fields: Any) -> pb.Ack:
        return await self.stub.Heartbeat(pb.HeartbeatRequest(session=self.session, **fields), timeout=SOON)

    def watch(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            asked = pb.WatchRequest(session=self.session, roster=self.roster.open_stream())
            async for view in self.stub.Watch(asked):
                self.roster.read(view)
                unpack_plan(view, self.roster.members)
                self.seen.append(view)

    async def sees(self, holds: Callable[[pb.View], object]) -> pb.View:
        """The latest view, once it is as told."""
        await until(lambda: self.seen and holds(self.seen[-1]))
        return self.seen[-1]

    async def stream_ends(self) -> None:
        assert self._watching is not None
        await asyncio.wait_for(self._watching, SOON)

    async def at_work(self, **changes: Any) -> None:
        """Join, and get as far as a member can alone: it has state_0."""
        await self.join(**changes)
        self.watch()
        await self.report(layout_reported=pb.LayoutReported(numel=40, digest=digest("layout")))
        await self.sees(lambda v: v.initialise or v.has_state)
        await self.report(state_reported=pb.StateReported(round=0, digest=digest("state 0")))

    async def ready(self, round_: int) -> None:
        view = await self.sees(lambda v: v.closing)
        ready = pb.ContributionReady(steps=4, samples=2, loss=2.0, delta_norm=1.0, front=view.train.lease[0].first)
        await self.report(pb.Fence(round=round_), contribution_ready=ready)

    async def reduce(self) -> None:
        """Seal what it owns and hold everything."""
        plan = (await self.sees(lambda v: v.HasField("plan"))).plan
        fence = pb.Fence(incarnation=plan.incarnation, epoch=plan.epoch, round=plan.round, attempt=plan.attempt)
        me = [member.node_id for member in plan.members].index(self.node)
        seals = [
            pb.Seal(
                chunk=c, digest=digest(c), inputs=b"\xff", norms=[0.0] * sum(m.weight > 0 for m in plan.members)
            )
            for c, owner in enumerate(plan.owners)
            if owner == me
        ]
        await self.report(fence, chunks_sealed=pb.ChunksSealed(seals=seals))
        sealed = root([digest(c) for c in range(len(plan.owners))])
        await self.report(fence, reduce_complete=pb.ReduceComplete(digest=sealed, bytes_up=1, bytes_down=1))


async def commit(*nodes: Node, round_: int) -> None:
    """These nodes are the round's, and do all that its commit takes."""
    for node in nodes:
        await node.report(pb.Fence(round=round_), steps_reached=pb.StepsReached())
    for node in nodes:
        await node.ready(round_)
    for node in nodes:
        await node.reduce()
    for node in nodes:
        await node.sees(lambda v: v.committed == round_)


class Coordinator:
    def __init__(
        self, plane: ControlPlane, journal: Journal, folder: Path, address: str, tls: Certificate | None
    ) -> None:
        self.plane, self.journal, self.address = plane, journal, address
        self.records = RunRecords(journal, folder, "reef")
        self.event_loop = plane.event_loop
        self.channel = grpc.aio.insecure_channel(address) if tls is None else trusting(address, tls)
        self.token = journal.issue_token("test", 100, math.inf)

    def take(self, effect: Effect) -> None:
        if isinstance(effect, Publish):
            self.records.add(effect.record)

    def node(self) -> Node:
        return Node(self.channel, self.token)

    async def pair(self) -> tuple[Node, Node]:
        """Two nodes that train round 1."""
        ada, bo = self.node(), self.node()
        await ada.at_work()
        await bo.at_work()
        for node in (ada, bo):
            await node.sees(lambda v: v.train.round == 1)
        return ada, bo


def trusting(address: str, certificate: Certificate) -> grpc.aio.Channel:
    options = [("grpc.ssl_target_name_override", NAME)]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(certificate.body), options)


@asynccontextmanager
async def coordinator(
    folder: Path, config: RunConfig = CONFIG, tls: Certificate | None = None, private: bool = True
) -> AsyncIterator[Coordinator]:
    journal = Journal(folder)
    plane = ControlPlane(config, journal, lambda effect: here.take(effect), tls, private)
    port, lives = plane.listen("127.0.0.1:0"), plane.event_loop.state.incarnation
    running = asyncio.create_task(plane.run())
    here = Coordinator(plane, journal, folder, f"127.0.0.1:{port}", tls)
    try:
        await until(lambda: plane.event_loop.state.incarnation > lives)
        yield here
    finally:
        await here.channel.close()
        plane.stop()
        await running
        journal.close()


async def until(holds: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + SOON
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


async def refused(call: Awaitable[object], code: grpc.StatusCode) -> str:
    """What a call that must fail with `code` was told."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is code, error.value
    return error.value.details() or ""


async def healthy(coordinator: Coordinator, name: str = "") -> bool:
    stub: Any = health_pb2_grpc.HealthStub(coordinator.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=SOON)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def get(coordinator: Coordinator, path: str) -> tuple[int, bytes]:
    """GET from the page, without a socket."""
    status, body = 0, b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status, body
        status, body = message.get("status", status), body + message.get("body", b"")

    path, _, query = path.partition("?")
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": []}
    await app(coordinator.event_loop, coordinator.records, "reef")(scope, receive, send)
    return status, body
