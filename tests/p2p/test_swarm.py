"""What strangers among libp2p's peers cannot do to a gateway, and what happens when p2pd dies."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from e2e.harness import ATOLL, until
from hivemind.dht.node import DHTNode
from p2p.gateways import LISTEN, gateway

from atoll.comm.errors import Unreachable
from atoll.comm.peer_names import peer_of_multiaddr
from atoll.comm.transport.certificates import Certificate, load_or_make
from atoll.node.gateway import swarm as swarms
from atoll.node.gateway.records import CoordinatorRecord, NewestRecords, record_key, write_record
from atoll.node.gateway.swarm import Swarm, SwarmOptions


def test_p2pd_that_dies_alone_is_started_again_and_the_gateway_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "multiaddr"
    command = [*ATOLL, "gateway", "--state-dir", str(tmp_path), "--listen"]

    def started(listen: str) -> tuple[subprocess.Popen[bytes], psutil.Process, str]:
        file.unlink(missing_ok=True)
        process = subprocess.Popen([*command, listen])
        until("the gateway", lambda: file.exists() and file.read_text().strip())
        (child,) = psutil.Process(process.pid).children()
        return process, child, file.read_text().strip()

    first, _, place = started(LISTEN)
    first.terminate()
    first.wait()
    process, child, again = started(place.rpartition("/p2p/")[0])
    assert again == place
    child.kill()
    until("another p2pd", lambda: [p for p in psutil.Process(process.pid).children() if p.pid != child.pid])

    async def come() -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    async with Swarm.opened(SwarmOptions(tmp_path / "peer", peers=[place])) as swarm:
                        return (await swarm.open(peer_of_multiaddr(place))).abort()
                except Unreachable:
                    await asyncio.sleep(0.5)

    asyncio.run(come())
    assert process.poll() is None
    process.terminate()
    process.wait()


def test_an_address_in_a_private_network_that_a_peer_announces_is_not_dialled(tmp_path: Path) -> None:
    asyncio.run(_announced(tmp_path))


async def _announced(tmp_path: Path) -> None:
    came = list[object]()

    def meet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(writer.get_extra_info("peername"))
        writer.close()

    router = await asyncio.start_server(
        meet, "127.0.0.1", 0
    )  # stands for a device of the asking machine's network
    announced = f"/ip4/127.0.0.1/tcp/{router.sockets[0].getsockname()[1]}"
    async with gateway(tmp_path, "public", public=True) as public:
        where = SwarmOptions(tmp_path / "liar", [LISTEN], [announced], [public.multiaddr])
        async with Swarm.opened(where) as liar, gateway(tmp_path, "asking", [public]) as asking:
            for swarm in (public.swarm, asking.swarm, liar):  # as in a public run; they are connected already
                swarm._guard.private = False
            came.clear()

            async def tried(until: Callable[[], object]) -> None:
                """Open streams to the liar: p2pd dials an address again some seconds after it was of no use."""
                async with asyncio.timeout(60):
                    while not until():
                        with pytest.raises(Unreachable):
                            await asking.swarm.open(liar.peer)
                        await asyncio.sleep(0.2)

            await tried(lambda: asking.swarm._guard.refused)
            assert not came
            asking.swarm._guard.private = True  # a private one: it is dialled, or this test would show nothing
            await tried(lambda: came)
    router.close()


def test_records_that_somebody_signs_for_himself_neither_fill_a_gateway_nor_push_its_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarms, "NewestRecords", partial(NewestRecords, most=32, of_network=8))
    asyncio.run(_flooded(tmp_path))


async def _flooded(tmp_path: Path) -> None:
    def certificate(name: str) -> Certificate:
        (tmp_path / name).mkdir()
        return load_or_make(tmp_path / name)

    own, forger = certificate("c"), certificate("f")
    async with gateway(tmp_path, "public", public=True) as public, gateway(tmp_path, "beside", [public]) as beside:

        def written(by: Certificate, run: str) -> tuple[bytes, bytes, int]:
            record = CoordinatorRecord(run, "", beside.swarm.host, 1, 1, int(time.time()) + 800)
            return record_key(run, by.pin), write_record(record, by.der, by.signing_key()), record.expires

        key, data, expires = written(own, "reef")
        assert await public.swarm.find(key) is None  # it was asked for this run
        assert await beside.swarm.publish(key, data, expires)
        where = ["/ip4/127.0.0.1/tcp/0"]
        flood = await DHTNode.create(initial_peers=[public.multiaddr], host_maddrs=where, startup_timeout=60)
        try:
            for number in range(60):
                made_up, forged, until_ = written(forger, f"made up {number}")
                await flood.store(made_up, forged, float(until_))
        finally:
            await flood.shutdown()
        assert len(public.swarm._dht.protocol.storage) <= 8 + 1
        assert public.swarm.kept(key) and await beside.swarm.find(key) == data
