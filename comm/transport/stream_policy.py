"""The choice of how many TCP streams lead to one peer, and which congestion control they use. Pure.

One stream cannot fill a long fat pipe: it grows by a segment each round trip after a loss, and its window is
bounded. On a short path, and on a slow link, more of them are only in each other's way; each costs processor time.

BBR does not take a lost segment for a full queue, and keeps its window when a connection is idle, between two
reduces or two chunks. That the streams of a node together send no more than its link carries, and those to a slow
peer no more than that one's does, is for `pacing` to see to.
"""

from math import ceil

MAX_STREAMS = 8  # streams to one peer at most
ENOUGH_STREAMS = 3  # streams where a lost segment makes none of them slower and their windows are not too small
MAX_STREAM_WINDOW_BYTES = 3e6  # bytes that a stream has under way at most: half of what Linux gives its receiver
ONE_STREAM_RTT = 0.002  # seconds of round trip below which one stream is enough
FOUR_STREAMS_RTT = 0.03  # seconds of round trip from which on four streams are worth trying
LONG_PATH_RTT = 0.005  # seconds of round trip beyond which a path is a long one
STREAM_FLIGHT_BYTES = 1 << 17  # bytes that a stream may have under way without trouble
LOSSY_SHARE = 2e-5  # share of the segments sent: more are lost on a path that is more than full now and then
FAST_RATE = 10e6  # bytes a second from which on losses hold back a few streams
LONG_PATH_CONGESTION_CONTROL = "bbr"


def stream_count(rtt: float, rate: float, peers: int, slowed: bool) -> int:
    """The number of streams to each of `peers` peers over paths with a round trip of `rtt` seconds, of which a
    link that carries `rate` bytes a second is the narrowest part; 0: not known yet. `slowed`: the paths lose
    segments, and what is lost makes a stream slower."""
    if rtt < ONE_STREAM_RTT:
        return 1
    if not rate:
        return 2 if rtt < FOUR_STREAMS_RTT else 4
    each = rate * rtt / max(peers, 1)
    if slowed:
        return min(max(ceil(2 * each / STREAM_FLIGHT_BYTES), 1), MAX_STREAMS)
    return min(
        max(min(ceil(each / STREAM_FLIGHT_BYTES), ENOUGH_STREAMS), ceil(each / MAX_STREAM_WINDOW_BYTES), 1),
        MAX_STREAMS,
    )


def is_lossy(sent: int, resent: int) -> bool:
    """Whether a path loses segments: `sent` were sent on it, of which `resent` were sent again."""
    return resent > LOSSY_SHARE * sent


def fetch_congestion_control(lossy: bool, rate: float) -> str:
    """The congestion control of a long path for a few streams that `pacing` does not see to; `rate`: bytes a
    second that such a stream carried of late."""
    return "bbr" if lossy and rate > FAST_RATE else "cubic"
