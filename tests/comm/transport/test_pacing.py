import random
from dataclasses import dataclass, field

import pytest

from atoll.comm.transport.bandwidth import LinkEstimate
from atoll.comm.transport.pacing import MIN_PACE_SHARE, MIN_QUEUE_DELAY, SHARE_MARGIN, LinkPacer, PeerPacer

LOOK = 0.05  # seconds


@dataclass
class Sender:
    """A node that always has something to send, over a link with a queue; acknowledgements come at once."""

    link: float  # bytes a second
    rtt: float  # seconds
    window: float = float("inf")  # bytes a second that TCP lets through
    elsewhere: float = 0.0  # seconds of queue at all peers
    pace: LinkPacer = field(default_factory=LinkPacer)
    now: float = 0.0
    sent: float = 0.0
    acked: float = 0.0
    longest: float = 0.0  # seconds of its queue
    estimate: LinkEstimate = field(default_factory=LinkEstimate)

    def run(self, seconds: float, known: float = 0.0) -> float:
        """The rate at which bytes were acknowledged; `known`: what the link was seen to carry before."""
        began, acked = self.now, self.acked
        while self.now < began + seconds:
            self.now += LOOK
            self.sent += LOOK * min(self.pace.rate or float("inf"), self.window, 3 * self.link)
            self.acked += min(LOOK * self.link, self.sent - self.acked)
            queue = (self.sent - self.acked) / self.link
            self.longest = max(self.longest, queue)
            counters = int(self.acked), int(self.sent)
            self.estimate.add(self.now, *counters)
            known = max(known, self.estimate.rate)
            self.pace.look(self.now, *counters[::-1], self.rtt, queue + self.elsewhere, known)
        return (self.acked - acked) / seconds


@pytest.mark.parametrize("rtt", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("link", [1e6, 12e6, 120e6])
def test_a_node_that_knows_nothing_fills_its_link_and_then_keeps_the_queue_short(link: float, rtt: float) -> None:
    sender = Sender(link, rtt)
    sender.run(12.0)
    sender.longest = 0.0
    assert sender.run(6.0) > 0.97 * link
    assert sender.longest < 0.1 + 0.5 * rtt


def test_a_link_that_has_become_faster_is_full_within_three_seconds() -> None:
    sender = Sender(10e6, 0.05)
    sender.run(4.0)
    sender.link = 40e6
    sender.run(3.0, known=10e6)
    assert sender.run(2.0, known=40e6) > 0.95 * 40e6


def test_what_tcp_does_not_let_through_is_not_taken_for_what_the_link_carries() -> None:
    sender = Sender(10e6, 0.05)
    sender.run(4.0)
    sender.window = 1e6
    sender.run(4.0)
    sender.window = float("inf")
    assert sender.run(1.0) > 0.9 * 10e6


@pytest.mark.parametrize("rate", [0.0, 1e6])
@pytest.mark.parametrize("step", [300, 20_000])  # bytes between two looks
def test_a_node_that_knows_nothing_of_its_link_stays_as_free_as_it_is_whatever_delay_it_sees(
    step: int, rate: float
) -> None:
    """A busy machine answers late, which looks like a queue: what little it sends meanwhile, or begins with, would
    be its pace for good."""
    pace, now, moved = LinkPacer(), 0.0, 0
    pace.rate = rate
    for _ in range(40):
        now, moved = now + LOOK, moved + step
        assert pace.look(now, moved, moved, 0.02, 0.2, known=0.0) == rate


def test_queues_at_all_peers_do_not_make_a_node_slower_than_its_link_is_known_to_be() -> None:
    sender = Sender(10e6, 0.05, elsewhere=0.2)
    sender.run(2.0, known=10e6)
    assert sender.run(4.0, known=10e6) > 0.99 * MIN_PACE_SHARE * 10e6


def test_the_longer_the_queue_the_slower_and_never_much_slower_than_the_link() -> None:
    rates = []
    for queue in (0.01, 0.02, 0.05, 1.0):
        pace, now, moved = LinkPacer(), 0.0, 0
        for _ in range(40):
            now, moved = now + LOOK, moved + int(LOOK * 10e6)
            pace.look(now, moved, moved, 0.05, queue, known=10e6)
        rates.append(pace.rate)
    assert rates == sorted(rates, reverse=True) and rates[0] > 10e6 > rates[2] > 9.4e6
    assert rates[-1] == pytest.approx(MIN_PACE_SHARE * 10e6)


def test_one_hiccup_costs_little() -> None:
    sender = Sender(100e6, 0.1)
    sender.run(3.0)
    sender.pace.rate = 100e6
    sender.elsewhere = 0.05
    sender.run(LOOK, known=20e6)
    sender.elsewhere = 0.0
    assert sender.pace.rate >= 0.8 * 100e6


def test_a_node_without_a_far_link_has_no_pace() -> None:
    assert LinkPacer().rate == 0


def test_a_slow_peer_is_sent_this_nodes_part_of_its_link_and_all_of_it_while_others_leave_it_unused() -> None:
    part = PeerPacer(3e6, 1 / 3)
    assert part.rate == pytest.approx(SHARE_MARGIN * 1e6)
    rates = [part.look(0.05, 0.0) for _ in range(20)]
    assert rates == sorted(rates) and rates[-1] == 3e6
    assert part.look(0.05, 0.05) == pytest.approx(SHARE_MARGIN * 1e6)  # the others are back


def test_a_burst_of_ones_own_is_no_queue_of_others() -> None:
    slow, fast = PeerPacer(2.4e6, 1 / 3), PeerPacer(24e6, 1 / 3)
    assert slow.look(0.05, 2 * MIN_QUEUE_DELAY) > SHARE_MARGIN * 0.8e6
    assert fast.look(0.05, 2 * MIN_QUEUE_DELAY) == pytest.approx(SHARE_MARGIN * 8e6)
    assert PeerPacer(1e5, 1.0).look(0.05, 0.1) == 1e5
    assert PeerPacer(1e5, 0.5).look(0.05, 0.1) == pytest.approx(SHARE_MARGIN * 5e4), (
        "nor does a queue grow for ever"
    )


def test_whoever_has_had_nothing_for_a_slow_peer_begins_with_its_part_of_the_link() -> None:
    part = PeerPacer(3e6, 1 / 3)
    for _ in range(20):
        part.look(0.05, 0.0)
    assert part.rest() == pytest.approx(SHARE_MARGIN * 1e6) == part.rate


def test_who_alone_sends_to_a_slow_peer_sends_no_more_than_its_link_carries() -> None:
    part = PeerPacer(3e6, 1.0)
    assert part.rate == 3e6 == part.look(0.05, 0.0)


@dataclass
class Member(Sender):
    """One of several whose acknowledgements wait for the others' queues, too."""

    carried: LinkEstimate = field(default_factory=LinkEstimate)

    @property
    def queue(self) -> float:
        return (self.sent - self.acked) / self.link


def test_nodes_that_see_each_others_queues_fill_their_links_after_some_reduces() -> None:
    """At first one knows its link; the others know too little of theirs, and see its queue."""
    rng, members, rates = random.Random(1), [Member(12e6, 0.05) for _ in range(4)], [0.0] * 4
    for member, known in zip(members, (12e6, 9.6e6, 9.6e6, 10e6), strict=True):
        member.pace.rate = known
        for step in range(50):
            member.carried.add(LOOK * (step - 50), int(LOOK * step * known), int(LOOK * step * known))
    for reduce in range(6):
        for member in members:
            member.carried.begin()
            member.sent = member.acked
        began = [member.acked for member in members]
        for step in range(int(3 / LOOK)):
            now = 4.0 * reduce + LOOK * step
            for member in members:
                member.sent += LOOK * min(member.pace.rate, 3 * member.link)
                member.acked += min(LOOK * member.link, member.sent - member.acked)
                member.carried.add(now, int(member.acked), int(member.sent))
            longest = max(member.queue for member in members)
            for member in members:
                queue, counters = longest + rng.uniform(0.0, 0.01), (int(member.sent), int(member.acked))
                member.pace.look(now, *counters, member.rtt, queue, member.carried.rate)
        rates = [(member.acked - was) / 3 for member, was in zip(members, began, strict=True)]
    assert min(rates) > 0.95 * 12e6
