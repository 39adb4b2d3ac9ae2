"""The data plane of one node: it accepts reduce streams and answers fetches, on one port.

    a stream of an attempt          waits until this node begins that attempt too (its payload unread, so the
                                    sender is held back), then belongs to the attempt; refused if the attempt
                                    is over or has been overtaken, or if its sender is not in the plan
    requests for chunks             answered from the node's `Shelf`, any number on one connection
    anything else                   closed, with a sentence, before anything is allocated for it

No peer can crash the node from here. Peers are those who know the run's key; that a node's bytes are right
is for digests to say.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from types import TracebackType
from typing import Protocol, Self

from atoll.comm import compress, wire
from atoll.comm.codec import Malformed, Octets, view
from atoll.comm.errors import PeerError, ResourceError
from atoll.comm.ids import NodeId, Round, RunId
from atoll.comm.plan import BadPlan, Fence, Plan
from atoll.comm.wire import Broken, Closed, Header, Kind, Link, Meter

log = logging.getLogger("atoll.plane")

PATIENCE = 20.0  # seconds a stream may wait for this node to begin its attempt
IDLE = 60.0  # seconds between two requests on one connection
MAX_LINKS = 1024  # accepted connections


class PeerLost(PeerError):
    """`node` broke the protocol or its connection; `sentence` says how."""

    def __init__(self, node: NodeId, sentence: str) -> None:
        super().__init__(f"{node}: {sentence}")
        self.node, self.sentence = node, sentence


class Missing(PeerError):
    """The peer is well but does not have what was asked for: ask another, or for a newer round."""


class Item(Enum):
    """What can be fetched."""

    SEALED = Kind.GET_SEALED
    STATE = Kind.GET_STATE
    DIGESTS = Kind.GET_DIGESTS


class Shelf(Protocol):
    """What this node can give to others. Called in the event loop, so it must be quick; what it returns must
    not change while it is sent: the caller never copies it."""

    def sealed(self, round: Round, chunk: int) -> Octets | None:
        """The sealed bytes of a committed round's chunk."""

    def state(self, round: Round, chunk: int) -> Octets | None:
        """The chunk's anchor, then its momentum, after `round`: fp32, little-endian."""

    def digests(self, round: Round) -> Sequence[bytes] | None:
        """The digest of each chunk of `state(round)`."""


class Arrivals:
    """The incoming streams of the attempt that this node has begun."""

    def __init__(self, plan: Plan, me: NodeId) -> None:
        self.fence = plan.fence
        self._links = {m.node: asyncio.Queue[Link](1) for m in plan.members if m.node != me}
        self._seen: set[NodeId] = set()
        self.over = asyncio.Event()
        self.verdict = Kind.ABORT

    async def link(self, node: NodeId) -> Link:
        """Wait for the stream of `node`."""
        return await self._links[node].get()

    def add(self, node: NodeId, link: Link) -> None:
        if node not in self._links:
            raise Broken(f"{node} is not in the plan of round {self.fence.round}, attempt {self.fence.attempt}")
        if node in self._seen:
            raise Broken(f"{node} already has a stream in this attempt")
        self._seen.add(node)
        self._links[node].put_nowait(link)


class DataPlane:
    """`start` it, `close` it. One for a node and run."""

    def __init__(self, run: RunId, node: NodeId, key: bytes, shelf: Shelf) -> None:
        self.run, self.node = run, node
        self._key, self._shelf = key, shelf
        self._meter = Meter()
        self._address = ""
        self._links: set[Link] = set()  # accepted ones
        self._newest: Fence | None = None  # of all attempts begun
        self._arrivals: Arrivals | None = None  # of the attempt under way
        self._begun = asyncio.Event()  # set, and replaced, whenever an attempt begins
        self._serving: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, listen: str, run: RunId, node: NodeId, key: bytes, shelf: Shelf) -> Self:
        """Listen on "host:port"; port 0 lets the kernel choose. `ResourceError` if that cannot be had.

        With an empty key everybody is refused until `identify` brings the real one.
        """
        if max(len(run.encode()), len(node.encode())) > 255:
            raise ValueError("the ids of a run and of a node have at most 255 bytes")
        plane = cls(run, node, key, shelf)
        sock = await _listen(listen)
        host, port = sock.getsockname()[:2]
        plane._address = wire.format_address(host, port)
        ready = asyncio.Event()
        plane._serving = asyncio.create_task(plane._serve(sock, ready), name=f"data plane of {node}")
        await ready.wait()
        return plane

    def identify(self, node: NodeId, key: bytes) -> None:
        """Take the id and the run's key that the coordinator gave at the join."""
        self.node, self._key = node, key

    @property
    def address(self) -> str:
        """Where it listens, with the port that was bound."""
        return self._address

    @property
    def bytes_up(self) -> int:
        """Bytes sent, headers included."""
        return self._meter.up

    @property
    def bytes_down(self) -> int:
        """Bytes received, headers included."""
        return self._meter.down

    async def close(self) -> None:
        """Close the port and all accepted connections. Cancel a reduce before: it would blame its peers."""
        if self._serving is not None:
            self._serving.cancel()
            with suppress(asyncio.CancelledError):
                await self._serving

    # Dialling side

    async def dial(self, node: NodeId, address: str) -> Link:
        """A connection to `node` with the hello said; `Broken` if it cannot be had. The caller closes it."""
        try:
            host, port = wire.parse_address(address)
            async with asyncio.timeout(wire.HANDSHAKE):
                reader, writer = await asyncio.open_connection(host, port)
        except ValueError as error:
            raise Broken(str(error)) from None
        except TimeoutError:
            raise Broken(f"no connection to {address} within {wire.HANDSHAKE:g} s") from None
        except OSError as error:
            raise Broken(f"no connection to {address}: {wire.reason(error)}") from None
        link = Link(reader, writer, self._meter)
        try:
            await wire.greet(link, self.run, self.node, node, self._key)
        except BaseException:
            link.abort()
            raise
        return link

    async def fetch(
        self, node: NodeId, address: str, item: Item, round: Round, chunk: int, size: int, deadline: float = 60.0
    ) -> bytes:
        """One `Fetcher.fetch` on a connection of its own."""
        async with Fetcher(self, node, address) as fetcher:
            return await fetcher.fetch(item, round, chunk, size, deadline)

    # The attempt under way

    @contextmanager
    def attempt(self, plan: Plan) -> Iterator[Arrivals]:
        """Receive the streams of `plan`; they are told DONE if the body returns, ABORT if it raises."""
        if self._arrivals is not None:
            raise RuntimeError(f"{plan}: another attempt is still under way")
        if self._newest is not None and plan.fence <= self._newest:
            raise BadPlan(f"{plan}: an attempt that is as new has already begun")
        arrivals = self._arrivals = Arrivals(plan, self.node)
        self._newest = plan.fence
        self._begun.set()
        self._begun = asyncio.Event()
        try:
            yield arrivals
            arrivals.verdict = Kind.DONE
        finally:
            self._arrivals = None
            arrivals.over.set()

    # Accepting side

    async def _serve(self, sock: socket.socket, ready: asyncio.Event) -> None:
        """Own the server and a task for each accepted connection."""
        async with asyncio.TaskGroup() as group:

            def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                if len(self._links) >= MAX_LINKS:
                    writer.transport.abort()
                    return
                link = Link(reader, writer, self._meter)
                self._links.add(link)
                group.create_task(self._accept(link))

            server = await asyncio.start_server(accepted, sock=sock)
            ready.set()
            try:
                await asyncio.Event().wait()
            finally:
                server.close()

    async def _accept(self, link: Link) -> None:
        who = "a stranger"
        try:
            node = await wire.welcome(link, self.run, self.node, self._key)
            who = node
            first = await link.receive(IDLE)
            if first.kind is Kind.OPEN:
                await self._admit(node, first, link)
            else:
                await self._answer_all(first, link)
        except Closed:
            pass
        except Broken as error:
            log.warning("closed a connection from %s: %s", who, error)
            await link.farewell(Kind.REFUSED, str(error))
        except Exception:
            log.exception("closed a connection from %s because of a fault of this node", who)
        finally:
            self._links.discard(link)
            link.abort()

    async def _admit(self, node: NodeId, first: Header, link: Link) -> None:
        """Hand a stream to its attempt, and say farewell when that is over."""
        if first.length:
            raise Broken("the first frame of a stream has a payload")
        arrivals = await self._begins(first.fence)
        arrivals.add(node, link)
        await arrivals.over.wait()
        await link.farewell(arrivals.verdict)

    async def _begins(self, fence: Fence) -> Arrivals:
        """Wait until the attempt of `fence` is under way here; `Broken` if it is over or does not come."""
        try:
            async with asyncio.timeout(PATIENCE):
                while self._newest is None or self._newest < fence:
                    await self._begun.wait()
        except TimeoutError:
            raise Broken(f"attempt {_short(fence)} did not begin here within {PATIENCE:g} s") from None
        if self._arrivals is None or self._arrivals.fence != fence:
            raise Broken(f"attempt {_short(fence)} is over, the newest one here is {_short(self._newest)}")
        return self._arrivals

    async def _answer_all(self, request: Header, link: Link) -> None:
        while True:
            if request.length:
                raise Broken("a request with a payload")
            await self._answer(request, link)
            request = await link.receive(IDLE)

    async def _answer(self, request: Header, link: Link) -> None:
        round, chunk = request.fence.round, request.chunk
        match request.kind:
            case Kind.GET_SEALED:
                found = self._shelf.sealed(round, chunk)
            case Kind.GET_STATE:
                found = self._shelf.state(round, chunk)
            case Kind.GET_DIGESTS:
                digests = self._shelf.digests(round)
                found = None if digests is None else b"".join(digests)
            case _:
                raise Broken(f"a frame of kind {request.kind.name} where a stream or a request begins")
        if found is None:
            await link.send(wire.unfenced(Kind.MISSING, round, chunk))
            return
        kind, data = Kind.DATA, view(found)
        if request.kind is Kind.GET_STATE:
            packed = await asyncio.to_thread(compress.pack, data)
            if len(packed) < len(data):
                kind, data = Kind.PACKED, view(packed)
        await link.send(wire.unfenced(kind, round, chunk, len(data)), data)


class Fetcher:
    """One connection to `node` for many chunks, dialled at the first one, and again after a failure.

    One `fetch` at a time; use several fetchers for several chunks at once.
    """

    def __init__(self, plane: DataPlane, node: NodeId, address: str) -> None:
        self._plane, self.node, self.address = plane, node, address
        self._link: Link | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hang_up()

    async def fetch(self, item: Item, round: Round, chunk: int, size: int, deadline: float = 60.0) -> bytes:
        """`size` bytes (of digests: 16 for each chunk), within `deadline` seconds. Compare their digest yourself.

        `Missing` if the peer does not have them; `PeerLost` if it fails, or answers anything else.
        """
        what = f"{item.name.lower()} of round {round}, chunk {chunk} from {self.address}"
        answered = False
        try:
            async with asyncio.timeout(deadline):
                data = await self._ask(item, round, chunk, size)
            answered = True
            return data
        except TimeoutError:
            raise PeerLost(self.node, f"it did not answer within {deadline:g} s ({what})") from None
        except (Broken, Malformed) as error:
            raise PeerLost(self.node, f"{error} ({what})") from None
        except Missing:
            answered = True
            raise
        finally:
            if not answered:  # what comes next on this connection could be the rest of this answer
                self._hang_up()

    async def _ask(self, item: Item, round: Round, chunk: int, size: int) -> bytes:
        if self._link is None:
            self._link = await self._plane.dial(self.node, self.address)
        link = self._link
        await link.send(wire.unfenced(item.value, round, chunk))
        answer = await link.receive(None)
        match answer.kind:
            case Kind.DATA if answer.length == size:
                return await link.read(size)
            case Kind.PACKED if answer.length < size and item is Item.STATE:
                return await asyncio.to_thread(compress.unpack, await link.read(answer.length), size)
            case Kind.DATA | Kind.PACKED:
                raise Broken(f"it offers {answer.length} bytes where {size} were expected")
            case Kind.MISSING if answer.length == 0:
                raise Missing(f"{self.node} does not have {item.name.lower()} of round {round}, chunk {chunk}")
            case Kind.REFUSED:
                raise Broken(f"it refused: {await link.sentence(answer)}")
            case _:
                raise Broken(f"it answered with a frame of kind {answer.kind.name}")

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.abort()
            self._link = None


async def _listen(listen: str) -> socket.socket:
    """A listening socket on the first address that `listen` resolves to: port 0 must be one port, not two."""
    try:
        host, port = wire.parse_address(listen)
    except ValueError as error:
        raise ResourceError(f"cannot listen: {error}") from None
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        return socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            where = f"port {port} on {host or 'this machine'}"
            raise ResourceError(f"{where} is in use: choose another with --listen") from None
        raise ResourceError(
            f"cannot listen on {listen}: {wire.reason(error)}; choose another with --listen"
        ) from None


def _short(fence: Fence | None) -> str:
    return "none" if fence is None else f"{fence.attempt} of round {fence.round} (incarnation {fence.incarnation})"
