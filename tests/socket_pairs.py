"""Both ends of a connection in one process, for a test that speaks on them."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from atoll.comm.transport.connection import ByteCounter, Link, RateLimiter

Talk = Callable[[Link, Link], Awaitable[None]]
DEADLINE = 60.0  # seconds; nothing here takes longer than a moment on an idle machine
NOISE = bytes(range(256)) * 8192  # 2 MiB: more than a socket takes at once


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await body
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"

    asyncio.run(bounded())


def unix() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        return dialled, server.accept()[0]


Pair = Callable[[], tuple[socket.socket, socket.socket]]


def between(talk: Talk, pair: Pair = tcp, up: RateLimiter | None = None, down: RateLimiter | None = None) -> None:
    """Run `talk` with both ends of a connection, of which the first one has the caps."""

    async def body() -> None:
        ends = pair()
        for end in ends:
            end.setblocking(False)
        links = Link(ends[0], ByteCounter(), up, down), Link(ends[1], ByteCounter())
        try:
            await talk(*links)
        finally:
            for link in links:
                link.close()

    run(body())
