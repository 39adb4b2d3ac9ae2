"""The coordinator's side of its door: opens the public ports, keeps the door's process alive, tells it who is who.

A gateway of this machine has an entrance of its own (`open_to_gateway`), at a socket in the door's folder: it
binds each connection to a name that says where that comes from, as the door does towards the service.

The service listens at the paths that `open` returns. It asks `origin` where a call came from, and says by `prove`,
`revoke` and `shun` what it thinks of who calls. Should the door's process end, all connections break, and another
one opens the same ports: they are this process's, so nobody else gets them meanwhile.
"""

import asyncio
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from atoll.comm import log as logs
from atoll.comm.errors import ResourceError
from atoll.comm.ids import NodeId
from atoll.comm.invite import join_host_port, split_host_port
from atoll.coordinator.door.ports import DoorSpec, PortLimits, PortSpec

log = logging.getLogger("atoll.coordinator")
MODULE = "atoll.coordinator.door.doorkeeper"
BACKLOG = 1024  # connections that wait to be accepted
REOPEN_PAUSE = 0.2  # seconds between the end of the door's process and the next one
PING_INTERVAL = 1.0  # seconds
LAST_TIMEOUT = 5.0  # seconds that the door's process has to end
SHUN_SECONDS = 10.0  # for which nothing is accepted from an address whose strangers call too often
MAX_FOLDER_BYTES = 30  # of the path where temporary files go
INVITED = "-"  # in the place of a node: one that showed a token, and has no id yet


class Origin(NamedTuple):
    """The place that a call came from."""

    number: str  # of the connection, as the door counts them; empty: it came by no door
    host: str  # of the client
    port: str

    @property
    def peer(self) -> str:
        """The client's address as gRPC writes it."""
        return f"ipv6:[{self.host}]:{self.port}" if ":" in self.host else f"ipv4:{self.host}:{self.port}"


class FrontDoor:
    """The public ports of one coordinator. `open` them, then `run`; `close` it."""

    def __init__(self) -> None:
        # 0700: nobody else reaches the service but by the door
        self._folder = tempfile.mkdtemp(prefix="atoll-", dir=_short_folder())
        self._ports: list[tuple[socket.socket, str, PortLimits]] = []  # listening socket, path behind it
        self._owners: dict[str, NodeId] = {}  # connections, by their numbers
        self._writer: asyncio.StreamWriter | None = None
        self._generation = 0
        self._heard_at: float | None = None  # seconds; None: the door's process is about to start
        self._member_hosts: tuple[str, ...] = ()

    def open(self, sock: socket.socket, limits: PortLimits) -> str:
        """Take connections at a listening socket, within limits; returns the path of the Unix socket where the
        service is to listen for them. Before `run`."""
        path = f"{self._folder}/{len(self._ports)}"
        self._ports.append((sock, path, limits))
        return path

    def open_to_gateway(self, path: str, limits: PortLimits) -> str:
        """Take connections from a gateway of this machine, too, for the service that listens at `path`; returns
        the path of the socket that the gateway dials. Before `run`."""
        entrance = f"{self._folder}/gateway"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(entrance)
        sock.listen(BACKLOG)
        self._ports.append((sock, path, limits))
        return entrance

    def know(self, hosts: tuple[str, ...]) -> None:
        """Name the hosts that members come from, for whom places are held. Before `run`."""
        self._member_hosts = tuple(host for host in hosts if host and not any(c.isspace() for c in host))

    async def run(self) -> None:
        """Keep the door's process alive until cancelled."""
        while True:
            code = await self._open()
            log.warning(f"the door's process ended ({code}): all connections broke, and it is started again")
            await asyncio.sleep(REOPEN_PAUSE)

    def close(self) -> None:
        """Close the ports."""
        for sock, _, _ in self._ports:
            sock.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def silence(self) -> float:
        """Seconds for which the door's process has not answered; 0 before it first did."""
        return 0.0 if self._heard_at is None else time.monotonic() - self._heard_at

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process id of the door's process, while there is one."""
        return () if self._process is None else (self._process.pid,)

    def origin(self, peer: str) -> Origin:
        """The place that a call with this peer, in gRPC's words, came from."""
        if peer.startswith("unix:"):
            parts = unquote(peer).rpartition("/")[2].split(",")
            return Origin(*parts) if len(parts) == 3 else Origin("", "127.0.0.1", "0")
        kind, _, rest = peer.partition(":")
        host, _, port = unquote(rest).rpartition(":")
        return Origin("", host.strip("[]") if kind in ("ipv4", "ipv6") else "127.0.0.1", port)

    def has_owner(self, origin: Origin) -> bool:
        """Whether somebody has shown a token or a session over this connection."""
        return origin.number in self._owners

    def prove(self, origin: Origin, node: NodeId | None) -> None:
        """Say that a connection is this member's; None: of one that showed a token, and has no id yet."""
        before = self._owners.get(origin.number)
        if not origin.number or before or (before is not None and node is None):
            return
        self._owners[origin.number] = node or NodeId("")
        self._say(f"prove {origin.number} {node or INVITED}")

    @property
    def nodes(self) -> set[NodeId]:
        """The nodes that connections were proved to be of."""
        return {node for node in self._owners.values() if node}

    def revoke(self, node: NodeId) -> None:
        """Say that a node is no member any more: its connections must prove themselves again."""
        self._owners = {number: of for number, of in self._owners.items() if of != node}
        self._say(f"revoke {node}")

    def allow(self, origin: Origin, size: int) -> None:
        """Let `size` bytes from a connection pass that no limit counts; 0: what is left of them counts again. They
        are let pass before anything that is said over the connection from now on arrives."""
        if origin.number:
            self._say(f"allow {origin.number} {size}")

    def shun(self, origin: Origin) -> None:
        """Take no connection of a stranger from this host for SHUN_SECONDS."""
        if origin.number:
            self._say(f"shun {origin.host} {SHUN_SECONDS:g}")

    _process: asyncio.subprocess.Process | None = None

    async def _open(self) -> int:
        """Start the door's process; returns its exit status when it ends."""
        ours, theirs = socket.socketpair()
        self._generation += 1
        ports = tuple(PortSpec(sock.fileno(), path, limits) for sock, path, limits in self._ports)
        spec = DoorSpec(self._generation, self._folder, theirs.fileno(), ports, logs.beside("door"))
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", MODULE, msgspec.json.encode(spec).decode()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(spec.wire, *(port.descriptor for port in ports)),
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        for host in self._member_hosts:
            self._say(f"known {host}")
        pinging = asyncio.create_task(self._ping())
        try:
            await self._read(reader)
            return await self._process.wait()
        finally:
            pinging.cancel()
            self._writer.close()  # ends it
            self._writer, self._heard_at = None, None
            self._owners.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_TIMEOUT):
                    await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
            self._process = None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            async for line in reader:
                match line.decode().split():
                    case ["gone", number]:
                        self._owners.pop(number, None)
                    case _:
                        self._heard_at = time.monotonic()

    async def _ping(self) -> None:
        while True:
            self._say("ping")
            await asyncio.sleep(PING_INTERVAL)

    def _say(self, line: str) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(line.encode() + b"\n")


def _short_folder() -> str | None:
    """Where temporary files go (None), or "/tmp": names of connections are paths of Unix sockets, which have 104
    bytes at most."""
    return "/tmp" if len(tempfile.gettempdir().encode()) > MAX_FOLDER_BYTES and os.path.isdir("/tmp") else None


def listening_socket(address: str, option: str) -> socket.socket:
    """A TCP socket that listens at `address`, host:port; port 0 lets the kernel choose. Raises `ResourceError`,
    which names `option`."""
    host, port = split_host_port(address, option)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if host == "::":  # all addresses, as gRPC and uvicorn understand it
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        why = "is in use" if error.errno == 98 else f"cannot be used ({error.strerror})"
        raise ResourceError(
            f"port {port} on {host or 'all addresses'} {why}: give another with {option}"
        ) from None
    return sock


def bound_address(sock: socket.socket) -> str:
    """The "host:port" at which a socket listens."""
    host, port = sock.getsockname()[:2]
    return join_host_port(host, port)
