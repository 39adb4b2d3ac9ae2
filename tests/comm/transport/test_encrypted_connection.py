"""A connection under TLS: the same calls, other bytes on the wire, and the same ends."""

import asyncio
import socket
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from socket_pairs import NOISE, between

from atoll.comm.transport.connection import Link, LinkBroken, LinkClosed, LinkSpoiled

# TLS


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
    """For the server, for the client, and the server's certificate."""
    folder: Path = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=atoll"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return server, client, ssl.PEM_cert_to_DER_cert(certificate.read_text())


def test_under_tls_the_same_calls_carry_the_same_bytes_both_ways(contexts: Any) -> None:
    server, client, certificate = contexts

    async def talk(here: Link, there: Link) -> None:
        shown = await asyncio.gather(here.secure(client, False, 5), there.secure(server, True, 5))
        assert list(shown) == [certificate, b""]
        before = here._meter.up
        async with asyncio.TaskGroup() as group:
            for link in (here, there):
                group.create_task(link.write(b"head", NOISE, b"", memoryview(b"tail")))
            for link in (here, there):
                assert await link.read(8 + len(NOISE)) == b"head" + NOISE + b"tail"
        assert here._meter.up - before > len(NOISE), "records are counted as they are sent"

    between(talk)


def test_what_travels_under_tls_is_not_what_was_written(contexts: Any) -> None:
    server, client, _ = contexts
    sent: list[bytes] = []

    async def talk(here: Link, there: Link) -> None:
        await asyncio.gather(here.secure(client, False, 5), there.secure(server, True, 5))
        push = here.push

        async def recorded(rest: list[memoryview]) -> None:
            sent.extend(bytes(piece) for piece in rest)
            await push(rest)

        here.push = recorded  # type: ignore[method-assign]
        await here.write(b"a secret of this run")
        assert await there.read(20) == b"a secret of this run"
        assert sent and b"secret" not in b"".join(sent)

    between(talk)


def test_ends_are_told_apart_under_tls_too(contexts: Any) -> None:
    server, client, _ = contexts

    async def talk(here: Link, there: Link) -> None:
        await asyncio.gather(here.secure(client, False, 5), there.secure(server, True, 5))
        await there.write(b"abc")
        there.close()
        with pytest.raises(LinkBroken, match="in mid-frame"):
            await here.read(4)
        with pytest.raises(LinkClosed):
            await here.read(1)

    between(talk)


def test_a_session_that_is_ended_in_order_is_closed(contexts: Any) -> None:
    server, client, _ = contexts

    async def talk(here: Link, there: Link) -> None:
        await asyncio.gather(here.secure(client, False, 5), there.secure(server, True, 5))
        await there.write(b"abc")
        assert there._tls is not None
        with suppress(ssl.SSLWantReadError):
            there._tls._session.unwrap()  # says that nothing follows; the connection stays
        await there._tls._flush()
        with pytest.raises(LinkBroken, match="in mid-frame"):
            await here.read(4)
        with pytest.raises(LinkClosed):
            await here.read(1)

    between(talk)


def test_bytes_that_change_on_their_way_are_said_to_be_spoiled_and_only_where_they_came(contexts: Any) -> None:
    server, client, _ = contexts

    async def talk(here: Link, there: Link) -> None:
        await asyncio.gather(here.secure(client, False, 5), there.secure(server, True, 5))
        push = there.push

        async def changed(rest: list[memoryview]) -> None:
            whole = bytearray(b"".join(rest))
            whole[-100] ^= 1
            await push([memoryview(whole)])

        there.push = changed  # type: ignore[method-assign]
        await there.write(NOISE[:1000])
        with pytest.raises(LinkSpoiled, match="the TLS session broke"):
            await here.read(1000)
        there.push = push  # type: ignore[method-assign]
        with suppress(LinkBroken):
            await here.write(b"what follows is the alert that says so")
        here.close()
        with pytest.raises(LinkBroken) as other:
            await there.read(1)
        assert not isinstance(other.value, LinkSpoiled)

    between(talk)


def test_a_reader_that_has_a_part_of_a_record_waits_for_no_more_than_its_rest(contexts: Any) -> None:
    server, client, _ = contexts

    async def talk(here: Link, there: Link) -> None:
        await asyncio.gather(here.secure(client, False, 5), there.secure(server, True, 5))
        push, held = there.push, list[memoryview]()

        async def all_but_the_end(rest: list[memoryview]) -> None:
            whole = b"".join(rest)
            held.append(memoryview(whole)[-600:])
            await push([memoryview(whole)[:-600]])

        there.push = all_but_the_end  # type: ignore[method-assign]
        await there.write(NOISE[:20_000])  # two records; most of the second one is here at first
        reading = asyncio.create_task(here.read(20_000))
        while not here._waiting:
            await asyncio.sleep(0)
        await push(held)
        assert await reading == NOISE[:20_000]

    between(talk)


@pytest.mark.parametrize("tls_is_server", [True, False])
def test_a_peer_without_tls_is_refused_with_a_sentence(contexts: Any, tls_is_server: bool) -> None:
    server, client, _ = contexts

    async def talk(here: Link, there: Link) -> None:
        await there.write(b"ATOL\2\0\0\0" + bytes(16))
        with pytest.raises(LinkBroken, match="no TLS session: "):
            await here.secure(server if tls_is_server else client, tls_is_server, 5)

    between(talk)


def test_a_peer_that_says_nothing_ends_the_tls_handshake_at_its_deadline(contexts: Any) -> None:
    async def talk(here: Link, there: Link) -> None:
        with pytest.raises(LinkBroken, match="no TLS session within 0.02 s"):
            await here.secure(contexts[1], False, 0.02)
        there._sock.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkClosed, match="closed in the TLS handshake"):
            await here.secure(contexts[1], False, 5)

    between(talk)
