"""The records of a run of which nothing is left but its segments: to read, as `RunRecords` of a coordinator
are."""

import threading
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from math import inf

from atoll.coordinator.history.record_archive import RecordArchive
from atoll.coordinator.history.record_codec import RecordView
from atoll.coordinator.history.series import SeriesTable
from atoll.coordinator.state_machine.events import CommitRecord, Decision, Note


class ArchivedRecords:
    """The records in an archive that nobody adds to. All calls block, and raise `ResourceError` where something
    cannot be read."""

    def __init__(self, archive: RecordArchive) -> None:
        self._archive = archive
        self._series: SeriesTable | None = None
        self._decisions: list[tuple[float, Decision]] | None = None
        self._turn = threading.Lock()

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

    def decisions(self) -> list[tuple[float, Decision]]:
        """Every decision against a member, with the time of the commit that it came before; looked for in all
        records at the first call."""
        with self._turn:
            if self._decisions is None:
                self._decisions = [
                    (view.committed_at, decision)
                    for first, last in self._archive.spans()
                    for view in self.views(range(first, last + 1))
                    for decision in view.decisions
                ]
            return self._decisions
