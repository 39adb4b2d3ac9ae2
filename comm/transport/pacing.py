"""How fast a node sends, over all its links together: as fast as its own link carries, and no queue; and to one
slow peer (`PeerPacer`). Pure.

    free      nothing is known of the link: TCP finds out, as fast as it can
    paced     what would go faster than the pace waits here, not in a queue of the network

A queue at the node's own link makes the round trips to all peers longer, one at a peer's link only those to that
peer. So the shortest of the peers' delays is the own link's, if it lasts: queues of bursts come and go. While
there is none, and the node sends as fast as it may, the link may carry more: the pace rises, the more the longer
that goes on. When there is one, the pace is what the link is known to carry, less what drains the queue in
`DRAINED`. It may be others' all the same, whose links all acknowledgements wait for: so it never is much less.
TCP's own control goes on below this, link by link; it sees losses only where the network has them. (Delay and
delivered rate as signs of a full link: BBR, Cardwell et al. 2016; here for the sum of many streams. The least
delay of an interval as the queue that stands: CoDel, Nichols and Jacobson 2012.)
"""

from collections import deque

WINDOW = 0.25  # seconds over which a rate is measured
FIRST_RISE, RISE = 0.05, 0.25  # of the pace: the first step, and the longest; each is twice the one before
NEAR_PACE = 0.93  # of the pace: so much is as fast as the node may
ABOVE = 1.02  # times what the link carries: it is to be full
DRAINED = 0.6  # seconds in which a queue is to be gone
LEAST = 0.85  # of what the link carries, at least
LEAP = 1.1  # times what the link is known to carry: so much more may it carry now
BEST, RECENT = 0.96, 2.0  # of the highest rate in so many seconds: the highest of some is by chance a little more
FALL = 0.85  # times at most, each time
STANDS = 0.15  # seconds in which a queue of a burst is gone
STANDING = 0.5  # of what is a queue at a moment: one that stands is known sooner
QUEUE = 0.015  # seconds of delay that are a queue; below, they are noise
OF_TRIP = 0.2  # of the round trip: likewise
BURST = 1 << 17  # bytes that come to a slow peer's link at once
SHORT = 0.06  # seconds of queue that they are at most
MORE = 1.05  # times a node's part of a peer's link, whose senders do not all send at the same time


class LinkPacer:
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
        while len(samples) > 2 and now - samples[1][0] >= WINDOW:
            samples.popleft()
        since, sent_then, acked_then = samples[0]
        if (seconds := now - since) < WINDOW:
            return self.rate
        carried = (acked - acked_then) / seconds
        best = max(_recent(self._carried, now, carried, RECENT))
        stands, full = min(_recent(self._queues, now, queue, STANDS)), STANDING * max(QUEUE, OF_TRIP * rtt)
        if now < self._judge_at:
            return self.rate
        if stands > full:
            carries = max(known, min(BEST * best, LEAP * known)) if known else carried
            share = max(ABOVE - (stands - full) / DRAINED, LEAST)
            self.rate, self._step = max(share * carries, FALL * self.rate), FIRST_RISE
            self._judge_at = now + rtt
        elif self.rate and (sent - sent_then) / seconds > NEAR_PACE * self.rate:
            self.rate *= 1 + self._step
            self._step = min(2 * self._step, RISE)
            self._judge_at = now + rtt + WINDOW / 2
        return self.rate


def _recent(values: deque[tuple[float, float]], now: float, value: float, seconds: float) -> list[float]:
    """Of so many seconds, with this one."""
    values.append((now, value))
    while now - values[0][0] > seconds:
        values.popleft()
    return [value for _, value in values]


class PeerPacer:
    """How fast a node sends to a peer whose link is slower than its own, and carries what others send, too.

    Its part of the link is its own. While no queue is seen there, others leave theirs unused: a slow peer's chunks
    come and go one by one, now to and from this node, now another. So the pace rises, up to the whole link; anew
    each time that there is something to send, or all would begin with the whole link.
    """

    def __init__(self, whole: float, part: float) -> None:
        """The link carries `whole` bytes a second, of which a `part` is this node's."""
        self._whole, self._own = whole, min(MORE * part, 1.0) * whole
        self.rate = self._own  # bytes a second

    def look(self, rtt: float, queue: float) -> float:
        """The pace until the next look; for `rtt` and `queue` see `LinkPacer`, both of this peer."""
        full = queue > max(QUEUE, OF_TRIP * rtt, min(BURST / self._whole, SHORT))
        self.rate = self._own if full else min((1 + RISE) * self.rate, self._whole)
        return self.rate

    def rest(self) -> float:
        """Likewise, while there is nothing to send."""
        self.rate = self._own
        return self.rate
