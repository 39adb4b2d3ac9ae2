"""The places in memory for the chunks that connections are answered with, which all connections of a node share.

A chunk of the state is asked for in parts, and stays in memory until its last part is sent: megabytes for each
connection, of which a node may have a thousand when many join at once. So no more than `MAX_CHUNKS` have one at a
time, and no member more than `MAX_CHUNKS_PER_MEMBER` of these, over however many connections. The others wait,
first come, first served: who asks fetches from other donors meanwhile. A place goes to the next one when the chunk
is sent, when nothing was asked for `IDLE_TIMEOUT` seconds, when the connection ends, and after `MAX_CHUNK_TIME`
seconds, so that nobody who reads slowly keeps others waiting; who had it waits again.
"""

import asyncio
from collections.abc import Hashable
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from atoll.comm.ids import NodeId

MAX_CHUNKS = 32  # chunks in memory
MAX_CHUNKS_PER_MEMBER = 8  # of these
IDLE_TIMEOUT = 5.0  # seconds between two requests
MAX_CHUNK_TIME = 60.0  # seconds for one chunk


class ChunkPlaces:
    """The places of a node, and each member's share of them."""

    def __init__(self) -> None:
        self._common = asyncio.Semaphore(MAX_CHUNKS)
        self._shares = WeakValueDictionary[NodeId, asyncio.Semaphore]()  # of those that have connections

    def slot(self, node: NodeId) -> "ChunkSlot":
        """What a connection of this member is answered with."""
        share = self._shares.get(node)
        if share is None:
            share = self._shares[node] = asyncio.Semaphore(MAX_CHUNKS_PER_MEMBER)
        return ChunkSlot(self._common, share)


class ChunkSlot:
    """The chunk that one connection was last answered with, and its place in memory; use it with `with`."""

    def __init__(self, places: asyncio.Semaphore, share: asyncio.Semaphore) -> None:
        """`places`: that all have; `share`: of them, its member's."""
        self._places, self._share, self._clock = places, share, asyncio.get_running_loop().time
        self._idle: asyncio.TimerHandle | None = None
        self._since: float | None = None  # seconds; None: it has no place
        self.request: Hashable = None  # what was asked for, and is in `data`
        self.data: memoryview | None = None
        self.packing_pays = True  # it takes less time than it saves

    async def begin(self, request: Hashable) -> None:
        """Wait for a place for what is asked for now. `data` is for the caller to fill in."""
        self.drop()
        await self._share.acquire()
        try:
            await self._places.acquire()
        except BaseException:
            self._share.release()
            raise
        self._since, self.request = self._clock(), request

    def asked(self) -> None:
        """Stop the clock that gives the place up: the connection's next request is here."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def answered(self) -> None:
        """Keep the place for the next request for `IDLE_TIMEOUT` seconds: a part was sent. A place that was kept
        for more than `MAX_CHUNK_TIME` seconds is given up."""
        if self._since is not None and self._clock() > self._since + MAX_CHUNK_TIME:
            self.drop()
        elif self._since is not None:
            self._idle = asyncio.get_running_loop().call_later(IDLE_TIMEOUT, self.drop)

    def drop(self) -> None:
        """Give the place to the next one."""
        self.request = self.data = None
        if self._since is not None:
            self._since = None
            self._places.release()
            self._share.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.asked()
        self.drop()
