"""All commit records of a run, from its first round on: the newest are rows of the journal, older ones segments in
its state directory, the oldest perhaps only in the operator's store.

`maintain` moves rows into segments, copies those to the store, and keeps to the room that there is. All of it
blocks for a while, and is made in a thread, by nobody else meanwhile; records and series may be read at the same
time.
"""

import logging
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from types import MappingProxyType

from atoll.comm.errors import AtollError, ResourceError
from atoll.comm.ids import NodeId
from atoll.coordinator.history.record_archive import RecordArchive, copy_missing, shrink
from atoll.coordinator.history.record_codec import RecordView
from atoll.coordinator.history.record_store import LocalStore, RecordStore
from atoll.coordinator.history.segment import ROUNDS
from atoll.coordinator.history.series import SERIES, SeriesTable, round_ages, series_row
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.state_machine.events import CommitRecord, Decision, Note
from atoll.coordinator.state_machine.rollback import MAX_PAST_COMMITS

log = logging.getLogger("atoll.coordinator")
FOLDER = "records"  # in the state directory
ROWS_KEPT = MAX_PAST_COMMITS + ROUNDS  # records that stay rows: of these rounds some may yet be void
DEFAULT_ROOM = 1.5e9  # bytes of segments that are kept
MAX_REWRITTEN = 4  # segments at once, each of which takes a second with a thousand members


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What the operator wants of old records."""

    room: float = DEFAULT_ROOM  # bytes of segments in the state directory, at most
    age: float = inf  # seconds since the last commit of a segment there, at most (`round_ages`)
    store: RecordStore | None = None  # where they are copied to


class RunRecords:
    """The records of one run, to read, and to look after."""

    def __init__(
        self, journal: Journal, state_dir: Path, run: str, options: RecordOptions = RecordOptions()
    ) -> None:
        self._journal, self._run, self._options = journal, run, options
        self._local = LocalStore(state_dir / FOLDER)
        self.archive = RecordArchive(self._local, *filter(None, [options.store]))
        self._series: SeriesTable | None = None
        self._turn, self._loading = threading.Lock(), threading.Lock()

    def iter_rounds(self, since: int = 0, limit: int = 0) -> Generator[CommitRecord, None, None]:
        """The records of the rounds after `since`, in order; the first `limit` of them, 0: all. Raises
        `ResourceError` where some cannot be read."""
        every = self._from(since)
        yield from islice(every, limit) if limit else every

    def _from(self, since: int) -> Generator[CommitRecord, None, None]:
        while True:
            before = since
            if since + 1 < self._journal.round_span()[0]:
                for record in self.archive.records(since):
                    yield record
                    since = record.round
            with closing(self._journal.iter_rounds(since)) as rows:
                first = next(rows, None)
                if first is not None and first.round > since + 1 and since > before:
                    continue  # rows became a segment after these were read: they are there now
                if first is not None:
                    yield first
                yield from rows
            return

    def views(self, rounds: Sequence[int]) -> Generator[RecordView, None, None]:
        """The records of some rounds, ascending, as far as they are there. Raises `ResourceError`."""
        first = self._journal.round_span()[0]
        yield from self.archive.views([number for number in rounds if number < first])
        for number in rounds:
            if number >= first:
                for _, body in self._journal.iter_encoded_rounds(number - 1, 1):
                    view = RecordView(body)
                    if view.round == number:
                        yield view

    def iter_notes(self, before: float = inf) -> Generator[tuple[float, Note], None, None]:
        """What was noted before a time (seconds since 1970), the newest first, with its times. Raises
        `ResourceError`."""
        oldest = before
        with closing(self._journal.iter_notes(before)) as found:
            for oldest, note in found:
                yield oldest, note
        yield from self.archive.notes(oldest)

    def decisions(self, since: float = -inf, until: float = inf) -> list[tuple[float, Decision]]:
        """Every decision against a member from `since` to `until` (seconds since 1970) with its time, in order."""
        return [(at, decision) for at, decision in self._journal.decisions() if since <= at <= until]

    def series(self) -> SeriesTable:
        """The figures of all rounds so far; read at the first call. Raises `ResourceError`."""
        with self._loading:
            if self._series is None:
                table = SeriesTable()
                for rows in self.archive.series():
                    table.extend(rows)
                table.extend(self._journal.iter_series(table.last))
                with self._turn:  # whoever adds a record waits for no more than those that came meanwhile
                    table.extend(self._journal.iter_series(table.last))
                    self._series = table
            return self._series

    def add(self, record: CommitRecord) -> None:
        """Take in a record that the journal has."""
        with self._turn:
            if self._series is not None:
                self._series.extend([series_row(record)])

    def maintain(self, owners: Mapping[NodeId, str] = MappingProxyType({}), now: float = 0.0) -> None:
        """Do what is due at `now`, seconds since 1970; `owners` of the nodes are kept beside their records. What
        a store or a disk does not take is tried again the next time, and said in the log."""
        try:
            while self._move_block():
                pass
            self.archive.enter_owners(owners)
            if self._options.store is not None:
                copy_missing(self._local, self._options.store)
            first = self._first_kept(now)
            shrink(self._local, int(self._options.room), self._options.store, first, MAX_REWRITTEN)
        except AtollError as error:
            log.warning(f"records are not archived now, it is tried again: {error}")

    def _first_kept(self, now: float) -> int:
        """The first round that is not too old at `now`, seconds since 1970; 0: every round is kept."""
        if self._options.age == inf:
            return 0
        try:
            rounds, committed_at = self.series().columns("round", "committed_at")
        except ResourceError as error:  # their room is bounded nevertheless
            log.warning(f"how old records are is not known: {error}")
            return 0
        young = rounds[round_ages(committed_at, now) <= self._options.age]
        return int(young[0]) if len(young) else self.series().last + 1

    def _move_block(self) -> bool:
        """Move a segment's records out of the journal, if they are old enough."""
        first, newest = self._journal.round_span()
        last = -(-first // ROUNDS) * ROUNDS
        if not first or newest - last < ROWS_KEPT:
            return False
        encoded = [body for _, body in self._journal.iter_encoded_rounds(first - 1, last - first + 1)]
        series = self.series()
        rows, before = series.rows(first, last), series.rows(first - 1, first - 1)
        at = SERIES.index("committed_at")
        since = before[0][at] if before else 0.0
        self.archive.add(self._run, rows, encoded, self._journal.notes_between(since, rows[-1][at]))
        self._journal.drop_rounds(last)
        return True
