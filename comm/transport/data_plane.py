"""The data plane of one node: it accepts links and answers fetches, on one port.

    a link                          belongs to the reduces, this round's and the next ones' (`peers`)
    requests for chunks             answered (`fetch_server`), any number on one connection
    a leaf's offer                  kept, to ask it
    anything else                   closed, with a sentence, before anything is allocated for it

Strangers, who have not proved the run's key, have few places, shared between addresses, and a short time.
No peer can crash the node from here. Peers are the members that are here, who prove it with a key of their own
(`key_ring`), and each may have a few connections; those of who is no member any more are closed. That a node's
bytes are right is for digests to say. With TLS, a node shows a certificate that it made for itself, and is dialled
under the pin that the coordinator has of it: who dials says nothing before that was compared, and its proof is
good for that certificate alone.
"""

import asyncio
import errno
import logging
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Self

from atoll.comm.addresses import OwnNetwork, resolve
from atoll.comm.errors import ResourceError, Unreachable
from atoll.comm.ids import NO_PIN, NodeId, Pin, PublicKey, Round, RunId
from atoll.comm.peer_names import is_peer_host
from atoll.comm.rate_limits import RateLimit, TokenBuckets
from atoll.comm.signatures import PrivateKey
from atoll.comm.strangers import StrangerLimits, Strangers, network_of
from atoll.comm.transport import frames
from atoll.comm.transport.connection import (
    ByteCounter,
    Link,
    LinkBroken,
    LinkClosed,
    LinkReset,
    RateLimiter,
    os_reason,
)
from atoll.comm.transport.fetch_client import FetchClient, FetchItem
from atoll.comm.transport.fetch_server import IDLE_TIMEOUT, FetchServer, StateSource
from atoll.comm.transport.frames import FrameKind
from atoll.comm.transport.key_ring import KeyRing, RunKey
from atoll.comm.transport.leaf_relay import OfferDialer, OfferPool
from atoll.comm.transport.peer_links import PeerLinks
from atoll.comm.transport.tls import TlsContexts

log = logging.getLogger("atoll.plane")

MAX_LINKS = 1024  # accepted connections
MAX_STRANGERS = 256  # accepted connections that have not proved whose they are yet
MAX_STRANGERS_PER_ADDRESS = 128  # of these
STRANGER_RATE = RateLimit(20, 512)  # connections of one address that prove nothing
STRANGER_LINES = RateLimit(1, 50)  # of the log
ACCEPTS_AT_ONCE = 64  # connections, before those that are open are served again
BACKLOG = 1024  # connections that wait to be accepted
STRANGER = "a stranger"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset, and nothing lingers in the kernel
MAX_LINKS_PER_MEMBER = 40  # accepted connections of one member: 16 links, 16 of a recovery, and a few more


class DataPlane:
    """The port of one node in one run, and all its connections. `start` it, `close` it."""

    def __init__(
        self,
        run: RunId,
        node: NodeId,
        key: bytes,
        shelf: StateSource,
        caps: tuple[float, float] = (0, 0),
        streams: int = 0,
        congestion_control: str = "",
        tls: TlsContexts | None = None,
        identity: PrivateKey | None = None,
    ) -> None:
        self.run, self.node = run, node
        self.keys = KeyRing(identity, key)
        self._tls = tls
        self._meter = ByteCounter()
        self._up, self._down = (RateLimiter(rate) for rate in caps)
        self._address = ""
        # Host and port of this machine that lead to a peer's host; None: no gateway is here.
        self.reach: Callable[[str], Awaitable[tuple[str, int]]] | None = None
        self.private_addresses = True  # peers may be in private networks: until the run is known
        self._accepted: dict[Link, str] = {}  # with the network that each came from
        limits = StrangerLimits(MAX_STRANGERS, MAX_STRANGERS_PER_ADDRESS, STRANGER_RATE)
        self._strangers = Strangers[Link](limits)  # of these
        self._stranger_lines = TokenBuckets(STRANGER_LINES)
        self._accepted_of: defaultdict[NodeId, dict[Link, None]] = defaultdict(dict)  # the others, by their member
        self._serving: asyncio.Task[None] | None = None
        self._room: Callable[[], float] | None = None
        self.peers = PeerLinks(self._dial_link, self._meter, streams, congestion_control, self._up)
        self.offers, self.offering = OfferPool(), OfferDialer(self._serve_at)
        self._answers = FetchServer(shelf, self.peers, self.offers, self._up, congestion_control)

    @classmethod
    async def start(
        cls,
        listen: str,
        run: RunId,
        node: NodeId,
        key: bytes,
        shelf: StateSource,
        caps: tuple[float, float] = (0, 0),
        streams: int = 0,
        congestion_control: str = "",
        tls: TlsContexts | None = None,
        identity: PrivateKey | None = None,
    ) -> Self:
        """Listen on "host:port"; port 0 lets the kernel choose. `ResourceError` if that cannot be had.

        With an empty key everybody is refused until `identify` brings the real one. `caps`: bytes a second up and
        down, 0: as much as there is. `streams` to each peer, 0: as many as measurements say. Without `tls`
        nothing is encrypted. `identity`: the node's own key, with which nobody is accepted but whom `admit` names;
        without it, whoever knows the run's key is.
        """
        if max(len(run.encode()), len(node.encode())) > 255:
            raise ValueError("the ids of a run and of a node have at most 255 bytes")
        plane = cls(run, node, key, shelf, caps, streams, congestion_control, tls, identity)
        sock = await _listen(listen)
        host, port = sock.getsockname()[:2]
        plane._address = frames.format_address(host, port)
        plane._serving = asyncio.create_task(plane._serve(sock), name=f"data plane of {node}")
        return plane

    def identify(self, node: NodeId, key: RunKey) -> None:
        """Take the id and the run's key that the coordinator gave at the join."""
        self.node = node
        self.keys.change_key(key, asyncio.get_running_loop().time())

    def admit(self, members: Mapping[NodeId, PublicKey], key: RunKey) -> None:
        """Take the members that are here, with their keys, and the run's key that the coordinator says are in
        force. Connections of who is no member any more are closed."""
        self.keys.change_key(key, asyncio.get_running_loop().time())
        for node in self.keys.change_members(members):
            self.peers.drop(node)
            self.offers.drop(node)
            for link in list(self._accepted_of.get(node, ())):
                link.close()

    @property
    def address(self) -> str:
        """The "host:port" where it listens, with the port that was bound."""
        return self._address

    @property
    def pin(self) -> Pin:
        """The pin of the certificate that it shows; empty: it shows none."""
        return self._tls.pin if self._tls is not None else NO_PIN

    @property
    def bytes_up(self) -> int:
        """Bytes sent, headers included."""
        return self._meter.up

    @property
    def bytes_down(self) -> int:
        """Bytes received, headers included."""
        return self._meter.down

    def limit(self, up: float, down: float) -> None:
        """Send and take in so many bytes a second at most from now on; 0: as much as there is."""
        for limiter, rate in ((self._up, up), (self._down, down)):
            if limiter.rate != rate:
                limiter.change(rate)

    @property
    def limits(self) -> tuple[float, float]:
        """Bytes a second that it may send, and take in; 0: as much as there is."""
        return self._up.rate, self._down.rate

    def budget(self, room: Callable[[], float] | None) -> None:
        """Let no more bytes through, up and down together, than `room` says at each moment; None: there is no such
        limit. While it says 0 nobody is let in who dials."""
        self._up.room = self._down.room = self._room = room

    @property
    def is_closed(self) -> bool:
        """Whether nothing may pass."""
        return self._room is not None and self._room() < 1

    def hush(self) -> None:
        """Give nothing more to those who fetch here: they ask others, who would else wait for this node."""
        self._answers.hush()

    async def close(self) -> None:
        """Close the port and all connections."""
        await self.offering.close()
        await self.peers.close()
        if self._serving is not None:
            self._serving.cancel()
            with suppress(asyncio.CancelledError):
                await self._serving

    # Dialling side

    async def dial(self, node: NodeId, address: str, pin: Pin = NO_PIN) -> Link:
        """A connection to `node` with the hello said; `LinkBroken` if it cannot be had. The caller closes it.
        `pin` is of the node's certificate, where the run is encrypted."""
        try:
            host, port = frames.parse_address(address)
            async with asyncio.timeout(frames.HANDSHAKE_TIMEOUT):
                if is_peer_host(host):
                    sock = await _connect(*await self._by_gateway(host), private=True)
                else:
                    sock = await _connect(host, port, self.private_addresses)
        except (Unreachable, ValueError) as error:
            raise LinkBroken(str(error)) from None
        except TimeoutError:
            raise LinkBroken(f"no connection to {address} within {frames.HANDSHAKE_TIMEOUT:g} s") from None
        except OwnNetwork as error:
            raise LinkBroken(f"no connection to {address}: {error}") from None
        except OSError as error:
            raise LinkBroken(f"no connection to {address}: {os_reason(error)}") from None
        link = Link(sock, self._meter, self._up, self._down)
        try:
            if self._tls is not None:
                await self._tls.dial(link, pin, frames.HANDSHAKE_TIMEOUT)
            shown = pin if self._tls is not None else NO_PIN
            await frames.greet(link, self.run, self.node, node, self.keys, shown)
        except BaseException:
            link.close()
            raise
        return link

    async def _by_gateway(self, host: str) -> tuple[str, int]:
        """Where this machine's gateway lets a peer be dialled. Raises `Unreachable`."""
        if self.reach is None:
            raise Unreachable(
                f"{host} is reached through a gateway, and there is none here: join by a URL that names one"
            )
        return await self.reach(host)

    async def _dial_link(self, node: NodeId, address: str, pin: Pin) -> Link:
        link = await self.dial(node, address, pin)
        try:
            await frames.send(link, frames.unfenced(FrameKind.LINK))
        except BaseException:
            link.close()
            raise
        return link

    async def fetch(
        self,
        node: NodeId,
        address: str,
        item: FetchItem,
        round: Round,
        chunk: int,
        size: int,
        deadline: float = 60.0,
        pin: Pin = NO_PIN,
    ) -> bytes:
        """Fetch one item as `FetchClient.fetch` does, on a connection of its own. Raises what that raises."""
        async with FetchClient(self, node, address, pin) as fetcher:
            return await fetcher.fetch(item, round, chunk, size, deadline)

    # Accepting side

    async def _serve(self, sock: socket.socket) -> None:
        """Own the port and a task for each accepted connection."""
        loop, accepts = asyncio.get_running_loop(), 0
        with sock:
            async with asyncio.TaskGroup() as group:
                while True:
                    if (accepts := accepts + 1) % ACCEPTS_AT_ONCE == 0:  # `sock_accept` may never wait
                        await asyncio.sleep(0)
                    try:
                        accepted, address = await loop.sock_accept(sock)
                    except OSError as error:  # out of descriptors, or the stranger has gone already
                        log.warning("a connection could not be accepted: %s", os_reason(error))
                        await asyncio.sleep(0.1)
                        continue
                    network = network_of(address[0])
                    exhausted = self._strangers.exhausted(network, loop.time())
                    if self.is_closed or exhausted or not self._make_room(network):
                        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                        accepted.close()
                        continue
                    link = Link(accepted, self._meter, self._up, self._down)
                    self._accepted[link] = network
                    displaced = self._strangers.admit(link, network, loop.time()).displaced
                    if displaced is not None:  # members need a moment, others have no claim
                        displaced.close()
                    group.create_task(self._accept(link))

    def _make_room(self, network: str) -> bool:
        """Whether there is a place for one more link from `network`; where all are taken, the network that has the
        most, and more than this one would have, loses its newest."""
        if len(self._accepted) < MAX_LINKS:
            return True
        counts = Counter(self._accepted.values())
        crowd, most = counts.most_common(1)[0]
        if most <= counts[network] + 1:
            return False
        newest = next(link for link in reversed(self._accepted) if self._accepted[link] == crowd)
        del self._accepted[newest]
        newest.close()
        return True

    async def _accept(self, link: Link) -> None:
        who = STRANGER
        try:
            who = node = await self._shake_hands(link)
            self._strangers.prove(link, asyncio.get_running_loop().time())
            self._enter(node, link)
            first = await frames.receive(link, IDLE_TIMEOUT)
            if first.kind is FrameKind.LINK:
                await self.peers.adopt(node, link)
            elif first.kind is FrameKind.OFFER:
                await self.offers.keep(node, link)
            else:
                with suppress(LinkReset):  # who asked has it from another by now, or is gone
                    await self._answers.answer_until_hushed(node, link, first)
        except LinkClosed:
            pass
        except LinkBroken as error:
            if who != STRANGER or self._stranger_lines.take("", asyncio.get_running_loop().time()):
                log.warning("closed a connection from %s: %s", who, error)
            if self._tls is None or link.encrypted:
                await frames.farewell(link, FrameKind.REFUSED, str(error))
        except Exception:
            log.exception("closed a connection from %s because of a fault of this node", who)
        finally:
            self._accepted.pop(link, None)
            self._strangers.leave(link)
            self._leave(NodeId(who), link)
            link.close()

    async def _shake_hands(self, link: Link) -> NodeId:
        """TLS and hello have one deadline. Raises `LinkBroken`."""
        within = frames.HANDSHAKE_TIMEOUT
        try:
            async with asyncio.timeout(within):
                if self._tls is not None:
                    await self._tls.accept(link, within)
                return await frames.welcome(link, self.run, self.node, self.keys, self.pin)
        except TimeoutError:
            raise LinkBroken(f"it did not say hello within {within:g} s") from None

    def _enter(self, node: NodeId, link: Link) -> None:
        """Count the link as one of this member's. Beyond its share its oldest one goes: that is given up, most
        likely, on its side."""
        mine = self._accepted_of[node]
        while len(mine) >= MAX_LINKS_PER_MEMBER:
            oldest = next(iter(mine))
            del mine[oldest]
            oldest.close()
        mine[link] = None

    def _leave(self, node: NodeId, link: Link) -> None:
        if (mine := self._accepted_of.get(node)) is not None:
            mine.pop(link, None)
            if not mine:
                del self._accepted_of[node]

    async def _serve_at(self, node: NodeId, address: str, pin: Pin) -> None:
        """Answer what `node` asks, which cannot dial this one."""
        link = await self.dial(node, address, pin)
        try:
            await frames.send(link, frames.unfenced(FrameKind.OFFER))
            await self._answers.answer_all(node, link, None)
        finally:
            link.close()


async def _listen(listen: str) -> socket.socket:
    """A listening socket on the first address that `listen` resolves to: port 0 must be one port, not two."""
    try:
        host, port = frames.parse_address(listen)
    except ValueError as error:
        raise ResourceError(f"cannot listen: {error}") from None
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        sock = socket.create_server(address, family=family, backlog=BACKLOG)
        sock.setblocking(False)
        return sock
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            where = f"port {port} on {host or 'this machine'}"
            raise ResourceError(f"{where} is in use: choose another with --listen") from None
        raise ResourceError(
            f"cannot listen on {listen}: {os_reason(error)}; choose another with --listen"
        ) from None


async def _connect(host: str, port: int, private: bool) -> socket.socket:
    """A connection to the first address of `host` that may be dialled (`addresses`) and takes it."""
    loop = asyncio.get_running_loop()
    failure: OSError = OSError(errno.EHOSTUNREACH, "no address")
    for family, address in await resolve(host, port, private):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure
