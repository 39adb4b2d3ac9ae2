"""The gateway's place among libp2p's peers: streams to them and from them, and the DHT that they keep together.

hivemind starts a process of libp2p for us (p2pd) and speaks Kademlia over it; of hivemind nothing else is used.
Its relays are off, those that p2pd would offer to everybody and those that it would look for: a gateway relays
itself (`relaying`), with limits of its own, at once, and between private addresses, too.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self

import psutil

from atoll.comm.addresses import is_own_network
from atoll.comm.errors import ResourceError, Unreachable
from atoll.comm.peer_names import host_of_peer, peer_of_multiaddr
from atoll.node.gateway.dial_guard import DialGuard
from atoll.node.gateway.records import (
    MAX_OWN_RUNS,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    NewestRecords,
    record_place,
)
from atoll.node.gateway.relaying import Caller
from atoll.node.gateway.splice import Stream

os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")  # read when it is imported
import hivemind.dht.node  # noqa: E402
import hivemind.dht.protocol  # noqa: E402
from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.validation import RecordValidatorBase  # noqa: E402
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID  # noqa: E402
from hivemind.proto import dht_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer, get_dht_time  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402

log = logging.getLogger("atoll.gateway")
PROTOCOL = "/atoll/gateway/1"
START_SECONDS = 60.0  # that p2pd has to come up: 1 is usual, 15 is hivemind's, too few on a busy machine
ANSWER_SECONDS = 10.0  # that a peer of the DHT has to answer
LAST_SECONDS = 3.0  # for a p2pd that is to end, and for what ends with it
NOBODY = ""  # in the place of a network: nothing is to be kept for anybody
Handler = Callable[[Caller, Stream], Awaitable[None]]
FAILURES = (P2PDaemonError, P2PHandlerError, OSError, EOFError, RuntimeError, ValueError)  # of a call to p2pd
_storing: ContextVar[str] = ContextVar("storing", default=NOBODY)  # the network of the peer that is being answered


class DHTProtocol(hivemind.dht.protocol.DHTProtocol):  # type: ignore[misc]  # by its name peers call it
    """hivemind's, which knows the network of a peer that has a record kept."""

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Answer a peer that has records kept."""
        token = _storing.set(await self._network(context.remote_id))
        try:
            return await super().rpc_store(request, context)
        finally:
            _storing.reset(token)

    async def _network(self, peer: PeerID) -> str:
        for info in await self.p2p.list_peers():
            if info.peer_id == peer and info.addrs:
                return _caller(peer, info.addrs[0]).network
        return "unknown"


class OwnRecordsOnly(RecordValidatorBase):  # type: ignore[misc]
    """Lets nothing into the DHT, nor out of it, but records of coordinators at their own places, and none that is
    older than one before; no network fills it."""

    def __init__(self) -> None:
        self.newest = NewestRecords()
        self.drop: Callable[[bytes], None] = lambda place: None  # forgets the record at a place

    def validate(self, record: Any) -> bool:
        """Whether the record is one that its run's coordinator signed; where a peer has it kept, it is counted."""
        packed = record.value
        if record.subkey != DHTProtocol.IS_REGULAR_VALUE or len(packed) > MAX_RECORD_BYTES + 8:
            return False
        try:
            data = MSGPackSerializer.loads(packed)
        except Exception:  # whatever that library raises for bytes that it cannot read
            return False
        if not isinstance(data, bytes):
            return False
        if not self.newest.admit(data, record.key, record.expiration_time, now := get_dht_time()):
            return False
        if (network := _storing.get()) and (displaced := self.newest.keep(record.key, network, now)) is not None:
            self.drop(displaced)
        return True


@dataclass(frozen=True, slots=True)
class SwarmOptions:
    """Where a gateway is, among others."""

    identity: Path  # file of its key, made if there is none
    listen: Sequence[str] = ()  # multiaddrs without a peer; empty: nobody can dial it
    announce: Sequence[str] = ()  # as others dial it; empty: as it listens
    peers: Sequence[str] = ()  # multiaddrs of gateways that it knows


def _daemon_under(guard: DialGuard) -> Any:
    """hivemind's class of p2pd, with the one option that `P2P.create` does not have, and under a guard."""

    class Daemon(P2P):  # type: ignore[misc]
        @staticmethod
        def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
            return guard.command(P2P._make_process_args(*args, relayService=False, **kwargs))

    return Daemon


class Swarm:
    """This gateway among its peers, from `opened` on."""

    def __init__(
        self, daemon: Any, dht: Any, guard: DialGuard, records: NewestRecords, multiaddrs: Sequence[str]
    ) -> None:
        self._daemon, self._dht, self._guard, self._records = daemon, dht, guard, records
        self._known = dict[bytes, Multiaddr]()  # where peers are, to come back to when they are gone
        self.peer: bytes = daemon.peer_id.to_bytes()
        self.multiaddrs = tuple(multiaddrs)  # as others dial it

    @classmethod
    @asynccontextmanager
    async def opened(cls, options: SwarmOptions) -> AsyncIterator[Self]:
        """Be there while the context lasts. Raises `ResourceError` where p2pd does not start, `Unreachable` where
        no peer answers."""
        note = options.identity.with_suffix(".pid")
        await asyncio.to_thread(_end_leftover, note, str(options.identity))
        named = (*options.peers, *options.announce, *options.listen)
        async with AsyncExitStack() as opened:
            guard = await opened.enter_async_context(DialGuard.opened(any(map(_is_private, named))))
            daemon = await _start(options, guard)
            opened.push_async_callback(_in_time, daemon.shutdown)
            note.write_text(str(daemon._child.pid))
            validator = OwnRecordsOnly()
            dht = await _join(daemon, options, validator)
            opened.push_async_callback(_in_time, dht.shutdown)
            shown = await daemon.get_visible_maddrs(latest=True) if options.listen else ()
            swarm = cls(daemon, dht, guard, validator.newest, [str(multiaddr) for multiaddr in shown])
            for multiaddr in options.peers:
                swarm.know(multiaddr)
            yield swarm

    @property
    def is_private(self) -> bool:
        """Whether peers may be in private networks."""
        return self._guard.private

    @property
    def host(self) -> str:
        """This gateway's name as a host."""
        return host_of_peer(self.peer)

    async def ended(self) -> int:
        """The exit status of p2pd, when it has ended by itself."""
        return int(await self._daemon._child.wait())

    def know(self, multiaddr: str) -> None:
        """Dial the peer at this multiaddr there, whatever else is known of it. Whose run has one in a private
        network is a private one."""
        self._guard.private = self._guard.private or _is_private(multiaddr)
        peer = peer_of_multiaddr(multiaddr)
        self._known[peer] = Multiaddr(multiaddr.rpartition("/p2p/")[0])

    async def serve(self, handler: Handler) -> None:
        """Call `handler` for each stream from now on, with who opened it."""

        async def accept(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = Stream(reader, writer)
            try:
                await handler(_caller(info.peer_id, info.addr), stream)
            except asyncio.CancelledError:  # the process ends; whoever cancelled it waits for nothing else
                stream.abort()

        await self._daemon.add_binary_stream_handler(PROTOCOL, accept)

    async def open(self, peer: bytes) -> Stream:
        """A stream to a peer, over the connection that there is to it, or a new one. Raises `Unreachable`."""
        try:
            if (place := self._known.get(peer)) is not None:  # of no effect where there is a connection
                await self._daemon._client.connect(PeerID(peer), [place])
            _, reader, writer = await self._daemon.call_binary_stream_handler(PeerID(peer), PROTOCOL)
        except FAILURES as error:
            raise Unreachable(_line(error)) from None
        return Stream(reader, writer)

    async def publish(self, key: bytes, data: bytes, expires: int) -> bool:
        """Have a record kept by those next to its key; whether the last of them that was asked took it."""
        try:
            await self._come_back()
            return bool(await self._dht.store(key, data, float(expires)))
        except FAILURES as error:
            log.warning(f"the record could not be published: {_line(error)}")
            return False

    async def find(self, key: bytes) -> bytes | None:
        """The record under a key that lasts the longest; None: nobody has one."""
        self._records.favour(record_place(key))
        try:
            await self._come_back()
            found = await self._dht.get(key, latest=True)
        except FAILURES as error:
            log.warning(f"the record could not be looked for: {_line(error)}")
            return None
        return found.value if found is not None and isinstance(found.value, bytes) else None

    async def _come_back(self) -> None:
        """Have the known peers in the routing table again: it forgets who was away for a moment."""
        table = self._dht.protocol.routing_table
        gone = [peer for peer in map(PeerID, self._known) if table.get(peer_id=peer) is None]
        await asyncio.gather(*(self._dht.protocol.call_ping(peer, strict=False) for peer in gone))

    def kept(self, key: bytes) -> bool:
        """Whether this gateway itself keeps a record under a key."""
        place = type(self._dht.node_id)(int.from_bytes(record_place(key), "big"))
        return self._dht.protocol.storage.get(place) is not None


def _end_leftover(note: Path, identity: str) -> None:
    """End the p2pd with this identity that a gateway which was killed has left behind."""
    try:
        process = psutil.Process(int(note.read_text()))
        if f"-id={identity}" in process.cmdline():
            process.kill()
            process.wait(LAST_SECONDS)
    except (OSError, ValueError, psutil.Error):
        pass  # there is none, or it is not ours to end


async def _start(options: SwarmOptions, guard: DialGuard) -> Any:
    try:
        return await _daemon_under(guard).create(
            initial_peers=options.peers or None,
            host_maddrs=options.listen,
            no_listen=not options.listen,
            announce_maddrs=options.announce or None,
            dht_mode="server" if options.listen else "client",
            force_reachability="public" if options.listen else "private",
            identity_path=str(options.identity),
            check_if_identity_free=False,  # it would start another p2pd for that
            nat_port_map=False,
            auto_nat=False,
            use_relay=False,
            startup_timeout=START_SECONDS,
        )
    except FAILURES as error:
        raise ResourceError(f"libp2p does not start ({_line(error)}): is --listen free and one of ours?") from None


async def _join(daemon: Any, options: SwarmOptions, validator: OwnRecordsOnly) -> Any:
    """Kademlia over the daemon. A peer whose clock is 3 s off this machine's counts as none that answers."""
    hivemind.dht.node.DHTProtocol = DHTProtocol  # it takes the class from there, and no other way
    try:
        dht = await DHTNode.create(
            p2p=daemon,
            initial_peers=options.peers or None,
            client_mode=not options.listen,
            record_validator=validator,
            wait_timeout=ANSWER_SECONDS,
            cache_locally=False,  # a coordinator that moved is to be found at once
            cache_nearest=0,
            cache_on_store=False,
            cache_size=1,
            ensure_bootstrap_success=bool(options.peers),
            strict=False,
        )
    except FAILURES as error:
        raise Unreachable(
            f"no gateway answers at {', '.join(options.peers)} ({_line(error)}): is one running there, is this "
            f"machine's clock right? Here it is {time.strftime('%H:%M:%S', time.gmtime())} UTC; 3 s are allowed"
        ) from None
    storage, of = dht.protocol.storage, type(dht.node_id)
    storage.maxsize = MAX_RECORDS + MAX_OWN_RUNS  # `NewestRecords` says what gives way before
    validator.drop = lambda place: storage.__delitem__(of.from_bytes(place))
    return dht


async def _in_time(end: Callable[[], Awaitable[None]]) -> None:
    """End something, which may wait for a p2pd that has ended before."""
    with suppress(TimeoutError, *FAILURES):
        async with asyncio.timeout(LAST_SECONDS):
            await end()


def _is_private(multiaddr: str) -> bool:
    """Whether the IP address in a multiaddr is one of a private network."""
    host = (multiaddr.split("/") + ["", "", ""])[2]
    try:
        return is_own_network(host) and not ip_address(host).is_unspecified
    except ValueError:
        return False


def _caller(peer: PeerID, multiaddr: Any) -> Caller:
    """A peer with the address that its connection comes from."""
    parts = str(multiaddr).split("/")  # "", "ip4", host, "tcp", port, ...
    host, port = (parts[2], parts[4]) if len(parts) > 4 else ("0.0.0.0", "0")
    return Caller(peer.to_bytes(), host, int(port) if port.isdecimal() else 0)


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
