"""The daemon's side of the gateway beside it: starts its process, keeps it alive, asks it. Imports nothing of
hivemind's: that is the process's.
"""

import asyncio
import itertools
import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec

from atoll.comm import log as log_setup
from atoll.comm.errors import AtollError, Unreachable
from atoll.comm.extras import demand
from atoll.comm.invite import Invite, split_host_port
from atoll.node.gateway.wire import MAX_LINE_BYTES, Question, ReachCoordinator, ReachPeer, Reply, ServeData

log = logging.getLogger("atoll.node")
FOLDER = "gateway"  # in the node's state directory
START_AGAIN_SECONDS = 1.0  # between the end of the process and the next one; twice as long after each that failed
LONGEST_PAUSE_SECONDS = 30.0
LIVED_SECONDS = 60.0  # after which a process has not failed
END_SECONDS = 10.0  # that it has to end
REACH_SECONDS = 5.0  # for a port to a peer: the gateway is asked, not the peer


class GatewayProcess:
    """The gateway beside a node. `opened`, then `lead_to_coordinator` and `serve_data`, then `reach` at any
    time."""

    def __init__(self, invite: Invite, state_dir: Path) -> None:
        self._invite, self._state_dir = invite, state_dir / FOLDER
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Reply]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._up = asyncio.Event()
        self._coordinator = ""  # "host:port" of the port that leads to it
        self._data = ""  # "host:port" of the node's data plane
        self.found = ""  # the address in the coordinator's record; empty: it cannot be dialled
        self.host = ""  # under which others reach this node

    @classmethod
    @asynccontextmanager
    async def opened(cls, invite: Invite, state_dir: Path) -> AsyncIterator[Self]:
        """The process lives while the context lasts. Raises `MissingPackage`."""
        demand("a join URL that names a gateway", "hivemind")
        made = cls(invite, state_dir)
        keeping = asyncio.create_task(made._keep_alive())
        try:
            yield made
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def lead_to_coordinator(self, patience: float) -> Invite:
        """The invite with an address of this machine that leads to the coordinator, wherever that moves. Raises
        `Unreachable` where none was found for `patience` seconds."""
        try:
            async with asyncio.timeout(patience):
                await self._ask_coordinator()
        except TimeoutError:
            places = ", ".join(self._invite.rendezvous)
            raise Unreachable(
                f"no coordinator of run {self._invite.run} was found through {places} for "
                f"{patience:g} s: is a gateway running there, and one beside the coordinator?"
            ) from None
        return Invite(self._coordinator, self._invite.run, self._invite.token, self._invite.pin)

    async def serve_data(self, address: str) -> str:
        """Let others reach the data plane at this "host:port"; returns the host under which they do."""
        self._data = address
        self.host = (await self._ask(ServeData(address))).value
        return self.host

    async def reach(self, host: str) -> tuple[str, int]:
        """Host and port of this machine that lead to the data plane behind a peer's host. Raises `Unreachable`."""
        try:
            async with asyncio.timeout(REACH_SECONDS):
                reply = await self._ask(ReachPeer(host))
        except TimeoutError:
            raise Unreachable(f"this machine's gateway does not answer ({host})") from None
        return split_host_port(reply.value, "the gateway's port")

    async def _ask_coordinator(self) -> None:
        port = split_host_port(self._coordinator, "the gateway's port")[1] if self._coordinator else 0
        reply = await self._ask(ReachCoordinator(self._invite.run, self._invite.pin, port))
        self._coordinator, self.found = reply.value, reply.found

    async def _ask(self, ask: ServeData | ReachCoordinator | ReachPeer) -> Reply:
        """The answer, of the next process if this one ends before. Raises `Unreachable` where it is a no."""
        while True:
            await self._up.wait()
            number = next(self._numbers)
            answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            self._asked[number] = answered
            if self._writer is not None:
                self._writer.write(msgspec.json.encode(Question(number, ask)) + b"\n")
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
        """Start the process, and again when it ends; then it gets the port that it had, and serves what it did."""
        clock, pause = asyncio.get_running_loop().time, START_AGAIN_SECONDS
        while True:
            began = clock()
            code = await self._live()
            pause = START_AGAIN_SECONDS if clock() - began > LIVED_SECONDS else pause
            log.warning(f"the gateway's process ended ({code}): it is started again in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _live(self) -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *gateway_words(self._invite, self._state_dir, theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the daemon, whose good-bye goes by the gateway
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        resuming = asyncio.create_task(self._resume())
        self._up.set()
        try:
            with suppress(ConnectionError):
                async for line in reader:
                    reply = msgspec.json.decode(line, type=Reply)
                    if (answered := self._asked.get(reply.number)) is not None and not answered.done():
                        answered.set_result(reply)
            return await process.wait()
        finally:
            self._up.clear()
            resuming.cancel()
            self._writer.close()  # ends it
            self._writer = None
            for answered in list(self._asked.values()):
                if not answered.done():
                    answered.set_exception(ConnectionResetError("the gateway's process ended"))
            await _ended(process)

    async def _resume(self) -> None:
        """Have the new process do what the one before it did."""
        try:
            if self._data:
                await self.serve_data(self._data)
            if self._coordinator:
                await self._ask_coordinator()
        except AtollError as error:
            log.warning(f"the gateway: {error}")


def gateway_words(invite: Invite, state_dir: Path, wire: int) -> list[str]:
    """The command line of the gateway beside a node; `wire`: the descriptor of its socket to this process. Where
    the node logs to a file, the gateway has one of its own: a process does not follow another to its next file."""
    words = [sys.executable, "-P", "-m", "atoll.comm.cli", "gateway", f"--state-dir={state_dir}", f"--wire={wire}"]
    words += [f"--peer={multiaddr}" for multiaddr in invite.rendezvous]
    beside = log_setup.file_beside("gateway")
    return words if beside is None else [*words, f"--log-file={beside}"]


async def _ended(process: asyncio.subprocess.Process) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    if process.returncode is None:
        process.kill()
