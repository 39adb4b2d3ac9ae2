"""Curves of long runs: every figure is kept, and a picture has few points that show what many would."""

import numpy as np
import pytest
from long_runs import long_record

from atoll.coordinator.history.series import (
    LONGEST_PAUSE,
    SeriesTable,
    downsampled,
    pack_series,
    round_ages,
    series_row,
    unpack_series,
)


def test_the_figures_of_rounds_come_back() -> None:
    rows = [series_row(long_record(k, 3)) for k in range(1, 40)]
    assert np.array_equal(unpack_series(pack_series(rows), len(rows)), np.array(rows), equal_nan=True)


def test_a_table_grows_and_what_is_void_takes_the_place_of_what_was() -> None:
    table, rows = SeriesTable(), [series_row(long_record(k, 2)) for k in range(1, 1001)]
    table.extend(rows)
    assert len(table) == table.last == 1000 and table.column("tokens")[499] == rows[499][2]
    changed = (700.0, *rows[699][1:-1], 1.0)
    table.extend([changed])
    assert len(table) == 1000 and table.rows(699, 701)[1] == pytest.approx(changed, nan_ok=True)
    assert table.rows(5000, 6000) == []


def test_few_points_keep_the_first_the_last_and_each_extreme() -> None:
    rng = np.random.default_rng(0)
    x, y = np.arange(100_000.0), rng.normal(size=100_000)
    y[[0, 31_337, 77_777]] = np.nan, 100.0, -100.0
    few_x, few_y = downsampled(x, y, 1000)
    assert 500 < len(few_x) <= 1000 and np.all(np.diff(few_x) > 0)
    assert (few_x[0], few_x[-1]) == (1, 99_999) and few_y.max() == 100 and few_y.min() == -100
    assert all(y[int(at)] == value for at, value in zip(few_x, few_y, strict=True))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_what_is_few_stays_as_it_is(count: int) -> None:
    x = np.zeros(count)
    assert all(np.array_equal(of, x) for of in downsampled(x, x, 4 if count > 4 else 5)) or count == 5


def test_points_at_one_place_are_four_at_most() -> None:
    x, y = downsampled(np.zeros(100), np.arange(100.0), 8)
    assert list(y) == [0, 99]


def test_a_round_is_as_old_as_the_clock_says_but_for_its_jumps() -> None:
    even = np.array([0.0, 100.0, 250.0])
    assert round_ages(even, 300.0).tolist() == [300.0, 200.0, 50.0]
    ahead = np.array([0.0, 1e9, 1e9 + 60.0, 100.0])
    assert round_ages(ahead, 160.0).tolist() == [LONGEST_PAUSE + 120.0, 120.0, 60.0, 60.0]
    assert round_ages(even, 1e9).tolist() == [LONGEST_PAUSE + 250.0, LONGEST_PAUSE + 150.0, LONGEST_PAUSE]
    assert round_ages(even[:0], 300.0).tolist() == []
