"""Explanations by the limits that owners set on what their nodes send and take in. Pure.

What a node holds back itself no path shows: few bytes are on their way at a time, and its peers have everything
later than it does. How many bytes passed, at the rate at which they may, says how long that took at least. It is
no fault: the owner wants it so.
"""

from collections.abc import Iterator

from atoll.comm.ids import NodeId
from atoll.coordinator.causes.explanation import Confidence, Explanation, Kind, Weight
from atoll.coordinator.causes.observations import Observations

MIN_SLOW_SECONDS = 0.4  # that an exchange, or a path, took longer than it would have: less is its ordinary unrest


def by_limits(seen: Observations) -> Iterator[Explanation]:
    """Members whose owners let them send, or take in, so little that the exchange took longer for it."""
    for node, account in seen.accounts.items():
        ways = ("sends", account.sent, account.limit_up), ("takes in", account.received, account.limit_down)
        for what, size, limit in ways:
            if (longer := _longer(seen, size, limit)) >= MIN_SLOW_SECONDS:
                yield Explanation(
                    *(Kind.LIMITED, node, f"{seen.name(node)}'s owner limits what it {what} to {mbit(limit)}"),
                    *(Weight.SLOWNESS, longer, Confidence.TOLD),
                    facts=(("bytes", str(size)), ("seconds at that rate", f"{size / limit:.1f}")),
                )


def holds_back(seen: Observations, sender: NodeId, receiver: NodeId) -> bool:
    """Whether the owner of one of them limits what passes between the two, and the exchange took longer for it."""
    here, there = seen.account(sender), seen.account(receiver)
    longer = _longer(seen, here.sent, here.limit_up), _longer(seen, there.received, there.limit_down)
    return max(longer) >= MIN_SLOW_SECONDS


def mbit(rate: float) -> str:
    """A rate in bytes a second, for people."""
    return f"{8e-6 * rate:.3g} Mbit/s"


def _longer(seen: Observations, size: int, limit: float) -> float:
    """Seconds by which so many bytes, at no more than `limit` bytes a second (0: no limit), made the exchange
    longer than usual; than by its plan where nothing is usual yet."""
    return min(size / limit, seen.exchange) - (seen.usual_exchange or seen.predicted) if limit else 0.0
