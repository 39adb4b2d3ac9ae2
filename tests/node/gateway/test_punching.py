"""Two machines meet in a TCP connection that both began; whoever else answers is none of them."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from atoll.comm.errors import Unreachable
from atoll.node.gateway import punching
from atoll.node.gateway.punching import NONCE_BYTES, Address, allowed, observe, punch
from atoll.node.gateway.splice import Stream

NOISE = bytes(range(256)) * 1024
HERE = allowed(private=True)


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body

    asyncio.run(bounded())


async def observer() -> tuple[asyncio.Server, Address]:
    server = await observe(("127.0.0.1", 0))
    return server, server.sockets[0].getsockname()[:2]


async def relayed() -> tuple[Stream, Stream]:
    """Both ends of a stream."""
    one, other = [Stream(*await asyncio.open_connection(sock=sock)) for sock in socket.socketpair()]
    return one, other


def test_two_that_connect_to_each_other_at_once_have_a_connection_and_nobody_listened() -> None:
    async def body() -> None:
        server, place = await observer()
        one, other = await relayed()
        near, far = await asyncio.gather(punch(one, place, HERE), punch(other, place, HERE))
        near.writer.write(NOISE)
        far.writer.write(NOISE[::-1])
        assert await far.reader.readexactly(len(NOISE)) == NOISE
        assert await near.reader.readexactly(len(NOISE)) == NOISE[::-1]
        for stream in (near, far, one, other):
            stream.abort()
        server.close()

    run(body())


def test_an_observer_tells_who_connects_as_what_it_sees_it_and_ends() -> None:
    async def body() -> None:
        server, place = await observer()
        reader, writer = await asyncio.open_connection(*place)
        host, port = writer.get_extra_info("sockname")
        assert await reader.read() == f"{host}:{port}\n".encode()
        writer.close()
        server.close()

    run(body())


def test_another_machine_that_answers_at_the_address_is_not_taken_for_the_right_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(punching, "PUNCH_SECONDS", 0.5)

    async def body() -> None:
        server, place = await observer()
        (one, other), came = await relayed(), list[bytes]()

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.append(await reader.readexactly(NONCE_BYTES))
            writer.write(bytes(NONCE_BYTES))
            writer.close()

        stranger = await asyncio.start_server(meet, "127.0.0.1", 0)
        port = stranger.sockets[0].getsockname()[1]
        other.writer.write(f"127.0.0.1:{port}\n".encode() + b"n" * NONCE_BYTES)
        with pytest.raises(Unreachable, match="no hole was punched"):
            await punch(one, place, HERE)
        assert came
        for closing in (server, stranger):
            closing.close()

    run(body())


@pytest.mark.parametrize(
    "said",
    [b"10.0.0.1:22\n", b"127.0.0.1:22\n", b"router.lan:80\n", b"8.8.8.8\n", b"\xff:1\n", b"x" * 200 + b"\n"],
)
def test_nobody_is_made_to_dial_what_is_no_public_address(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> Stream:
        raise AssertionError("something was dialled")

    monkeypatch.setattr(punching, "_met", never)

    async def body() -> None:
        server, place = await observer()
        one, other = await relayed()
        other.writer.write(said + b"n" * NONCE_BYTES)
        with pytest.raises(Unreachable):
            await punch(one, place, allowed(private=False))
        server.close()

    run(body())


def test_without_an_answer_there_is_no_hole_and_it_is_said_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punching, "AGREE_SECONDS", 0.2)
    monkeypatch.setattr(punching, "PUNCH_SECONDS", 0.2)

    async def body() -> None:
        server, place = await observer()
        one, other = await relayed()
        with pytest.raises(Unreachable, match="no hole was punched"):
            await punch(one, place, HERE)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        other.writer.write(f"127.0.0.1:{port}\n".encode() + b"n" * NONCE_BYTES)
        with pytest.raises(Unreachable, match="no hole was punched"):
            await punch(one, place, HERE)
        server.close()
        await server.wait_closed()
        with pytest.raises(Unreachable, match="no observer answers"):
            await punch(one, place, HERE)

    run(body())
