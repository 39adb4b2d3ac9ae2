"""A coordinator is found by what it signed, whoever keeps or changes its record."""

import asyncio
import time
from pathlib import Path

import pytest
from hivemind.dht.node import DHTNode
from p2p.gateways import Peer, gateway

from atoll.comm.errors import Unreachable
from atoll.comm.transport.certificates import Certificate, load_or_make
from atoll.node.gateway.finding import CoordinatorFinder
from atoll.node.gateway.records import LIFE_SECONDS, CoordinatorRecord, read_record, record_key, write_record
from atoll.node.gateway.splice import Stream
from atoll.node.gateway.stream_header import Answer, Service
from atoll.node.gateway.swarm import Swarm, SwarmOptions


def record(peer: Peer, address: str, sequence: int, lasts: int) -> CoordinatorRecord:
    """A record that lasts so many seconds."""
    return CoordinatorRecord("reef", address, peer.swarm.host, 1, sequence, int(time.time()) + lasts)


def certificate(folder: Path, name: str) -> Certificate:
    (folder / name).mkdir()
    return load_or_make(folder / name)


def write(made: CoordinatorRecord, by: Certificate) -> bytes:
    return write_record(made, by.der, by.signing_key())


async def publish(peer: Peer, made: CoordinatorRecord, by: Certificate) -> bool:
    return await peer.swarm.publish(record_key("reef", by.pin), write(made, by), made.expires)


def test_a_record_is_found_and_a_newer_one_takes_its_place(tmp_path: Path) -> None:
    asyncio.run(_found(tmp_path))


async def _found(tmp_path: Path) -> None:
    own = certificate(tmp_path, "c")
    async with (
        gateway(tmp_path, "public", public=True) as public,
        gateway(tmp_path, "beside", [public]) as beside,
        gateway(tmp_path, "node", [public]) as node,
    ):
        finder = CoordinatorFinder("reef", own.pin, tmp_path / "seen", node.swarm, node.relaying.reach)
        with pytest.raises(Unreachable, match="no gateway knows"):
            await finder.connect()
        for sequence in (1, 2):
            made = record(beside, "", sequence, 100 * sequence)
            assert await publish(beside, made, own)
            found = await node.swarm.find(record_key("reef", own.pin))
            assert found is not None and read_record(found, "reef", own.pin) == made
        assert not await publish(
            beside, record(beside, "", 1, LIFE_SECONDS), own
        )  # an old one, which lasts longer
        finder = CoordinatorFinder("reef", own.pin, tmp_path / "seen", node.swarm, node.relaying.reach)
        await finder.look()
        assert finder.record == made
        old = CoordinatorFinder("reef", own.pin, tmp_path / "seen", node.swarm, node.relaying.reach)
        assert old.record == made  # a node that starts again remembers


def test_what_a_lying_peer_keeps_or_says_is_not_taken(tmp_path: Path) -> None:
    asyncio.run(_lied(tmp_path))


async def _lied(tmp_path: Path) -> None:
    own, forger = certificate(tmp_path, "c"), certificate(tmp_path, "f")
    key = record_key("reef", own.pin)
    async with gateway(tmp_path, "public", public=True) as public:
        genuine = record(public, "203.0.113.7:4700", 1, LIFE_SECONDS - 100)
        forged = record(public, "198.51.100.66:4700", 2, LIFE_SECONDS)
        # A peer of the same DHT, with no rules of its own: it stores what it likes, and answers with it.
        liar = await DHTNode.create(
            initial_peers=[public.multiaddr],
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            cache_nearest=0,
            startup_timeout=60,
        )
        try:
            where = SwarmOptions(tmp_path / "node", peers=[str(m) for m in await liar.get_visible_maddrs()])
            async with Swarm.opened(where) as alone:  # it knows the liar first
                lies = [
                    (write(forged, forger), forged.expires),
                    (write(genuine, own), genuine.expires + 10**6),  # an old one for ever
                    (b"x" * 100_000, genuine.expires),
                ]
                for data, expires in lies:
                    await liar.store(key, data, float(expires))
                    liar.protocol.storage.store(
                        _place(liar, key), liar.protocol.serializer.dumps(data), float(expires)
                    )
                    assert not public.swarm.kept(key)
                    assert await alone.find(key) is None
                await publish(public, genuine, own)
                assert public.swarm.kept(key)  # whatever the liar says of it
                finder = CoordinatorFinder("reef", own.pin, tmp_path / "seen", alone, _nowhere)
                await finder.look()
                assert finder.record in (None, genuine)
        finally:
            await liar.shutdown()


def _place(node: DHTNode, key: bytes) -> object:
    return type(node.node_id).generate(key)


async def _nowhere(peer: bytes, service: Service) -> Stream:
    raise Unreachable(Answer.SILENT.name)
