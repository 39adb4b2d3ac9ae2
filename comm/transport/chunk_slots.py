"""What a connection was last answered with, and its place in the memory that all of them share.

A chunk of the state is asked for in parts, and stays in memory until its last part is sent: megabytes for each
connection, of which a node may have a thousand when many join at once. So no more than `PLACES` have one at a
time. The others wait, first come, first served: who asks fetches from other donors meanwhile. A
place goes to the next one when the chunk is sent, when nothing was asked for `HOLD` seconds, when the connection
ends, and after `TURN` seconds, so that nobody who reads slowly keeps others waiting; who had it waits again.
"""

import asyncio
from collections.abc import Hashable
from types import TracebackType
from typing import Self

PLACES = 32  # chunks in memory
HOLD = 5.0  # seconds between two requests
TURN = 60.0  # seconds for one chunk


class ChunkSlot:
    """Of one connection; use it with `with`."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places, self._clock = places, asyncio.get_running_loop().time
        self._idle: asyncio.TimerHandle | None = None
        self._since: float | None = None  # seconds; None: it has no place
        self.what: Hashable = None  # was asked for
        self.data: memoryview | None = None
        self.slow = True  # to pack takes less time than it saves

    async def begin(self, what: Hashable) -> None:
        """Something else was asked for: wait for a place for it. `data` is for the caller to fill in."""
        self.drop()
        await self._places.acquire()
        self._since, self.what = self._clock(), what

    def asked(self) -> None:
        """The next request is here."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def answered(self) -> None:
        """So the place is kept for the next one, but not for long."""
        if self._since is not None and self._clock() > self._since + TURN:
            self.drop()
        elif self._since is not None:
            self._idle = asyncio.get_running_loop().call_later(HOLD, self.drop)

    def drop(self) -> None:
        """Give the place to the next one."""
        self.what = self.data = None
        if self._since is not None:
            self._since = None
            self._places.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.asked()
        self.drop()
