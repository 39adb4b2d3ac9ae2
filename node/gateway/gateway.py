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
from atoll.comm.gateway_note import read_note
from atoll.comm.ids import Pin, is_pin
from atoll.comm.peer_names import peer_of_host, peer_of_multiaddr
from atoll.node.gateway.finding import LOOK_SECONDS, CoordinatorFinder, Publisher, published_certificate
from atoll.node.gateway.local_ports import LocalPorts
from atoll.node.gateway.relaying import Relaying
from atoll.node.gateway.stream_header import RelayLimits, Service
from atoll.node.gateway.swarm import Swarm, SwarmOptions
from atoll.node.gateway.wire import MAX_LINE_BYTES, Question, ReachCoordinator, ReachPeer, Reply, ServeData

log = logging.getLogger("atoll.gateway")
FIND_SECONDS = 1.0  # between two looks for a coordinator that nobody knows yet
ADDRESS_FILE = "multiaddr"  # in the state directory: under which others know this gateway


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The options of one gateway."""

    state_dir: Path
    listen: Sequence[str] = ()
    announce: Sequence[str] = ()
    peers: Sequence[str] = ()
    coordinator: Path | None = None  # state directory of the one that it is beside
    limits: RelayLimits = field(default_factory=RelayLimits)
    wire: int = -1  # descriptor of the socket to the daemon that it is beside; -1: there is none


class Gateway:
    """One life of a gateway."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._ports = LocalPorts()
        self._finders: dict[tuple[str, str], CoordinatorFinder] = {}
        self._swarm: Swarm
        self._relaying: Relaying

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
        where = SwarmOptions(options.state_dir / "identity", options.listen, options.announce, options.peers)
        async with Swarm.opened(where) as self._swarm:
            relays = [peer_of_multiaddr(peer) for peer in options.peers]
            self._relaying = Relaying(self._swarm.open, relays, options.limits)
            await self._swarm.serve(self._relaying.accept)
            self._introduce()
            try:
                async with asyncio.TaskGroup() as tasks:
                    duties = [tasks.create_task(self._relaying.hold(relay)) for relay in relays]
                    if options.coordinator is not None:
                        duties.append(tasks.create_task(self._publish(options.coordinator)))
                    if options.wire >= 0:
                        duties.append(tasks.create_task(self._listen(stop)))
                    await stop.wait()
                    for duty in duties:
                        duty.cancel()
            finally:
                self._ports.close()

    def _introduce(self) -> None:
        """Say under which addresses others know it."""
        for multiaddr in self._swarm.multiaddrs:
            log.info(f"others reach this gateway at {multiaddr}")
        said = "\n".join(self._swarm.multiaddrs).encode() + b"\n"
        with atomic_write(self._options.state_dir / ADDRESS_FILE, None, mode=0o644) as file:
            write_all(file, [memoryview(said)], 0)

    async def _publish(self, state_dir: Path) -> None:
        """Let nodes find and reach the coordinator in this directory, from its first start on."""
        while await asyncio.to_thread(read_note, state_dir) is None:
            await asyncio.sleep(LOOK_SECONDS)
        certificate = published_certificate(state_dir)
        file = self._options.state_dir / "published"
        publisher = Publisher(state_dir, certificate, self._swarm.host, file, self._swarm)
        await publisher.run(partial(self._relaying.served.__setitem__, Service.COORDINATOR))

    # The daemon's questions

    async def _listen(self, stop: asyncio.Event) -> None:
        sock = socket.socket(fileno=os.dup(self._options.wire))
        reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_LINE_BYTES)
        async with asyncio.TaskGroup() as answers:
            pending = set[asyncio.Task[None]]()
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

    async def _answer(self, question: Question, writer: asyncio.StreamWriter) -> None:
        try:
            reply = await self._carry_out(question)
        except (AtollError, OSError, ValueError) as error:
            reply = Reply(question.number, error=str(error) or type(error).__name__)
        writer.write(msgspec.json.encode(reply) + b"\n")

    async def _carry_out(self, question: Question) -> Reply:
        match question.ask:
            case ServeData(address):
                self._relaying.served[Service.DATA] = address
                return Reply(question.number, self._swarm.host)
            case ReachCoordinator(run, pin, port):
                return await self._lead_to_coordinator(question.number, run, pin, port)
            case ReachPeer(host):
                peer = peer_of_host(host)
                connect = partial(self._relaying.reach, peer, Service.DATA)
                return Reply(question.number, await self._ports.address(host, connect))

    async def _lead_to_coordinator(self, number: int, run: str, pin: str, port: int) -> Reply:
        if not is_pin(pin):
            raise Refused("the pin is none")
        file = self._options.state_dir / f"coordinator-{pin}"
        if (finder := self._finders.get((run, pin))) is None:
            finder = CoordinatorFinder(run, Pin(pin), file, self._swarm, self._relaying.reach)
            self._finders[run, pin] = finder
        while True:
            await finder.look()
            if (record := finder.record) is not None:
                break
            await asyncio.sleep(FIND_SECONDS)
        address = await self._ports.address(f"the coordinator of {run}", finder.connect, port)
        return Reply(number, address, record.address)
