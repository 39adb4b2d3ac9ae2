"""A plugin of pytest's: every connection that a data plane dials goes through two real gateways.

    pytest -p p2p.over_gateways tests/comm/transport ...

    data plane -- port of gateway A -- p2pd of A -- libp2p -- p2pd of B -- gateway B -- data plane

The gateways live in a thread of their own as long as the tests do. One gateway leads to one data plane; so that tests
may have any number, B has a protocol of libp2p's for each port that is dialled, and behind each what a gateway has.
"""

import asyncio
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p import PeerID

from atoll.comm.errors import Unreachable
from atoll.comm.invite import split_host_port
from atoll.comm.transport import data_plane
from atoll.node.gateway.local_ports import LocalPorts
from atoll.node.gateway.relaying import Relaying
from atoll.node.gateway.splice import Stream
from atoll.node.gateway.stream_header import RelayLimits, Service
from atoll.node.gateway.swarm import FAILURES, PROTOCOL, Swarm, SwarmOptions, _caller

LISTEN = "/ip4/127.0.0.1/tcp/0"
Connect = Callable[[str, int, bool], Awaitable[socket.socket]]


class TwoGateways:
    """Two gateways in a thread of their own, and ports that lead through both."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._opened = AsyncExitStack()
        self._folder = tempfile.TemporaryDirectory()
        self._ports = LocalPorts()
        self._known = set[int]()
        self.passed = 0  # connections
        self._a: Swarm
        self._b: Swarm
        self._do(self._open()).result(120)

    def _do(self, work: Any) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open(self) -> None:
        folder = Path(self._folder.name)
        self._b = await self._opened.enter_async_context(Swarm.opened(SwarmOptions(folder / "b", [LISTEN])))
        known = self._b.multiaddrs
        self._a = await self._opened.enter_async_context(Swarm.opened(SwarmOptions(folder / "a", peers=known)))

    async def _port(self, host: str, port: int) -> str:
        protocol = f"{PROTOCOL}/{port}"
        if port not in self._known:
            self._known.add(port)
            behind = Relaying(_nowhere, (), RelayLimits())
            behind.served[Service.DATA] = f"{host}:{port}"

            async def accept(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await behind.accept(_caller(info.peer_id, info.addr), Stream(reader, writer))

            await self._b._daemon.add_binary_stream_handler(protocol, accept)

        async def open_stream(peer: bytes) -> Stream:
            try:
                _, *both = await self._a._daemon.call_binary_stream_handler(PeerID(peer), protocol)
            except FAILURES as error:
                raise Unreachable(str(error)) from None
            return Stream(*both)

        async def reach() -> Stream:
            self.passed += 1
            return await Relaying(open_stream, (), RelayLimits()).reach(self._b.peer, Service.DATA)

        return await self._ports.address(f"{host}:{port}", reach)

    async def port(self, host: str, port: int) -> tuple[str, int]:
        """The host and port that lead to a data plane at this host and port."""
        address = await asyncio.wrap_future(self._do(self._port(host, port)))
        return split_host_port(address, "the gateway's port")

    def close(self) -> None:
        async def end() -> None:
            self._ports.close()
            await self._opened.aclose()

        self._do(end()).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._folder.cleanup()


async def _nowhere(_: bytes) -> Stream:
    raise Unreachable("nothing is asked of this side")


@pytest.fixture(scope="session")
def two_gateways() -> Iterator[TwoGateways]:
    both = TwoGateways()
    yield both
    both.close()


@pytest.fixture(autouse=True)
def through_gateways(two_gateways: TwoGateways, monkeypatch: pytest.MonkeyPatch) -> None:
    directly: Connect = data_plane._connect

    async def connect(host: str, port: int, private: bool) -> socket.socket:
        return await directly(*await two_gateways.port(host, port), True)

    monkeypatch.setattr(data_plane, "_connect", connect)
