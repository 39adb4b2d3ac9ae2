"""How fast a run goes, and when it will be finished: from the times of its commits. Pure.

A round takes what lies between two commits, idle time included. What it will take is the mean of the latest
rounds: of as many as were alike, so that it follows a change of pace within a few rounds and is not moved by
chance. A round that took very long (a coordinator was away for a night) counts as no more than OUTLIER usual ones;
while one takes so long the run stands still, and nobody knows when it will be finished.
"""

from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median

from atoll.coordinator.history.series import SeriesTable
from atoll.coordinator.state_machine.events import CommitRecord

MIN_WINDOW, MAX_WINDOW = 8, 128  # latest rounds that are looked at
OUTLIER = 3.0  # times the median
STILL_SECONDS = 10.0  # without a commit, from which on a run may stand still
ALIKE = 0.05  # by which the medians of older and newer rounds may differ in any case
NORMAL_MAD = 1.4826  # a normal distribution's deviation over its median absolute one
MEDIAN_ERROR = 1.2533  # of a median, times that of a mean, for the same


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of a run at a moment; None: not known."""

    round_s: float | None = None  # seconds from one commit to the next
    tokens_per_s: float | None = None
    # Until the last commit; None also where the run's end is open, or it stands still
    seconds_left: float | None = None


def pace_of(series: SeriesTable, total: int, now: float, upto: int, newest: CommitRecord | None = None) -> Pace:
    """The pace at `now` (seconds since 1970) of a run of `total` rounds (0: its end is open), by its rounds up to
    `upto`, and `newest` after them."""
    rounds, at, tokens = series.columns("round", "committed_at", "tokens")
    end = int(rounds.searchsorted(upto, "right"))
    start = max(end - MAX_WINDOW - 1, 0)
    times, committed = at[start:end].tolist(), tokens[start:end].tolist()
    number = int(rounds[end - 1]) if end else 0
    if newest is not None:
        times, committed, number = [*times, newest.committed_at], [*committed, newest.tokens], newest.round
    return pace(times, committed, max(total - number, 0) if total else None, now)


def pace(committed_at: list[float], tokens: list[float], left: int | None, now: float) -> Pace:
    """The pace by the latest rounds' times of commit (seconds) and the run's tokens then; `left`: rounds to come,
    None: nobody knows. Times that are 0 are not known."""
    walls = [b - a for a, b in zip(committed_at, committed_at[1:], strict=False) if 0 < a <= b]
    if not walls:
        return Pace(seconds_left=0.0 if left == 0 else None)
    window = alike(walls)
    usual = median(window)
    round_s = fmean(min(wall, OUTLIER * usual) for wall in window) if usual else fmean(window)
    first = len(committed_at) - len(window) - 1
    spent = committed_at[-1] - committed_at[first]
    rate = max(tokens[-1] - tokens[first], 0.0) / spent if spent > 0 else None
    if left is None:
        return Pace(round_s, rate)
    since = max(now - committed_at[-1], 0.0)
    if left and since > max(OUTLIER * round_s, STILL_SECONDS):
        return Pace(round_s, rate)
    under_way = min(since, round_s) if left else 0.0
    return Pace(round_s, rate, left * round_s - under_way)


def alike(walls: list[float]) -> list[float]:
    """The latest rounds that took as long as each other, but for chance: as many as MIN_WINDOW, and twice as many
    again and again while those before are like them."""
    size = MIN_WINDOW
    while 2 * size <= min(len(walls), MAX_WINDOW):
        both, newer, older = walls[-2 * size :], walls[-size:], walls[-2 * size : -size]
        noise = MEDIAN_ERROR * spread(both) * sqrt(2 / size)
        if abs(median(older) - median(newer)) > max(ALIKE * median(both), 3 * noise):
            break
        size *= 2
    return walls[-size:]


def spread(values: list[float]) -> float:
    """The standard deviation of what are about normal numbers, by the differences of neighbours, which one change
    of their mean does not move (Rice, 1984, in a robust form)."""
    return NORMAL_MAD / sqrt(2) * median(abs(b - a) for a, b in zip(values, values[1:], strict=False))
