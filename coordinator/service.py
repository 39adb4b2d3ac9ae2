"""The control plane over grpc.aio: turns calls into events and the state into each node's stream of views.

Refuses at the edge: wrong protocol, run, token or session, and anything out of bounds, with a sentence.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from math import isfinite
from urllib.parse import unquote

import grpc

from atoll.comm.config import to_json
from atoll.comm.errors import ConfigError, Refused
from atoll.comm.ids import NodeId
from atoll.comm.invite import join_host_port, split_host_port
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import atoll_pb2_grpc as rpc
from atoll.coordinator import events as ev
from atoll.coordinator.journal import Journal
from atoll.coordinator.kernel import Kernel
from atoll.coordinator.view import view

PROTOCOL = 1
DIGEST = 16  # bytes
MOST_LOSS = 1e6  # nats a token; sums of it stay finite
MOST_PARAMETERS = 1 << 42
Context = grpc.aio.ServicerContext[object, object]


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a heartbeat says beyond liveness: shown, never decided upon."""

    tokens_per_s: float
    loss: float
    bytes_up: int
    bytes_down: int
    rss_bytes: int


class Service(rpc.CoordinatorServicer):
    def __init__(self, kernel: Kernel, journal: Journal, run: str, data_key: bytes) -> None:
        self._kernel, self._journal, self._run, self._key = kernel, journal, run, data_key
        self._joining = asyncio.Lock()  # ids are given one at a time
        self._streams: dict[NodeId, int] = {}  # the number of each node's latest stream
        self.vitals: dict[NodeId, Vitals] = {}

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        if request.protocol != PROTOCOL:
            await self._refuse(
                context, f"you speak protocol {request.protocol}, this run {PROTOCOL}: update atoll"
            )
        if request.run != self._run:
            await self._refuse(
                context, f"the URL names run {request.run!r}, this coordinator serves {self._run!r}"
            )
        name = "".join(c for c in request.name if c.isprintable())[:64].strip()
        address = await self._address(request.address, context)
        async with self._joining:
            node, session = self._returning(request.session)
            if node is None:
                try:
                    await asyncio.to_thread(self._journal.redeem_token, request.token, time.time())
                except Refused as error:
                    await self._refuse(context, str(error), grpc.StatusCode.PERMISSION_DENIED)
                node, session = NodeId(f"n{self._kernel.state.members.next_id}"), secrets.token_hex(16)
            await self._kernel.submit(ev.Joined(node, name or node, address, session))
        config = self._kernel.state.config
        return pb.JoinReply(
            node_id=node,
            session=session,
            run=self._run,
            config=to_json(config),
            data_key=self._key,
            heartbeat=min(1.0, config.members.lease / 4),
            address=address,
        )

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.View]:
        node = await self._node(request.session, context)
        mine = self._streams[node] = self._streams.get(node, 0) + 1
        try:
            await self._kernel.submit(ev.Connected(node))
            version, last = -1, None
            while mine == self._streams[node]:
                version = await self._kernel.changed(version)
                now = view(self._kernel.state, node)
                if now != last:
                    last = now
                    yield _stamped(now, version)
                if node not in self._kernel.state.members.here:
                    return
        finally:
            if mine == self._streams[node]:
                self._kernel.post(ev.Disconnected(node))

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.Ack:
        node = self._kernel.member_of(request.session)
        if node is None:
            return self._unknown(request.session)
        self.vitals[node] = Vitals(
            request.tokens_per_s, request.loss, request.bytes_up, request.bytes_down, request.rss_bytes
        )
        await self._kernel.submit(ev.Heard(node, request.phase[:20], request.round, request.inner_step))
        return pb.Ack(known=True)

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.Ack:
        node = self._kernel.member_of(request.session)
        if node is None:
            return self._unknown(request.session)
        if request.fence.incarnation > self._kernel.state.incarnation:
            await self._refuse(context, "this coordinator is older than the one you spoke to")
        event = _event(node, request)
        if event is None:
            await self._refuse(context, "the report is empty or holds a number out of range")
        else:
            await self._kernel.submit(event)
        if self._kernel.member_of(request.session) is None and not isinstance(event, ev.Leaving):
            return self._unknown(request.session)
        return pb.Ack(known=True)

    def _returning(self, session: str) -> tuple[NodeId | None, str]:
        """The node that had this session before; it may come back without a token."""
        members = self._kernel.state.members
        for member in (*members.here.values(), *members.gone.values()):
            if session and member.session == session:
                return member.node, session
        return None, ""

    async def _node(self, session: str, context: Context) -> NodeId:
        node = self._kernel.member_of(session)
        if node is None:
            reason = self._unknown(session).reason
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
        assert node is not None
        return node

    def _unknown(self, session: str) -> pb.Ack:
        node, _ = self._returning(session)
        gone = self._kernel.state.members.gone.get(node) if node is not None else None
        return pb.Ack(known=False, reason=gone.reason if gone is not None else "the session is not a member's")

    async def _address(self, asked: str, context: Context) -> str:
        """The data-plane address; a missing host is the one the connection came from."""
        try:
            host, port = split_host_port(asked, "the data-plane address")
        except ConfigError as error:
            await self._refuse(context, str(error))
        if host not in ("", "0.0.0.0", "::"):
            return join_host_port(host, port)
        kind, _, peer = context.peer().partition(":")
        seen = unquote(peer).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else "127.0.0.1"
        return join_host_port(seen, port)

    @staticmethod
    async def _refuse(
        context: Context, sentence: str, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION
    ) -> None:
        await context.abort(code, sentence)


def _stamped(view_: pb.View, version: int) -> pb.View:
    stamped = pb.View()
    stamped.CopyFrom(view_)
    stamped.version = version
    return stamped


def _event(node: NodeId, request: pb.ReportRequest) -> ev.Event | None:
    """The report as an event; None if it makes no sense."""
    fence = request.fence
    match request.WhichOneof("report"):
        case "layout" if 0 < request.layout.numel <= MOST_PARAMETERS and len(request.layout.digest) == DIGEST:
            return ev.LayoutKnown(node, request.layout.numel, request.layout.digest)
        case "state_at" if len(request.state_at.digest) == DIGEST:
            return ev.StateAt(node, request.state_at.round, request.state_at.digest)
        case "ready" if abs(request.ready.loss) <= MOST_LOSS and isfinite(request.ready.delta_norm):
            r = request.ready
            return ev.BecameReady(
                node, fence.round, r.steps, r.tokens, r.samples, r.loss, r.delta_norm, r.first_sample
            )
        case "seals" if all(len(s.digest) == DIGEST for s in request.seals.seals):
            seals = tuple((s.chunk, s.digest) for s in request.seals.seals)
            return ev.Sealed(node, fence.round, fence.attempt, seals)
        case "held" if len(request.held.digest) == DIGEST:
            h = request.held
            return ev.Held(node, fence.round, fence.attempt, h.digest, h.bytes_up, h.bytes_down)
        case "evaluated" if abs(request.evaluated.loss) <= MOST_LOSS:
            return ev.Evaluated(node, request.evaluated.round, request.evaluated.loss)
        case "unreachable":
            lost = request.unreachable
            return ev.PeerLost(node, NodeId(lost.node_id), fence.round, fence.attempt, lost.reason[:200])
        case "leave":
            return ev.Leaving(node, request.leave.reason[:200])
        case _:
            return None
