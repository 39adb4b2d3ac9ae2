"""The node's side of the control plane: join, views, reports and heartbeats over one gRPC channel
(`tls_channel`).

Rides out a coordinator that is away: every call has a deadline and is tried again with jittered backoff, of at
most a few seconds, so that the node is back soon after the coordinator is. What it does when is decided elsewhere,
without a clock or a connection: `outbox` says which reports are to be sent, `freshness` when a stream of views
fell behind and is to be opened again, `backoff` how long to wait between tries.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from math import isfinite
from typing import TypeVar

import grpc

from atoll.comm.errors import Refused, Unreachable
from atoll.comm.ids import NO_PIN, Pin
from atoll.comm.invite import Invite
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import atoll_pb2_grpc as rpc
from atoll.comm.proto.join_proof import prove_join
from atoll.comm.proto.packed_plan import OtherRoster, unpack_plan
from atoll.comm.proto.report_stream import ReportStream
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport.frames import PROTOCOL
from atoll.node.control import tls_channel
from atoll.node.control.backoff import FIRST_REOPENING_SECONDS, FIRST_RETRY_SECONDS, Backoff
from atoll.node.control.checkup import Busy, CheckupClient, RunSight, Silent
from atoll.node.control.clock_offset import ClockOffset
from atoll.node.control.freshness import StreamFreshness, ViewVersion
from atoll.node.control.outbox import ReportOutbox, ReportQueue, SessionLost
from atoll.node.control.refusals import refused
from atoll.node.control.roster import Roster

log = logging.getLogger("atoll.node")
MAX_OUTAGES = 32  # of the coordinator, that are remembered
T = TypeVar("T")
CALL_SECONDS = 10.0  # deadline of one call
LOOK_SECONDS = 5.0  # for which a join waits for what is told before it
OUTAGE_SECONDS = 24 * 3600.0  # seconds for which a member goes on without a coordinator
OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.min_reconnect_backoff_ms", 1_500),  # for one attempt: four round trips of a long way, or a busy machine
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_500),
]


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """A node's description of itself, sent when it joins."""

    name: str
    address: str  # data plane
    leaf: bool = False  # nobody can dial it
    role: str = ""  # "reducer": owns chunks, has no trainer
    pin: Pin = NO_PIN  # of the certificate that the data plane shows
    key: PrivateKey = field(default_factory=PrivateKey.generate)  # the node's, for its life


class ControlClient:
    """One node's connection to the coordinator: `look` if it is to, `join`, then `watch`, `send_reports` and
    `heartbeat` side by side, each of which raises `SessionLost` when the coordinator no longer knows the session;
    `close` at the end."""

    def __init__(self, invite: Invite) -> None:
        self.invite = invite  # with the address where the coordinator is, or was last
        self._channel: grpc.aio.Channel | None = None  # opened by the first join
        self._stub: rpc.CoordinatorAsyncStub
        self._outbox, self._freshness = ReportOutbox(), StreamFreshness()
        self.roster = Roster()
        self._posted = {queue.kind: asyncio.Event() for queue in self._outbox.queues}
        self._left = set[asyncio.Task[None]]()  # that close channels to where the coordinator was
        self._stream: grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.View] | None = None
        self._reports: ReportStream | None = None  # opened by the first report
        self._away_since: float | None = None  # seconds; when the coordinator stopped answering
        self._outages = deque[tuple[float, float]]((), MAX_OUTAGES)  # seconds; from when to when it did not
        self.clock = ClockOffset()
        self.session = ""
        self.admitted = False  # the coordinator has let this node in, or an earlier life had asked it to
        self.relay = ""  # multiaddr at which this node relays; empty: it does not
        self.on_gateways: Callable[[Sequence[str]], None] | None = None  # told the run's gateways, as they change
        # Whether the coordinator is looked for elsewhere: then whoever answers in its place refuses nothing.
        self.is_sought: Callable[[], bool] = lambda: False

    async def close(self) -> None:
        for closing in self._left:
            closing.cancel()
        await asyncio.gather(*self._left, return_exceptions=True)
        self._end_reports()
        if self._channel is not None:
            await self._channel.close()

    async def move(self, address: str) -> None:
        """Go on at this "host:port", where the coordinator is now; the session stays what it is, and what was
        asked at its old place is asked again. Raises `OtherCoordinator` and `Unreachable`: then nothing has
        changed."""
        there = replace(self.invite, address=address)
        opened = await tls_channel.channel(there, OPTIONS)
        before, self.invite = self._channel, there
        self._use(opened)
        self._reopen_stream()
        if before is not None:  # calls on it end by their deadlines: cancelled, they would end who made them
            self._left.add(closing := asyncio.create_task(before.close(CALL_SECONDS + 1.0)))
            closing.add_done_callback(self._left.discard)

    async def join(self, identity: NodeIdentity, patience: float) -> pb.JoinReply:
        """Join, or come back under the session held before. Raises `Refused`, `Unreachable` after `patience`."""
        request = pb.JoinRequest(
            protocol=PROTOCOL,
            run=self.invite.run,
            token=self.invite.token,
            name=identity.name,
            address=identity.address,
            session=self.session,
            leaf=identity.leaf,
            role=identity.role,
            pin=identity.pin,
            version=version("atoll"),
        )
        prove_join(request, identity.key)
        reply = await self._retry(lambda: self._ask_to_join(request), patience)
        self._end_reports()  # those of the session before are nobody's, and the next ones wait for none of them
        self.session, self.admitted = reply.session, True
        self._outbox.begin_session(reply.session)
        self._freshness.begin_session()
        return reply

    async def look(self, role: str, patience: float) -> RunSight | None:
        """What the coordinator tells of its run before this node joins. None: it is there, and does not tell it in
        time, or not to this node: the join will say why. Raises `ConfigError` for a run that this version does not
        understand, `Refused` for another coordinator than the invite's, `Unreachable` after `patience`."""
        return await self._retry(lambda: self._ask_to_look(role), patience)

    async def _ask_to_look(self, role: str) -> RunSight | None:
        asking = CheckupClient(self.invite, await self._open(), self.session, role)
        try:
            return await asking.look(times=1, deadline=LOOK_SECONDS)
        except (Busy, Silent, Refused) as error:
            log.info(f"the run is not known before the join: {error}")
            return None

    async def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            try:
                opened = await tls_channel.channel(self.invite, OPTIONS)
            except tls_channel.OtherCoordinator as error:
                if self.is_sought():
                    raise Unreachable(str(error)) from None
                raise
            if self._channel is None:  # else it has moved meanwhile
                return self._use(opened)
            await opened.close()
        return self._channel

    def _use(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        self._end_reports()
        self._channel, self._stub = channel, rpc.CoordinatorStub(channel)
        return channel

    async def _ask_to_join(self, request: pb.JoinRequest) -> pb.JoinReply:
        await self._open()
        try:
            return await self._stub.Join(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not self.invite.pin:
                await tls_channel.check_plain(self.invite)
            raise

    async def watch(self) -> AsyncIterator[pb.View]:
        """Views as they come, through as many streams as it takes. Raises `SessionLost`."""
        backoff = Backoff(FIRST_REOPENING_SECONDS)
        while True:
            async for view in self._views():
                backoff.reset()
                self._freshness.see((view.incarnation, view.version))
                yield view
            await asyncio.sleep(backoff.pause(random.random()))

    async def _views(self) -> AsyncIterator[pb.View]:
        """The views of one stream; ends when it breaks."""
        self._freshness.open_stream()
        asked = pb.WatchRequest(session=self.session, roster=self.roster.open_stream())
        call = self._stream = self._stub.Watch(asked, wait_for_ready=True)
        try:
            async for view in call:
                self._note_answer()
                if self.roster.read(view) is None:
                    log.warning("the stream of views lacks a part of the members: it is opened again")
                    return
                try:
                    unpack_plan(view, self.roster.members)
                except OtherRoster as error:
                    if self.roster.is_late(view):
                        continue
                    log.warning(f"{error}: all of them are asked for")
                    self.roster.distrust()
                    return
                yield view
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise SessionLost(error.details() or "") from None
            self._note_silence(_why(error))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stream is call or (task is not None and task.cancelling()):
                raise  # else it was `_check_stream` that gave the stream up
        finally:
            call.cancel()

    def report(self, report: pb.ReportRequest, more: bool = False) -> None:
        """Send a report when its turn comes (`ReportOutbox`); `more`: others of its kind follow soon."""
        self._posted[self._outbox.post(report, time.monotonic(), more).kind].set()

    async def send_reports(self) -> None:
        """Empty the outboxes until cancelled. Raises `SessionLost`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for queue in self._outbox.queues:
                    tasks.create_task(self._send_queue(queue))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _send_queue(self, queue: ReportQueue) -> None:
        posted = self._posted[queue.kind]
        while True:
            while (pause := queue.pause(time.monotonic())) > 0:
                posted.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause if isfinite(pause) else None):
                        await posted.wait()
            request = queue.take()
            ack = await self._retry(partial(self._tell, request, CALL_SECONDS), OUTAGE_SECONDS)
            queue.acknowledge(ack)

    async def _tell(self, report: pb.ReportRequest, timeout: float) -> pb.Ack:
        if self._reports is None or self._reports.ended:
            self._reports = ReportStream(self._stub)
        return await self._reports.send(report, timeout)

    def _end_reports(self) -> None:
        if self._reports is not None:
            self._reports.close()
            self._reports = None

    async def heartbeat(self, beat: pb.HeartbeatRequest) -> bool:
        """One heartbeat; returns whether it was answered: a missed one is made up for by the next. Raises
        `SessionLost`."""
        beat.session, beat.relay = self.session, self.relay
        asked = self.clock.asked()
        try:
            ack = await self._stub.Heartbeat(beat, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            self._note_silence(_why(error))
            return False
        self._note_answer()
        self.clock.answered(asked, ack.now)
        if not ack.known:
            raise SessionLost(ack.reason)
        if ack.gateways and self.on_gateways is not None:
            self.on_gateways(ack.gateways)
        self._check_stream((ack.incarnation, ack.version))
        return True

    def _check_stream(self, newest: ViewVersion) -> None:
        """Give up a stream that has not brought the newest view for too long."""
        if self._stream is not None and self._freshness.is_stale(newest, time.monotonic()):
            log.info("the stream of views fell behind: it is opened again")
            self._reopen_stream()

    def _reopen_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    async def leave(self, reason: str, incidents: int = 0) -> None:
        """Say good-bye; the node goes in any case. `incidents`: of the round, as `mask` has them."""
        leave = pb.Leave(reason=reason, incidents=incidents)
        request = pb.ReportRequest(session=self.session, leave=leave)
        try:
            await self._tell(request, 2.0)
        except (grpc.aio.AioRpcError, Unreachable):
            log.info("the coordinator did not hear the good-bye; it will notice")

    async def _retry(self, call: Callable[[], Awaitable[T]], patience: float) -> T:
        until = time.monotonic() + patience
        backoff = Backoff(FIRST_RETRY_SECONDS)
        while True:
            try:
                answer = await call()
                self._note_answer()
                return answer
            except (grpc.aio.AioRpcError, Unreachable) as error:
                if isinstance(error, grpc.aio.AioRpcError) and (no := refused(error)) is not None:
                    raise no from None
                why = _why(error)
                self._note_silence(why)
                left = until - time.monotonic()
                if left <= 0:
                    raise Unreachable(
                        f"no coordinator at {self.invite.address} for {patience:g} s ({why}): "
                        "is it running, is the port open?"
                    ) from None
                await asyncio.sleep(min(backoff.pause(random.random()), left))

    @property
    def away(self) -> float:
        """Seconds for which the coordinator has not answered; 0: it does."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    def longest_outage(self, start: float, end: float) -> float:
        """The longest time, in seconds, in which the coordinator did not answer, of those that reach into the time
        from `start` to `end` of the monotonic clock."""
        now = [(self._away_since, time.monotonic())] if self._away_since is not None else []
        return max((b - a for a, b in (*self._outages, *now) if b >= start and a <= end), default=0.0)

    def _note_silence(self, why: str) -> None:
        """Say once that the coordinator does not answer."""
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning(f"no coordinator at {self.invite.address} ({why}): trying until it answers")

    def _note_answer(self) -> None:
        if self._away_since is not None:
            self._outages.append((self._away_since, time.monotonic()))
            log.info(f"the coordinator answers again after {time.monotonic() - self._away_since:.1f} s")
            self._away_since = None


def _why(error: grpc.aio.AioRpcError | Unreachable) -> str:
    """One line of why a call failed."""
    said = str(error) if isinstance(error, Unreachable) else error.details() or error.code().name
    return said.splitlines()[0]
