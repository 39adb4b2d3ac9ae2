"""Streams to and from other gateways: opened directly or through a relay, answered, joined to local services.

    to a peer       directly; where that has not come about after DIRECT_SECONDS, through a hole in both NATs
                    (`punching`), and PUNCH_SECONDS later through the relays that both are connected to. The first
                    that comes about is used; what did not come about is not tried first for a while. A relay whose
                    stream brought nothing is tried after the others.
    from a peer     OPEN and PASS are joined to a local service, if that one is served: nothing else of this
                    machine can be reached. RELAY is joined to another peer's service, if this gateway relays,
                    within its limits. HOLD is a peer that wants to be reached through this gateway; it lasts as
                    long as its stream.

Who opens streams is free to call itself what it likes, so they are counted by the networks that they come from;
where places run out, the network that has the most makes room (`strangers`). What passes is TLS between members:
neither gateways nor relays can read or change it.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from atoll.comm.errors import Unreachable
from atoll.comm.gateway_note import relayed
from atoll.comm.peer_names import host_of_peer
from atoll.comm.rate_limits import RateLimit, TokenBuckets
from atoll.comm.strangers import StrangerLimits, Strangers, network_of
from atoll.comm.transport.connection import RateLimiter
from atoll.node.gateway.punching import Address, allowed, punch
from atoll.node.gateway.splice import Stream, come_in, dial, splice
from atoll.node.gateway.stream_header import (
    PREFIX_BYTES,
    SENTENCES,
    Answer,
    BadHeader,
    Hold,
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
PUNCH_SECONDS = 4.0  # after which a relay is tried besides a hole
AGAIN_SECONDS = 300.0  # for which a peer is not tried first by a way that did not come about
SPOILT_SECONDS = 300.0  # for which a relay is tried last, through which nothing came
HEADER_SECONDS = 10.0  # for a header, and for its answer
OPEN_SECONDS = 8.0  # for one way to a peer; less than members wait for each other's hello
LIFE_SIGN_SECONDS = 10.0  # between two on a connection to a relay; it is lost after three that did not come
LIFE_SIGN = b"."
HOLD_AGAIN_SECONDS = 2.0  # between two tries to be connected to a relay
NO_RELAY_SECONDS = 60.0  # the same, where it said that it is none
MAX_STREAMS = 1024  # from peers, at once
MAX_STREAMS_OF_NETWORK = 256  # of these
HEADERS = StrangerLimits(256, 64, RateLimit(20, 512))  # streams that have not said what they are for, by network
PUNCHES = RateLimit(2, 64)  # holes that others want through one relay
NETWORK_BITS = 24  # of an IPv4 address
MAX_REMEMBERED = 4096  # peers
WORDS = {"direct": "directly", "punched": "through a hole", "relayed": "through a relay"}
OpenStream = Callable[[bytes], Awaitable[Stream]]


class Caller(NamedTuple):
    """The peer that opened a stream, and the address that its connection comes from."""

    peer: bytes
    host: str  # an IP address
    port: int

    @property
    def network(self) -> str:
        """The network that its streams are counted with."""
        return network_of(self.host, NETWORK_BITS)


class RefusedByPeer(Unreachable):
    """A gateway answered, and said no."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(SENTENCES[answer])
        self.answer = answer


class MeteredLimiter(RateLimiter):
    """A limit that knows how much has passed."""

    passed = 0  # bytes

    async def take(self, size: int) -> None:
        """Wait until `size` bytes may pass, and count them."""
        self.passed += size
        await super().take(size)


class Relaying:
    """The streams of one gateway."""

    def __init__(self, open_stream: OpenStream, relays: Iterable[bytes], limits: RelayLimits) -> None:
        """`open_stream`: to a peer, or raises `Unreachable`; `relays`: peers that may relay for this one."""
        self._open_stream, self.relays = open_stream, tuple(relays)
        self._relays_changed = asyncio.Event()
        self.served: dict[Service, str] = {}  # what others may reach here: "host:port", the coordinator's entrance
        self.book = RelayBook(limits)
        self.limiter = MeteredLimiter(limits.rate)  # of what is relayed
        self._vain: OrderedDict[tuple[str, bytes], float] = (
            OrderedDict()
        )  # ways to peers, and when they were tried
        self._spoilt: dict[bytes, float] = {}  # relays, and when nothing came through them
        self._headers = Strangers[int](HEADERS)
        self._waiting: dict[int, Stream] = {}  # whose headers are to come
        self._streams = Counter[str]()  # from each network
        self._holds: dict[Hold, Stream] = {}
        self._relayed: set[Stream] = set()
        self._number = 0
        # Who waits for a stream alone is kept alive by nobody: asyncio knows its tasks and readers weakly.
        self._answering = set[asyncio.Task[Any] | None]()
        self.holding: set[bytes] = set()  # relays through which this gateway can be reached
        self.held = asyncio.Event()  # there was one
        self.opened = {"direct": 0, "punched": 0, "relayed": 0}  # streams to peers, by their way
        self.observer = 0  # this relay's port for who wants to know as what it is seen; 0: there is none
        self.host_of: Callable[[bytes], str] = lambda relay: (
            ""
        )  # the IP address of a relay; empty: it is not known
        self.may_punch: Callable[[str], bool] = allowed(private=False)
        self._observers = dict[bytes, Address]()  # of relays
        self._punches = TokenBuckets(PUNCHES)

    def use(self, relays: Iterable[bytes]) -> None:
        """Be reached, and reach others, through these relays from now on."""
        self.relays = tuple(dict.fromkeys(relays))
        self._relays_changed.set()

    def limit(self, streams: int, rate: float) -> None:
        """Relay so many streams at once and bytes a second (0: no limit) from now on. With 0 streams it is no
        relay any more: what it relays ends, and who is reached through it looks for another."""
        self.book.limit(streams)
        if self.limiter.rate != rate:
            self.limiter.change(rate)
        for stream in (*self._relayed, *self._holds.values()) if not streams else ():
            stream.abort()

    # To peers

    async def reach(self, peer: bytes, service: Service) -> Stream:
        """A stream to a service behind a peer, by the first way that comes about. Raises `Unreachable`."""
        relays = [relay for relay in self._by_merit() if relay != peer]
        ways = [Way("relayed", partial(self._through, relay, peer, service), DIRECT_SECONDS) for relay in relays]
        holes = [relay for relay in relays if relay in self._observers][: service is Service.DATA]
        if holes and not self._was_vain("punched", peer):
            ways.insert(0, Way("punched", partial(self._punched, holes[0], peer), PUNCH_SECONDS))
        direct = Way("direct", partial(self._ask, peer, StreamHeader(Purpose.OPEN, service)), DIRECT_SECONDS)
        ways.insert(len(ways) if self._was_vain("direct", peer) else 0, direct)
        way, stream = await _first(ways)
        for before in ways[: [w.name for w in ways].index(way)]:
            self._note_vain(before.name, peer)
        self._vain.pop((way, peer), None)
        self.opened[way] += 1
        log.info(f"{host_of_peer(peer)[:16]} is reached {WORDS[way]}")
        return stream

    def _was_vain(self, way: str, peer: bytes) -> bool:
        return time.monotonic() - self._vain.get((way, peer), -AGAIN_SECONDS) < AGAIN_SECONDS

    def _note_vain(self, way: str, peer: bytes) -> None:
        if not self._was_vain(way, peer):
            self._vain[way, peer] = time.monotonic()
            if len(self._vain) > MAX_REMEMBERED:
                self._vain.popitem(last=False)

    async def _punched(self, relay: bytes, peer: bytes) -> Stream:
        """A connection to a peer's data plane through a hole in both NATs, agreed upon through a relay."""
        stream = await self._ask(relay, StreamHeader(Purpose.RELAY, Service.PUNCH, peer))
        try:
            return await punch(stream, self._observers[relay], self.may_punch)
        finally:
            stream.abort()

    def _by_merit(self) -> list[bytes]:
        now = time.monotonic()
        return sorted(self.relays, key=lambda r: now - self._spoilt.get(r, -SPOILT_SECONDS) < SPOILT_SECONDS)

    async def _through(self, relay: bytes, peer: bytes, service: Service) -> Stream:
        """A stream to a peer's service through a relay, which is held against it if it brings nothing."""

        def judge(came: int) -> None:
            if came:
                self._spoilt.pop(relay, None)
            else:
                self._spoilt[relay] = time.monotonic()

        return replace(await self._ask(relay, StreamHeader(Purpose.RELAY, service, peer)), over=judge)

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
                        raise RefusedByPeer(answer)
                except BaseException:
                    stream.abort()
                    raise
                return stream
        except TimeoutError:
            raise Unreachable(f"nothing came back for {OPEN_SECONDS:g} s") from None
        except (OSError, EOFError, BadHeader) as error:
            raise Unreachable(f"the stream broke ({error or type(error).__name__})") from None

    async def keep_holding(self) -> None:
        """Stay connected to all relays, as they change, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            holding = dict[bytes, asyncio.Task[None]]()
            while True:
                self._relays_changed.clear()
                holding = {relay: task for relay, task in holding.items() if not task.done()}
                for relay in self.relays:
                    if relay not in holding:
                        holding[relay] = tasks.create_task(self.hold(relay))
                await self._relays_changed.wait()

    async def hold(self, relay: bytes) -> None:
        """Stay connected to a relay, so that others reach this gateway through it, as long as it is one of those
        that are used."""
        said = ""
        while relay in self.relays:
            pause = HOLD_AGAIN_SECONDS
            try:
                stream = await self._ask(relay, StreamHeader(Purpose.HOLD))
                log.info("others can reach this gateway through a relay")
                said = ""
                await self._learn_observer(relay, stream)
                self.holding.add(relay)
                self.held.set()
                await _live(stream)
            except (EOFError, OSError, TimeoutError) as error:
                log.info(f"no place at a relay: {error or type(error).__name__}")
            except Unreachable as error:
                if str(error) != said:
                    log.info(f"no place at a relay: {error}")
                said = str(error)
                if isinstance(error, RefusedByPeer) and error.answer is Answer.NO_RELAY:
                    pause = NO_RELAY_SECONDS
            finally:
                self.holding.discard(relay)
            await asyncio.sleep(pause)

    async def _learn_observer(self, relay: bytes, stream: Stream) -> None:
        async with asyncio.timeout(HEADER_SECONDS):
            port = int.from_bytes(await stream.reader.readexactly(2), "big")
        self._observers.pop(relay, None)
        if port and (host := self.host_of(relay)):
            self._observers[relay] = (host, port)

    # From peers

    async def accept(self, caller: Caller, stream: Stream) -> None:
        """Answer a stream that a peer has opened."""
        network = caller.network
        if sum(self._streams.values()) >= MAX_STREAMS or self._streams[network] >= MAX_STREAMS_OF_NETWORK:
            return stream.abort()
        self._number += 1
        number, admission = self._number, self._headers.admit(self._number, network, time.monotonic())
        if not admission.admitted:
            return stream.abort()
        if admission.displaced is not None:
            self._waiting[admission.displaced].abort()
        self._waiting[number] = stream
        self._streams[network] += 1
        self._answering.add(task := asyncio.current_task())
        try:
            async with asyncio.timeout(HEADER_SECONDS):
                prefix = await stream.reader.readexactly(PREFIX_BYTES)
                header = read_header(prefix + await stream.reader.readexactly(length_behind(prefix)))
            self._settle(number)
            match header.purpose:
                case Purpose.OPEN | Purpose.PASS:
                    await self._serve(caller, stream, header)
                case Purpose.RELAY:
                    await self._relay(caller, stream, header)
                case Purpose.HOLD:
                    await self._keep(caller, stream)
        except (BadHeader, EOFError, OSError, TimeoutError) as error:
            log.debug("a stream was closed: %s", error)
            stream.abort()
        finally:
            self._answering.discard(task)
            self._settle(number)
            self._streams[network] -= 1
            if not self._streams[network]:
                del self._streams[network]

    def _settle(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._headers.leave(number)

    async def _serve(self, caller: Caller, stream: Stream, header: StreamHeader) -> None:
        if header.service is Service.PUNCH:
            return await self._serve_through_hole(caller, stream)
        address = self.served.get(header.service)
        if address is None:
            return await _refuse(stream, Answer.NOT_SERVED)
        try:
            if header.service is Service.COORDINATOR:
                host = relayed(caller.host) if header.purpose is Purpose.PASS else caller.host
                local = await come_in(address, host, caller.port)
            else:
                local = await dial(address)
        except (OSError, TimeoutError):
            return await _refuse(stream, Answer.SILENT)
        await _agree(stream)
        await splice(stream, local)

    async def _serve_through_hole(self, caller: Caller, stream: Stream) -> None:
        """Join the data plane to a connection that comes through a hole; `stream`: through the relay."""
        address, observer = self.served.get(Service.DATA), self._observers.get(caller.peer)
        if address is None or observer is None or not self._punches.take(caller.peer, time.monotonic()):
            return await _refuse(stream, Answer.NOT_SERVED)
        try:
            await _agree(stream)
            there = await punch(stream, observer, self.may_punch)
        except Unreachable as error:
            return log.debug("for a peer: %s", error)
        finally:
            stream.abort()
        try:
            local = await dial(address)
        except (OSError, TimeoutError):
            return there.abort()
        await splice(there, local)

    async def _relay(self, caller: Caller, stream: Stream, header: StreamHeader) -> None:
        if (answer := self.book.begin(caller.peer, header.peer, caller.network)) is not Answer.YES:
            return await _refuse(stream, answer)
        try:
            try:
                onward = await self._ask(header.peer, StreamHeader(Purpose.PASS, header.service))
            except Unreachable:
                return await _refuse(stream, Answer.SILENT)
            self._relayed.add(stream)
            await _agree(stream)
            await splice(stream, onward, self.limiter)
        finally:
            self._relayed.discard(stream)
            self.book.end(caller.peer, header.peer, caller.network)

    async def _keep(self, caller: Caller, stream: Stream) -> None:
        answer, hold, displaced = self.book.hold(caller.peer, caller.network)
        if answer is not Answer.YES:
            return await _refuse(stream, answer)
        if displaced is not None:
            self._holds[displaced].abort()
        self._holds[hold] = stream
        try:
            await _agree(stream)
            stream.writer.write(self.observer.to_bytes(2, "big"))
            await _live(stream)
        finally:
            del self._holds[hold]
            self.book.let_go(hold)


class Way(NamedTuple):
    """One way to a peer."""

    name: str
    go: Callable[[], Awaitable[Stream]]
    patience: float  # seconds, until the next one is tried besides


async def _first(ways: Sequence[Way]) -> tuple[str, Stream]:
    """The first way that comes about; each begins when the one before it has failed, or its patience after it.
    Raises `Unreachable` where none does."""
    names: dict[asyncio.Task[Stream], str] = {}
    errors: list[str] = []
    waiting = list(ways)
    try:
        patience: float | None = None
        while waiting or names:
            if waiting:
                name, go, patience = waiting.pop(0)
                names[asyncio.ensure_future(go())] = name
            patience = patience if waiting else None
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
