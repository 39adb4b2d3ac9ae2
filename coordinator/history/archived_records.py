"""The records of a run of which nothing is left but its segments: to read, as `RunRecords` of a coordinator
are."""

import threading
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from math import inf

import numpy as np

from atoll.coordinator.history.record_archive import RecordArchive, Span
from atoll.coordinator.history.record_codec import RecordView
from atoll.coordinator.history.series import F64, SeriesTable
from atoll.coordinator.state_machine.events import CommitRecord, Decision, Note


class ArchivedRecords:
    """The records in an archive that nobody adds to. All calls block, and raise `ResourceError` where something
    cannot be read."""

    def __init__(self, archive: RecordArchive) -> None:
        self._archive = archive
        self._series: SeriesTable | None = None
        self._decided: dict[Span, list[tuple[float, Decision]]] = {}
        self._turn = threading.RLock()

    def iter_rounds(self, since: int = 0, limit: int = 0) -> Generator[CommitRecord, None, None]:
        """The records of the rounds after `since`, in order; the first `limit` of them, 0: all."""
        every = self._archive.records(since)
        yield from islice(every, limit) if limit else every

    def views(self, rounds: Sequence[int]) -> Iterator[RecordView]:
        """The records of some rounds, ascending, as far as they are there."""
        return self._archive.views(rounds)

    def series(self) -> SeriesTable:
        """The figures of all rounds; read at the first call."""
        with self._turn:
            if self._series is None:
                table = SeriesTable()
                for rows in self._archive.series():
                    table.extend(rows)
                self._series = table
            return self._series

    def iter_notes(self, before: float = inf) -> Iterator[tuple[float, Note]]:
        """What was noted before a time (seconds since 1970), the newest first, with its times."""
        return self._archive.notes(before)

    def decisions(self, since: float = -inf, until: float = inf) -> list[tuple[float, Decision]]:
        """Every decision against a member from `since` to `until` (seconds since 1970), with the time of the
        commit that it came before. A segment's records are looked through once, when they are asked for."""
        rounds, times = self.series().columns("round", "committed_at")
        with self._turn:
            return [
                (at, decision)
                for span in self._archive.spans()
                if _overlap(times[slice(*np.searchsorted(rounds, (span[0], span[1] + 1)))], since, until)
                for at, decision in self._of_segment(span)
                if since <= at <= until
            ]

    def _of_segment(self, span: Span) -> list[tuple[float, Decision]]:
        if span not in self._decided:
            views = self.views(range(span[0], span[1] + 1))
            self._decided[span] = [(view.committed_at, decision) for view in views for decision in view.decisions]
        return self._decided[span]


def _overlap(times: F64, since: float, until: float) -> bool:
    """Whether any of a segment's commits came from `since` to `until`; so also where none is known."""
    return not len(times) or bool(times.min() <= until and times.max() >= since)
