"""Two streams joined: the bytes of each go to the other as they are, at the pace of the slower."""

import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from atoll.comm.invite import split_host_port
from atoll.comm.transport.connection import RateLimiter

READ_BYTES = 1 << 16  # at a time
CONNECT_SECONDS = 10.0
_numbers = itertools.count(1)


def _nobody(_: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Stream:
    """Both directions of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    over: Callable[[int], None] = _nobody  # told how many bytes came from it, when it is spliced no more

    def abort(self) -> None:
        """End it at once."""
        self.writer.transport.abort()


async def dial(address: str) -> Stream:
    """A TCP connection to "host:port". Raises `OSError`, `TimeoutError` after CONNECT_SECONDS."""
    host, port = split_host_port(address, "the address")
    async with asyncio.timeout(CONNECT_SECONDS):
        return Stream(*await asyncio.open_connection(host, port, limit=READ_BYTES))


async def come_in(entrance: str, host: str, port: int) -> Stream:
    """A connection to the coordinator whose entrance for gateways is at this path, named for where it comes from
    (`gateway_note`). Raises `OSError`, `TimeoutError`."""
    name = f"{os.path.dirname(entrance)}/g{os.getpid()}-{next(_numbers)},{host},{port}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.bind(name)
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.get_running_loop().sock_connect(sock, entrance)
            return Stream(*await asyncio.open_connection(sock=sock, limit=READ_BYTES))
    except BaseException:
        sock.close()
        raise
    finally:
        with suppress(OSError):
            os.unlink(name)


async def splice(one: Stream, other: Stream, limiter: RateLimiter | None = None) -> None:
    """Pass bytes both ways until both sides have ended or one broke; then both are closed."""
    pumps = _Pump(one, other, limiter), _Pump(other, one, limiter)
    try:
        async with asyncio.TaskGroup() as both:
            for pump in pumps:
                both.create_task(pump.run())
    except* OSError:
        one.abort()
        other.abort()
    finally:
        for pump in pumps:
            pump.source.writer.close()
            pump.source.over(pump.passed)


class _Pump:
    """One direction."""

    def __init__(self, source: Stream, sink: Stream, limiter: RateLimiter | None) -> None:
        self.source, self._sink, self._limiter = source, sink, limiter
        self.passed = 0  # bytes

    async def run(self) -> None:
        """Pass on until the source ends, and then its end."""
        reader, writer = self.source.reader, self._sink.writer
        while data := await reader.read(READ_BYTES):
            self.passed += len(data)
            if self._limiter is not None:
                await self._limiter.take(len(data))
            writer.write(data)
            await writer.drain()
        with suppress(OSError):  # the other side has ended as well
            writer.write_eof()
