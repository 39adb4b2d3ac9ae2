"""The way to the coordinator: what cannot be reached is tried again, what is another's is refused."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.comm.errors import Refused, Unreachable
from atoll.comm.ids import NO_PIN, Pin
from atoll.comm.invite import Invite
from atoll.comm.transport.certificates import load_or_make, pin_of
from atoll.node.control import tls_channel


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body

    asyncio.run(bounded())


@asynccontextmanager
async def listening(answer: bytes | None, folder: Path | None = None) -> AsyncIterator[str]:
    """An address that answers every connection with these bytes, over TLS where there is a folder with a
    certificate; None: with silence."""
    context = None
    if folder is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(load_or_make(folder).path)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def to(address: str, pin: Pin = NO_PIN) -> Invite:
    return Invite(address, "reef", "token", pin)


def test_the_certificate_of_the_url_is_trusted_and_another_is_not(tmp_path: Path) -> None:
    async def body() -> None:
        async with listening(b"", tmp_path) as address:
            channel = await tls_channel.channel(to(address, load_or_make(tmp_path).pin), [])
            await channel.close()
            with pytest.raises(Refused, match="another certificate than the join URL's.*new join URL"):
                await tls_channel.channel(to(address, pin_of(b"another")), [])

    run(body())


@pytest.mark.parametrize("answer", [b"\0\0\x12\x04\0\0\0\0\0" + bytes(18), b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_does_not_speak_tls_is_refused_where_the_url_has_a_pin(answer: bytes) -> None:
    async def body() -> None:
        async with listening(answer) as address:
            with pytest.raises(Refused, match="does not speak TLS and the join URL has a pin"):
                await tls_channel.channel(to(address, pin_of(b"")), [])
            await tls_channel.check_plain(to(address))

    run(body())


def test_what_speaks_tls_is_refused_where_the_url_has_no_pin(tmp_path: Path) -> None:
    async def body() -> None:
        async with listening(b"", tmp_path) as address:
            with pytest.raises(Refused, match="speaks TLS and the join URL has no pin"):
                await tls_channel.check_plain(to(address))

    run(body())


def test_what_hangs_up_is_silent_or_gone_may_be_there_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_channel, "DEADLINE", 0.2)

    async def body() -> None:
        async with listening(None) as silent, listening(b"") as gone:
            for address, why in ((silent, "nothing came from .* for 0.2 s"), (gone, ".")):
                with pytest.raises(Unreachable, match=why):
                    await tls_channel.channel(to(address, pin_of(b"")), [])
                await tls_channel.check_plain(to(address))
        with pytest.raises(Unreachable, match="connection refused"):
            await tls_channel.channel(to(gone, pin_of(b"")), [])

    run(body())
