"""The coordinator's answers to a machine that looks before it joins: what the run is, whether the machine can be
dialled, and how fast bytes travel between the two.

Only who shows a token or a session is answered, and nothing of it changes the run. What it could be used for
otherwise is bounded here:

    dialling others         only the address that the call comes from, and none for a call that a relay passed on;
                            a caller in a private network may name another one there, where the run lets such
                            addresses in. The answer is one of three
                            words, and comes within DIAL_SECONDS. DIALS for each address and each node, ALL_DIALS
                            for everybody together, MAX_DIALS at a time; who finds no place in time is told so
    the coordinator's link  one measurement at a time, of RATE_BYTES and RATE_SECONDS at most. MEASURED for each
                            address and each node, ALL_MEASURED for everybody together
"""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc

from atoll.comm.addresses import OwnNetwork, SocketAddress, is_own_network, resolve, same_host
from atoll.comm.config.run import to_json
from atoll.comm.errors import ConfigError, RefusedForNow
from atoll.comm.gateway_note import is_relayed
from atoll.comm.ids import Pin
from atoll.comm.invite import split_host_port
from atoll.comm.proto import checkup_pb2 as cp
from atoll.comm.rate_limits import RateLimit, TokenBuckets
from atoll.comm.transport.certificates import NAME, pin_of
from atoll.coordinator.door.front_door import FrontDoor, Origin
from atoll.coordinator.service import validation
from atoll.coordinator.service.event_loop import STOPPING, EventLoop
from atoll.coordinator.service.refusals import barred
from atoll.coordinator.service.run_gateways import RunGateways
from atoll.coordinator.state_machine.members import Member
from atoll.coordinator.state_machine.state import Phase

SERVICE = "atoll.v1.Checkup"
LOOKS = RateLimit(0.5, 30)  # of one address, and of one node
ALL_LOOKS = RateLimit(50, 500)  # of everybody together
DIALS = RateLimit(1 / 30, 10)  # of one address, and of one node
ALL_DIALS = RateLimit(1, 60)  # of everybody together
MAX_DIALS = 4  # at a time
PLACE_SECONDS = 4.0  # that a caller waits for one of these
DIAL_SECONDS = 5.0  # for an answer
CLOSE_SECONDS = 1.0  # for the good-bye of who was dialled
RATE_BYTES = 8 << 20  # bytes of one measurement at most
RATE_SECONDS = 2.0  # of one measurement at most
LATE_SECONDS = 30.0  # after one, for what is left of its bytes to arrive
MEASURED = RateLimit((64 << 20) / 3600, 64 << 20)  # bytes of one address, and of one node
ALL_MEASURED = RateLimit((1 << 30) / 3600, 1 << 30)  # bytes of everybody together
TURN_SECONDS = 10.0  # that a measurement waits for those before it
MAX_TURNS = 8  # measurements that wait
BLOCK_BYTES = 1 << 16
FRAMING = 1 << 16  # bytes around the blocks of one measurement, at most
Code = grpc.StatusCode
Context = grpc.aio.ServicerContext[object, object]


class Callers(Protocol):
    """Whoever knows the callers: the control plane's service."""

    async def caller(self, asks: cp.Caller, context: Context) -> Member | None:
        """The node whose session the caller shows; None: it shows a token. Aborts for others."""

    def prove_caller(self, asks: cp.Caller, context: Context) -> None:
        """Take the connection of a known caller for no stranger's."""

    def network(self, context: Context) -> str:
        """The address that a call comes from, as limits count it."""

    async def refuse(self, context: Context, code: Code, sentence: str) -> Any:
        """End a call with a sentence."""


class Quota:
    """A limit on what each caller may ask for, and one on what all may together."""

    def __init__(self, what: str, each: RateLimit, together: RateLimit) -> None:
        self._what, self._each, self._together = what, TokenBuckets(each), TokenBuckets(together)

    def take(self, callers: Sequence[Hashable], now: float, cost: int = 1) -> str:
        """Count `cost` at `now` (seconds) against all names of one caller, and against everybody. Returns why
        it is too much, and then counts nothing; empty: it is not."""
        wanted = [
            *((self._each, caller, "from you") for caller in callers),
            (self._together, "", "from everybody"),
        ]
        for number, (buckets, caller, whose) in enumerate(wanted):
            if not buckets.take(caller, now, cost):
                for paid, by, _ in wanted[:number]:
                    paid.refund(by, now, cost)
                hourly = buckets.rate.per_second * 3600
                return f"more {self._what} {whose} than {hourly:,.0f} an hour: try again later"
        return ""


class CheckupService:
    """The calls of `atoll.v1.Checkup`; their names are the protocol's."""

    def __init__(
        self,
        callers: Callers,
        event_loop: EventLoop,
        door: FrontDoor,
        gateways: RunGateways,
        private_addresses: bool,
        tls: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds, by which limits count."""
        self._callers, self._event_loop, self._door, self._clock = callers, event_loop, door, clock
        self._gateways, self._private, self._tls = gateways, private_addresses, tls
        self._looks = Quota("looks", LOOKS, ALL_LOOKS)
        self._dials = Quota("calls back", DIALS, ALL_DIALS)
        self._measured = Quota("bytes of measurements", MEASURED, ALL_MEASURED)
        self._dialling, self._measuring = asyncio.Semaphore(MAX_DIALS), asyncio.Semaphore(1)
        self._turns = 0  # measurements that wait, or are under way
        self._late: dict[str, asyncio.TimerHandle] = {}  # connections whose bytes count again in a moment

    def handler(self) -> grpc.GenericRpcHandler:
        """The service for the server of the control plane."""
        unary = grpc.unary_unary_rpc_method_handler
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Look": unary(self.Look, cp.Caller.FromString, cp.LookReply.SerializeToString),
            "DialBack": unary(self.DialBack, cp.DialBackRequest.FromString, cp.DialBackReply.SerializeToString),
            "Receive": grpc.unary_stream_rpc_method_handler(
                self.Receive, cp.ReceiveRequest.FromString, cp.Block.SerializeToString
            ),
            "Send": grpc.stream_unary_rpc_method_handler(
                self.Send, cp.SendRequest.FromString, cp.SendReply.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def Look(self, request: cp.Caller, context: Context) -> cp.LookReply:
        """Tell what the run is, and what time it is. Aborts, as all calls here, for who shows neither token nor
        session, and with `RESOURCE_EXHAUSTED` for too many calls; with `UNAVAILABLE` when stopping."""
        node = await self._callers.caller(request, context)
        if self._event_loop.draining:
            await self._callers.refuse(context, Code.UNAVAILABLE, STOPPING)
        await self._limit(self._looks, request, node, context)
        state = self._event_loop.state
        no = barred(state, node.node, node.key) if node is not None else None
        return cp.LookReply(
            config=to_json(state.config),
            time=time.time(),
            members=len(state.members.generation),
            host=self._host(context),
            penalty=str(no or ""),
            penalty_passes=isinstance(no, RefusedForNow),
            private=self._private,
            gateways=self._gateways.told,
            joined=node is not None,
            finished=state.round.phase is Phase.FINISHED,
        )

    async def DialBack(self, request: cp.DialBackRequest, context: Context) -> cp.DialBackReply:
        """Dial the caller's data plane, as far as its certificate. Aborts with `INVALID_ARGUMENT` for an address
        that is not the caller's, `RESOURCE_EXHAUSTED` where it was not tried, for others are being dialled."""
        node = await self._callers.caller(request.caller, context)
        try:
            pin = validation.pin(request.pin, self._tls)
            address = validation.address(request.address, self._door.origin(context.peer()).peer)
        except (ValueError, ConfigError) as error:
            await self._callers.refuse(context, Code.INVALID_ARGUMENT, str(error))
        await self._limit(self._dials, request.caller, node, context)
        reply = cp.DialBackReply(outcome=cp.TIMED_OUT, address=address)
        try:
            async with asyncio.timeout(PLACE_SECONDS):
                await self._dialling.acquire()
        except TimeoutError:
            await self._callers.refuse(
                context, Code.RESOURCE_EXHAUSTED, "others are being dialled: it was not tried"
            )
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                place = await own_place(address, self._host(context), self._private)
                reply.outcome = cp.REACHED if await _answers(*place, pin) else cp.REFUSED
        except TimeoutError:
            pass
        except ValueError as error:
            await self._callers.refuse(context, Code.INVALID_ARGUMENT, str(error))
        finally:
            self._dialling.release()
        return reply

    async def Receive(self, request: cp.ReceiveRequest, context: Context) -> None:
        """Send as many bytes as are asked for, within the limits."""
        node = await self._callers.caller(request.caller, context)
        async with self._turn(request.caller, node, context):
            writing = await self._pour(min(request.bytes, RATE_BYTES), context)
        if writing is not None:  # who does not read waits for nobody else's turn
            await writing

    async def _pour(self, left: int, context: Context) -> "asyncio.Task[None] | None":
        """Send `left` bytes; returns the block that the caller has not taken in time."""
        body, until = os.urandom(BLOCK_BYTES), self._clock() + RATE_SECONDS
        while left > 0 and (seconds := until - self._clock()) > 0:
            writing = asyncio.create_task(_write(context, cp.Block(body=body[:left])))
            if not (await asyncio.wait((writing,), timeout=seconds))[0]:
                return writing
            await writing
            left -= BLOCK_BYTES
        return None

    async def Send(self, requests: AsyncIterator[cp.SendRequest], context: Context) -> cp.SendReply:
        """Take bytes in until there are enough, or no more come, and say how fast they came."""
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                first = await anext(requests)
        except (StopAsyncIteration, TimeoutError):
            return cp.SendReply()
        node = await self._callers.caller(first.caller, context)
        origin = self._door.origin(context.peer())
        async with self._turn(first.caller, node, context):
            if (earlier := self._late.pop(origin.number, None)) is not None:
                earlier.cancel()
            self._door.allow(origin, RATE_BYTES + FRAMING)
            try:
                await context.send_initial_metadata(())
                return await self._count(requests)
            finally:  # what a slow link has taken in already is still to come
                later = asyncio.get_running_loop().call_later
                self._late[origin.number] = later(LATE_SECONDS, self._take_back, origin)

    def _take_back(self, origin: Origin) -> None:
        self._late.pop(origin.number, None)
        self._door.allow(origin, 0)

    async def _count(self, requests: AsyncIterator[cp.SendRequest]) -> cp.SendReply:
        """What comes until there is enough, or no more comes."""
        begun = last = 0.0
        size, total = 0, 0
        try:
            async with asyncio.timeout(RATE_SECONDS + 1.0):  # the first block may be long on its way
                async for request in requests:
                    last = self._clock()
                    total += len(request.body)
                    if not begun:
                        begun = last
                    else:
                        size += len(request.body)
                    if total >= RATE_BYTES or last - begun >= RATE_SECONDS:
                        break
        except TimeoutError:
            pass
        return cp.SendReply(bytes=size, seconds=last - begun)

    @asynccontextmanager
    async def _turn(self, asks: cp.Caller, node: Member | None, context: Context) -> AsyncIterator[None]:
        """The one measurement that goes on, after those that came before it."""
        await self._limit(self._measured, asks, node, context, RATE_BYTES)
        if self._turns >= MAX_TURNS:
            await self._callers.refuse(context, Code.RESOURCE_EXHAUSTED, "too many measure at once: try again")
        self._turns += 1
        try:
            try:
                async with asyncio.timeout(TURN_SECONDS):
                    await self._measuring.acquire()
            except TimeoutError:
                await self._callers.refuse(context, Code.RESOURCE_EXHAUSTED, "others are measuring: try again")
            try:
                yield
            finally:
                self._measuring.release()
        finally:
            self._turns -= 1

    async def _limit(
        self, quota: "Quota", asks: cp.Caller, node: Member | None, context: Context, cost: int = 1
    ) -> None:
        callers = (self._callers.network(context), *((node.node,) if node is not None else ()))
        if why := quota.take(callers, self._clock(), cost):
            await self._callers.refuse(context, Code.RESOURCE_EXHAUSTED, why)
        self._callers.prove_caller(asks, context)

    def _host(self, context: Context) -> str:
        return self._door.origin(context.peer()).host


async def _write(context: Context, block: cp.Block) -> None:
    await context.write(block)


async def own_place(address: str, caller: str, private: bool) -> tuple[int, SocketAddress]:
    """The address family and socket address behind `address`, host:port, if it is the host that the call comes
    from; or, where `private` addresses are let in, another one of a private network, for a caller in such a one.
    Raises `ValueError` for any other."""
    if is_relayed(caller):
        raise ValueError("you come through a relay, and this machine is not dialled by way of one")
    host, port = split_host_port(address, "the data-plane address")
    try:
        found = await resolve(host, port, private)
    except OwnNetwork:
        raise ValueError(f"{address} is in a private network, and this run is public: nobody dials it") from None
    except OSError as error:
        raise ValueError(f"the data-plane address {address} leads nowhere ({error.strerror})") from None
    for family, place in found:
        neighbour = private and is_own_network(caller) and is_own_network(str(place[0]))
        if same_host(str(place[0]), caller) or neighbour:
            return family, place
    raise ValueError(
        f"you come from {caller}, and only there a node is dialled for a check: {address} is another machine's"
    )


async def _answers(family: int, place: SocketAddress, pin: Pin) -> bool:
    """Whether somebody listens there, and shows the certificate with this pin, if there is one."""
    context: ssl.SSLContext | None = None
    if pin:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, place)
        secure: dict[str, Any] = {"ssl": context, "server_hostname": NAME, "ssl_shutdown_timeout": CLOSE_SECONDS}
        _, writer = await asyncio.open_connection(sock=sock, **(secure if pin else {}))
    except OSError:  # ssl's are some of them
        sock.close()
        return False
    except BaseException:
        sock.close()
        raise
    try:
        shown = writer.get_extra_info("ssl_object")
        return shown is None or pin_of(shown.getpeercert(binary_form=True) or b"") == pin
    finally:
        if pin:
            writer.close()  # with a good-bye: a reset would look like a fault in the node's log
        else:
            writer.write_eof()
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, writer.close)
