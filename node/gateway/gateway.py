"""The process of `atoll gateway`: a peer of libp2p's beside a daemon or a coordinator, or on its own."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from atoll.comm.errors import AtollError, Refused, ResourceError
from atoll.comm.files import atomic_write, make_folder, write_all
from atoll.comm.gateway_note import GatewayNote, gateways_among, read_note, write_gateways
from atoll.comm.ids import Pin, is_pin
from atoll.comm.peer_names import SUFFIX, host_and_port, peer_of_host, peer_of_multiaddr
from atoll.node.gateway.finding import LOOK_SECONDS, CoordinatorFinder, Publisher, published_certificate
from atoll.node.gateway.local_ports import LocalPorts
from atoll.node.gateway.punching import allowed, observe
from atoll.node.gateway.relaying import Relaying
from atoll.node.gateway.splice import Stream
from atoll.node.gateway.stream_header import RelayLimits, Service
from atoll.node.gateway.swarm import SwarmOptions
from atoll.node.gateway.swarm_keeper import SwarmKeeper
from atoll.node.gateway.wire import (
    MAX_LINE_BYTES,
    AwaitPlace,
    Question,
    ReachCoordinator,
    ReachPeer,
    RelayWithin,
    Reply,
    ServeData,
    UseGateways,
)

log = logging.getLogger("atoll.gateway")
FIND_SECONDS = 1.0  # between two looks for a coordinator that nobody knows yet
COUNT_SECONDS = 1.0  # between two words to the daemon on what was relayed
NOTE_SECONDS = 60.0  # between two notes to the coordinator
ADDRESS_FILE = "multiaddr"  # in the state directory: under which others know this gateway
KNOWN_FILE = "known"  # in it: the gateways that the run told of last


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The options of one gateway."""

    state_dir: Path
    listen: Sequence[str] = ()
    announce: Sequence[str] = ()
    peers: Sequence[str] = ()
    coordinator: Path | None = None  # state directory of the one that it is beside
    limits: RelayLimits = field(default_factory=RelayLimits)
    # port of a relay at which it says as what it sees who connects; 0: the one behind --listen's; -1: there is
    # none
    observer: int = 0
    wire: int = -1  # descriptor of the socket to the daemon that it is beside; -1: there is none
    entrance: int = -1  # descriptor of that daemon's listening socket, from where the coordinator is reached


class Gateway:
    """One life of a gateway."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._ports = LocalPorts()
        self._finder: CoordinatorFinder | None = None  # of the one run that the daemon joins
        self._leads = False  # to that run's coordinator
        self._peers = tuple(dict.fromkeys((*options.peers, *_known(options.state_dir))))
        where = SwarmOptions(options.state_dir / "identity", options.listen, options.announce, self._peers)
        self._relaying = Relaying(self._open, map(peer_of_multiaddr, self._peers), options.limits)
        self._swarm = SwarmKeeper(where, self._relaying.accept)
        self._relaying.host_of = self._swarm.host_of
        self._ready = asyncio.Event()  # there is a swarm, or was one

    async def run(self) -> None:
        """Serve until SIGTERM, or until the wire ends. Raises what `Swarm.opened` raises, `ConfigError`."""
        options = self._options
        try:
            make_folder(options.state_dir)
        except OSError as error:
            raise ResourceError(f"cannot use {options.state_dir}: {error.strerror}") from None
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        observer = await self._observe() if options.limits.streams and options.observer >= 0 else None
        try:
            async with asyncio.TaskGroup() as tasks:
                duties = [
                    tasks.create_task(self._swarm.run(self._introduce)),
                    tasks.create_task(self._hold()),
                ]
                if options.coordinator is not None:
                    duties.append(tasks.create_task(self._publish(options.coordinator)))
                if options.wire >= 0:
                    duties.append(tasks.create_task(self._listen(stop)))
                await stop.wait()
                for duty in duties:
                    duty.cancel()
        finally:
            self._ports.close()
            if observer is not None:
                observer.close()

    async def _observe(self) -> asyncio.Server | None:
        """Tell who connects to a port of this relay as what it is seen, so that it can punch holes."""
        host, port = host_and_port(self._options.listen[0])
        try:
            server = await observe((host, self._options.observer or (port + 1 if port else 0)))
        except (OSError, OverflowError) as error:
            log.warning(f"nobody punches holes by this relay: port {port + 1} cannot be had ({error})")
            return None
        self._relaying.observer = server.sockets[0].getsockname()[1]
        return server

    async def _open(self, peer: bytes) -> Stream:
        return await self._swarm.open(peer)

    async def _hold(self) -> None:
        await self._ready.wait()
        await self._relaying.keep_holding()

    def _introduce(self) -> None:
        """Say under which addresses others know it."""
        for multiaddr in self._swarm.multiaddrs if self._swarm.lives == 1 else ():
            log.info(f"others reach this gateway at {multiaddr}")
        _write(self._options.state_dir / ADDRESS_FILE, self._swarm.multiaddrs)
        self._relaying.may_punch = allowed(self._swarm.is_private)
        self._ready.set()

    # The coordinator beside it

    async def _publish(self, state_dir: Path) -> None:
        """Let nodes find and reach the coordinator in this directory, from its first start on."""
        while await asyncio.to_thread(read_note, state_dir) is None:
            await asyncio.sleep(LOOK_SECONDS)
        certificate = published_certificate(state_dir)
        await self._ready.wait()
        file = self._options.state_dir / "published"
        publisher = Publisher(state_dir, certificate, self._swarm.host, file, self._swarm)
        async with asyncio.TaskGroup() as both:
            both.create_task(publisher.run(self._serve))
            both.create_task(self._tell(state_dir))

    def _serve(self, note: GatewayNote) -> None:
        """Serve the coordinator that has left this note."""
        self._relaying.served[Service.COORDINATOR] = note.entrance
        self._use(note.relays)

    async def _tell(self, state_dir: Path) -> None:
        """Tell the coordinator by which gateways its run can be reached: its members are told."""
        ways = (*self._swarm.multiaddrs, *self._options.peers)
        while True:
            await asyncio.to_thread(write_gateways, state_dir, self._swarm.host.removesuffix(SUFFIX), ways)
            await asyncio.sleep(NOTE_SECONDS)

    # The daemon's questions

    async def _listen(self, stop: asyncio.Event) -> None:
        sock = socket.socket(fileno=os.dup(self._options.wire))
        reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_LINE_BYTES)
        async with asyncio.TaskGroup() as answers:
            pending = {answers.create_task(self._count(writer))}
            try:
                async for line in reader:
                    question = msgspec.json.decode(line, type=Question)
                    pending.add(task := answers.create_task(self._answer(question, writer)))
                    task.add_done_callback(pending.discard)
            except ConnectionError:
                pass
            stop.set()
            for task in list(pending):
                task.cancel()

    async def _count(self, writer: asyncio.StreamWriter) -> None:
        """Say how much was relayed, whenever that was more."""
        said = 0
        while True:
            await asyncio.sleep(COUNT_SECONDS)
            if (passed := self._relaying.limiter.passed) != said:
                writer.write(msgspec.json.encode(Reply(0, relayed=passed)) + b"\n")
                said = passed

    async def _answer(self, question: Question, writer: asyncio.StreamWriter) -> None:
        try:
            await self._ready.wait()
            reply = await self._carry_out(question)
        except (AtollError, OSError, ValueError) as error:
            reply = Reply(question.number, error=str(error) or type(error).__name__)
        writer.write(msgspec.json.encode(reply) + b"\n")

    async def _carry_out(self, question: Question) -> Reply:
        match question.ask:
            case ServeData(address):
                self._relaying.served[Service.DATA] = address
                return Reply(question.number, self._swarm.host)
            case ReachCoordinator(run, pin):
                return await self._lead_to_coordinator(question.number, run, pin)
            case ReachPeer(host):
                peer = peer_of_host(host)
                connect = partial(self._relaying.reach, peer, Service.DATA)
                return Reply(question.number, await self._ports.address(host, connect))
            case UseGateways(multiaddrs):
                self._use(multiaddrs)
                return Reply(question.number)
            case AwaitPlace(by_relay):
                if by_relay or not self._swarm.multiaddrs:
                    await self._relaying.held.wait()
                return Reply(question.number, "\n".join(self._swarm.multiaddrs))
            case RelayWithin(streams, rate):
                self._relaying.limit(streams, rate)
                return Reply(question.number)

    def _use(self, multiaddrs: Sequence[str]) -> None:
        """Be reached, and reach others, through these gateways beside those that were named at the start."""
        told = gateways_among(multiaddrs)
        peers = tuple(dict.fromkeys((*self._options.peers, *told)))
        self._swarm.know(told)
        _write(self._options.state_dir / KNOWN_FILE, told)  # one that starts again finds them there
        self._relaying.may_punch = allowed(self._swarm.is_private)
        self._relaying.use(peer_of_multiaddr(peer) for peer in peers if self._is_other(peer))

    def _is_other(self, multiaddr: str) -> bool:
        return not self._swarm.host or peer_of_multiaddr(multiaddr) != peer_of_host(self._swarm.host)

    async def _lead_to_coordinator(self, number: int, run: str, pin: str) -> Reply:
        if not is_pin(pin) or self._options.entrance < 0:
            raise Refused("the pin is none, or nothing was opened to lead there")
        if self._finder is None:
            file = self._options.state_dir / f"coordinator-{pin}"
            self._finder = CoordinatorFinder(run, Pin(pin), file, self._swarm, self._relaying.reach)
        finder = self._finder
        await finder.look()
        while finder.record is None:
            await asyncio.sleep(FIND_SECONDS)
            await finder.look()
        if not self._leads:
            self._leads = True
            sock = socket.socket(fileno=os.dup(self._options.entrance))
            sock.setblocking(False)
            await self._ports.address(f"the coordinator of {run}", finder.connect, sock)
        return Reply(number, found=finder.record.address)


def _known(state_dir: Path) -> tuple[str, ...]:
    """The gateways that the run told of before this start."""
    try:
        return gateways_among((state_dir / KNOWN_FILE).read_text().split())
    except (OSError, ValueError):
        return ()


def _write(path: Path, multiaddrs: Sequence[str]) -> None:
    said = "\n".join(multiaddrs).encode() + b"\n"
    with atomic_write(path, None, mode=0o644) as file:
        write_all(file, [memoryview(said)], 0)
