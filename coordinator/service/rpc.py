"""The control plane over grpc.aio: turns calls into events, and the streams of views into streams of bytes.

Refuses at the edge, with a sentence: wrong protocol, run, token or session, what is out of bounds, what comes too
often. Every call but the streams, and each report, ends within `CALL_TIMEOUT`, whatever deadline it came with.

Who speaks under a session is `sessions`' to say: its secret brings a node back under its id without a token. A
node may choose its secret itself and send it with its first join: should the answer be lost, the same join brings
it back as the same node.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

import grpc

from atoll.comm.addresses import OwnNetwork, resolve
from atoll.comm.config.outer import MergeName
from atoll.comm.config.run import MembersConfig, to_json
from atoll.comm.errors import AtollError, ConfigError, Refused, RefusedForNow
from atoll.comm.ids import NodeId, Pin, PublicKey
from atoll.comm.invite import join_host_port, split_host_port
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import checkup_pb2 as cp
from atoll.comm.rate_limits import RateLimit, TokenBuckets
from atoll.comm.strangers import network_of
from atoll.comm.transport.frames import PROTOCOL
from atoll.coordinator.door.front_door import FrontDoor, Origin
from atoll.coordinator.service import validation
from atoll.coordinator.service.data_keys import DataKeys
from atoll.coordinator.service.event_loop import STOPPING, CoordinatorStopping, EventLoop
from atoll.coordinator.service.journal import Journal, JournalFull
from atoll.coordinator.service.metrics import Metrics
from atoll.coordinator.service.refusals import barred, status_of
from atoll.coordinator.service.report_limits import REPORT_BYTES, ReportBytes, check_entries
from atoll.coordinator.service.report_streams import ReportContext, ReportRefused, ReportStreams
from atoll.coordinator.service.run_gateways import RunGateways
from atoll.coordinator.service.sessions import SessionDirectory, session_of
from atoll.coordinator.service.view_streams import ViewStreams
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.conduct import floods_anew, invite_refusal
from atoll.coordinator.state_machine.members import REDUCER, VERIFIER, Member
from atoll.coordinator.state_machine.run_layout import LayoutRule, RunLayout

SERVICE_NAME = "atoll.v1.Coordinator"
HEARTBEATS_PER_LEASE = 7  # a member that misses three of them is suspected
HEARTBEAT_INTERVAL = 3.0  # seconds between a member's heartbeats at most, so that people see what it does,
HEARTBEATS_PER_SECOND = 350  # but not more than so many of all members together, where the lease is long enough
RESOLVE_TIMEOUT = 10.0  # seconds that the name in a node's address may take
CALL_TIMEOUT = 30.0  # seconds that a call may wait for the journal
HEARTBEAT_LIMIT = RateLimit(20, 40)  # of one node
REPORT_LIMIT = RateLimit(50, 1000)  # of one node: at once it may have lost each of a thousand peers
ENTRANCE_LIMIT = RateLimit(1, 20)  # of one node: streams of views and joins under its session; joins by its key
STRANGER_LIMIT = RateLimit(5, 50)  # of one address: calls that prove nothing, such as joins with a wrong token
# Seconds that a member waits for the refusal of a call too many. Its connections have few calls at a time: so who
# does not wait by itself can make only so many, each of which costs about as much as one that is taken.
REFUSAL_PAUSE = 1.0
Code = grpc.StatusCode
Call = grpc.aio.ServicerContext[object, object]
Context = Call | ReportContext


class CoordinatorService:
    """The calls of `atoll.v1.Coordinator`; their names are the protocol's."""

    def __init__(
        self,
        event_loop: EventLoop,
        views: ViewStreams,
        journal: Journal,
        metrics: Metrics,
        door: FrontDoor,
        run: str,
        keys: DataKeys,
        gateways: RunGateways,
        tls: bool = False,
        private_addresses: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds, by which limits count."""
        self._event_loop, self._views, self._journal, self._metrics = event_loop, views, journal, metrics
        self._door, self._clock = door, clock
        self._run, self._keys, self._gateways, self._tls = run, keys, gateways, tls
        self._sessions = SessionDirectory(event_loop.state.members)
        self._private_addresses = private_addresses
        self._layouts = LayoutRule(event_loop.state.config)
        self._joining = asyncio.Lock()  # ids and lives are given one at a time
        self._entering: asyncio.Task[None] | None = None  # the latest join, whose caller may be gone
        self._heartbeats, self._reports = TokenBuckets(HEARTBEAT_LIMIT), TokenBuckets(REPORT_LIMIT)
        self._report_bytes, self.report_streams = ReportBytes(), ReportStreams()
        self._entrances, self._strangers = TokenBuckets(ENTRANCE_LIMIT), TokenBuckets(STRANGER_LIMIT)

    def handler(self) -> grpc.GenericRpcHandler:
        """The service as the generated code has it, but for its views, which are bytes already."""
        unary = grpc.unary_unary_rpc_method_handler
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Join": unary(self.Join, pb.JoinRequest.FromString, pb.JoinReply.SerializeToString),
            "Watch": grpc.unary_stream_rpc_method_handler(self.Watch, pb.WatchRequest.FromString),
            "Heartbeat": unary(self.Heartbeat, pb.HeartbeatRequest.FromString, pb.Ack.SerializeToString),
            "Report": grpc.stream_stream_rpc_method_handler(
                self.Report, pb.ReportRequest.FromString, pb.Ack.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        """Admit a node that has a valid token, or that was a member before, and tell it its id, its session and
        the run's config. Aborts with `FAILED_PRECONDITION` for another protocol or run, or a reducer of no use to
        it, `INVALID_ARGUMENT` for a bad address, pin, key or role, `PERMISSION_DENIED` for a bad token, a banned
        node, or a session with another key, `ABORTED` for a node that is out for a while and for a connected
        member's key, `RESOURCE_EXHAUSTED` for too many calls, `UNAVAILABLE` when stopping or when the journal
        cannot take it."""
        stranger = self._holder(request.session) is None
        if stranger:
            await self.guard(context)
        if self._event_loop.draining:
            await self._abort(context, Code.UNAVAILABLE, STOPPING)
        if request.protocol != PROTOCOL:
            sentence = f"you speak protocol {request.protocol}, this run {PROTOCOL}: update atoll"
            await self._abort(context, Code.FAILED_PRECONDITION, sentence)
        if request.run != self._run:
            sentence = f"the URL names run {validation.name(request.run)!r}, this coordinator serves {self._run!r}"
            await self._abort(context, Code.FAILED_PRECONDITION, sentence)
        if request.role not in ("", REDUCER, VERIFIER) or (request.role and request.leaf):
            sentence = (
                f"role {request.role[:20]!r}{' of a leaf' if request.leaf else ''}: this run knows only {REDUCER} "
                f"and {VERIFIER}"
            )
            await self._abort(context, Code.INVALID_ARGUMENT, sentence)
        if request.role == VERIFIER and not self._event_loop.state.config.security.replay:
            sentence = "this run replays nothing (security.replay is 0): it has no use for a verifier"
            await self._abort(context, Code.FAILED_PRECONDITION, sentence)
        if request.role == REDUCER and self._event_loop.state.config.outer.merge is MergeName.RADIAL:
            sentence = "this run merges deltas tensor by tensor (outer.merge=radial), and a reducer knows none"
            await self._abort(context, Code.FAILED_PRECONDITION, sentence)
        if stranger:  # who has no token has no names looked up
            await self._check_token(request.token, request.role, context)
            self._strangers.refund(self.network(context), self._clock())
        try:
            address, pin = (
                validation.address(request.address, self._door.origin(context.peer()).peer),
                validation.pin(request.pin, self._tls),
            )
            key = validation.key(request)
            if not (request.leaf or self._private_addresses or validation.is_behind_gateway(address)):
                address = await public_address(address)
        except (ValueError, ConfigError) as error:
            await self._abort(context, Code.INVALID_ARGUMENT, str(error))
        self._prove(None, context)  # before it waits for the joins before it
        async with self._joining:
            member = await self._admitted(request, address, pin, key, context)
        self._prove(member.node, context)
        state = self._event_loop.state
        config = state.config
        return pb.JoinReply(
            node_id=member.node,
            session=session_of(member),
            run=self._run,
            config=to_json(config),
            data_key=self._keys.key(state.expulsions),
            data_key_number=state.expulsions,
            mark=self._keys.mark,
            heartbeat=heartbeat_interval(config.members, len(state.members.here)),
            address=address,
            gateways=self._gateways.told,
        )

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[bytes]:
        """Stream the views of a member to it, as encoded bytes, while it is connected. Aborts with
        `UNAUTHENTICATED` for a session that is not a living member's."""
        member = self._member(request.session)
        if member is None:
            await self._stranger(request.session, context)
            await self._abort(context, Code.UNAUTHENTICATED, self._ack(request.session).reason)
        self._prove(member.node, context)
        await self._limit(self._entrances, member.node, context, "streams of views and joins", REFUSAL_PAUSE)
        stream = self._views.open(member.node, member.life, request.roster)
        try:
            await self._take(ev.Connected(member.node, member.life), context)
            async for view in stream.views():
                yield view
        finally:
            if self._views.close(stream):
                self._event_loop.post(ev.Disconnected(member.node, member.life))

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.Ack:
        """Take in that a member lives and what it is doing; the answer says whether it is still a member."""
        member = self._member(request.session)
        if member is None:
            await self._stranger(request.session, context)
            return self._ack(request.session)
        self._prove(member.node, context)
        await self._limit(self._heartbeats, member.node, context, "heartbeats", REFUSAL_PAUSE)
        beat = validation.heartbeat(member.node, member.life, request)
        self._event_loop.heartbeat(beat, validation.vitals(request), validation.unanswered(request))
        self._metrics.heartbeats.inc()
        hosts = self._door.origin(context.peer()).host, host_of_address(member.address)
        self._gateways.offer(member.node, request.relay, hosts)
        ack = self._ack(request.session)
        ack.now = time.time()  # by which a node knows whether its clock is right
        ack.gateways.extend(self._gateways.told)
        return ack

    async def Report(self, requests: AsyncIterator[pb.ReportRequest], context: Call) -> AsyncIterator[pb.Ack]:
        """Make a member's reports durable and act on them, one after the other; each answer says whether it is
        still a member. Refuses with `INVALID_ARGUMENT` for a malformed report, `ABORTED` if the node has spoken to
        a later incarnation of the coordinator and has to join again, `FAILED_PRECONDITION` if it has another model
        than the run, `RESOURCE_EXHAUSTED` for too many, `UNAVAILABLE` when the node should say it again."""
        with self.report_streams.stream():
            each = ReportContext(context)
            async for request in requests:
                try:
                    ack = await self._take_report(request, each)
                except ReportRefused as refusal:
                    ack = refusal.ack
                with self.report_streams.answer():
                    yield ack

    async def _take_report(self, request: pb.ReportRequest, context: Context) -> pb.Ack:
        member = self._member(request.session)
        if member is None:
            await self._stranger(request.session, context)
            return self._ack(request.session)
        self._prove(member.node, context)
        if self._event_loop.trouble:  # nothing of it is counted, as it is to be said again
            await asyncio.sleep(REFUSAL_PAUSE)
            await self._abort(context, Code.UNAVAILABLE, self._event_loop.trouble)
        if not self._reports.take(member.node, self._clock()):
            await self._flooded(member, context, f"reports from {member.node}", REPORT_LIMIT)
        if request.fence.incarnation > self._event_loop.state.incarnation:
            sentence = "this coordinator was put back to an earlier state than you have heard of: join again"
            await self._deny(context, RefusedForNow(sentence))
        if not self._report_bytes.take(member.node, request, self._clock()):
            await self._flooded(member, context, f"bytes of reports from {member.node}", REPORT_BYTES)
        self.report_streams.enter(member.node)  # one too many ends no other stream, where others may wait
        try:
            check_entries(request, self._event_loop.state)
            event = validation.event(member.node, member.life, request)
        except ValueError as error:
            await self._abort(context, Code.INVALID_ARGUMENT, str(error))
        if isinstance(event, ev.LayoutReported):
            told = RunLayout(event.numel, event.digest, event.fragments)
            if why := self._layouts.refusal(told):
                await self._abort(context, Code.FAILED_PRECONDITION, why)
        await self._take(event, context)
        self._metrics.reports.labels(request.WhichOneof("report")).inc()
        if isinstance(event, ev.Leaving):
            version = self._views.version(member.node)
            return pb.Ack(known=True, incarnation=self._event_loop.state.incarnation, version=version)
        ack = self._ack(request.session)
        if not ack.known and isinstance(event, ev.LayoutReported):
            layout = event.numel, event.digest, event.fragments
            if self._event_loop.state.has_other_layout(*layout):  # it need not join again
                await self._abort(context, Code.FAILED_PRECONDITION, ack.reason)
        return ack

    async def _flooded(self, member: Member, context: Context, what: str, rate: RateLimit) -> NoReturn:
        """Refuse a report too many, and have nobody wait for what comes behind it."""
        if floods_anew(self._event_loop.state, member.node):
            self._event_loop.post(ev.ReportsRefused(member.node, member.life))
        await self._too_many(context, what, rate, REFUSAL_PAUSE)

    async def caller(self, asks: cp.Caller, context: Context) -> Member | None:
        """The node, here or gone, whose session a caller shows who wants to know something about the run; None: it
        shows a token, which stays as it is. Aborts as `Join` does for another run, a bad token, and too many
        calls."""
        if (known := self._holder(asks.session)) is None:
            await self.guard(context)
        if asks.run != self._run:
            sentence = f"the URL names run {validation.name(asks.run)!r}, this coordinator serves {self._run!r}"
            await self._abort(context, Code.FAILED_PRECONDITION, sentence)
        if known is None:
            await self._check_token(asks.token, asks.role, context)
            self._strangers.refund(self.network(context), self._clock())
        return known

    def prove_caller(self, asks: cp.Caller, context: Context) -> None:
        """Tell the door whose connection a call came over; its `caller` is known, and has not called too often."""
        here = self._member(asks.session)
        self._prove(None if here is None else here.node, context)

    def network(self, context: Context) -> str:
        """The address that a call comes from, as limits count it."""
        return network_of(self._door.origin(context.peer()).host)

    async def _admitted(
        self, request: pb.JoinRequest, address: str, pin: Pin, key: PublicKey, context: Context
    ) -> Member:
        """The node as a member: one that was here before, or a new one in return for a token. A crash between
        the join and the use of the token leaves a token that is good for one node more, not one too few."""
        async with self._in_time(context):
            if self._entering is not None:
                await asyncio.wait([self._entering])
        if (before := self._holder(request.session)) is None:
            await self._limit(self._entrances, f"the key {key.hex()[:16]}", context, "joins")
            invite, owner = await self._check_token(request.token, request.role, context)
        else:
            await self._limit(self._entrances, before.node, context, "streams of views and joins")
            invite = before.invite
            owner = await self._check_role(invite, request.role, context)
        fresh = validation.secret(request.session) or secrets.token_hex(16)
        state = self._event_loop.state
        try:
            who = self._sessions.admission(request.session, key, state.members, fresh)
        except Refused as error:
            await self._deny(context, error)
        if who.life > 1:  # it uses up no invite, so that it has the one that it came with
            known = state.members.here.get(who.node) or state.members.departed[who.node]
            invite = known.invite
            owner = await self._check_role(invite, request.role, context)
        elif sentence := invite_refusal(state, invite):
            await self._deny(context, RefusedForNow(sentence))
        if (no := barred(self._event_loop.state, who.node, key)) is not None:
            await self._deny(context, no)
        name = validation.name(request.name) or who.node
        version = validation.version(request.version)
        joined = ev.Joined(
            who.node,
            who.life,
            name,
            address,
            who.secret,
            request.leaf,
            request.role,
            pin,
            key,
            invite,
            owner,
            version,
        )
        token = request.token if who.life == 1 else ""  # an invite is for so many nodes, however often each joins
        async with self._in_time(context):
            self._entering = asyncio.create_task(self._enter(joined, token))
            await asyncio.shield(self._entering)
        if (member := self._event_loop.state.members.here.get(who.node)) is None:  # held against it meanwhile
            no = barred(self._event_loop.state, who.node, joined.key)
            await self._deny(context, no or RefusedForNow("the node is out already: join again"))
        return member

    async def _enter(self, joined: ev.Joined, token: str) -> None:
        """Goes on when who called is gone: by then it may be in the journal."""
        await self._event_loop.submit(joined)
        self._sessions.enter(joined.session, joined.node)
        if token:
            with suppress(Refused, JournalFull):
                await asyncio.to_thread(self._journal.redeem_token, token, time.time())

    async def _check_role(self, invite: int, role: str, context: Context) -> str:
        """Refuse a node that comes back in a role that its invite is not for. Return the invite's owner."""
        try:
            record = await asyncio.to_thread(self._journal.invite, invite)
            if record is not None:
                record.check_role(role)
                return record.owner
        except Refused as error:
            await self._deny(context, error)
        except JournalFull as error:
            await self._abort(context, Code.UNAVAILABLE, str(error))
        return ""

    async def _check_token(self, token: str, role: str, context: Context) -> tuple[int, str]:
        """The number of the invite that the token is of, and its owner."""
        try:
            record = await asyncio.to_thread(self._journal.check_token, token, time.time())
            record.check_role(role)
        except Refused as error:
            await self._deny(context, error)
        except JournalFull as error:
            await self._abort(context, Code.UNAVAILABLE, str(error))
        return record.number, record.owner

    def _holder(self, session: str) -> Member | None:
        return self._sessions.holder(session, self._event_loop.state.members)

    def _member(self, session: str) -> Member | None:
        return self._sessions.member(session, self._event_loop.state.members)

    def _ack(self, session: str) -> pb.Ack:
        return self._sessions.ack(session, self._event_loop.state, self._views.version)

    async def _take(self, event: ev.Event, context: Context) -> None:
        """Have the event made durable, or say why not; the node then sends it again."""
        async with self._in_time(context):
            await self._event_loop.submit(event)

    @asynccontextmanager
    async def _in_time(self, context: Context) -> AsyncIterator[None]:
        """Wait for the journal here, but not too long."""
        if self._event_loop.trouble:
            await self._abort(context, Code.UNAVAILABLE, self._event_loop.trouble)
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                yield
        except TimeoutError:
            sentence = f"the journal took more than {CALL_TIMEOUT:g} s: it may have happened, say it again"
            await self._abort(context, Code.UNAVAILABLE, sentence)
        except CoordinatorStopping:
            await self._abort(context, Code.UNAVAILABLE, STOPPING)

    async def _stranger(self, session: str, context: Context) -> None:
        """Let a caller without a member's session pass, unless there were too many from its address, or from the
        node that it was."""
        if (before := self._holder(session)) is not None:
            life = f"an earlier life of {before.node}"
            await self._limit(self._entrances, life, context, "calls", REFUSAL_PAUSE)
        else:
            await self.guard(context)

    async def guard(self, context: Context) -> None:
        """Let a call pass that anybody may make, unless there were too many from its address. The coordinator's
        own, which do not come by the door, always pass."""
        origin = self._door.origin(context.peer())
        if origin.number and not self._strangers.take(self.network(context), self._clock()):
            await self._too_many_strangers(origin, context)

    async def _too_many_strangers(self, origin: Origin, context: Context) -> NoReturn:
        pause = REFUSAL_PAUSE
        if not self._door.has_owner(origin):
            self._door.shun(origin)
            pause = 0.0  # its connection closes soon
        what = f"calls without a valid token or session from {origin.host}"
        await self._too_many(context, what, self._strangers.rate, pause)

    def _prove(self, node: NodeId | None, context: Context) -> None:
        """Tell the door whose connection the call came over."""
        self._door.prove(self._door.origin(context.peer()), node)

    async def _limit(
        self, buckets: TokenBuckets, caller: str, context: Context, what: str, pause: float = 0.0
    ) -> None:
        """Let a call pass unless there were too many from its caller, who is told so after `pause` seconds."""
        if not buckets.take(caller, self._clock()):
            await self._too_many(context, f"{what} from {caller}", buckets.rate, pause)

    async def refuse(self, context: Context, code: Code, sentence: str) -> NoReturn:
        """End a call with a sentence, and count it."""
        await self._abort(context, code, sentence)

    async def _too_many(self, context: Context, what: str, rate: RateLimit, pause: float = 0.0) -> NoReturn:
        await asyncio.sleep(pause)
        sentence = f"more {what} than {rate.per_second:g} a second and {rate.burst} at once: wait, then try again"
        await self._abort(context, Code.RESOURCE_EXHAUSTED, sentence)

    async def _deny(self, context: Context, no: Refused) -> NoReturn:
        await self._abort(context, status_of(no), str(no))

    async def _abort(self, context: Context, code: Code, sentence: str) -> NoReturn:
        self._metrics.refused.labels(code.name).inc()
        await context.abort(code, sentence)
        raise AtollError(sentence)  # not reached


async def public_address(address: str) -> str:
    """The address with its host's name resolved, so that peers dial what was looked at. Raises `ValueError` unless
    it is a public one."""
    host, port = split_host_port(address, "the data-plane address")
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT):
            found = await resolve(host, port, private=False)
    except OwnNetwork:
        raise ValueError(
            f"peers are to dial this node at {address}, which is in a private network, and this run is public: "
            "give --advertise HOST:PORT with a public address, or --leaf; or let the run's operator set "
            "security.private_addresses=allow"
        ) from None
    except (OSError, TimeoutError) as error:
        raise ValueError(f"the data-plane address {address} leads nowhere ({error}): give another") from None
    return join_host_port(str(found[0][1][0]), port)


def host_of_address(address: str) -> str:
    """The host in a member's address."""
    return split_host_port(address, "a member's address")[0]


def heartbeat_interval(limits: MembersConfig, members: int) -> float:
    """Seconds between two heartbeats of a member of a run with so many, or those that it waits for to start."""
    longest = max(HEARTBEAT_INTERVAL, max(members, limits.start) / HEARTBEATS_PER_SECOND)
    return min(max(limits.lease / HEARTBEATS_PER_LEASE, 0.2), longest)
