"""The journal: what was appended is read back as it was; tokens, snapshots, and calls from many threads."""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import pytest
from journal_contents import contents, note, numbered, record, reopened, sample

from atoll.comm.errors import ConfigError, Refused, ResourceError
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.service.journal import EVENT_TYPES, MAX_NOTES, Journal, JournalSnapshot
from atoll.coordinator.state_machine import events as ev

SOON = 20.0  # seconds; nothing here takes longer than a moment


def test_every_kind_of_event_is_read_back_as_it_was(tmp_path: Path) -> None:
    entries = [(i / 7, sample(kind)) for i, kind in enumerate(EVENT_TYPES.values())]
    with closing(Journal(tmp_path)) as journal:
        journal.append(entries, [])
        assert journal.events_since_snapshot == len(entries)
    assert reopened(tmp_path)[1] == entries


def test_commit_records_are_read_back_in_order(journal: Journal) -> None:
    records = [record(k) for k in (1, 2, 3)]
    journal.append([], records)
    assert journal.rounds() == records
    assert journal.rounds(since=2) == records[2:]
    changed = replace(records[1], reason="known better now")
    journal.append([], [changed])
    assert journal.rounds(since=1) == [changed, records[2]]


def test_commit_records_are_read_while_a_transaction_is_open(journal: Journal) -> None:
    records = [record(k) for k in (1, 2, 3)]
    journal.append([], records)
    with ThreadPoolExecutor(1) as others, journal._transaction():
        assert others.submit(journal.rounds, 1).result(SOON) == records[1:]


def test_a_write_does_not_wait_for_who_reads_commit_records_slowly(journal: Journal) -> None:
    records = [record(k) for k in (1, 2, 3)]
    journal.append([], records)
    slowly = journal.iter_rounds()
    assert next(slowly) == records[0]
    with ThreadPoolExecutor(1) as others:
        others.submit(journal.append, [], [record(4)]).result(SOON)
    assert list(slowly) == records[1:]
    assert journal.rounds(since=3) == [record(4)]


def test_notes_are_read_back_oldest_first_and_the_latest_are_kept(journal: Journal) -> None:
    journal.append([], [], [note(1), (2.0, ev.Note("of a node", NodeId("n1")))])
    assert journal.notes() == [note(1), (2.0, ev.Note("of a node", NodeId("n1")))]
    journal.append([], [], [note(k) for k in range(MAX_NOTES + 500)])
    latest = [note(k) for k in range(500, MAX_NOTES + 500)]
    assert journal.notes(3) == latest[-3:] and len(journal.notes()) == 200
    assert journal.notes(10**6) == latest
    journal.snapshot(0.0, b"")  # old notes leave the file here
    assert journal.notes(10**6) == latest
    assert journal._rows("select count(*) from notes") == [(MAX_NOTES,)]


def test_decisions_are_read_back_in_order_each_once(tmp_path: Path) -> None:
    first, second = (replace(sample(ev.Decision), number=k) for k in (1, 2))
    with closing(Journal(tmp_path)) as journal:
        journal.append([], [], [], [(1.0, first)])
        journal.append([], [], [], [(2.0, second)])
        journal.append([], [], [], [(2.0, second)])  # the disk took it, and said that it did not
        journal.snapshot(0.0, b"")
    with closing(Journal(tmp_path)) as journal:
        assert journal.decisions() == [(1.0, first), (2.0, second)]


def test_a_snapshot_stands_for_the_events_before_it(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        assert journal.restore() is None
        journal.append(numbered(1, 2), [record(1)], [note(1)])
        journal.snapshot(2.5, b"one and two")
        assert journal.events_since_snapshot == 0
        journal.append(numbered(3), [], [note(2)])
        assert journal.events_since_snapshot == 1
    one = JournalSnapshot(2.5, b"one and two")
    assert reopened(tmp_path) == (one, numbered(3), [record(1)], [note(1), note(2)])
    with closing(Journal(tmp_path)) as journal:
        journal.snapshot(4, b"three too")
    assert reopened(tmp_path) == (JournalSnapshot(4.0, b"three too"), [], [record(1)], [note(1), note(2)])


def test_only_its_owner_reads_the_runs_key_in_it(tmp_path: Path) -> None:
    def modes() -> set[int]:
        return {path.stat().st_mode & 0o777 for path in tmp_path.glob("journal.sqlite*")}

    journal = Journal(tmp_path)
    journal.set_meta("key", "secret")
    assert modes() == {0o600}
    journal.close()
    (tmp_path / "journal.sqlite").chmod(0o644)  # as an earlier version left it
    Journal(tmp_path).close()
    assert modes() == {0o600}


@pytest.mark.long
def test_the_files_stay_small_over_a_long_run(tmp_path: Path) -> None:
    body = random.Random(0).randbytes(100_000)
    largest = 0
    with closing(Journal(tmp_path)) as journal:
        for first in range(0, 20_000, 50):
            batch = [(float(k), sample(ev.ContributionReady)) for k in range(first, first + 50)]
            journal.append(batch, [], [note(k) for k in range(2)])
            if journal.events_since_snapshot >= 500:
                journal.snapshot(0.0, body)
            largest = max(largest, sum(f.stat().st_size for f in tmp_path.iterdir()))
        assert journal.events_since_snapshot == 0
        assert largest < 2_500_000
        journal.snapshot(0.0, bytes(5_000_000))
        for k in range(300):
            journal.append(numbered(k), [])
        assert (tmp_path / "journal.sqlite-wal").stat().st_size <= 1 << 20


def test_a_token_is_good_for_its_uses_and_its_time(journal: Journal) -> None:
    token = journal.issue_token("for ada", 2, expires=100.0)
    assert journal.redeem_token(token, 50.0).name == "for ada"
    assert journal.redeem_token(token, 50.0).name == "for ada"
    with pytest.raises(Refused, match="used up"):
        journal.redeem_token(token, 50.0)
    with pytest.raises(Refused, match="expired"):
        journal.redeem_token(journal.issue_token("", 1, 100.0), 101.0)
    with pytest.raises(Refused, match="not one of this run's"):
        journal.redeem_token("guess", 50.0)


def test_the_token_itself_is_not_in_the_file(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        token = journal.issue_token("", 1, 1e12)
    assert all(token.encode() not in f.read_bytes() for f in tmp_path.iterdir())


def test_calls_from_many_threads_take_turns(journal: Journal) -> None:
    token = journal.issue_token("", 100, 1e12)

    def write(k: int) -> None:
        journal.append(numbered(k), [], [note(k)])
        if k % 10 == 9:
            journal.snapshot(float(k), str(k).encode())

    def read() -> tuple[JournalSnapshot | None, list[int]]:
        return journal.restore(), [int(at) for at, _ in journal.events()]

    with ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(3) as others:
        writes = [writer.submit(write, k) for k in range(200)]
        reads = [others.submit(read) for _ in range(100)]
        joins = [others.submit(journal.redeem_token, token, 0.0) for _ in range(100)]
        for write_done in writes:
            write_done.result(30)
        for join_done in joins:
            join_done.result(30)
        for read_done in reads:
            taken, seen = read_done.result(30)
            assert taken is None or int(taken.body) == taken.at
            assert not seen or (seen[0] % 10 == 0 and seen == list(range(seen[0], seen[0] + len(seen))))
    assert len(journal.notes(1000)) == 200
    with pytest.raises(Refused, match="used up"):
        journal.redeem_token(token, 0.0)


def test_nobody_reads_the_middle_of_a_transaction(journal: Journal) -> None:
    journal.append(numbered(1), [record(1)], [note(1)])
    before = contents(journal)
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(ZeroDivisionError), journal._transaction():
            journal._db.execute("delete from events")
            reading = other.submit(contents, journal)
            wait([reading], 0.05)  # it would be done by now if it did not take turns
            raise ZeroDivisionError
        assert reading.result(30) == before


def test_a_second_coordinator_is_refused_and_an_invite_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run yet"):
        Journal(tmp_path, lock=False)
    with closing(Journal(tmp_path)):
        with pytest.raises(ResourceError, match="another coordinator"):
            Journal(tmp_path)
        Journal(tmp_path, lock=False).close()
    Journal(tmp_path).close()


def test_an_invite_in_the_coordinators_own_process_does_not_cost_it_its_locks(tmp_path: Path) -> None:
    invite = "import sys; from pathlib import Path; from atoll.coordinator.service.journal import Journal\n"
    invite += "j = Journal(Path(sys.argv[1]), lock=False); print(len(list(j.events()))); j.close()"

    def elsewhere() -> int:
        return int(
            subprocess.run([sys.executable, "-c", invite, tmp_path], stdout=subprocess.PIPE, check=True).stdout
        )

    with closing(Journal(tmp_path)) as journal:
        journal.append(numbered(1), [])
        Journal(tmp_path, lock=False).close()
        assert elsewhere() == 1  # closing, it would take the log away if it took itself for the last
        journal.append(numbered(2), [])
        assert elsewhere() == 2
