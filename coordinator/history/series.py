"""The figures of rounds that make curves, as columns over many rounds; and fewer points of them, for a picture.

A curve of 100,000 rounds on 1,000 points keeps what the eye would see of it: of each stretch of rounds the first,
least, largest and last value (the M4 aggregation: Jugel et al., VLDB 2014, section 4.2).
"""

from collections.abc import Iterable, Sequence
from math import nan

import numpy as np
from numpy.typing import NDArray

from atoll.coordinator.history.columns import pack, unpack
from atoll.coordinator.state_machine.events import CommitRecord

F64 = NDArray[np.float64]
SERIES = (
    *("round", "committed_at", "tokens", "train_loss", "val_loss", "members", "contributors", "attempts"),
    *("inner", "collect", "reduce", "commit", "bytes_up", "bytes_down", "void"),
)
LONGEST_PAUSE = 86_400.0  # seconds between two commits that a clock is believed
PHASES = ("inner", "collect", "reduce", "commit")  # seconds of a round
Row = tuple[float, ...]  # a number for each name of SERIES; NaN: not known


def series_row(record: CommitRecord) -> Row:
    """A record's figures."""
    known = not record.void
    return (
        record.round,
        record.committed_at,
        record.tokens,
        record.train_loss if known else nan,
        nan if record.val_loss is None else record.val_loss,
        len(record.members),
        len(record.contributors),
        record.attempts,
        *(record.seconds.get(phase, 0.0) for phase in PHASES),
        sum(record.bytes_up.values()),
        sum(record.bytes_down.values()),
        record.void,
    )


def pack_series(rows: Sequence[Row]) -> list[bytes]:
    """A column of each series."""
    return [pack(list(map(float, values))) for values in zip(*rows, strict=True)]


def unpack_series(columns: Sequence[bytes], count: int) -> F64:
    """The rows that `pack_series` packed, (count, len(SERIES)). Raises `BadColumn`."""
    return np.array([unpack(column, count) for column in columns], np.float64).T


class SeriesTable:
    """The rows of a run's rounds, in memory: 120 bytes a round."""

    def __init__(self) -> None:
        self._rows = np.empty((0, len(SERIES)))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def last(self) -> int:
        """The latest round; 0: none."""
        return int(self._rows[self._count - 1, 0]) if self._count else 0

    def extend(self, rows: F64 | Iterable[Row]) -> None:
        """Add rows, in the order of their rounds; one of a round that is there takes that one's place."""
        for row in rows:
            number = int(row[0])
            at = self._count
            if number <= self.last:
                at = int(np.searchsorted(self._rows[: self._count, 0], number))
                if self._rows[at, 0] != number:
                    continue
            elif at == len(self._rows):
                more = max(len(self._rows) // 8, 256)  # of a long run the room that is left over is megabytes
                self._rows = np.concatenate([self._rows, np.empty((more, len(SERIES)))])
            self._rows[at] = row
            self._count = max(self._count, at + 1)

    def rows(self, first: int, last: int) -> list[Row]:
        """The rows of these rounds that are there."""
        numbers = self._rows[: self._count, 0]
        start, end = np.searchsorted(numbers, (first, last + 1))
        return [tuple(row) for row in self._rows[start:end].tolist()]

    def column(self, name: str) -> F64:
        """One series, of all rounds."""
        return self.columns(name)[0]

    def columns(self, *names: str) -> list[F64]:
        """Several series, of all rounds that were there at one moment."""
        count = self._count
        return [self._rows[:count, SERIES.index(name)] for name in names]


def round_ages(committed_at: F64, now: float) -> F64:
    """Seconds since each of these commits, in order. Between two the clock may have been set: what seems longer
    than a day counts as one, and what seems to go backwards as nothing."""
    passed = np.clip(np.diff(committed_at, append=now), 0.0, LONGEST_PAUSE)
    ages: F64 = np.cumsum(passed[::-1])[::-1]
    return ages


def downsampled(x: F64, y: F64, points: int) -> tuple[F64, F64]:
    """About `points` points of the curve y over x (ascending), what is no number left out: see `kept_points`."""
    kept = kept_points(x, y, points)
    return x[kept], y[kept]


def kept_points(x: F64, y: F64, points: int) -> NDArray[np.int64]:
    """The places of about `points` points that make a picture of the curve y over x (ascending), what is no number
    left out: of each of points / 4 stretches of x of equal width the first, least, largest and last, in order.
    All, where there are no more."""
    known = np.flatnonzero(np.isfinite(y) & np.isfinite(x))
    x, y = x[known], y[known]
    if len(x) <= points:
        return known
    stretches = max(points // 4, 1)
    width = (x[-1] - x[0]) / stretches
    at = np.zeros(len(x))
    if width > 0:
        at = x - x[0]
        at /= width
        np.minimum(at, stretches - 1, out=at)
    of_stretch = at.astype(np.int32)
    starts = np.flatnonzero(np.diff(of_stretch, prepend=-1))
    ends = np.append(starts[1:], len(x)) - 1
    by_value = np.lexsort((y, of_stretch))
    kept: NDArray[np.int64] = known[np.unique(np.concatenate([starts, by_value[starts], by_value[ends], ends]))]
    return kept
