"""The daemon's side of the gateway beside it: starts its process, keeps it alive, asks it. Imports nothing of
hivemind's: that is the process's.
"""

import asyncio
import itertools
import logging
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from atoll.comm import log as logs
from atoll.comm.errors import Unreachable
from atoll.comm.extras import demand, lacking
from atoll.comm.invite import Invite, join_host_port, split_host_port
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

log = logging.getLogger("atoll.node")
FOLDER = "gateway"  # in the node's state directory
BACKLOG = 128  # connections that wait for the process
START_AGAIN_SECONDS = 1.0  # between the end of the process and the next one; twice as long after each that failed
LONGEST_PAUSE_SECONDS = 30.0
LIVED_SECONDS = 60.0  # after which a process has not failed
END_SECONDS = 10.0  # that it has to end
REACH_SECONDS = 5.0  # for a port to a peer: the gateway is asked, not the peer
Ask = ServeData | ReachCoordinator | ReachPeer | UseGateways | AwaitPlace | RelayWithin


@dataclass(frozen=True, slots=True)
class RelayOffer:
    """The place at which a node's gateway passes on what others send each other."""

    host: str  # IP address at which others dial it
    port: int

    def multiaddr(self, host: str) -> str:
        """Its multiaddr at this host, without the peer."""
        return f"/ip{6 if ':' in host else 4}/{host}/tcp/{self.port}"


def missing_gateway() -> str:
    """What a node of this machine lacks for a gateway, and how to install it; empty: nothing."""
    return lacking("a gateway", "hivemind")


class GatewayProcess:
    """The gateway beside a node. `opened`, then asked at any time."""

    def __init__(self, state_dir: Path, gateways: Sequence[str], offer: RelayOffer | None) -> None:
        self._state_dir, self._gateways, self._offer = state_dir / FOLDER, tuple(gateways), offer
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Reply]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._up = asyncio.Event()
        # The port that leads to the coordinator is this process's, for its life: nobody else gets it while there
        # is no gateway, and who connects meanwhile waits.
        self._entrance = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._lasting = dict[type[Ask], Ask]()  # what the next process has to be told as well
        self._relayed_before = self._relayed_now = 0  # bytes, by the processes that ended and by this one
        self.found = ""  # the address in the coordinator's record; empty: it cannot be dialled
        self.host = ""  # under which others reach this node
        self.multiaddr = ""  # under which others may use it as a relay; empty: they may not

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, state_dir: Path, gateways: Sequence[str], offer: RelayOffer | None = None
    ) -> AsyncIterator[Self]:
        """The process lives while the context lasts; it begins with these gateways' multiaddrs. `offer`: where it
        relays for others. Raises `MissingPackage`."""
        demand("a gateway", "hivemind")
        made = cls(state_dir, gateways, offer)
        keeping = asyncio.create_task(made._keep_alive())
        try:
            yield made
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            made._entrance.close()

    @property
    def relayed(self) -> int:
        """Bytes that it has passed on for others."""
        return self._relayed_before + self._relayed_now

    async def lead_to_coordinator(self, invite: Invite, patience: float) -> Invite:
        """The invite with an address of this machine that leads to the coordinator, wherever that moves; `found`
        is then the one in its record. Raises `Unreachable` where no record was found for `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                self.found = (await self._ask(ReachCoordinator(invite.run, invite.pin), lasting=True)).found
        except TimeoutError:
            places = ", ".join(self._gateways)
            raise Unreachable(
                f"no coordinator of run {invite.run} was found through {places} for "
                f"{patience:g} s: is a gateway running there, and one beside the coordinator?"
            ) from None
        host, port = self._entrance.getsockname()[:2]
        return Invite(join_host_port(host, port), invite.run, invite.token, invite.pin)

    async def serve_data(self, address: str) -> str:
        """Let others reach the data plane at this "host:port"; returns the host under which they do."""
        self.host = (await self._ask(ServeData(address), lasting=True)).value
        return self.host

    async def await_place(self, patience: float, by_relay: bool = False) -> None:
        """Wait until others can reach this gateway; `by_relay`: that it listens is not enough. Raises
        `Unreachable` after `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                said = (await self._ask(AwaitPlace(by_relay))).value.split()
        except TimeoutError:
            raise Unreachable(f"no relay of the run had a place for {patience:g} s") from None
        if self._offer is not None and said:
            peer = said[0].rpartition("/p2p/")[2]
            self.multiaddr = f"{self._offer.multiaddr(self._offer.host)}/p2p/{peer}"

    async def reach(self, host: str) -> tuple[str, int]:
        """Host and port of this machine that lead to the data plane behind a peer's host. Raises `Unreachable`."""
        try:
            async with asyncio.timeout(REACH_SECONDS):
                reply = await self._ask(ReachPeer(host))
        except TimeoutError:
            raise Unreachable(f"this machine's gateway does not answer ({host})") from None
        return split_host_port(reply.value, "the gateway's port")

    def use(self, multiaddrs: Sequence[str]) -> None:
        """Tell it which gateways the run has now."""
        self._tell(UseGateways(tuple(multiaddrs)))

    def relay_within(self, streams: int, rate: float) -> None:
        """Let it pass on so many streams at once and bytes a second (0: no limit) for others from now on."""
        self._tell(RelayWithin(streams, rate))

    def _tell(self, ask: UseGateways | RelayWithin) -> None:
        """Have it do something, now and in its next lives; what it answers says nothing."""
        if self._lasting.get(type(ask)) != ask:
            self._lasting[type(ask)] = ask
            self._write(0, ask)

    def _write(self, number: int, ask: Ask) -> None:
        if self._writer is not None and self._up.is_set():
            self._writer.write(msgspec.json.encode(Question(number, ask)) + b"\n")

    async def _ask(self, ask: Ask, lasting: bool = False) -> Reply:
        """The answer, of the next process if this one ends before. Raises `Unreachable` where it is a no."""
        if lasting:
            self._lasting[type(ask)] = ask
        while True:
            await self._up.wait()
            number = next(self._numbers)
            answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            self._asked[number] = answered
            self._write(number, ask)
            try:
                reply = await answered
            except ConnectionError:
                continue
            finally:
                self._asked.pop(number, None)
            if reply.error:
                raise Unreachable(reply.error)
            return reply

    async def _keep_alive(self) -> None:
        """Start the process, and again when it ends; then it is told what the one before it was."""
        clock, pause = asyncio.get_running_loop().time, START_AGAIN_SECONDS
        while True:
            began = clock()
            code = await self._live()
            self._relayed_before, self._relayed_now = self.relayed, 0
            pause = START_AGAIN_SECONDS if clock() - began > LIVED_SECONDS else pause
            log.warning(f"the gateway's process ended ({code}): it is started again in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _live(self) -> int:
        ours, theirs = socket.socketpair()
        wire, entrance = theirs.fileno(), self._entrance.fileno()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *gateway_words(self._state_dir, wire, entrance, self._gateways, self._offer),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[wire, entrance],
                start_new_session=True,  # Ctrl-C is for the daemon, whose good-bye goes by the gateway
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        self._up.set()
        for ask in self._lasting.values():
            self._write(0, ask)
        try:
            with suppress(ConnectionError):
                async for line in reader:
                    self._hear(msgspec.json.decode(line, type=Reply))
            return await process.wait()
        finally:
            self._up.clear()
            self._writer.close()  # ends it
            self._writer = None
            for answered in list(self._asked.values()):
                if not answered.done():
                    answered.set_exception(ConnectionResetError("the gateway's process ended"))
            await _ended(process)

    def _hear(self, reply: Reply) -> None:
        if (answered := self._asked.get(reply.number)) is not None:
            if not answered.done():
                answered.set_result(reply)
        elif reply.relayed:
            self._relayed_now = reply.relayed
        elif reply.error:
            log.warning(f"the gateway: {reply.error}")


def gateway_words(
    state_dir: Path,
    wire: int,
    entrance: int,
    gateways: Sequence[str] = (),
    offer: RelayOffer | None = None,
) -> list[str]:
    """The command line of the gateway beside a node. `wire`: the descriptor of its socket to this process;
    `entrance`: of the port that leads to the coordinator. Where the node logs to a file, the gateway has one of
    its own."""
    words = [sys.executable, "-P", "-m", "atoll.comm.cli", "gateway"]
    words += [f"--state-dir={state_dir}", f"--wire={wire}", f"--entrance={entrance}"]
    words += [f"--peer={multiaddr}" for multiaddr in gateways]
    if offer is not None:
        everywhere = "::" if ":" in offer.host else "0.0.0.0"
        words += [
            f"--listen={offer.multiaddr(everywhere)}",
            f"--announce={offer.multiaddr(offer.host)}",
            "--relay",
        ]
    return [*words, f"--log-setup={msgspec.json.encode(logs.beside('gateway')).decode()}"]


async def _ended(process: asyncio.subprocess.Process) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    if process.returncode is None:
        process.kill()
