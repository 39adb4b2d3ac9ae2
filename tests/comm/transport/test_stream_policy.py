import pytest

from atoll.comm.transport.stream_policy import (
    ENOUGH_STREAMS,
    MAX_STREAMS,
    fetch_congestion_control,
    is_lossy,
    stream_count,
)

MBIT = 125e3  # bytes a second


@pytest.mark.parametrize(("rtt", "count"), [(0.0, 1), (0.0019, 1), (0.002, 2), (0.0299, 2), (0.03, 4), (0.3, 4)])
def test_before_anything_is_known_the_longer_the_path_the_more_streams(rtt: float, count: int) -> None:
    assert stream_count(rtt, 0.0, 3, slowed=False) == count


@pytest.mark.parametrize(
    ("rate", "rtt", "slowed", "count"),
    [
        (20, 0.05, False, 1),
        (100, 0.05, False, 2),
        (100, 0.1, True, 7),
        (1000, 0.1, False, ENOUGH_STREAMS),
        (1000, 0.1, True, MAX_STREAMS),
        (1000, 0.3, False, 5),
        (10_000, 0.1, False, MAX_STREAMS),
        (1000, 0.001, True, 1),
    ],
)
def test_the_more_is_under_way_the_more_streams(rate: float, rtt: float, slowed: bool, count: int) -> None:
    assert stream_count(rtt, rate * MBIT, 3, slowed) == count


def test_many_peers_share_what_is_under_way() -> None:
    assert stream_count(0.05, 100 * MBIT, 100, slowed=False) == 1


def test_a_path_that_loses_segments_is_known() -> None:
    assert not is_lossy(0, 0) and not is_lossy(1_000_000, 10)
    assert is_lossy(1_000_000, 100)


def test_alone_only_what_is_fast_and_loses_segments_gets_bbr() -> None:
    assert fetch_congestion_control(True, 100 * MBIT) == "bbr"
    assert fetch_congestion_control(True, 20 * MBIT) == fetch_congestion_control(False, 1000 * MBIT) == "cubic"
