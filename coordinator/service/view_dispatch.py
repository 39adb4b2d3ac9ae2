"""The dispatch of views: which stream is shown which one, and when it ends. Pure.

    the state changed, or a stream is new --> update --> the streams whose view changed: set_view --> next
                                                `------> those whose node is gone or lives anew: end

After a change of the state the common parts are encoded once, and only the streams whose view changed are woken. A
stream holds nothing but its latest view: a slow reader skips the ones in between. A phase's reason, which changes
with every report, is shown by itself every REASON_INTERVAL at most, of many streams more seldom. What members wait
for is urgent: an update of anything else may be cut short for it. `view_streams` and the simulation feed it.
"""

from collections.abc import Callable, Generator, Iterable
from math import inf
from typing import NamedTuple

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.service import view
from atoll.coordinator.service.roster import Roster, no_key
from atoll.coordinator.service.view import CommonView, NodeView
from atoll.coordinator.state_machine.state import State, order

MAX_DISPATCH_PAUSE = 0.05  # seconds between two dispatches, if the last took half as long
PAUSE_PER_VIEW = 0.0001  # seconds more for each view that the last one sent: the views of many joins become one
REASON_INTERVAL = 2.0  # seconds after which a view is sent for nothing but its phase's reason, at least
REASON_INTERVAL_PER_VIEW = 0.01  # seconds, times the streams: what a reason costs is a small part of the time
MANY_STREAMS = 100  # streams beyond which the roster is not shown at each change of it,
LIST_INTERVAL_PER_VIEW, MAX_LIST_INTERVAL = 0.001, 2.0  # seconds, times the streams; at most


class VersionedView(NamedTuple):
    """One node's view, as it was dispatched."""

    common: CommonView
    mine: NodeView
    version: int
    known: Roster | None = None  # the roster that its node has by then

    def encode(self) -> bytes:
        """The view as a message (`pb.View`)."""
        return view.encode(self.common, self.mine, self.version, self.known)


class ViewStream:
    """One node's open stream: its latest view, and whether it ends after that."""

    def __init__(self, node: NodeId, life: int, wake: Callable[[], None], known: Roster | None = None) -> None:
        """`wake` is called when there is something for `next`, or the stream has ended. `known`: the roster that
        the node has."""
        self.node, self.life, self._wake = node, life, wake
        self.latest: VersionedView | None = None
        self.ended = False  # after the latest view
        self.idle = False  # whether the reader has the latest view, and waits
        self._read: VersionedView | None = None
        self._known = known  # or which the views that were read have brought

    def set_view(self, latest: VersionedView) -> None:
        """Make this the stream's latest view."""
        self.latest, self.idle = latest, False
        self._wake()

    def end(self) -> None:
        """End the stream after its latest view."""
        self.ended, self.idle = True, False
        self._wake()

    def next(self) -> VersionedView | None:
        """The latest view, once; None where the reader has it: it then waits to be woken, or goes if this
        ended."""
        if (latest := self.latest) is not self._read:
            self._read = latest
            if latest is not None and latest.mine.member:
                known, self._known = self._known, latest.common.roster
                return latest._replace(known=known)
            return latest
        self.idle = not self.ended
        return None


class ViewDispatch:
    """The open streams of all nodes. Versions count the updates of this incarnation."""

    def __init__(self, state: State, data_key: Callable[[int], bytes] = no_key) -> None:
        """`data_key`: the run's key by how many were expelled."""
        self._data_key = data_key
        self.streams: dict[NodeId, ViewStream] = {}
        self.update_at: float | None = None  # seconds; when a reason that was held back is due
        # Streams to look at in any case: they have no view yet, or the last update was cut short
        self._fresh: set[NodeId] = set()
        self._seen = state
        self._common = view.common_view(state, data_key=data_key)
        self._version = 0
        self._headed_at = -inf  # seconds; when the head was last sent to all
        self._listed_at = -inf  # seconds; when the roster was

    def open(self, node: NodeId, life: int, wake: Callable[[], None], roster: bytes = b"") -> ViewStream:
        """Open the node's stream, which the next update gives a view; an earlier one of the node ends. `roster`:
        digest of the one that the node has."""
        if (before := self.streams.get(node)) is not None:
            before.end()
        known = self._common.roster if roster and roster == self._common.roster.digest else None
        stream = self.streams[node] = ViewStream(node, life, wake, known)
        self._fresh.add(node)
        return stream

    def close(self, stream: ViewStream) -> bool:
        """Forget a stream that broke. Returns False where the node has another by now, or is to have none."""
        if self.streams.get(stream.node) is not stream:
            return False
        del self.streams[stream.node]
        return True

    def end(self) -> None:
        """End every stream; that they break is nobody's fault."""
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.end()

    def version(self, node: NodeId) -> int:
        """The version of the node's latest view; where it has no stream, one that is newer than any it has."""
        stream = self.streams.get(node)
        if stream is None:
            return self._version + 1
        return stream.latest.version if stream.latest is not None else 0

    def is_urgent(self, state: State) -> bool:
        """Whether what members wait for is another than the latest update showed: the round, its phase, its
        plan."""
        return _awaited(state) != _awaited(self._seen)

    def update(self, state: State, now: float, draining: bool = False) -> Generator[ViewStream, None, None]:
        """Show every stream its view of `state`, if that changed, and yield each that got one. `now`: seconds, on
        a clock that never goes back. Streams may be opened and closed meanwhile. Who is not reached, since the
        iterator is closed, is looked at by the next update."""
        common, nodes = self._share(state, now, draining)
        self._version += 1
        try:
            for node in nodes:
                if (stream := self.streams.get(node)) is not None and self._show(stream, state, common):
                    yield stream
        except GeneratorExit:
            self._fresh.update(self.streams)
            raise

    def _share(self, state: State, now: float, draining: bool) -> tuple[CommonView, Iterable[NodeId]]:
        """What all share, and the nodes that may have a new view."""
        old, seen, fresh = self._common, self._seen, self._fresh
        new = view.common_view(state, old, draining, self._data_key)
        list_at = self._list_due(new, old, now)
        if list_at is not None:
            new = replace(new, roster=old.roster, roster_key=old.roster_key)
        if new.head is old.head:
            self.update_at = list_at  # a reason that was held back is what is shown again
        else:
            reason_at = self._headed_at + max(REASON_INTERVAL, REASON_INTERVAL_PER_VIEW * len(self.streams))
            if new.facts is old.facts and now < reason_at:
                new = replace(new, head=old.head)
                self.update_at = min(reason_at, list_at or reason_at)
            else:
                self._headed_at, self.update_at = now, list_at
        self._common, self._seen, self._fresh = new, state, set()
        nodes = view.affected_nodes(seen, state)
        same = view.common_parts(new) == view.common_parts(old)
        if nodes is not None and same:
            # In an order that does not hang on how sets hash: the simulation's seeds are to be repeatable.
            return new, sorted(nodes | fresh, key=order)
        # Of many, who is among the last to have the plan is among the first to have the next round's order.
        return new, list(self.streams if new.fence is None else reversed(self.streams))

    def _list_due(self, new: CommonView, old: CommonView, now: float) -> float | None:
        """The time at which a roster that changed is to be shown, in seconds; None: now. Where there are many
        streams it is shown now and then, as who dials waits for it (`key_ring.VIEW_DELAY`); but an expulsion is
        shown at once, and with a new plan what that goes by."""
        if new.roster is old.roster:
            return None
        urgent = new.roster.number != old.roster.number or new.fence not in (None, old.fence)
        due = self._listed_at + min(LIST_INTERVAL_PER_VIEW * len(self.streams), MAX_LIST_INTERVAL)
        if len(self.streams) > MANY_STREAMS and now < due and not urgent:
            return due
        self._listed_at = now
        return None

    def _show(self, stream: ViewStream, state: State, common: CommonView) -> bool:
        """Give the stream its view, if there is anything new in it."""
        member = state.members.here.get(stream.node)
        if member is not None and member.life != stream.life:
            stream.end()  # another process speaks for the node
            return False
        mine = view.node_view(state, common, stream.node)
        new = stream.latest is None or _differ(common, mine, stream.latest)
        if new:
            stream.set_view(VersionedView(common, mine, self._version))
        if member is None:
            stream.end()
        return new


def _awaited(state: State) -> tuple[object, ...]:
    r = state.round
    return r.number, r.phase, r.plan.fence if r.plan is not None else None


def pause(took: float, sent: int) -> float:
    """Seconds until the next update, after one that took so many seconds and sent so many views."""
    return min(2 * took, MAX_DISPATCH_PAUSE) + PAUSE_PER_VIEW * sent


def _differ(common: CommonView, mine: NodeView, latest: VersionedView) -> bool:
    old, was = latest.common, latest.mine
    train = bool(mine.lease) and common.train is not old.train
    plan = mine.planned and common.plan is not old.plan
    listed = common.roster is not old.roster
    return common.head is not old.head or train or plan or listed or view.has_news(mine, was)
