"""What a machine asks a coordinator without being a member: what the run is, whether it can be dialled, how fast
bytes travel. No invite is used up and no session begins.

`atoll doctor` asks, and a node before it joins and right after. Each call has a deadline and is made once.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self, TypeVar

import grpc

from atoll.comm.config.run import RunConfig, from_json
from atoll.comm.errors import Unreachable
from atoll.comm.ids import Pin
from atoll.comm.invite import Invite
from atoll.comm.proto import checkup_pb2 as cp
from atoll.comm.proto import checkup_pb2_grpc as rpc
from atoll.node.control.refusals import refused
from atoll.node.control.tls_channel import channel, check_plain

CALL_SECONDS = 10.0
MEASURE_SECONDS = 20.0  # deadline of a measurement, with the wait for others'
LOOKS = 3  # of which the one that was answered soonest says what time it is
RATE_BYTES = 8 << 20  # bytes that are sent, and asked for
MIN_RATE_BYTES = 1 << 17  # bytes after the first block, fewer of which say nothing
BLOCK_BYTES = 1 << 16
OPTIONS = [("grpc.max_receive_message_length", 4 << 20)]
T = TypeVar("T")


class Busy(Unreachable):
    """The coordinator has been asked too often of late, or by too many at once."""


class Silent(Unreachable):
    """The coordinator is there and does not answer this in time."""


@dataclass(frozen=True, slots=True)
class RunSight:
    """What a coordinator tells of its run, and what shows of the way to it."""

    run: RunConfig
    members: int  # that take part now
    host: str  # that this machine's calls come from
    penalty: str  # why this node would not be let in; empty: it would
    private: bool  # nodes may have addresses of private networks
    seconds: float  # of the shortest call
    clock_ahead: float  # seconds that this machine's clock is ahead of the coordinator's, by that call
    gateways: tuple[str, ...] = ()  # multiaddrs by which members are reached who cannot be dialled
    penalty_passes: bool = False  # it would be let in later
    joined: bool = False  # this node has, before: it needs no invite
    finished: bool = False  # the run has all its rounds


class CheckupClient:
    """The questions of one machine to the coordinator of a join URL. `opened` makes one."""

    def __init__(self, invite: Invite, way: grpc.aio.Channel, session: str, role: str) -> None:
        self._invite, self._stub = invite, rpc.CheckupStub(way)
        self._caller = cp.Caller(run=invite.run, token=invite.token, session=session, role=role)

    @classmethod
    @asynccontextmanager
    async def opened(cls, invite: Invite, session: str = "", role: str = "") -> AsyncIterator[Self]:
        """A connection to the coordinator. `session`: of this node's earlier joins, if there were any. Raises
        `Refused` for another than the URL's, `Unreachable`."""
        async with await channel(invite, OPTIONS) as way:
            yield cls(invite, way, session, role)

    async def look(self, times: int = LOOKS, deadline: float = CALL_SECONDS) -> RunSight:
        """What the run is, and how far it is: asked so many times, each answered within `deadline` seconds. Raises
        `Refused` for a token that is none of the run's, `Busy`, `Silent`, `Unreachable`, `ConfigError` for a run
        that this version does not understand."""
        best = float("inf")
        for _ in range(times):
            begun, begun_at = time.monotonic(), time.time()
            reply = await self._answer(self._stub.Look(self._caller, timeout=deadline))
            seconds = time.monotonic() - begun
            if seconds < best:
                best, ahead = seconds, begun_at + seconds / 2 - reply.time
        run = from_json(reply.config)
        ways, rest = tuple(reply.gateways), (reply.penalty_passes, reply.joined, reply.finished)
        told = reply.members, reply.host, reply.penalty, reply.private
        return RunSight(run, *told, best, ahead, ways, *rest)

    async def dial_back(self, address: str, pin: Pin) -> cp.DialBackReply:
        """Have the coordinator dial this machine's data plane at `address`, host:port, of which the host may be
        left out. Raises `Refused` for an address that it does not dial, `Busy`, `Unreachable`."""
        request = cp.DialBackRequest(caller=self._caller, address=address, pin=pin)
        return await self._answer(self._stub.DialBack(request, timeout=CALL_SECONDS))

    async def rate_down(self) -> float:
        """Bytes a second that come from the coordinator; 0: too few came to say. Raises `Refused`, `Busy`,
        `Unreachable`."""
        request = cp.ReceiveRequest(caller=self._caller, bytes=RATE_BYTES)
        return await self._answer(_drain(self._stub.Receive(request, timeout=MEASURE_SECONDS)))

    async def rate_up(self) -> float:
        """Bytes a second that go to the coordinator; 0: too few went to say. Raises as `rate_down`."""
        return await self._answer(self._fill())

    async def _fill(self) -> float:
        call = self._stub.Send(timeout=MEASURE_SECONDS)
        await call.write(cp.SendRequest(caller=self._caller))
        await call.initial_metadata()  # now it takes more than strangers may send
        block = cp.SendRequest(body=bytes(BLOCK_BYTES))
        try:
            for _ in range(RATE_BYTES // BLOCK_BYTES):
                await call.write(block)
            await call.done_writing()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass  # it has answered meanwhile, and if it refused, the answer says so
        reply = await call
        return _rate(reply.bytes, reply.seconds)

    async def _answer(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            why = (error.details() or error.code().name).splitlines()[0]
            if (no := refused(error)) is not None:
                raise no from None
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Busy(why) from None
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Silent(f"the coordinator at {self._invite.address} does not answer ({why})") from None
            if not self._invite.pin:
                await check_plain(self._invite)
            raise Unreachable(f"no coordinator answers at {self._invite.address} ({why})") from None


async def _drain(call: "grpc.aio.UnaryStreamCall[cp.ReceiveRequest, cp.Block]") -> float:
    begun = last = 0.0
    size = 0
    async for block in call:
        last = time.monotonic()
        if not begun:
            begun = last
        else:
            size += len(block.body)
    return _rate(size, last - begun)


def _rate(size: int, seconds: float) -> float:
    return size / seconds if size >= MIN_RATE_BYTES and seconds > 0 else 0.0
