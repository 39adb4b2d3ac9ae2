"""What a gateway takes from the DHT, whoever keeps it: a store that lies stands for the worst of its peers."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from atoll.comm.errors import ResourceError, Unreachable
from atoll.comm.gateway_note import GatewayNote, write_note
from atoll.comm.ids import Pin
from atoll.comm.peer_names import host_of_peer
from atoll.comm.transport.certificates import Certificate, load_or_make
from atoll.node.gateway import finding
from atoll.node.gateway.finding import CoordinatorFinder, Publisher, RecordFile, published_certificate, shows_pin
from atoll.node.gateway.records import BadRecord, CoordinatorRecord, read_record, record_key, write_record
from atoll.node.gateway.splice import Stream
from atoll.node.gateway.stream_header import Service

PEER = b"\x12\x20" + b"g" * 32
RECORD = CoordinatorRecord("reef", "", host_of_peer(PEER), 3, 7, int(time.time()) + 100)


@dataclass
class Store:
    """A DHT that says what it is told to say, and writes down what it is given."""

    says: bytes | None = None
    given: list[tuple[bytes, bytes]] = field(default_factory=list)

    async def publish(self, key: bytes, data: bytes, expires: int) -> bool:
        self.given.append((key, data))
        return True

    async def find(self, key: bytes) -> bytes | None:
        return self.says


class Reached(Exception):
    """The coordinator's gateway was asked."""


async def reach(peer: bytes, service: Service) -> Stream:
    assert (peer, service) == (PEER, Service.COORDINATOR)
    raise Reached


@pytest.fixture
def own(tmp_path: Path) -> Certificate:
    return load_or_make(tmp_path)


def write(own: Certificate, **change: object) -> bytes:
    return write_record(msgspec.structs.replace(RECORD, **change), own.der, own.signing_key())


def test_neither_an_older_nor_a_forged_record_takes_the_place_of_one(
    tmp_path: Path, own: Certificate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finding, "FRESH_SECONDS", 0.0)
    (tmp_path / "forger").mkdir()
    forged = write(load_or_make(tmp_path / "forger"), incarnation=9)
    store = Store()
    finder = CoordinatorFinder("reef", own.pin, tmp_path / "record", store, reach)

    async def look(says: bytes | None) -> CoordinatorRecord | None:
        store.says = says
        await finder.look()
        return finder.record

    async def body() -> None:
        with pytest.raises(Unreachable, match="no gateway knows"):
            await finder.connect()
        assert await look(forged) is None
        assert await look(write(own)) == RECORD
        for says in (None, forged, write(own, sequence=6), write(own, incarnation=2, sequence=99), b"x" * 10**6):
            assert await look(says) == RECORD
        with pytest.raises(Reached):
            await finder.connect()
        moved = await look(write(own, incarnation=4, sequence=0, address="127.0.0.1:1"))
        assert moved is not None and moved.incarnation == 4 and "has moved" in caplog.text

    with caplog.at_level("INFO"):
        asyncio.run(body())
    again = CoordinatorFinder("reef", own.pin, tmp_path / "record", Store(write(own)), reach)
    asyncio.run(again.look())
    assert again.record == finder.record  # a process that starts again has seen it, too
    assert CoordinatorFinder("reef", Pin("a" * 52), tmp_path / "record", Store(), reach).record is None


@pytest.mark.parametrize("damage", [b"", b"AGR1", b"x" * 10_000])
def test_a_damaged_file_of_what_was_seen_is_none(tmp_path: Path, own: Certificate, damage: bytes) -> None:
    (tmp_path / "record").write_bytes(damage)
    file = RecordFile(tmp_path / "record", "reef", own.pin)
    assert file.record is None and file.take(write(own))
    with pytest.raises(BadRecord):
        file.take(damage)


def test_a_coordinator_is_published_and_again_when_it_moves(
    tmp_path: Path, own: Certificate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finding, "LOOK_SECONDS", 0.0)
    store, served = Store(), list[str]()
    publisher = Publisher(tmp_path, own, host_of_peer(PEER), tmp_path / "published", store)

    async def published(count: int) -> CoordinatorRecord:
        async with asyncio.timeout(30):
            while len(store.given) < count:
                await asyncio.sleep(0)
        key, data = store.given[-1]
        assert key == record_key("reef", own.pin)
        return read_record(data, "reef", own.pin)

    async def body() -> None:
        task = asyncio.create_task(publisher.run(lambda note: served.append(note.entrance)))
        write_note(tmp_path, GatewayNote("reef", "203.0.113.7:4700", "/one", 1))
        first = await published(1)
        assert (first.address, first.incarnation) == ("203.0.113.7:4700", 1)
        write_note(tmp_path, GatewayNote("reef", "198.51.100.3:4700", "/two", 2))
        second = await published(2)
        assert (second.address, second.incarnation) == ("198.51.100.3:4700", 2)
        write_note(tmp_path, GatewayNote("reef", "198.51.100.3:4700", "/two", 2, relays=("/a",)))
        async with asyncio.timeout(30):
            while len(served) < 3:
                await asyncio.sleep(0)
        assert served == ["/one", "/two", "/two"] and len(store.given) == 2  # it has not moved
        write_note(tmp_path, GatewayNote("reef", "203.0.113.7:4700", "/one", 1))  # an old copy of it
        async with asyncio.timeout(30):
            while "a later coordinator of run reef is known" not in caplog.text:
                await asyncio.sleep(0)
        assert len(store.given) == 2
        task.cancel()

    asyncio.run(body())


def test_a_coordinator_without_a_certificate_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="security.tls=on"):
        published_certificate(tmp_path)


def test_what_shows_another_certificate_is_not_dialled(own: Certificate) -> None:
    async def body() -> None:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(own.path)
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0, ssl=context)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await shows_pin(address, own.pin)
        assert not await shows_pin(address, Pin("a" * 52))
        server.close()
        await server.wait_closed()
        assert not await shows_pin(address, own.pin)

    asyncio.run(body())
