"""Streams to and from other gateways: opened directly or through a relay, answered, joined to local services.

    to a peer       directly; where that has not come about after DIRECT_SECONDS, through the relays that both are
                    connected to as well. The first that comes about is used, and where it was a relay the next
                    stream begins with relays.
    from a peer     OPEN is joined to a local service, if that one is served: nothing else of this machine can be
                    reached. RELAY is joined to another peer's service, if this gateway relays, within its limits.
                    HOLD is a peer that wants to be reached through this gateway; it lasts as long as its stream.

What passes is TLS between members: neither gateways nor relays can read or change it.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from atoll.comm.errors import Unreachable
from atoll.comm.transport.connection import RateLimiter
from atoll.node.gateway.splice import Stream, dial, splice
from atoll.node.gateway.stream_header import (
    PREFIX_BYTES,
    SENTENCES,
    Answer,
    BadHeader,
    Purpose,
    RelayBook,
    RelayLimits,
    Service,
    StreamHeader,
    length_behind,
    read_answer,
    read_header,
    write_header,
)

log = logging.getLogger("atoll.gateway")
DIRECT_SECONDS = 0.5  # after which a relay is tried besides
DIRECT_AGAIN_SECONDS = 300.0  # for which a peer that could not be dialled is not tried first
HEADER_SECONDS = 10.0  # for a header, and for its answer
OPEN_SECONDS = 8.0  # for one way to a peer; less than members wait for each other's hello
LIFE_SIGN_SECONDS = 10.0  # between two on a connection to a relay; it is lost after three that did not come
LIFE_SIGN = b"."
HOLD_AGAIN_SECONDS = 2.0  # between two tries to be connected to a relay
MAX_STREAMS = 1024  # from peers, at once
MAX_REMEMBERED = 4096  # peers
OpenStream = Callable[[bytes], Awaitable[Stream]]


class Relaying:
    """The streams of one gateway."""

    def __init__(self, open_stream: OpenStream, relays: Sequence[bytes], limits: RelayLimits) -> None:
        """`open_stream`: to a peer, or raises `Unreachable`; `relays`: peers that may relay for this one."""
        self._open_stream, self._relays = open_stream, tuple(relays)
        self.served: dict[Service, str] = {}  # "host:port" of what others may reach here
        self.book = RelayBook(limits)
        self._limiter = RateLimiter(limits.rate) if limits.rate else None
        self._undialled: OrderedDict[bytes, float] = OrderedDict()  # peers, and when that was found out
        self._streams = 0
        self.holding: set[bytes] = set()  # relays through which this gateway can be reached
        self.opened = {"direct": 0, "relayed": 0}  # streams to peers, by their way

    # To peers

    async def reach(self, peer: bytes, service: Service) -> Stream:
        """A stream to a service behind a peer, by the first way that comes about. Raises `Unreachable`."""
        ways: list[tuple[str, Callable[[], Awaitable[Stream]]]] = [
            ("relayed", partial(self._ask, relay, StreamHeader(Purpose.RELAY, service, peer)))
            for relay in self._relays
            if relay != peer
        ]
        direct = ("direct", partial(self._ask, peer, StreamHeader(Purpose.OPEN, service)))
        tried = self._undialled.get(peer, -DIRECT_AGAIN_SECONDS)
        late = time.monotonic() - tried < DIRECT_AGAIN_SECONDS
        ways.insert(len(ways) if late else 0, direct)
        way, stream = await _first([(name, way) for name, way in ways])
        if way == "direct":
            self._undialled.pop(peer, None)
        elif not late:
            self._undialled[peer] = time.monotonic()
            if len(self._undialled) > MAX_REMEMBERED:
                self._undialled.popitem(last=False)
        self.opened[way] += 1
        return stream

    async def _ask(self, peer: bytes, header: StreamHeader) -> Stream:
        """A stream to a peer that has agreed to what the header asks for. Raises `Unreachable`."""
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                stream = await self._open_stream(peer)
                try:
                    stream.writer.write(write_header(header))
                    await stream.writer.drain()
                    answer = read_answer(await stream.reader.readexactly(1))
                    if answer is not Answer.YES:
                        raise Unreachable(SENTENCES[answer])
                except BaseException:
                    stream.abort()
                    raise
                return stream
        except TimeoutError:
            raise Unreachable(f"nothing came back for {OPEN_SECONDS:g} s") from None
        except (OSError, EOFError, BadHeader) as error:
            raise Unreachable(f"the stream broke ({error or type(error).__name__})") from None

    async def hold(self, relay: bytes) -> None:
        """Stay connected to a relay, so that others reach this gateway through it, until cancelled."""
        while True:
            try:
                stream = await self._ask(relay, StreamHeader(Purpose.HOLD))
                log.info("others can reach this gateway through a relay")
                self.holding.add(relay)
                await _live(stream)
            except Unreachable as error:
                log.info(f"no place at a relay: {error}")
            finally:
                self.holding.discard(relay)
            await asyncio.sleep(HOLD_AGAIN_SECONDS)

    # From peers

    async def accept(self, peer: bytes, stream: Stream) -> None:
        """Answer a stream that a peer has opened."""
        if self._streams >= MAX_STREAMS:
            return stream.abort()
        self._streams += 1
        try:
            async with asyncio.timeout(HEADER_SECONDS):
                prefix = await stream.reader.readexactly(PREFIX_BYTES)
                header = read_header(prefix + await stream.reader.readexactly(length_behind(prefix)))
            match header.purpose:
                case Purpose.OPEN:
                    await self._serve(stream, header.service)
                case Purpose.RELAY:
                    await self._relay(peer, stream, header)
                case Purpose.HOLD:
                    await self._keep(peer, stream)
        except (BadHeader, EOFError, OSError, TimeoutError) as error:
            log.debug("a stream was closed: %s", error)
            stream.abort()
        finally:
            self._streams -= 1

    async def _serve(self, stream: Stream, service: Service) -> None:
        address = self.served.get(service)
        if address is None:
            return await _refuse(stream, Answer.NOT_SERVED)
        try:
            local = await dial(address)
        except (OSError, TimeoutError):
            return await _refuse(stream, Answer.SILENT)
        await _agree(stream)
        await splice(stream, local)

    async def _relay(self, source: bytes, stream: Stream, header: StreamHeader) -> None:
        if (answer := self.book.begin(source, header.peer)) is not Answer.YES:
            return await _refuse(stream, answer)
        try:
            try:
                onward = await self._ask(header.peer, StreamHeader(Purpose.OPEN, header.service))
            except Unreachable:
                return await _refuse(stream, Answer.SILENT)
            await _agree(stream)
            await splice(stream, onward, self._limiter)
        finally:
            self.book.end(source, header.peer)

    async def _keep(self, peer: bytes, stream: Stream) -> None:
        if (answer := self.book.hold(peer)) is not Answer.YES:
            return await _refuse(stream, answer)
        try:
            await _agree(stream)
            await _live(stream)
        finally:
            self.book.let_go(peer)


async def _first(ways: Sequence[tuple[str, Callable[[], Awaitable[Stream]]]]) -> tuple[str, Stream]:
    """The first way that comes about; each begins when the one before it has failed, or DIRECT_SECONDS after it.
    Raises `Unreachable` where none does."""
    names: dict[asyncio.Task[Stream], str] = {}
    errors: list[str] = []
    waiting = list(ways)
    try:
        while waiting or names:
            if waiting:
                name, way = waiting.pop(0)
                names[asyncio.ensure_future(way())] = name
            patience = DIRECT_SECONDS if waiting else None
            done, _ = await asyncio.wait(names, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                name = names.pop(task)
                try:
                    return name, task.result()
                except Unreachable as error:
                    errors.append(f"{name}: {error}")
        raise Unreachable("; ".join(errors))
    finally:
        for task in names:
            task.add_done_callback(_abandon)
            task.cancel()


def _abandon(task: "asyncio.Task[Stream]") -> None:
    """A stream that came too late."""
    if not task.cancelled() and task.exception() is None:
        task.result().abort()


async def _live(stream: Stream) -> None:
    """Exchange signs of life until they stay away."""

    async def speak() -> None:
        while True:
            stream.writer.write(LIFE_SIGN)
            await stream.writer.drain()
            await asyncio.sleep(LIFE_SIGN_SECONDS)

    speaking = asyncio.create_task(speak())
    try:
        while True:
            async with asyncio.timeout(3 * LIFE_SIGN_SECONDS):
                if not await stream.reader.read(64):
                    return
    except (OSError, TimeoutError):
        return
    finally:
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)
        stream.abort()


async def _agree(stream: Stream) -> None:
    stream.writer.write(bytes([Answer.YES]))
    await stream.writer.drain()


async def _refuse(stream: Stream, answer: Answer) -> None:
    stream.writer.write(bytes([answer]))
    await stream.writer.drain()
    stream.writer.close()
