"""Two streams joined: the bytes of each go to the other as they are, at the pace of the slower."""

import asyncio
from contextlib import suppress
from typing import NamedTuple

from atoll.comm.invite import split_host_port
from atoll.comm.transport.connection import RateLimiter

READ_BYTES = 1 << 16  # at a time
CONNECT_SECONDS = 10.0


class Stream(NamedTuple):
    """Both directions of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def abort(self) -> None:
        """End it at once."""
        self.writer.transport.abort()


async def dial(address: str) -> Stream:
    """A TCP connection to "host:port". Raises `OSError`, `TimeoutError` after CONNECT_SECONDS."""
    host, port = split_host_port(address, "the address")
    async with asyncio.timeout(CONNECT_SECONDS):
        return Stream(*await asyncio.open_connection(host, port, limit=READ_BYTES))


async def splice(one: Stream, other: Stream, limiter: RateLimiter | None = None) -> None:
    """Pass bytes both ways until both sides have ended or one broke; then both are closed."""
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_pump(one.reader, other.writer, limiter))
            both.create_task(_pump(other.reader, one.writer, limiter))
    except* OSError:
        one.abort()
        other.abort()
    finally:
        for writer in (one.writer, other.writer):
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limiter: RateLimiter | None) -> None:
    while data := await reader.read(READ_BYTES):
        if limiter is not None:
            await limiter.take(len(data))
        writer.write(data)
        await writer.drain()
    with suppress(OSError):  # the other side has ended as well
        writer.write_eof()
