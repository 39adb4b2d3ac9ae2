"""When a run will be finished: within a tenth in its second half, whatever its rounds are like."""

import random
from collections.abc import Callable
from statistics import fmean

import past_runs
import pytest

from atoll.coordinator.history.series import SeriesTable, series_row
from atoll.coordinator.monitor.pace import MAX_WINDOW, Pace, alike, pace, pace_of

Wall = Callable[[random.Random, int, int], float]  # seconds of round k of n


def times(wall: Wall, rounds: int, seed: int) -> list[float]:
    rng, at = random.Random(seed), [1e9]
    for k in range(rounds):
        at.append(at[-1] + wall(rng, k, rounds))
    return at


def share_off(wall: Wall, rounds: int, by: float = 0.1) -> float:
    """The share of the second half's rounds (but for the last eight) after which the estimate of the time left is
    off by more than `by` of it, in ten runs."""
    off = list[bool]()
    for seed in range(10):
        at = times(wall, rounds, seed)
        for k in range(rounds // 2, rounds - 8):
            recent = at[max(0, k - MAX_WINDOW) : k + 1]
            found = pace(recent, [0.0] * len(recent), rounds - k, at[k])
            assert found.seconds_left is not None
            real = at[rounds] - at[k]
            off.append(abs(found.seconds_left - real) > by * real)
    return fmean(off)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [200, 1000])
@pytest.mark.parametrize(
    ("wall", "most"),
    [
        pytest.param(lambda r, k, n: 60 * r.gauss(1, 0.05), 0.0, id="even"),
        pytest.param(lambda r, k, n: 60 * max(0.1, r.gauss(1, 0.2)), 0.03, id="noisy"),
        pytest.param(
            lambda r, k, n: 60 * r.gauss(1, 0.05) * (2 if k % 8 == 0 else 1), 0.0, id="every eighth longer"
        ),
        pytest.param(lambda r, k, n: 60 * r.gauss(1, 0.05) * (1 + 0.3 * k / n), 0.06, id="slower and slower"),
        pytest.param(lambda r, k, n: 60 * r.gauss(1, 0.05) * (1 if k < n / 2 else 0.5), 0.25, id="twice as fast"),
    ],
)
def test_in_the_second_half_the_time_left_is_known_within_a_tenth(wall: Wall, most: float, rounds: int) -> None:
    assert share_off(wall, rounds) <= most


def test_one_night_away_is_not_expected_again_for_each_round_left() -> None:
    at = times(lambda r, k, n: 60.0 + (30_000.0 if k == 150 else 0.0), 200, 0)
    found = pace(at[:161], [0.0] * 161, 40, at[160])
    assert found.seconds_left is not None and found.seconds_left == pytest.approx(40 * 60, rel=0.1)


def test_a_recorded_run_is_foretold_in_its_second_half() -> None:
    story, table = past_runs.Story(rounds=200), SeriesTable()
    table.extend(map(series_row, past_runs.records(story)))
    end = story.committed_at(story.rounds)
    for k in range(story.middle + 12, story.rounds - 20):
        now = story.committed_at(k)
        left = pace_of(table, story.rounds, now, k).seconds_left
        assert left == pytest.approx(end - now, rel=0.1), k


def test_what_a_round_has_taken_so_far_is_not_to_come_and_one_that_is_overdue_is_about_to_end() -> None:
    at, tokens = [1000.0 + 60 * k for k in range(20)], [500.0 * k for k in range(20)]
    assert pace(at, tokens, 10, at[-1] + 20) == Pace(60.0, 500 / 60, 580.0)
    assert pace(at, tokens, 10, at[-1] + 120).seconds_left == 540.0
    assert pace(at, tokens, 10, at[-1] + 600) == Pace(60.0, 500 / 60, None), "it stands still"
    assert pace(at, tokens, 0, at[-1] + 600).seconds_left == 0.0
    assert pace(at, tokens, None, at[-1]).seconds_left is None


@pytest.mark.parametrize("at", [[], [5.0], [0.0, 0.0], [0.0, 60.0]])
def test_before_two_commits_nothing_is_known(at: list[float]) -> None:
    assert pace(at, [1.0] * len(at), 10, 100.0) == Pace()


def test_as_many_rounds_are_looked_at_as_were_alike() -> None:
    assert len(alike([60.0] * 500)) == MAX_WINDOW
    assert len(alike([60.0] * 20)) == 16 and len(alike([60.0] * 3)) == 3
    assert len(alike([60.0] * 100 + [30.0] * 16)) == 16
