"""How many TCP streams lead to one peer. Pure.

One stream cannot fill a long fat pipe: it grows by a segment each round trip after a loss, and its window is
bounded. On a short path more of them only cost time. So a path starts with a number that follows from its round
trip, and from reduce to reduce the number is doubled as long as that pays.
"""

from dataclasses import dataclass, replace

MOST = 16
PAYS = 1.15  # times the goodput before


@dataclass(frozen=True, slots=True)
class Streams:
    count: int
    before: int = 0  # the number that was tried last; 0: none
    goodput: float = 0.0  # bytes a second that it had
    settled: bool = False


def start(rtt: float) -> Streams:
    """For a path with a round trip of so many seconds."""
    for limit, count in ((0.002, 1), (0.015, 2), (0.04, 4)):
        if rtt < limit:
            return Streams(count, settled=rtt < 0.002)
    return Streams(8)


def observed(streams: Streams, goodput: float) -> Streams:
    """After a reduce in which the peer's links moved so many bytes a second."""
    if streams.settled or not goodput:
        return streams
    if goodput <= PAYS * streams.goodput:
        return replace(streams, count=streams.before, settled=True)
    if streams.count >= MOST:
        return replace(streams, settled=True)
    return Streams(min(2 * streams.count, MOST), streams.count, goodput)
