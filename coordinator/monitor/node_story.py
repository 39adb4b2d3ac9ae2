"""A node over the rounds: what it contributed, how fast it was, what it sent; in bounded time for any run;
and who came and went."""

from collections.abc import Iterable, Mapping, Sequence

from atoll.comm.ids import NodeId
from atoll.coordinator.history.record_codec import RecordView
from atoll.coordinator.history.segment import ROUNDS
from atoll.coordinator.monitor.round_story import training_pace

MAX_SEGMENTS = 64  # that are read for one answer
MAX_ADDED_UP = MAX_SEGMENTS * ROUNDS  # rounds over which a node's time is added up
MAX_POINTS = 400
MAX_ACCOUNTED = 1_000_000  # nodes in the records, all together, over which one node's time is added up
MAX_NAMED = 3  # members that a change of membership names
NodeSeries = dict[str, list[float | None]]  # by name of SERIES
SERIES = ("round", "at", "weight", "loss", "tokens_per_s", "exchange_s", "bytes_up", "bytes_down")


def rounds_to_read(first: int, last: int, points: int) -> Sequence[int]:
    """Some rounds from `first` to `last`, evenly spread, always with the last: `points` of them, fewer where they
    would be of more segments than MAX_SEGMENTS."""
    count = last - first + 1
    if count <= 0:
        return ()
    points = max(min(points, MAX_POINTS), 1)
    if count > MAX_SEGMENTS * ROUNDS:
        points = min(points, MAX_SEGMENTS)
    step = -(-count // points)
    return range(last - (count - 1) // step * step, last + 1, step)


def rounds_to_add_up(last: int, members: int) -> Sequence[int]:
    """The rounds up to `last` over which a node's time is added up: as many as is quick with so many members at
    most."""
    count = min(max(MAX_ACCOUNTED // max(members, 1), MAX_POINTS), MAX_ADDED_UP)
    return range(max(last - count + 1, 1), last + 1)


def node_series(views: Iterable[RecordView], node: NodeId) -> tuple[NodeSeries, str]:
    """The node's figures in these rounds, a list each (None: not known, or it did not contribute), and the name
    that it had last; empty: it was in none of them."""
    found: NodeSeries = {name: [] for name in SERIES}
    called = ""
    for view in views:
        called = view.names.get(node, called)
        for name, value in zip(SERIES, node_point(view, node), strict=True):
            found[name].append(value)
    return found, called


def time_spent(views: Iterable[RecordView], node: NodeId) -> tuple[dict[str, float], Sequence[int]]:
    """The node's seconds in each bucket over consecutive rounds, and the first and last of them that have some;
    empty: none has. Less than nothing of `open` is of steps before them, which are in another bucket here."""
    found, told = dict[str, float](), list[int]()
    for view in views:
        if spent := view.spent_by(node):
            told = [*told[:1], view.round]
        for bucket, seconds in spent.items():
            found[bucket] = found.get(bucket, 0.0) + seconds
    return {bucket: round(seconds, 3) for bucket, seconds in found.items() if seconds > 0}, told


def last_there(series: NodeSeries) -> int | None:
    """The last of the rounds in which the node was; None: it was in none of them."""
    there = zip(series["round"], series["weight"], series["bytes_up"], strict=True)
    return max((int(number or 0) for number, *figures in there if figures != [None, None]), default=None)


def membership_change(before: Mapping[NodeId, str], after: Mapping[NodeId, str]) -> str:
    """Who came and who went between two rounds, whose members' names these are; empty: not known."""
    if not before or not after:
        return ""
    gone = [name for node, name in before.items() if node not in after]
    came = [name for node, name in after.items() if node not in before]
    said = [_names(gone) + (" is gone" if len(gone) == 1 else " are gone")] if gone else []
    return ", ".join([*said, *([_names(came) + " joined"] if came else [])])


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def node_point(view: RecordView, node: NodeId) -> tuple[float | None, ...]:
    """The node's figures in one round, in the order of SERIES."""
    weight = view.of_nodes("contributors").get(node)
    here, told = weight is not None, view.of_nodes("tokens_per_s").get(node, 0.0)
    sent = view.of_nodes("bytes_up").get(node)
    return (
        view.round,
        view.committed_at,
        weight,
        view.of_nodes("losses").get(node) if here else None,
        (training_pace(weight, view.spent_by(node), told) or None) if weight is not None else None,
        view.seconds.get("reduce") if sent is not None else None,
        sent,
        view.of_nodes("bytes_down").get(node),
    )
