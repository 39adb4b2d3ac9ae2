import pytest

from atoll.comm.rates import WINDOW, Peak


def peak(totals: list[tuple[float, int]]) -> float:
    found = Peak()
    for now, total in totals:
        found.add(now, total)
    return found.rate


def test_a_steady_transfer_has_its_rate() -> None:
    assert peak([(i / 10, 100 * i) for i in range(30)]) == pytest.approx(1000)


def test_the_best_second_counts_and_waiting_before_and_after_does_not() -> None:
    idle = [(i / 10, 0) for i in range(20)]
    busy = [(2 + i / 10, 500 * i) for i in range(15)]
    after = [(3.5 + i / 10, 7000) for i in range(20)]
    assert peak(idle + busy + after) == pytest.approx(5000)


def test_a_burst_into_buffers_is_spread_over_the_window() -> None:
    assert peak([(0.0, 0), (0.1, 1000), *((0.1 + i / 10, 1000) for i in range(1, 20))]) <= 1000 / WINDOW


def test_nothing_is_said_before_a_window_has_passed() -> None:
    assert peak([(0.0, 0), (0.1, 1 << 30), (0.4, 1 << 31)]) == 0


def test_samples_that_come_late_make_no_rate_of_their_own() -> None:
    assert peak([(0.0, 0), (10.0, 1000)]) == pytest.approx(100)
