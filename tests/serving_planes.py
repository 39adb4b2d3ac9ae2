"""Two data planes that serve each other from a shelf of round 7."""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from atoll.comm.digest import digest
from atoll.comm.ids import NodeId, Round, RunId
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import FetchItem

DEADLINE = 60.0  # seconds; nothing here takes longer than a moment on an idle machine
RUN, A, B, KEY = RunId("run"), NodeId("a"), NodeId("b"), b"k" * 32
SEALED, NOISE, ZEROS = os.urandom(1000), os.urandom(100_000), bytes(100_000)
NEW, OLD = Round(7), Round(6)


class Books:
    """A shelf that holds round 7 and has moved on from round 6."""

    async def sealed(self, round: Round, chunk: int) -> bytes | None:
        return SEALED if round == NEW else None

    async def state(self, round: Round, chunk: int) -> bytes | None:
        if chunk == 13:
            raise RuntimeError("a bug of the node's")
        return (NOISE, ZEROS)[chunk] if round == NEW else None

    async def digests(self, round: Round) -> Sequence[bytes] | None:
        return [digest(NOISE), digest(ZEROS)] if round == NEW else None


class Nothing:
    """An empty shelf."""

    async def sealed(self, round: Round, chunk: int) -> None:
        return None

    async def state(self, round: Round, chunk: int) -> None:
        return None

    async def digests(self, round: Round) -> None:
        return None


@asynccontextmanager
async def two_planes(
    key_of_b: bytes = KEY, up: float = 0, down: float = 0
) -> AsyncIterator[tuple[DataPlane, DataPlane]]:
    """Bytes a second: `a` sends `up` at most, and `b` takes in `down`."""
    a = await DataPlane.start("127.0.0.1:0", RUN, A, KEY, Books(), (up, 0))
    b = await DataPlane.start("127.0.0.1:0", RUN, B, key_of_b, Books(), (0, down))
    try:
        yield a, b
    finally:
        await a.close()
        await b.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left after close"


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await body

    asyncio.run(bounded())


async def still_serves(a: DataPlane, b: DataPlane) -> bool:
    """`b` can fetch from `a`."""
    return await b.fetch(A, a.address, FetchItem.SEALED, NEW, 0, len(SEALED)) == SEALED
