"""Each node's stream of views, fed by one dispatcher.

After a change of the state the common parts are encoded once, and only the streams whose view
changed are woken. A stream holds nothing but its latest view: a slow reader skips the ones in between.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

from atoll.comm.ids import NodeId
from atoll.coordinator.service import view
from atoll.coordinator.service.event_loop import EventLoop
from atoll.coordinator.service.metrics import Metrics
from atoll.coordinator.service.view import CommonView, NodeView
from atoll.coordinator.state_machine.state import State

MAX_DISPATCH_PAUSE = 0.01  # seconds between two dispatches at most, if the last took as long
PAUSE_PER_VIEW = 0.0001  # seconds more for each view that the last one sent: the views of many joins become one
VIEWS_PER_SLICE = 20  # views that are sent before calls that came in meanwhile are served
REASON_INTERVAL = 2.0  # seconds after which a view is sent for nothing but its phase's reason


class ViewStream:
    """One node's open stream."""

    def __init__(self, node: NodeId, life: int) -> None:
        self.node, self.life = node, life
        self.view: tuple[CommonView, NodeView, int] | None = None  # the latest, with its version
        self._last = False
        self._wake = asyncio.Event()

    def set_view(self, common: CommonView, mine: NodeView, version: int) -> None:
        """Make this the stream's latest view."""
        self.view = (common, mine, version)
        self._wake.set()

    def end(self) -> None:
        """End the stream after its latest view."""
        self._last = True
        self._wake.set()

    @property
    def idle(self) -> bool:
        """Whether the latest view was handed over."""
        return not self._wake.is_set()

    async def views(self) -> AsyncIterator[bytes]:
        """The node's views as they come, encoded, until `end`."""
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


class ViewStreams:
    """The open streams of all nodes. Versions count the dispatches of this incarnation."""

    def __init__(self, kernel: EventLoop, metrics: Metrics) -> None:
        self._kernel, self._metrics = kernel, metrics
        self._streams: dict[NodeId, ViewStream] = {}
        self._fresh: set[NodeId] = set()  # streams without a view
        self._seen = kernel.state
        self._common = view.common_view(self._seen)
        self._version = 0
        self._headed_at = 0.0  # seconds; when the head was last sent to all
        self._later: asyncio.TimerHandle | None = None  # will send it for its reason
        self._due = asyncio.Event()

    def open(self, node: NodeId, life: int) -> ViewStream:
        """Open the node's stream; an earlier one of the node ends."""
        if (before := self._streams.get(node)) is not None:
            before.end()
        stream = self._streams[node] = ViewStream(node, life)
        self._metrics.streams.set(len(self._streams))
        self._fresh.add(node)
        self.notify()
        return stream

    def close(self, stream: ViewStream) -> bool:
        """Forget a stream that broke. Returns False where the node has another by now, or is to have none."""
        if self._streams.get(stream.node) is not stream:
            return False
        del self._streams[stream.node]
        self._metrics.streams.set(len(self._streams))
        return True

    def version(self, node: NodeId) -> int:
        """The version of the node's latest view; where it has no stream, one that is newer than any it has."""
        stream = self._streams.get(node)
        if stream is None:
            return self._version + 1
        return stream.view[2] if stream.view is not None else 0

    def notify(self) -> None:
        """Have the views looked at again: the state changed, or a stream is new."""
        self._due.set()

    async def wait_sent(self, within: float) -> None:
        """Wait until every node was sent its latest view, at most `within` seconds."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            await asyncio.sleep(MAX_DISPATCH_PAUSE)
            if not self._due.is_set() and all(stream.idle for stream in self._streams.values()):
                return

    def end(self) -> None:
        """End every stream; that they break is nobody's fault."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end()

    async def run(self) -> None:
        """Dispatch until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            began = time.monotonic()
            with self._metrics.dispatches.time():
                sent = await self._dispatch()
            await asyncio.sleep(min(time.monotonic() - began, MAX_DISPATCH_PAUSE) + PAUSE_PER_VIEW * sent)

    async def _dispatch(self) -> int:
        """Show every stream its view if that changed; how many did."""
        state, sent = self._kernel.state, 0
        common, nodes = self._prepare(state)
        self._version += 1
        for node in nodes:
            if (stream := self._streams.get(node)) is not None and self._show(stream, state, common):
                sent += 1
                if sent % VIEWS_PER_SLICE == 0:
                    await asyncio.sleep(0)
        self._metrics.views.inc(sent)
        return sent

    def _prepare(self, state: State) -> tuple[CommonView, Iterable[NodeId]]:
        """What all share, and the nodes that may have a new view."""
        old, seen, fresh = self._common, self._seen, self._fresh
        new = view.common_view(state, old, self._kernel.draining)
        if new.head is not old.head:
            now = asyncio.get_running_loop().time()
            if new.facts is old.facts and now < self._headed_at + REASON_INTERVAL:
                new = replace(new, head=old.head)
                if not self._later:
                    self._later = asyncio.get_running_loop().call_at(
                        self._headed_at + REASON_INTERVAL, self.notify
                    )
            else:
                self._headed_at, self._later = now, None
        self._common, self._seen, self._fresh = new, state, set()
        nodes = view.affected_nodes(seen, state)
        same = view.common_parts(new) == view.common_parts(old)
        return new, nodes | fresh if nodes is not None and same else list(self._streams)

    def _show(self, stream: ViewStream, state: State, common: CommonView) -> bool:
        """Give the stream its view, if there is anything new in it."""
        member = state.members.here.get(stream.node)
        if member is not None and member.life != stream.life:
            stream.end()  # another process speaks for the node
            return False
        mine = view.node_view(state, common, stream.node)
        new = stream.view is None or _differ(common, mine, *stream.view)
        if new:
            stream.set_view(common, mine, self._version)
        if member is None:
            stream.end()
        return new


def _differ(common: CommonView, mine: NodeView, old: CommonView, was: NodeView, _: int) -> bool:
    train = bool(mine.lease) and common.train is not old.train
    plan = mine.planned and common.plan is not old.plan
    return common.head is not old.head or train or plan or view.has_news(mine, was)
