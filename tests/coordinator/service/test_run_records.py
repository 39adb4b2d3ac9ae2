"""A run's records over its whole life: rows of the journal, then segments, each round once, at any moment."""

from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest
from journal_contents import note
from long_runs import long_record

from atoll.comm.errors import ResourceError
from atoll.coordinator.history.record_store import FACTS, LocalStore
from atoll.coordinator.history.segment import ROUNDS
from atoll.coordinator.history.series import Row
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.run_records import FOLDER, ROWS_KEPT, RecordOptions, RunRecords

LAST = 2 * ROUNDS + ROWS_KEPT + 20
ALL = [long_record(k, 2) for k in range(1, LAST + 1)]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path)) as opened:
        opened.append([], ALL, [(record.committed_at - 1, note(record.round)[1]) for record in ALL])
        yield opened


def test_old_rows_become_segments_and_every_round_is_read_once(journal: Journal, tmp_path: Path) -> None:
    records = RunRecords(journal, tmp_path, "reef")
    assert list(records.iter_rounds()) == ALL
    records.maintain()
    assert records.archive.spans() == [(1, ROUNDS), (ROUNDS + 1, 2 * ROUNDS)]
    assert journal.round_span() == (2 * ROUNDS + 1, LAST)
    assert list(records.iter_rounds()) == ALL
    assert list(records.iter_rounds(ROUNDS + 3, 2)) == ALL[ROUNDS + 3 : ROUNDS + 5]
    assert list(records.iter_rounds(2 * ROUNDS - 1, 3)) == ALL[2 * ROUNDS - 1 : 2 * ROUNDS + 2]
    assert list(records.iter_rounds(LAST)) == []
    notes = [of[1] for span in records.archive.spans() for of in records.archive.read(span).notes]
    assert notes == [note(k)[1] for k in range(1, 2 * ROUNDS + 1)]


def test_rows_that_become_a_segment_while_they_are_read_are_read_once(journal: Journal, tmp_path: Path) -> None:
    records = RunRecords(journal, tmp_path, "reef")
    slowly = records.iter_rounds()
    assert [next(slowly), next(slowly)] == ALL[:2]
    records.maintain()
    assert list(slowly) == ALL[2:]
    again = records.iter_rounds()
    assert next(again) == ALL[0]  # of a segment
    more = [long_record(k, 2) for k in range(LAST + 1, LAST + ROUNDS + 1)]
    journal.append([], more)
    records.maintain()
    assert list(again) == ALL[1:] + more


def test_a_crash_between_the_segment_and_the_rows_end_loses_and_doubles_nothing(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = RunRecords(journal, tmp_path, "reef")
    with monkeypatch.context() as dying:
        dying.setattr(journal, "drop_rounds", lambda last: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            records.maintain()
    assert records.archive.spans() == [(1, ROUNDS)] and journal.round_span() == (1, LAST)
    after = RunRecords(journal, tmp_path, "reef")
    assert list(after.iter_rounds()) == ALL
    after.maintain()
    assert list(after.iter_rounds()) == ALL and journal.round_span()[0] == 2 * ROUNDS + 1


def test_the_series_have_every_round_after_a_restart_too(journal: Journal, tmp_path: Path) -> None:
    first = RunRecords(journal, tmp_path, "reef")
    assert list(first.series().column("tokens")) == [r.tokens for r in ALL]
    first.maintain()
    second = RunRecords(journal, tmp_path, "reef")
    assert list(second.series().column("tokens")) == [r.tokens for r in ALL]
    newest = long_record(LAST + 1, 2)
    second.add(newest)
    assert second.series().last == LAST + 1


def test_a_store_gets_what_is_old_and_one_that_fails_is_tried_again(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(tmp_path / "far")
    records = RunRecords(journal, tmp_path, "reef", RecordOptions(room=0, store=store))

    def fails(name: str, data: bytes) -> None:
        raise ResourceError("far is full")

    with monkeypatch.context() as full:
        full.setattr(store, "write", fails)
        records.maintain()
    assert "tried again: far is full" in caplog.text and len(records.archive.spans()) == 2
    records.maintain()
    assert store.names() and not LocalStore(tmp_path / FOLDER).names()
    assert list(records.iter_rounds()) == ALL


def test_of_records_beyond_an_age_what_is_known_of_single_members_is_dropped(
    journal: Journal, tmp_path: Path
) -> None:
    age = ALL[-1].committed_at - ALL[ROUNDS - 1].committed_at
    records = RunRecords(journal, tmp_path, "reef", RecordOptions(age=age + 1000.0))
    records.maintain(now=ALL[-1].committed_at + 1000.0)
    assert list(records.iter_rounds()) == ALL
    records.maintain(now=ALL[-1].committed_at + 1001.0)
    found = list(records.iter_rounds())
    assert [bool(r.spent) for r in found] == [False] * ROUNDS + [True] * (len(ALL) - ROUNDS)
    assert found[ROUNDS:] == ALL[ROUNDS:] and found[0].contributors == ALL[0].contributors


def test_a_store_whose_facts_are_spoiled_is_tried_again_too(
    journal: Journal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(tmp_path / "far")
    store.write(FACTS, b"half a fi")
    records = RunRecords(journal, tmp_path, "reef", RecordOptions(store=store))
    records.maintain()
    assert "tried again" in caplog.text and "run.json is spoiled" in caplog.text
    assert len(store.names()) == 2, "what can be copied is"


def test_some_records_are_looked_at_wherever_they_lie(journal: Journal, tmp_path: Path) -> None:
    records = RunRecords(journal, tmp_path, "reef")
    wanted = [1, 2, ROUNDS, ROUNDS + 1, 2 * ROUNDS, 2 * ROUNDS + 1, LAST, LAST + 1]
    for _ in range(2):
        assert [view.round for view in records.views(wanted)] == wanted[:-1]
        found = [view.of_nodes("losses") for view in records.views([3, LAST - 1])]
        assert found == [ALL[2].losses, ALL[LAST - 2].losses]
        records.maintain()


def test_notes_are_read_from_the_newest_on_each_once_though_old_ones_are_in_segments_alone(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = RunRecords(journal, tmp_path, "reef")
    whole = [(record.committed_at - 1, note(record.round)[1]) for record in reversed(ALL)]
    assert list(records.iter_notes()) == whole
    records.maintain()
    assert list(records.iter_notes()) == whole
    monkeypatch.setattr("atoll.coordinator.service.journal.MAX_NOTES", LAST - ROUNDS)
    journal.snapshot(1.0, b"")
    assert len(list(journal.iter_notes(1e12))) == LAST - ROUNDS
    assert list(records.iter_notes()) == whole
    for number in (1, 5, ROUNDS, ROUNDS + 1, 2 * ROUNDS + 7, LAST):
        before = ALL[number - 1].committed_at
        assert next(records.iter_notes(before))[1] == note(number)[1], number
    assert list(records.iter_notes(ALL[0].committed_at - 1)) == []


def test_who_adds_a_record_does_not_wait_for_those_who_read_all_of_them(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, newest = RunRecords(journal, tmp_path, "reef"), long_record(LAST + 1, 2)
    read = journal.iter_series
    calls = list[int]()

    def slow(since: int) -> Generator[Row, None, None]:
        """While the first rows are read, a round is committed, and told by another thread."""
        calls.append(since)
        if len(calls) == 1:
            journal.append([], [newest])
            adding = Thread(target=records.add, args=(newest,))
            adding.start()
            adding.join(10)
            assert not adding.is_alive()
        return read(since)

    monkeypatch.setattr(journal, "iter_series", slow)
    assert records.series().last == LAST + 1 and len(records.series()) == LAST + 1 and len(calls) == 2


def test_a_clock_that_is_far_ahead_makes_no_record_old(journal: Journal, tmp_path: Path) -> None:
    records = RunRecords(journal, tmp_path, "reef", RecordOptions(age=60 * 86_400.0))
    records.maintain(now=ALL[-1].committed_at + 3e8)
    assert list(records.iter_rounds()) == ALL


def test_where_the_age_of_records_is_not_known_they_take_no_more_room_nevertheless(
    journal: Journal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local, far = LocalStore(tmp_path / FOLDER), LocalStore(tmp_path / "far")
    RunRecords(journal, tmp_path, "reef", RecordOptions()).maintain()
    damaged = local.names()[0]
    local.write(damaged, b"no segment")
    RunRecords(journal, tmp_path, "reef", RecordOptions(room=0, age=1.0, store=far)).maintain()
    assert "how old records are is not known" in caplog.text and len(local.names()) < 2
