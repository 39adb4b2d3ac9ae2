"""The streams of views as asyncio runs them: one task dispatches, each stream's call waits for what it is shown.

What is shown to whom is `view_dispatch`'s; here are the waiting, the real clock and the metrics.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress

from atoll.comm.ids import NodeId
from atoll.coordinator.service.event_loop import EventLoop
from atoll.coordinator.service.metrics import Metrics
from atoll.coordinator.service.view_dispatch import MAX_DISPATCH_PAUSE, ViewDispatch, pause

VIEWS_PER_SLICE = 20  # views that are sent before calls that came in meanwhile are served


class StreamReader:
    """The reading side of one node's stream, which its call waits at."""

    def __init__(self, dispatch: ViewDispatch, node: NodeId, life: int, roster: bytes) -> None:
        self._wake = asyncio.Event()
        self.stream = dispatch.open(node, life, self._wake.set, roster)

    async def views(self) -> AsyncIterator[bytes]:
        """The node's views as they come, encoded, until the stream ends."""
        while True:
            if (latest := self.stream.next()) is not None:
                yield latest.encode()
            elif self.stream.ended:
                return
            else:
                self._wake.clear()
                await self._wake.wait()


class ViewStreams:
    """The open streams of all nodes, and the task that feeds them."""

    def __init__(self, loop: EventLoop, metrics: Metrics, data_key: Callable[[int], bytes]) -> None:
        """`data_key`: the run's key by how many were expelled."""
        self._loop, self._metrics = loop, metrics
        self._dispatch = ViewDispatch(loop.state, data_key)
        self._update_later: asyncio.TimerHandle | None = None  # for a reason or a roster that is held back
        self._due, self._noticed = asyncio.Event(), asyncio.Event()  # an update is due; the state changed

    def open(self, node: NodeId, life: int, roster: bytes) -> StreamReader:
        """Open the node's stream; an earlier one of the node ends. `roster`: digest of the one that it has."""
        reader = StreamReader(self._dispatch, node, life, roster)
        self._metrics.streams.set(len(self._dispatch.streams))
        self.notify()
        return reader

    def close(self, reader: StreamReader) -> bool:
        """Forget a stream that broke. Returns False where the node has another by now, or is to have none."""
        forgotten = self._dispatch.close(reader.stream)
        self._metrics.streams.set(len(self._dispatch.streams))
        return forgotten

    def version(self, node: NodeId) -> int:
        """The version of the node's latest view; where it has no stream, one that is newer than any it has."""
        return self._dispatch.version(node)

    def notify(self) -> None:
        """Have the views looked at again: the state changed, or a stream is new."""
        self._due.set()
        self._noticed.set()

    async def wait_sent(self, within: float) -> None:
        """Wait until every node was sent its latest view, at most `within` seconds."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            await asyncio.sleep(MAX_DISPATCH_PAUSE)
            if not self._due.is_set() and all(stream.idle for stream in self._dispatch.streams.values()):
                return

    def end(self) -> None:
        """End every stream; that they break is nobody's fault."""
        self._dispatch.end()

    async def run(self) -> None:
        """Dispatch until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            began = time.monotonic()
            with self._metrics.dispatches.time():
                sent = await self.update()
            await self._pause(time.monotonic() + pause(time.monotonic() - began, sent))

    async def _pause(self, until: float) -> None:
        """Wait until then, or until there is something urgent to show."""
        while (left := until - time.monotonic()) > 0 and not self._dispatch.is_urgent(self._loop.state):
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._noticed.wait()
            self._noticed.clear()

    @property
    def update_due(self) -> float | None:
        """The time of the loop, in seconds, at which what is held back is shown; None: nothing is."""
        return self._update_later.when() if self._update_later is not None else None

    async def update(self) -> int:
        """Show every stream its view if that changed; how many did. What becomes urgent meanwhile cuts it
        short."""
        loop, sent = asyncio.get_running_loop(), 0
        with closing(self._dispatch.update(self._loop.state, loop.time(), self._loop.draining)) as shown:
            for _ in shown:
                sent += 1
                if sent % VIEWS_PER_SLICE == 0:
                    self._loop.crowd()
                    await asyncio.sleep(0)
                    if self._dispatch.is_urgent(self._loop.state):
                        self.notify()
                        break
        at, due = self._dispatch.update_at, self.update_due
        if at is not None and (due is None or at < due):
            if self._update_later is not None:
                self._update_later.cancel()
            self._update_later = loop.call_at(at, self._update_now)
        self._metrics.views.inc(sent)
        return sent

    def _update_now(self) -> None:
        self._update_later = None
        self.notify()
