"""How many TCP streams lead to one peer, and which congestion control they use. Pure.

One stream cannot fill a long fat pipe: it grows by a segment each round trip after a loss, and its window is
bounded. On a short path more of them only cost time. So a path starts with a number that follows from its round
trip, and from reduce to reduce the number is doubled as long as that pays.

BBR does not take a lost segment for a full queue. Where nothing is lost CUBIC leaves less of the link unused.
"""

from dataclasses import dataclass, replace

MOST = 16
LOSSY = 2e-5  # of the segments sent: more are lost on a path that is more than full now and then
NEAR = 0.002  # seconds of round trip below which one stream is enough
PAYS = 1.15  # times the goodput before


@dataclass(frozen=True, slots=True)
class Streams:
    count: int
    before: int = 0  # the number that was tried last; 0: none
    goodput: float = 0.0  # bytes a second that the node's link carried then
    settled: bool = False


def start(rtt: float) -> Streams:
    """For a path with a round trip of so many seconds."""
    if rtt < NEAR:
        return Streams(1, settled=True)
    return Streams(2 if rtt < 0.03 else 4)  # more would only be in each other's way on a slow link


def congestion_control(sent: int, resent: int) -> str:
    """For a path on which so many segments were sent, and of these sent again."""
    return "bbr" if resent > LOSSY * sent else "cubic"


def observed(streams: Streams, goodput: float) -> Streams:
    """After a reduce in which the node's link carried so many bytes a second, at best."""
    if streams.settled or not goodput:
        return streams
    if goodput <= PAYS * streams.goodput:
        return replace(streams, count=streams.before, settled=True)
    if streams.count >= MOST:
        return replace(streams, settled=True)
    return Streams(min(2 * streams.count, MOST), streams.count, goodput)
