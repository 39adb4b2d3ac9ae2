"""The pace at which a node sends, over all its links together: as fast as its own link carries, and no queue; and
to one slow peer (`PeerPacer`). Pure.

    free      nothing is known of the link: TCP finds out, as fast as it can
    paced     what would go faster than the pace waits here, not in a queue of the network

A queue at the node's own link makes the round trips to all peers longer, one at a peer's link only those to that
peer. So the shortest of the peers' delays is the own link's, if it lasts: queues of bursts come and go. While
there is none, and the node sends as fast as it may, the link may carry more: the pace rises, the more the longer
that goes on. When there is one, the pace is what the link is known to carry, less what drains the queue in
`DRAIN_TIME`. It may be others' all the same, whose links all acknowledgements wait for: so it never is much less.
TCP's own control goes on below this, link by link; it sees losses only where the network has them. (Delay and
delivered rate as signs of a full link: BBR, Cardwell et al. 2016; here for the sum of many streams. The least
delay of an interval as the queue that stands: CoDel, Nichols and Jacobson 2012.)
"""

from collections import deque

RATE_WINDOW = 0.25  # seconds over which a rate is measured
FIRST_RISE, MAX_RISE = 0.05, 0.25  # of the pace: the first step, and the longest; each is twice the one before
FULL_PACE_SHARE = 0.93  # share of the pace that counts as being as fast as the node may
FULL_LINK_RATIO = 1.02  # times what the link carries: the pace that keeps it full
DRAIN_TIME = 0.6  # seconds in which a queue is to be gone
MIN_PACE_SHARE = 0.85  # share of what the link carries that the pace is at least
MAX_LEAP_RATIO = 1.1  # times what the link is known to carry: so much more may it carry now
PEAK_WINDOW = 2.0  # seconds over which the highest rate is looked for
PEAK_SHARE = 0.96  # share of the highest rate that counts: the highest of several is a little too high by chance
MAX_FALL_RATIO = 0.85  # times the pace: lower it does not fall in one step
BURST_TIME = 0.15  # seconds in which a queue of a burst is gone
STANDING_SHARE = 0.5  # share of the delay that is a queue at a moment: a standing queue is known sooner
MIN_QUEUE_DELAY = 0.015  # seconds of delay that are a queue; below, they are noise
MIN_QUEUE_TRIP_SHARE = 0.2  # share of the round trip that is a queue; below, it is noise
PEER_BURST_BYTES = 1 << 17  # bytes that come to a slow peer's link at once
MAX_BURST_DELAY = 0.06  # seconds of queue that a burst to a slow peer counts as at most
SHARE_MARGIN = 1.05  # times a node's part of a peer's link, whose senders do not all send at the same time


class LinkPacer:
    """The pace of all that a node sends over long paths, by what its own link carries."""

    def __init__(self) -> None:
        self.rate = 0.0  # bytes a second; 0: no limit
        self._samples = deque[tuple[float, int, int]]()  # when; bytes sent, and acknowledged, until then
        self._carried = deque[tuple[float, float]]()  # when; bytes a second
        self._queues = deque[tuple[float, float]]()  # when; seconds
        self._step = FIRST_RISE
        self._judge_at = 0.0  # seconds; before, what was changed last does not show yet

    def look(self, now: float, sent: int, acked: int, rtt: float, queue: float, known: float) -> float:
        """The pace from now on. `sent` and `acked`: bytes, over all far links; `rtt`: seconds, without a queue,
        the longest; `queue`: seconds by which the round trips are longer now, at the peer where that is least;
        `known`: bytes a second that the link was seen to carry for longer, of late; 0: not known."""
        samples = self._samples
        if samples and acked == samples[-1][2]:
            samples.clear()  # nothing to carry, or a break: that is no rate
        samples.append((now, sent, acked))
        while len(samples) > 2 and now - samples[1][0] >= RATE_WINDOW:
            samples.popleft()
        since, sent_then, acked_then = samples[0]
        if (seconds := now - since) < RATE_WINDOW:
            return self.rate
        carried = (acked - acked_then) / seconds
        best = max(_recent(self._carried, now, carried, PEAK_WINDOW))
        stands = min(_recent(self._queues, now, queue, BURST_TIME))
        full = STANDING_SHARE * max(MIN_QUEUE_DELAY, MIN_QUEUE_TRIP_SHARE * rtt)
        if now < self._judge_at or not known:
            return self.rate
        if stands > full:
            carries = max(known, min(PEAK_SHARE * best, MAX_LEAP_RATIO * known))
            share = max(FULL_LINK_RATIO - (stands - full) / DRAIN_TIME, MIN_PACE_SHARE)
            self.rate, self._step = max(share * carries, MAX_FALL_RATIO * self.rate), FIRST_RISE
            self._judge_at = now + rtt
        elif self.rate and (sent - sent_then) / seconds > FULL_PACE_SHARE * self.rate:
            self.rate *= 1 + self._step
            self._step = min(2 * self._step, MAX_RISE)
            self._judge_at = now + rtt + RATE_WINDOW / 2
        return self.rate


def _recent(values: deque[tuple[float, float]], now: float, value: float, seconds: float) -> list[float]:
    """Of so many seconds, with this one."""
    values.append((now, value))
    while now - values[0][0] > seconds:
        values.popleft()
    return [value for _, value in values]


class PeerPacer:
    """The pace at which a node sends to a peer whose link is slower than its own, and carries what others send,
    too.

    Its part of the link is its own. While no queue is seen there, others leave theirs unused: a slow peer's chunks
    come and go one by one, now to and from this node, now another. So the pace rises, up to the whole link; anew
    each time that there is something to send, or all would begin with the whole link.
    """

    def __init__(self, whole: float, part: float) -> None:
        """The link carries `whole` bytes a second, of which a `part` is this node's."""
        self._whole, self._own = whole, min(SHARE_MARGIN * part, 1.0) * whole
        self.rate = self._own  # bytes a second

    def look(self, rtt: float, queue: float) -> float:
        """The pace until the next look, bytes a second. `rtt`: seconds of round trip to this peer without a queue;
        `queue`: seconds by which it is longer now."""
        burst = min(PEER_BURST_BYTES / self._whole, MAX_BURST_DELAY)
        full = queue > max(MIN_QUEUE_DELAY, MIN_QUEUE_TRIP_SHARE * rtt, burst)
        self.rate = self._own if full else min((1 + MAX_RISE) * self.rate, self._whole)
        return self.rate

    def rest(self) -> float:
        """The pace while there is nothing to send: this node's own share of the link."""
        self.rate = self._own
        return self.rate
