import random
from collections import Counter

import pytest

from atoll.comm.ids import NodeId
from atoll.comm.transport.bandwidth import (
    BURST_SECONDS,
    DECAY_PER_REDUCE,
    MAX_ROUND_TRIPS,
    RATE_WINDOWS,
    BurstRate,
    LinkEstimate,
    PeakRate,
    sample_peers,
    sample_round_trips,
)


def peak(totals: list[tuple[float, int]]) -> float:
    found = PeakRate()
    for now, total in totals:
        found.add(now, total)
    return found.best


def test_a_steady_transfer_has_its_rate() -> None:
    assert peak([(i / 10, 1000 * i) for i in range(30)]) == pytest.approx(10_000)


def test_the_best_two_seconds_count_and_waiting_does_not() -> None:
    idle = [(i / 10, 0) for i in range(20)]
    busy = [(2 + i / 10, 500 * i) for i in range(25)]
    after = [(4.5 + i / 10, 12000) for i in range(20)]
    assert peak(idle + busy + after) == pytest.approx(5000)


def test_a_burst_into_buffers_is_spread_over_the_window() -> None:
    assert peak([(0.0, 0), (0.1, 1000), *((0.1 + i / 10, 1000) for i in range(1, 30))]) <= 1000 / 2


def test_of_a_short_transfer_the_best_second_counts_a_little_less() -> None:
    assert peak([(i / 10, 500 * i) for i in range(15)]) == pytest.approx(0.95 * 5000)


def test_nothing_is_said_before_a_window_has_passed() -> None:
    assert peak([(0.0, 0), (0.1, 1 << 30), (0.4, 1 << 31)]) == 0


def test_samples_that_come_late_make_no_rate_of_their_own() -> None:
    assert peak([(0.0, 0), (10.0, 10_000)]) == pytest.approx(1000)


@pytest.mark.parametrize("seed", range(20))
def test_what_its_peers_saw_at_best_is_together_no_less_than_what_a_link_says_it_carried(seed: int) -> None:
    """Whatever goes to whom when: so who tells the truth of its link is believed."""
    rng = random.Random(seed)
    ways, step = rng.randint(1, 7), rng.choice([0.05, 0.1, 0.13])
    mine, theirs, totals = PeakRate(), [BurstRate() for _ in range(ways)], [0] * ways
    for i in range(rng.randint(int(0.6 / step), int(5 / step))):
        now = i * step
        if rng.random() < 0.9:
            totals[rng.randrange(ways)] += rng.choice([0, 1000, 50_000])
        mine.add(now, sum(totals))
        for seen, total in zip(theirs, totals, strict=True):
            seen.add(now, total)
    longest = max(window for window, _ in RATE_WINDOWS)
    # A window may be longer by a sample than it is called.
    assert mine.best <= sum(seen.rate for seen in theirs) * (1 + step / BURST_SECONDS) + 1e-6 * longest


def test_of_many_peers_each_is_told_of_by_as_many() -> None:
    peers = [NodeId(f"n{i}") for i in range(200)]
    told = Counter(n for me in range(200) for n in sample_peers(peers, me, 50))
    assert set(told.values()) == {50}
    assert sample_peers(peers[:50], 7, 50) == peers[:50]


def test_what_is_known_of_a_link_rises_at_once_and_falls_little_by_little() -> None:
    known, now, total = LinkEstimate(), 0.0, 0
    seen = []
    for rate in (10_000, 4000, 20_000):
        known.begin()
        for _ in range(30):
            known.add(now, total)
            now, total = now + 0.1, total + rate // 10
        seen.append(known.rate)
    assert seen == [pytest.approx(10_000), pytest.approx(10_000), pytest.approx(20_000)]
    for _ in range(3):
        known.begin()
    assert known.rate == pytest.approx(20_000 * DECAY_PER_REDUCE**2)


def test_of_many_round_trips_the_shortest_are_told_and_some_of_all_others() -> None:
    trips = {NodeId(f"n{i}"): 0.001 * i for i in range(1, 1001)}
    told = sample_round_trips(trips)
    assert len(told) <= MAX_ROUND_TRIPS and all(told[node] == trips[node] for node in told)
    assert set(list(trips)[: MAX_ROUND_TRIPS // 2]) <= told.keys()
    assert max(told.values()) > 0.9
    assert sample_round_trips({NodeId("a"): 0.1}) == {NodeId("a"): 0.1} and sample_round_trips({}) == {}


def test_a_link_that_has_too_little_to_carry_has_no_rate() -> None:
    assert peak([(i / 10, 1000 * (i // 5)) for i in range(100)]) == 0


def test_a_link_that_only_says_that_it_lives_shows_nothing_of_what_it_carries() -> None:
    """A wait for somebody else is no slow link."""
    beats = [(i / 10, 50 * i) for i in range(300)]
    assert peak(beats) == 0
    burst = BurstRate()
    for now, total in beats:
        burst.add(now, total)
    assert burst.rate == 0
    assert peak([*beats, *((30 + i / 10, 15_000 + 5000 * i) for i in range(25))]) == pytest.approx(50_000)


def test_a_queue_that_fills_or_empties_is_no_rate_of_the_link() -> None:
    link, queue, sent, acked, found = 10_000, 0, 0, 0, PeakRate()
    for i in range(100):
        found.add(i / 10, acked, sent)
        more = 1500 if i % 40 < 20 else 400  # a tenth of a second: the link carries 1000
        moved = min(queue + more, link // 10)
        queue, sent, acked = queue + more - moved, sent + more, acked + moved
    assert found.best == pytest.approx(link, rel=0.001)
    found = PeakRate()
    for now, (acked, sent) in enumerate(
        [(0, 20_000), (10_000, 30_000), (25_000, 35_000), (40_000, 40_000), (50_000, 50_000)]
    ):
        found.add(now, acked, sent)
    assert found.best <= 10_000, "acknowledgements that were held up come faster than anything was sent"
