import pytest

from atoll.comm.streams import MOST, Streams, congestion_control, observed, start


@pytest.mark.parametrize(
    ("rtt", "count"),
    [(0.0, 1), (0.0019, 1), (0.002, 2), (0.0299, 2), (0.03, 4), (0.3, 4)],
)
def test_the_longer_the_path_the_more_streams(rtt: float, count: int) -> None:
    assert start(rtt).count == count


def test_on_the_shortest_paths_nothing_is_tried() -> None:
    assert observed(start(0.001), 1e9) == start(0.001)


def reduces(rtt: float, goodput: dict[int, float]) -> list[int]:
    """The numbers of streams over six reduces, where so many streams have that goodput."""
    streams, seen = start(rtt), []
    for _ in range(6):
        seen.append(streams.count)
        streams = observed(streams, goodput[streams.count])
    return seen


def test_the_number_is_doubled_as_long_as_that_pays_and_then_stays() -> None:
    assert reduces(0.05, {4: 100.0, 8: 180.0, 16: 190.0}) == [4, 8, 16, 8, 8, 8]


def test_a_number_that_does_not_pay_is_given_up_for_the_one_before() -> None:
    assert reduces(0.05, {4: 100.0, 8: 100.0}) == [4, 8, 4, 4, 4, 4]
    assert reduces(0.05, {4: 100.0, 8: 50.0}) == [4, 8, 4, 4, 4, 4]


def test_there_are_never_more_than_the_most() -> None:
    assert max(reduces(0.1, {4: 1.0, 8: 2.0, 16: 4.0})) == MOST
    assert observed(Streams(MOST, 8, 1.0), 2.0).settled


def test_a_reduce_without_traffic_leaves_at_least_one_stream() -> None:
    assert observed(start(0.02), 0.0).count >= 1


def test_a_path_that_loses_segments_gets_bbr() -> None:
    assert congestion_control(0, 0) == congestion_control(1_000_000, 10) == "cubic"
    assert congestion_control(1_000_000, 100) == "bbr"
