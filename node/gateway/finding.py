"""The coordinator of a run, wherever it is: published by the gateway beside it, found by those of the nodes.

What was found last is kept in a file, signed as it came, so that a node that starts again neither depends on the
DHT nor takes an older record than it has seen.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from atoll.comm.errors import ResourceError, Unreachable
from atoll.comm.files import atomic_write, write_all
from atoll.comm.gateway_note import GatewayNote, read_note
from atoll.comm.ids import Pin
from atoll.comm.invite import split_host_port
from atoll.comm.peer_names import peer_of_host
from atoll.comm.transport.certificates import NAME, Certificate, pin_of
from atoll.node.gateway.records import (
    LIFE_SECONDS,
    MAX_RECORD_BYTES,
    BadRecord,
    CoordinatorRecord,
    is_newer,
    next_record,
    read_record,
    record_key,
    write_record,
)
from atoll.node.gateway.splice import Stream, dial
from atoll.node.gateway.stream_header import Service

log = logging.getLogger("atoll.gateway")
PUBLISH_SECONDS = 60.0  # between two records, where nothing has changed
PUBLISH_AGAIN_SECONDS = 10.0  # after one that was refused somewhere: whoever keeps an older one for longer may lie
LOOK_SECONDS = 1.0  # between two looks at the coordinator's note
FRESH_SECONDS = 2.0  # for which a record is not looked for again
PROBE_SECONDS = 5.0  # for a coordinator that can be dialled to show its certificate
Reach = Callable[[bytes, Service], Awaitable[Stream]]


class RecordStore(Protocol):
    """The DHT, as it is used here (`Swarm`)."""

    async def publish(self, key: bytes, data: bytes, expires: int) -> bool:
        """Have a record kept; False: it was refused somewhere."""

    async def find(self, key: bytes) -> bytes | None:
        """The record under a key; None: nobody has one."""


class RecordFile:
    """The newest record of one run that is known here, on the disk as well."""

    def __init__(self, path: Path, run: str, pin: Pin) -> None:
        self._path, self._run, self._pin = path, run, pin
        self.record: CoordinatorRecord | None = None
        try:
            with open(path, "rb") as file:
                self.record = read_record(file.read(MAX_RECORD_BYTES + 1), run, pin)
        except (OSError, BadRecord):
            pass  # there is none, or another run's

    def take(self, data: bytes) -> bool:
        """Take a record that is newer than the one here; whether it is. Raises `BadRecord`."""
        found = read_record(data, self._run, self._pin)
        if not is_newer(found, self.record):
            return False
        self.record = found
        try:
            with atomic_write(self._path, None) as file:
                write_all(file, [memoryview(data)], 0)
        except OSError as error:
            log.warning(f"cannot write {self._path}: {error.strerror or error}")
        return True


class CoordinatorFinder:
    """The way to one run's coordinator."""

    def __init__(self, run: str, pin: Pin, file: Path, store: RecordStore, reach: Reach) -> None:
        self._pin, self._key = pin, record_key(run, pin)
        self._file, self._store, self._reach = RecordFile(file, run, pin), store, reach
        self._looked_at = -FRESH_SECONDS

    @property
    def record(self) -> CoordinatorRecord | None:
        """The newest record that is known."""
        return self._file.record

    async def look(self) -> None:
        """Take a newer record, if there is one. An older or forged one is not taken, whoever gives it."""
        now = time.monotonic()
        if now - self._looked_at < FRESH_SECONDS:
            return
        self._looked_at = now
        if (data := await self._store.find(self._key)) is None:
            return
        before = self.record
        try:
            newer = self._file.take(data)
        except BadRecord as error:
            log.warning(f"a record was refused: {error}")
            return
        if newer and before is not None and _place(before) != _place(self.record):
            log.info(f"the coordinator has moved: {_place(self.record)}")

    async def connect(self) -> Stream:
        """A connection to the coordinator: directly where it can be dialled, else through its gateway. Raises
        `Unreachable`."""
        await self.look()
        record = self.record
        if record is None:
            raise Unreachable("no gateway knows where the run's coordinator is")
        if record.address and await shows_pin(record.address, self._pin):
            try:
                return await dial(record.address)
            except (OSError, TimeoutError):
                pass
        return await self._reach(peer_of_host(record.gateway), Service.COORDINATOR)


class Publisher:
    """Says where the coordinator beside this gateway is."""

    def __init__(
        self, state_dir: Path, certificate: Certificate, gateway: str, file: Path, store: RecordStore
    ) -> None:
        """`state_dir`: the coordinator's; `gateway`: this one's host; `file`: for what was published."""
        self._state_dir, self._certificate, self._gateway = state_dir, certificate, gateway
        self._file, self._store = file, store

    async def run(self, serve: Callable[[GatewayNote], None]) -> None:
        """Publish until cancelled; call `serve` with the coordinator's note at first, and when that changes.
        Raises `ConfigError` where the run's name is too long for a record."""
        served: GatewayNote | None = None
        published, due = ("", "", 0), 0.0  # seconds, when it is due again
        while True:
            note = await asyncio.to_thread(read_note, self._state_dir)
            if note is not None and note != served:
                serve(note)
                served = note
            if note is not None and (_of(note) != published or time.monotonic() >= due):
                taken = await self._publish(note, _of(note) != published)
                published = _of(note)
                due = time.monotonic() + (PUBLISH_SECONDS if taken else PUBLISH_AGAIN_SECONDS)
            await asyncio.sleep(LOOK_SECONDS)

    async def _publish(self, note: GatewayNote, anew: bool) -> bool:
        """Publish, unless another coordinator of the run has come after this one. `anew`: say so."""
        key = record_key(note.run, self._certificate.pin)
        file = RecordFile(self._file, note.run, self._certificate.pin)
        now = int(time.time())
        fresh = CoordinatorRecord(note.run, note.address, self._gateway, note.incarnation, now, now + LIFE_SECONDS)
        if (found := await self._store.find(key)) is not None:
            with suppress(BadRecord):
                file.take(found)
        if (record := next_record(file.record, fresh)) is None:
            if anew:
                log.warning(f"a later coordinator of run {note.run} is known: this one is not published")
            return True
        if anew:
            log.info(f"published: the coordinator of run {note.run} is at {note.address}")
        data = write_record(record, self._certificate.der, self._certificate.signing_key())
        file.take(data)
        return await self._store.publish(key, data, record.expires)


async def shows_pin(address: str, pin: Pin) -> bool:
    """Whether what answers at "host:port" shows the certificate with this pin."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, port = split_host_port(address, "the address")
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=NAME)
    except (OSError, TimeoutError):
        return False
    try:
        return pin_of(writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b"") == pin
    finally:
        writer.transport.abort()


def published_certificate(state_dir: Path) -> Certificate:
    """The certificate of the coordinator in this directory. Raises `ResourceError` if it has none."""
    from atoll.comm.transport.certificates import FILE, load_or_make

    if not (state_dir / FILE).exists():
        raise ResourceError(
            f"the coordinator in {state_dir} shows no certificate, by which its record is known: start it with "
            "security.tls=on"
        )
    return load_or_make(state_dir)


def _of(note: GatewayNote) -> tuple[str, str, int]:
    """What a record says of a note."""
    return note.run, note.address, note.incarnation


def _place(record: CoordinatorRecord | None) -> str:
    return f"{record.address or 'no address'} behind {record.gateway[:16]}" if record is not None else ""
