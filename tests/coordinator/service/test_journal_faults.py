"""The journal on a disk that refuses, after a power cut, and after SIGKILL: nothing is kept by halves."""

import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest
from journal_contents import Contents, contents, note, numbered, record, reopened

from atoll.coordinator.service.journal import Journal, JournalFull, JournalSnapshot

FRAME, HEADER = 4096 + 24, 32  # bytes, of SQLite's write-ahead log


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


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in (1, 2))])
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
    cuts = sorted({0, *boundaries[:200], *(rng.randrange(len(log)) for _ in range(20))})
    after = [found(log[:cut]) for cut in cuts]
    assert after == sorted(after) and set(after) == set(range(calls + 1))
    for cut in rng.sample(cuts, 20):
        assert found(log[:cut] + rng.randbytes(len(log) - cut)) == after[cuts.index(cut)]
    for at in rng.sample(range(len(log)), 20):
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
