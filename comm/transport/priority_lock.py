"""A lock for tasks of one event loop that is given to the smallest key first."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush


class PriorityLock:
    """A lock that goes to the smallest key first, of equal ones to who came first. With chunks as keys, a slow
    node's chunks arrive one by one, in the order in which all members send them, not all of them late."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count, self._taken = 0, False

    @asynccontextmanager
    async def one(self, key: int, most: float) -> AsyncIterator[None]:
        """Hold the lock, for `most` seconds: then it is another's turn, whether this one is done or not."""
        if self._taken:
            self._count += 1
            turn = asyncio.get_running_loop().create_future()
            heappush(self._waiting, (key, self._count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()
                raise
        self._taken = True
        turn_over = False

        def pass_on() -> None:
            nonlocal turn_over
            if not turn_over:
                turn_over = True
                self._next()

        late = asyncio.get_running_loop().call_later(most, pass_on)
        try:
            yield
        finally:
            late.cancel()
            pass_on()

    def _next(self) -> None:
        while self._waiting:
            _, _, turn = heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False
