"""Each node's stream of views, fed by one dispatcher.

After a change of the state the parts that all nodes share are encoded once, and only the streams whose view
changed are woken. A stream holds nothing but its latest view: a slow reader skips the ones in between.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from atoll.comm.ids import NodeId
from atoll.coordinator import view
from atoll.coordinator.metrics import Metrics
from atoll.coordinator.state import State
from atoll.coordinator.view import Own, Shared

PAUSE = 0.02  # seconds between two dispatches: about 50 a second, however many events there are
SLICE = 20  # views that are sent before calls that came in meanwhile are taken
EASE = 0.0003  # seconds more for every view that a dispatch sent: the views of many joins are sent as one


class Stream:
    """One node's open stream."""

    def __init__(self, node: NodeId, life: int) -> None:
        self.node, self.life = node, life
        self.view: tuple[Shared, Own, int] | None = None  # the latest, with its version
        self._last = False
        self._wake = asyncio.Event()

    def show(self, common: Shared, mine: Own, version: int) -> None:
        """Make this the stream's latest view."""
        self.view = (common, mine, version)
        self._wake.set()

    def end(self) -> None:
        """Nothing comes after the latest view."""
        self._last = True
        self._wake.set()

    @property
    def idle(self) -> bool:
        """The latest view was handed over."""
        return not self._wake.is_set()

    async def views(self) -> AsyncIterator[bytes]:
        """The views as they come, encoded."""
        sent = None
        while True:
            if self.view is not sent and self.view is not None:
                sent = self.view
                yield view.encode(*sent)
            elif self._last:
                return
            else:
                self._wake.clear()
                await self._wake.wait()


class Views:
    """Every node's stream. Versions count the dispatches of this incarnation."""

    def __init__(self, state: Callable[[], State], metrics: Metrics) -> None:
        self._state, self._metrics = state, metrics
        self._streams: dict[NodeId, Stream] = {}
        self._common: Shared | None = None
        self._version = 0
        self._due = asyncio.Event()
        self._draining = False

    def open(self, node: NodeId, life: int) -> Stream:
        """The node's stream from now on; an earlier one ends."""
        if (before := self._streams.get(node)) is not None:
            before.end()
        stream = self._streams[node] = Stream(node, life)
        self._metrics.streams.set(len(self._streams))
        self.changed()
        return stream

    def close(self, stream: Stream) -> bool:
        """The stream broke; False: it was not the node's any more."""
        if self._streams.get(stream.node) is not stream:
            return False
        del self._streams[stream.node]
        self._metrics.streams.set(len(self._streams))
        return True

    def version(self, node: NodeId) -> int:
        """Of the node's latest view; of one that has no stream: newer than any it has."""
        stream = self._streams.get(node)
        if stream is None:
            return self._version + 1
        return stream.view[2] if stream.view is not None else 0

    def changed(self) -> None:
        """The state changed, or a stream is new."""
        self._due.set()

    async def drain(self, within: float) -> None:
        """Tell every node that the coordinator will be away; returns when they were told, or `within` seconds."""
        self._draining = True
        self.changed()
        deadline = asyncio.get_running_loop().time() + within
        await asyncio.sleep(PAUSE)
        while not self._told() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(PAUSE)

    def _told(self) -> bool:
        return not self._due.is_set() and all(stream.idle for stream in self._streams.values())

    def end(self) -> None:
        """End every stream; whose broke is nobody's fault."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end()

    async def run(self) -> None:
        """Dispatch until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            with self._metrics.dispatches.time():
                sent = await self._dispatch()
            await asyncio.sleep(PAUSE + EASE * sent)

    async def _dispatch(self) -> int:
        """Show every stream its view if that changed; how many did."""
        state = self._state()
        common = self._common = view.shared(state, self._common, self._draining)
        self._version += 1
        sent = 0
        for stream in list(self._streams.values()):
            member = state.members.here.get(stream.node)
            if member is not None and member.life != stream.life:
                stream.end()
                continue
            mine = view.own(state, common, stream.node)
            if stream.view is None or _differ(common, mine, *stream.view):
                stream.show(common, mine, self._version)
                sent += 1
                if sent % SLICE == 0:
                    await asyncio.sleep(0)
            if member is None:
                stream.end()
        self._metrics.views.inc(sent)
        return sent


def _differ(common: Shared, mine: Own, old: Shared, was: Own, _: int) -> bool:
    train = bool(mine.lease) and common.train is not old.train
    plan = mine.planned and common.plan is not old.plan
    return mine != was or common.head is not old.head or train or plan
