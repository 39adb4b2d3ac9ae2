"""The journal: what was appended is read back as it was, whatever becomes of the process, the disk or the file."""

import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError, ConfigError, Refused, ResourceError
from atoll.comm.ids import NodeId
from atoll.coordinator.service.journal import (
    EVENT_TYPES,
    FORMAT_VERSION,
    MAX_NOTES,
    Journal,
    JournalFull,
    JournalSnapshot,
    _sealed,
)
from atoll.coordinator.service.journaled_machine import JournaledMachine, encode
from atoll.coordinator.state_machine import events as ev

PLAIN = {int: 3, float: 0.1, str: "naïve", bytes: b"\x00\xff" * 8, bool: True}
FRAME, HEADER = 4096 + 24, 32  # bytes, of SQLite's write-ahead log
SOON = 20.0  # seconds; nothing here takes longer than a moment


def sample(kind: Any) -> Any:
    """Some value of this type."""
    kind = getattr(kind, "__supertype__", kind)  # of a NewType
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, type):
        return kind(**{name: sample(hint) for name, hint in get_type_hints(kind).items()})
    inner = [sample(arg) for arg in get_args(kind) if arg not in (..., types.NoneType)]
    origin = get_origin(kind)
    if origin is tuple:
        return tuple(inner)
    if origin is dict:
        return dict([inner])
    assert origin in (Union, types.UnionType), f"no sample of {kind}"
    return inner[0]


def numbered(*numbers: int) -> list[tuple[float, ev.Event]]:
    return [(float(k), ev.Started(k)) for k in numbers]


def note(k: int, length: int = 0) -> tuple[float, ev.Note]:
    return float(k), ev.Note(f"note {k} " + "." * length)


def record(k: int) -> ev.CommitRecord:
    some: ev.CommitRecord = sample(ev.CommitRecord)
    return replace(some, round=k)


Contents = tuple[
    JournalSnapshot | None, list[tuple[float, ev.Event]], list[ev.CommitRecord], list[tuple[float, ev.Note]]
]


def contents(journal: Journal) -> Contents:
    return journal.restore(), list(journal.events()), journal.rounds(), journal.notes(MAX_NOTES)


def reopened(directory: Path) -> Contents:
    with closing(Journal(directory)) as journal:
        return contents(journal)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path)) as journal:
        yield journal


# -- what it keeps


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


# -- tokens and turns


def test_a_token_is_good_for_its_uses_and_its_time(journal: Journal) -> None:
    token = journal.issue_token("for ada", 2, expires=100.0)
    assert journal.redeem_token(token, 50.0) == "for ada"
    assert journal.redeem_token(token, 50.0) == "for ada"
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


# -- a disk that says no


@contextmanager
def no_room(journal: Journal) -> Iterator[None]:
    """SQLITE_FULL: the file may not grow."""
    [(pages,)] = journal._db.execute("pragma page_count").fetchall()
    [(unlimited,)] = journal._db.execute("pragma max_page_count").fetchall()
    journal._db.execute(f"pragma max_page_count = {pages}")
    try:
        yield
    finally:
        journal._db.execute(f"pragma max_page_count = {unlimited}")


@contextmanager
def failing_writes(journal: Journal) -> Iterator[None]:
    """SQLITE_IOERR: the kernel refuses the log's next bytes, in the middle of a frame."""
    size = journal._path.with_name("journal.sqlite-wal").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))  # SIGXFSZ is ignored in Python
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(journal: Journal) -> Iterator[None]:
    """SQLITE_READONLY."""
    journal._db.execute("pragma query_only = 1")
    try:
        yield
    finally:
        journal._db.execute("pragma query_only = 0")


@contextmanager
def taken(journal: Journal) -> Iterator[None]:
    """SQLITE_BUSY: somebody's shell holds a transaction open."""
    journal._db.execute("pragma busy_timeout = 10")
    with closing(sqlite3.connect(journal._path, isolation_level=None)) as shell:
        shell.execute("begin immediate")
        yield
        shell.execute("rollback")


CALLS: dict[str, Callable[[Journal], object]] = {
    "append": lambda journal: journal.append(numbered(*range(3, 500)), [record(2)], [note(2, 20_000)]),
    "snapshot": lambda journal: journal.snapshot(2.0, bytes(100_000)),
    "set_meta": lambda journal: journal.set_meta("config", "x" * 20_000),
    "issue_token": lambda journal: journal.issue_token("x" * 20_000, 1, 1e12),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "fault, said",
    [
        (no_room, "database or disk is full"),
        (failing_writes, "disk I/O error"),
        (read_only, "attempt to write a readonly database"),
        (taken, "database is locked"),
    ],
)
def test_what_a_disk_refuses_is_not_kept_and_may_be_tried_again(
    fault: Callable[[Journal], AbstractContextManager[None]], said: str, call: str, tmp_path: Path
) -> None:
    """The same calls with and without faults leave the same journal."""
    with closing(Journal(tmp_path / "faulty")) as journal, closing(Journal(tmp_path / "well")) as well:
        for each in (journal, well):
            each.append(numbered(1, 2), [record(1)], [note(1)])
        with fault(journal):
            for _ in range(3):
                with pytest.raises(
                    JournalFull, match=f"cannot be written now .{said}.*, and nothing of this call is kept"
                ):
                    CALLS[call](journal)
                assert not journal._db.in_transaction
                assert contents(journal) == contents(well)  # it can still be read
        for each in (journal, well):
            CALLS[call](each)
            each.append(numbered(500), [])
        assert contents(journal) == contents(well)
    assert reopened(tmp_path / "faulty") == reopened(tmp_path / "well")


def test_a_snapshot_makes_room_in_a_full_journal(journal: Journal) -> None:
    journal.append(numbered(*range(1000)), [])
    with no_room(journal):
        with pytest.raises(JournalFull):
            journal.append(numbered(*range(1000)), [])
        journal.snapshot(1.0, bytes(20_000))
        journal.append(numbered(7), [])
    assert contents(journal)[:2] == (JournalSnapshot(1.0, bytes(20_000)), numbered(7))


def test_damage_found_while_it_runs_is_a_sentence(journal: Journal) -> None:
    journal.append(numbered(*range(1000)), [])
    journal._db.execute("pragma wal_checkpoint(truncate)")
    with open(journal._path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (journal._path.stat().st_size - 4096))
    journal._db.execute("pragma shrink_memory")
    for call in (
        lambda: list(journal.events()),
        lambda: journal.append(numbered(1), []),
        lambda: journal.meta("x"),
    ):
        with pytest.raises(ConfigError, match="journal.sqlite is damaged .*put a copy of its directory back"):
            call()


# -- files that are not read


def text(path: Path) -> None:
    path.write_text("not a database, and long enough to be looked at" * 50)


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript("create table events (id integer); insert into events values (1)")


def foreign_with_a_log(path: Path) -> None:
    with closing(sqlite3.connect(path.with_name("theirs"))) as db:
        db.executescript("pragma journal_mode=wal; create table events (id); insert into events values (1)")
        for suffix in ("", "-wal"):
            shutil.copy(f"{path.with_name('theirs')}{suffix}", f"{path}{suffix}")


def format_1(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        for table in ("meta", "events", "rounds", "tokens"):
            db.execute(f"create table {table} (key, value)")


def format_99(path: Path) -> None:
    Journal(path.parent).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("pragma user_version = 99")


@pytest.mark.parametrize(
    "make, sentence",
    [
        (text, "is not a coordinator's journal .*not a database.*: move it away"),
        (foreign, "is not a coordinator's journal .a database of another program.: move it away"),
        (foreign_with_a_log, "is not a coordinator's journal .a database of another program.: move it away"),
        (format_1, f"has format 1, this version of atoll reads {FORMAT_VERSION}: start the version"),
        (format_99, f"has format 99, this version of atoll reads {FORMAT_VERSION}: start the version"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(
    make: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    make(tmp_path / "journal.sqlite")
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    for lock in (True, True, False):  # twice: a refusal gives the directory free again
        with pytest.raises(ConfigError, match=sentence):
            Journal(tmp_path, lock)
    assert before.items() <= {f.name: f.read_bytes() for f in tmp_path.iterdir()}.items()


def test_an_empty_file_is_a_fresh_journal(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").touch()
    (tmp_path / "journal.sqlite.new").write_text("a creation that was cut short")
    assert reopened(tmp_path) == (None, [], [], [])
    assert {f.name for f in tmp_path.iterdir()} == {"journal.sqlite", "lock"}


def test_a_log_without_its_file_is_not_played_into_a_fresh_one(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "a")) as journal:
        journal.append(numbered(1), [])
        (tmp_path / "b").mkdir()
        shutil.copy(tmp_path / "a" / "journal.sqlite-wal", tmp_path / "b")
    with pytest.raises(ConfigError, match="journal.sqlite-wal is there without its journal.sqlite: put that back"):
        Journal(tmp_path / "b")
    assert (tmp_path / "b" / "journal.sqlite-wal").stat().st_size > 0


def test_a_state_directory_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot use the state directory"):
        Journal(tmp_path / "file")


@pytest.mark.parametrize(
    "kind, body, why",
    [("Teleported", b"{}", "no such kind"), ("Started", b"{}", "missing"), ("Tick", b"}", "JSON")],
)
def test_an_event_of_another_version_is_named(journal: Journal, kind: str, body: bytes, why: str) -> None:
    journal.append(numbered(1), [])
    values = _sealed(2.0, kind, body)
    journal._db.execute("insert into events (at, kind, body, digest) values (?, ?, ?, ?)", values)
    with pytest.raises(
        ConfigError, match=rf"event 2 \({kind}\) .* cannot be understood \(.*{why}.*another version"
    ):
        list(journal.events())


def test_joins_and_snapshots_from_before_there_were_certificates_are_understood(journal: Journal) -> None:
    config = RunConfig(name="reef")
    joined = ev.Joined(NodeId("n1"), 1, "ada", "10.0.0.1:7", "s" * 32)
    core = JournaledMachine(config, journal)
    core.adopt(batch := core.prepare([ev.Started(1), joined], 1.0))
    state = msgspec.msgpack.decode(encode(batch.state))
    del state["config"]["security"], state["members"]["here"]["n1"]["pin"]
    journal.snapshot(1.0, msgspec.msgpack.encode(state))
    body = msgspec.to_builtins(replace(joined, node=NodeId("n2")))
    del body["pin"]
    row = _sealed(2.0, "Joined", msgspec.json.encode(body))
    journal._db.execute("insert into events (at, kind, body, digest) values (?, ?, ?, ?)", row)
    here = JournaledMachine(config, journal).state.members.here
    assert {node: member.pin for node, member in here.items()} == {"n1": "", "n2": ""}


@pytest.mark.parametrize(
    "change, sentence",
    [
        ("update snapshot set body = x'00'", "the snapshot does not match its digest"),
        ("update snapshot set at = 7", "the snapshot does not match its digest"),
        ("update events set at = at + 1 where seq = 2", "event 2 does not match its digest"),
        ("update events set kind = 'Tick' where seq = 3", "event 3 does not match its digest"),
        ("delete from events where seq = 2", "event 2 is missing"),
        ("update rounds set body = x'00'", "the record of round 1 does not match its digest"),
        ("update notes set at = 'noon'", "note 1 does not match its digest"),
    ],
)
def test_a_row_that_is_not_as_it_was_written_is_named(journal: Journal, change: str, sentence: str) -> None:
    journal.snapshot(0.0, b"state")
    journal.append(numbered(1, 2, 3), [record(1)], [note(1)])
    journal._db.execute(change)
    with pytest.raises(ConfigError, match=f"is damaged .{sentence}.*: put a copy"):
        contents(journal)


def test_a_table_that_is_not_as_it_was_made_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    path = tmp_path / "journal.sqlite"
    path.write_bytes(path.read_bytes().replace(b"notes (seq integer primary", b"notes (seq integer private"))
    with pytest.raises(ConfigError, match="is damaged .its tables are not as they were made"):
        Journal(tmp_path)


def test_damage_to_what_is_not_read_yet_is_found_at_the_opening(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.issue_token("", 1, 1e12)
        [(page,)] = journal._rows("select rootpage from sqlite_master where name = 'tokens'")
    with open(tmp_path / "journal.sqlite", "r+b") as file:
        file.seek((page - 1) * 4096 + 5)  # where its rows begin
        file.write(b"\xff")
    with pytest.raises(ConfigError, match="is damaged .*: put a copy") as refusal:
        Journal(tmp_path)
    assert "\n" not in str(refusal.value)


def test_flipped_and_missing_bytes_are_refused_or_do_no_harm(tmp_path: Path) -> None:
    """No damage to the file changes what is read from it."""
    rng = random.Random(1)
    with closing(Journal(tmp_path)) as journal:
        journal.snapshot(0.0, rng.randbytes(5000))
        journal.append(numbered(*range(100)), [record(k) for k in range(5)], [note(k) for k in range(20)])
        whole = contents(journal)
    path = tmp_path / "journal.sqlite"
    good = path.read_bytes()
    refused = 0
    for at in (*rng.sample(range(len(good)), 150), *rng.sample(range(1, 100), 20)):
        for bad in (good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :], good[:at]):
            path.write_bytes(bad)
            try:
                assert reopened(tmp_path) == whole
            except AtollError:
                refused += 1
    assert refused > 200  # every truncation is, and most flips


# -- power cuts and SIGKILL


@pytest.mark.parametrize("seed", range(3))
def test_a_log_cut_anywhere_holds_the_first_calls_whole(seed: int, tmp_path: Path) -> None:
    """`states[k]` is what the journal held after call k: a cut leaves one of them, no cut the last."""
    rng = random.Random(seed)
    states: list[Contents] = []
    with closing(Journal(tmp_path / "a")) as journal:
        journal._db.execute("pragma wal_autocheckpoint = 0")
        calls = rng.randrange(20, 40)
        for k in range(100 + calls):
            if rng.random() < 0.15:
                journal.snapshot(float(k), rng.randbytes(rng.choice((10, 10_000))))
            else:
                journal.append(
                    numbered(*range(k, k + rng.randrange(1, 6))), [record(k)], [note(k, rng.randrange(5000))]
                )
            if k == 99:  # from here on the log is written over from its beginning
                journal._db.execute("pragma wal_checkpoint(full)")
                states = []
            states.append(contents(journal))
        assert len(states) == calls + 1
        file, log = ((tmp_path / "a" / f"journal.sqlite{suffix}").read_bytes() for suffix in ("", "-wal"))

    def found(damaged: bytes) -> int:
        """After which call the journal with this log is."""
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "journal.sqlite").write_bytes(file)
        (tmp_path / "b" / "journal.sqlite-wal").write_bytes(damaged)
        try:
            return states.index(reopened(tmp_path / "b"))
        finally:
            shutil.rmtree(tmp_path / "b")

    boundaries = range(HEADER, len(log) + 1, FRAME)
    assert found(log) == calls and found(log + rng.randbytes(10_000)) == calls
    cuts = sorted({0, *boundaries[:200], *(rng.randrange(len(log)) for _ in range(50))})
    after = [found(log[:cut]) for cut in cuts]
    assert after == sorted(after) and set(after) == set(range(calls + 1))
    for cut in rng.sample(cuts, 40):
        assert found(log[:cut] + rng.randbytes(len(log) - cut)) == after[cuts.index(cut)]
    for at in rng.sample(range(len(log)), 40):
        found(log[:at] + bytes([log[at] ^ 0xFF]) + log[at + 1 :])


WRITER = """
import sys
from pathlib import Path
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.service.journal import Journal
journal = Journal(Path(sys.argv[1]))
taken = journal.restore()
last = (0 if taken is None else int(taken.body)) + journal.events_since_snapshot
while True:
    last += 1
    journal.append([(float(last), ev.Started(last))], [], [(float(last), ev.Note(str(last)))])
    print(last, flush=True)
    if last % 50 == 0:
        journal.snapshot(float(last), str(last).encode())
"""


def test_what_was_acknowledged_before_sigkill_is_there(tmp_path: Path) -> None:
    rng = random.Random(0)
    acknowledged = 0
    for _ in range(5):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(rng.randrange(1, 400)):
                acknowledged = int(process.stdout.readline())
            process.kill()
            for line in process.stdout:
                acknowledged = int(line)
        assert process.returncode == -signal.SIGKILL
        taken, entries, _, notes = reopened(tmp_path)
        first = 0 if taken is None else int(taken.body)
        assert entries == numbered(*range(first + 1, first + 1 + len(entries)))
        assert first + len(entries) == len(notes) in (acknowledged, acknowledged + 1)
