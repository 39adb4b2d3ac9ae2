"""The gateway beside a node, if it takes one: how others reach the node that cannot dial it, and it them.

a URL that names gateways    it is started before the join, finds the coordinator, and others reach the node by it
a coordinator that is away   in a run that has gateways: it is started for as long as the coordinator is looked for
                             elsewhere, and stays where that is reached by gateways alone
a dial-back that failed      in a run that has gateways: it is started, and the node joins again under its name
relay=true                   it is started at a port, and passes on what others send each other
a peer behind a gateway      it is started when the first one is to be dialled
else                         there is none, and nothing of hivemind's is needed
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from ipaddress import ip_address

from atoll.comm.errors import AtollError, ConfigError, Unreachable
from atoll.comm.gateway_note import gateways_among
from atoll.comm.invite import Invite, split_host_port
from atoll.comm.peer_names import is_peer_host
from atoll.node.config import NodeConfig
from atoll.node.daemon.state_dir import JoinOptions
from atoll.node.daemon.whereabouts import Whereabouts
from atoll.node.gateway.client import GatewayProcess, RelayOffer, missing_gateway
from atoll.node.state_files import RELAY_PORT, WHEREABOUTS

log = logging.getLogger("atoll.node")
PLACE_SECONDS = 60.0  # for a gateway to start, and for a relay to have a place for it


class NodeGateway:
    """What one node has of gateways: those of the run, as it was told them, and the process beside it."""

    def __init__(self, invite: Invite, config: NodeConfig, options: JoinOptions, opened: AsyncExitStack) -> None:
        """`invite`: as the join URL says it; `opened` ends the process, and is this one's alone."""
        self.invite, self._config, self._options, self._opened = invite, config, options, opened
        self.whereabouts = Whereabouts(options.state_dir / WHEREABOUTS, invite)
        self._starting = asyncio.Lock()
        self._process: GatewayProcess | None = None
        self._stays = False  # the process does: it is there not only to look for the coordinator
        self._run_gateways: tuple[str, ...] = ()
        self.known = asyncio.Event()  # the run has some
        self.relay = ""  # multiaddr at which this node relays; empty: it does not

    @property
    def run_gateways(self) -> tuple[str, ...]:
        """The gateways of the run that are known here, by their multiaddrs."""
        return self._run_gateways or self.invite.rendezvous or self.whereabouts.gateways

    @property
    def lacks_for_search(self) -> str:
        """Why this node does not find a coordinator again that has moved, and what would help; empty: it does."""
        if not self.invite.pin:
            return "its run has no certificate by which it would be known there: then join by a new URL"
        if not self.run_gateways:
            lacks = "its run has told of no gateway that knows where that is"
            return f"{lacks}: then join by a new URL, best one with dht"
        return missing_gateway()

    @property
    def found(self) -> str | None:
        """The address in the coordinator's record; empty: it cannot be dialled; None: it was not looked for."""
        return self._process.found if self._process is not None and self.invite.rendezvous else None

    @property
    def relayed(self) -> int:
        """Bytes that it has passed on for others."""
        return self._process.relayed if self._process is not None else 0

    async def lead_to_coordinator(self) -> Invite:
        """The invite with an address that leads to the coordinator: it, or, where it names gateways, a port of
        this machine. Raises `MissingPackage`, `Unreachable`."""
        if not self.invite.rendezvous:
            return self.invite
        process = await self._start(self._offer(self._options.advertise))
        return await process.lead_to_coordinator(self.invite, self._options.patience)

    @asynccontextmanager
    async def for_search(self) -> AsyncIterator[GatewayProcess]:
        """The process, as long as the context lasts: to look for the coordinator where an address named it."""
        async with self._starting:
            process = await self._open()
        try:
            yield process
        finally:
            async with self._starting:
                if not self._stays:
                    await self._end()

    def stay(self) -> None:
        """Keep the process from now on, after the search as well."""
        self._stays = True

    def learn(self, multiaddrs: Sequence[str]) -> None:
        """Take in which gateways the run has now, as its coordinator says."""
        if gateways := gateways_among(multiaddrs):  # one that has begun again does not know them yet
            self._run_gateways = gateways
            self.whereabouts.learn(gateways)
            self.known.set()
            if self._process is not None:
                self._process.use(self._run_gateways)

    async def reach(self, host: str) -> tuple[str, int]:
        """Host and port of this machine that lead to the data plane behind a peer's host. Raises `Unreachable`."""
        if not self.run_gateways:
            raise Unreachable(f"{host} is reached through a gateway, and the run has none that is known here")
        return await (await self._start()).reach(host)

    async def serve(self, address: str) -> str:
        """Let others reach the data plane at this "host:port"; returns the host under which they do. Raises
        `Unreachable` where no way leads there, `MissingPackage`."""
        return await (await self._start()).serve_data(address)

    async def serve_by_relay(self, address: str) -> str:
        """The same, once a relay has a place for this node."""
        process = await self._start()
        await process.await_place(PLACE_SECONDS, by_relay=True)
        return await process.serve_data(address)

    async def offer_relay(self, address: str) -> None:
        """Begin to relay, at the host of `address`, host:port, where others dial this node. Whatever is in the way
        is said, and the node goes on without."""
        try:
            if (offer := self._offer(self._options.advertise or address)) is None:
                raise ConfigError(
                    f"relay=true, and others do not dial this node at an IP address ({address}): give --advertise "
                    "with one"
                )
            process = await self._start(offer)
            await process.await_place(PLACE_SECONDS)
            if not process.multiaddr:
                raise Unreachable("this node's gateway was started before it was to relay: start the node again")
            self.relay = process.multiaddr
            log.info(f"this node passes on what others send each other, at {self.relay}")
        except AtollError as error:
            log.warning(f"this node is no relay: {error}")

    def relay_within(self, streams: int, rate: float) -> None:
        """Pass on so many streams at once (0: nothing) and bytes a second (0: no limit) from now on."""
        if self._process is not None and self.relay:
            self._process.relay_within(streams, rate)

    async def _start(self, offer: RelayOffer | None = None) -> GatewayProcess:
        """The process, for good, started now if there was none."""
        async with self._starting:
            if offer is not None and not self._stays:
                await self._end()  # one that is there for a search relays nothing
            self._stays = True
            return await self._open(offer)

    async def _open(self, offer: RelayOffer | None = None) -> GatewayProcess:
        if self._process is None:
            opening = GatewayProcess.opened(self._options.state_dir, self.run_gateways, offer)
            self._process = await self._opened.enter_async_context(opening)
        return self._process

    async def _end(self) -> None:
        self._process = None
        await self._opened.aclose()

    def _offer(self, address: str) -> RelayOffer | None:
        """Where this node relays, if it is to and others dial it at an IP address."""
        host = split_host_port(address, "--advertise")[0] if address else ""
        if not self._config.relay or not host or is_peer_host(host):
            return None
        try:
            ip_address(host)
        except ValueError:
            return None
        return RelayOffer(host, self._port())

    def _port(self) -> int:
        """The port at which it relays: as set, as it was, or any."""
        if self._config.relay_port:
            return self._config.relay_port
        file = self._options.state_dir / RELAY_PORT  # a firewall may have been told of it
        with suppress(OSError, ValueError):
            port = int(file.read_text())
            with socket.create_server(("", port)):
                return port
        with socket.create_server(("", 0)) as free:
            port = int(free.getsockname()[1])
        with suppress(OSError):
            file.write_text(f"{port}\n")
        return port
