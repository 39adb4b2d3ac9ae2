"""The records of a run's older rounds, as segments; the newest are rows of the journal (`coordinator.service`).

    journal's rows --add--> segments on the disk --copy--> the operator's store, where one is given
                                   |
                                   +--shrink--> no more bytes than are to be kept, and none older: the oldest
                                                go, once they are in the store; where there is none, what was
                                                known of single members is dropped

A segment is of 128 rounds and is written once. Calls block: they are made in threads. One thread writes; others
may read meanwhile.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

import msgspec

from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.history import record_codec, segment
from atoll.coordinator.history.columns import BadColumn
from atoll.coordinator.history.record_codec import BadRecord, RecordView
from atoll.coordinator.history.record_store import FACTS, RecordStore, RunFacts, facts_of
from atoll.coordinator.history.segment import PREFIX_SIZE, Segment, SegmentHeader
from atoll.coordinator.history.series import F64, SERIES, Row, unpack_series
from atoll.coordinator.state_machine.events import CommitRecord, Note

HEAD_BYTES = 16 << 10  # that are read of a segment at first: most headers are within
# Fields of a record about single members that are dropped where room is short. Who was there and contributed how
# much stays, and what was decided, failed, or was to blame.
NOTHING_OF_MEMBERS: dict[str, Any] = {
    name: {}
    for name in (
        *(
            "bytes_up",
            "bytes_down",
            "shares",
            "rates",
            "norms",
            "scales",
            "samples",
            "digests",
            "losses",
            "figures",
            "exchange",
            "spent",
        ),
        *("lacking", "names"),
    )
}
Span = tuple[int, int]  # first and last round


class RecordArchive:
    """The segments in one or several places: where a segment is in more than one, the first place's is read."""

    def __init__(self, *stores: RecordStore) -> None:
        """What is added goes to the first."""
        self._stores = stores

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return " and ".join(store.place for store in self._stores)

    def facts(self) -> RunFacts | None:
        """The run's name and configs; None: there is no run. Raises `ConfigError`."""
        return next((facts for store in self._stores if (facts := facts_of(store)) is not None), None)

    def enter_config(self, run: str, digest: str, config: bytes) -> None:
        """Keep a config of the run, as JSON, under its digest. Raises `ConfigError` where another run is."""
        store = self._stores[0]
        facts = facts_of(store) or RunFacts(run)
        if facts.run != run:
            raise ConfigError(f"{store.place} has the records of the run {facts.run!r}: give another place")
        if digest not in facts.configs:
            configs = facts.configs | {digest: msgspec.Raw(config)}
            store.write(FACTS, RunFacts(run, configs, facts.owners).encode())

    def enter_owners(self, owners: Mapping[NodeId, str]) -> None:
        """Keep the owners of nodes; of those that are not named what is known stays. Raises `ConfigError` and
        `ResourceError`."""
        store = self._stores[0]
        facts = facts_of(store)
        if facts is not None and (known := {**facts.owners, **owners}) != facts.owners:
            store.write(FACTS, RunFacts(facts.run, facts.configs, known).encode())

    def spans(self) -> list[Span]:
        """First and last round of each segment, in order. Raises `ResourceError`."""
        names = {name for store in self._stores for name in store.names()}
        return sorted(span for name in names if (span := segment.rounds_of(name)) is not None)

    def add(
        self, run: str, rows: Sequence[Row], records: Sequence[bytes], notes: Sequence[tuple[float, Note]]
    ) -> None:
        """Write a segment of consecutive rounds (`segment.write`); one that is there already is written anew."""
        name = segment.name_of(int(rows[0][0]), int(rows[-1][0]))
        self._stores[0].write(name, segment.write(run, rows, records, notes))

    def read(self, span: Span) -> Segment:
        """A whole segment. Raises `ResourceError` where it is gone or damaged."""
        try:
            found = segment.read(self._bytes(span, 0, None))
            _demand(found.header, span)
            return found
        except BadRecord as error:
            raise ResourceError(self._damaged(span, error)) from None

    def header(self, span: Span) -> SegmentHeader:
        """What a segment's beginning says of it. Raises `ResourceError`."""
        head = self._bytes(span, 0, HEAD_BYTES)
        try:
            end = PREFIX_SIZE + segment.header_size(head[:PREFIX_SIZE])
            if end > len(head):
                head = self._bytes(span, 0, end)
            header = segment.read_header(head[PREFIX_SIZE:end])
            _demand(header, span)
            return header
        except BadRecord as error:
            raise ResourceError(self._damaged(span, error)) from None

    def records(self, since: int = 0) -> Iterator[CommitRecord]:
        """The records of the rounds after `since`, one segment at a time. Raises `ResourceError`."""
        for span in self.spans():
            if span[1] > since:
                try:
                    yield from self.read(span).decoded(since)
                except BadRecord as error:
                    raise ResourceError(self._damaged(span, error)) from None

    def views(self, rounds: Sequence[int]) -> Iterator[RecordView]:
        """The records of some rounds, ascending, that are here; each segment is read once. Raises
        `ResourceError`."""
        left = deque(rounds)
        for span in self.spans():
            while left and left[0] < span[0]:
                left.popleft()
            if not left or left[0] > span[1]:
                continue
            found = self.read(span).records
            while left and left[0] <= span[1]:
                try:
                    yield RecordView(found[left.popleft() - span[0]])
                except BadRecord as error:
                    raise ResourceError(self._damaged(span, error)) from None

    def notes(self, before: float = inf) -> Iterator[tuple[float, Note]]:
        """What was noted before a time (seconds since 1970), the newest first, with its times; a segment is read
        when its notes are asked for. Raises `ResourceError`."""
        spans = self.spans()
        newest = bisect_left(spans, before, key=self.committed_at) if before < inf else len(spans)
        for span in reversed(spans[: newest + 1]):
            yield from (found for found in reversed(self.read(span).notes) if found[0] < before)

    def committed_at(self, span: Span) -> float:
        """The time of the segment's last commit, seconds since 1970; its notes are older. Raises
        `ResourceError`."""
        [rows] = self._blocks([span])
        return float(rows[-1, SERIES.index("committed_at")])

    def series(self, since: int = 0) -> Iterator[F64]:
        """The figures of the rounds in each segment that has some after `since`. Raises `ResourceError`."""
        yield from self._blocks(span for span in self.spans() if span[1] > since)

    def _blocks(self, spans: Iterable[Span]) -> Iterator[F64]:
        for span in spans:
            try:
                rows = unpack_series(self.header(span).series, span[1] - span[0] + 1)
                if rows[:, SERIES.index("round")].tolist() != list(range(span[0], span[1] + 1)):
                    raise BadColumn("its figures are of other rounds")
                yield rows
            except BadColumn as error:
                raise ResourceError(self._damaged(span, error)) from None

    def _bytes(self, span: Span, start: int, end: int | None) -> bytes:
        name = segment.name_of(*span)
        for store in self._stores:
            try:
                return store.read(name, start, end)
            except FileNotFoundError:
                continue
        raise ResourceError(f"{self.place}: the records of rounds {span[0]} to {span[1]} are gone")

    def _damaged(self, span: Span, error: Exception) -> str:
        return f"{self.place}/{segment.name_of(*span)} is damaged ({error}): put a copy of it back, or remove it"


def _demand(header: SegmentHeader, span: Span) -> None:
    """Raise `BadRecord` unless the header is of the rounds that the segment is named for."""
    if (header.first, header.last) != span:
        raise BadRecord(f"it says that it has rounds {header.first} to {header.last}")


def copy_missing(local: RecordStore, remote: RecordStore) -> int:
    """Copy to `remote` what `local` has and it has not, segments in order; returns how many. Raises
    `ResourceError`; what was copied until then stays."""
    there, copied = set(remote.names()), 0
    for name in local.names():
        if name not in there:
            remote.write(name, local.read(name))
            copied += 1
    facts, theirs = facts_of(local), facts_of(remote)
    if facts is not None and (theirs is None or theirs.encode() != facts.encode()):
        remote.write(FACTS, facts.encode())
    return copied


def shrink(
    local: RecordStore, keep: int, remote: RecordStore | None = None, first: int = 0, most: float = inf
) -> None:
    """Have the local segments take no more than `keep` bytes, and have none whose last round is before the `first`
    that is kept. The oldest go first: they are removed if `remote` has them; without a `remote` they are written
    anew without what was known of single members, `most` of them at once, and nothing is lost of the run's curves.
    Raises `ResourceError`."""
    sizes = {name: local.size(name) for name in local.names()}
    excess, old = sum(sizes.values()) - keep, first > 0
    there = set(remote.names()) if remote is not None and (excess > 0 or old) else set()
    for name, size in sizes.items():
        old = old and ((span := segment.rounds_of(name)) is None or span[1] < first)
        if (excess <= 0 and not old) or most <= 0:
            return
        if name in there:
            local.remove(name)
            excess -= size
        elif remote is None and (smaller := _without_members(local.read(name))) is not None:
            local.write(name, smaller)
            most -= 1
            excess -= size - len(smaller)


def _without_members(data: bytes) -> bytes | None:
    """The segment without what was known of single members but their weights; None: it is so already, or
    damaged."""
    try:
        found = segment.read(data)
        if found.header.members:
            encoded = [record_codec.encode(replace(r, **NOTHING_OF_MEMBERS)) for r in found.decoded()]
            return segment.write(found.header.run, found.rows, encoded, found.notes, members=False)
    except (BadColumn, BadRecord):
        pass  # what is there of it may still be of use to somebody
    return None
