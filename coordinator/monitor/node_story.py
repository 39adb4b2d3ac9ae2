"""A node over the rounds: what it contributed, how fast it was, what it sent; in bounded time for any run."""

from collections.abc import Iterable, Sequence

from atoll.comm.ids import NodeId
from atoll.coordinator.history.record_codec import RecordView
from atoll.coordinator.history.segment import ROUNDS

MAX_SEGMENTS = 64  # that are read for one answer
MAX_POINTS = 400
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


def node_series(views: Iterable[RecordView], node: NodeId) -> tuple[dict[str, list[float | None]], str]:
    """The node's figures in these rounds, a list each (None: not known, or it did not contribute), and the name
    that it had last; empty: it was in none of them."""
    found: dict[str, list[float | None]] = {name: [] for name in SERIES}
    called = ""
    for view in views:
        called = view.names.get(node, called)
        for name, value in zip(SERIES, node_point(view, node), strict=True):
            found[name].append(value)
    return found, called


def node_point(view: RecordView, node: NodeId) -> tuple[float | None, ...]:
    """The node's figures in one round, in the order of SERIES."""
    weight = view.of_nodes("contributors").get(node)
    here = weight is not None
    sent = view.of_nodes("bytes_up").get(node)
    return (
        view.round,
        view.committed_at,
        weight,
        view.of_nodes("losses").get(node) if here else None,
        (view.of_nodes("tokens_per_s").get(node) or None) if here else None,
        view.seconds.get("reduce") if sent is not None else None,
        sent,
        view.of_nodes("bytes_down").get(node),
    )
