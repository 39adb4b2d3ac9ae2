"""Bytes pass between gateways, directly and through a relay; nothing but what is served can be reached."""

import asyncio
import os
import subprocess
from pathlib import Path

import psutil
import pytest
from e2e.harness import ATOLL, until
from p2p.gateways import LISTEN, gateway

from atoll.comm.errors import Unreachable
from atoll.node.gateway.local_ports import LocalPorts
from atoll.node.gateway.splice import dial
from atoll.node.gateway.stream_header import RelayLimits, Service

NOISE = os.urandom(1 << 22)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def echoed(address: str, noise: bytes) -> bytes:
    """What comes back of `noise` from "host:port"."""
    stream = await dial(address)

    async def send() -> None:
        stream.writer.write(noise)
        await stream.writer.drain()

    async with asyncio.TaskGroup() as both:
        both.create_task(send())
        back = both.create_task(stream.reader.readexactly(len(noise)))
    stream.abort()
    return back.result()


@pytest.mark.parametrize("public", [True, False], ids=["direct", "relayed"])
def test_bytes_reach_a_peers_service_and_come_back(tmp_path: Path, public: bool) -> None:
    asyncio.run(_passed(tmp_path, public))


async def _passed(tmp_path: Path, public: bool) -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    ports = LocalPorts()
    async with (
        gateway(tmp_path, "relay", public=True, limits=RelayLimits(streams=4)) as relay,
        gateway(tmp_path, "served", [relay], public) as served,
        gateway(tmp_path, "asking", [relay]) as asking,
    ):
        peer = served.swarm.peer
        with pytest.raises(Unreachable):  # nothing is served, and the relay does not know it
            await asking.relaying.reach(peer, Service.DATA)
        served.relaying.served[Service.DATA] = "{}:{}".format(*server.sockets[0].getsockname())
        holding = asyncio.create_task(served.relaying.hold(relay.swarm.peer))
        async with asyncio.timeout(60):
            while not served.relaying.holding:
                await asyncio.sleep(0.05)
        address = await ports.address("there", lambda: asking.relaying.reach(peer, Service.DATA))
        async with asyncio.timeout(60):
            one, other = await asyncio.gather(echoed(address, NOISE), echoed(address, NOISE[::-1]))
        assert (one, other) == (NOISE, NOISE[::-1])
        assert asking.relaying.opened == {"direct": 2 * public, "punched": 0, "relayed": 2 * (not public)}
        with pytest.raises(Unreachable, match="does not serve that|does not answer"):
            await asking.relaying.reach(peer, Service.COORDINATOR)
        holding.cancel()
        ports.close()
        await asyncio.gather(holding, return_exceptions=True)
    server.close()


def test_what_a_gateway_that_was_killed_left_behind_is_ended_by_the_next(tmp_path: Path) -> None:
    command = [*ATOLL, "gateway", "--state-dir", str(tmp_path), "--listen"]

    def started(listen: str) -> tuple[subprocess.Popen[bytes], str, psutil.Process]:
        place = tmp_path / "multiaddr"
        place.unlink(missing_ok=True)
        process = subprocess.Popen([*command, listen])
        until("the gateway", lambda: place.exists() and place.read_text().strip())
        (child,) = psutil.Process(process.pid).children()
        return process, place.read_text().strip(), child

    first, place, left = started(LISTEN)
    first.kill()
    first.wait()
    assert left.is_running()
    second, again, child = started(place.rpartition("/p2p/")[0])  # its port was taken till then
    assert again == place and not left.is_running()
    second.terminate()
    second.wait()
    child.wait(30)


def test_a_gateway_that_is_no_relay_passes_nothing_on(tmp_path: Path) -> None:
    asyncio.run(_refused(tmp_path))


async def _refused(tmp_path: Path) -> None:
    async with (
        gateway(tmp_path, "public", public=True) as public,
        gateway(tmp_path, "served", [public]) as served,
        gateway(tmp_path, "asking", [public]) as asking,
    ):
        with pytest.raises(Unreachable, match="that gateway is no relay"):
            await asking.relaying.reach(served.swarm.peer, Service.DATA)
