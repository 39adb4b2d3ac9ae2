"""Files that a journal does not read, damaged or of another program or version: refused with a sentence."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from journal_contents import contents, note, numbered, record, reopened, sample

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.service.journal import FORMAT_VERSION, Journal, _sealed
from atoll.coordinator.service.journaled_machine import JournaledMachine, encode
from atoll.coordinator.state_machine import events as ev


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


def test_layouts_and_snapshots_from_before_trainers_could_be_unable_to_evaluate_are_understood(
    journal: Journal,
) -> None:
    config, layout = RunConfig(name="reef"), b"layout"
    joined = [ev.Joined(NodeId(f"n{i}"), 1, "ada", f"10.0.0.{i}:7", f"{i}" * 32) for i in (1, 2)]
    core = JournaledMachine(config, journal)
    events: list[ev.Event] = [ev.Started(1), *joined, ev.LayoutReported(NodeId("n1"), 1, 40, layout)]
    core.adopt(batch := core.prepare(events, 1.0))
    state = msgspec.msgpack.decode(encode(batch.state))
    for member in state["members"]["here"].values():
        del member["evaluates"]
    journal.snapshot(1.0, msgspec.msgpack.encode(state))
    body = msgspec.to_builtins(ev.LayoutReported(NodeId("n2"), 1, 40, layout))
    del body["evaluates"]
    row = _sealed(2.0, "LayoutReported", msgspec.json.encode(body))
    journal._db.execute("insert into events (at, kind, body, digest) values (?, ?, ?, ?)", row)
    here = JournaledMachine(config, journal).state.members.here
    assert {m.node: (m.state, m.evaluates) for m in here.values()} == {
        "n1": ("recovering", True),
        "n2": ("recovering", True),
    }


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
        ("update decisions set number = 2", "decision 2 does not match its digest"),
    ],
)
def test_a_row_that_is_not_as_it_was_written_is_named(journal: Journal, change: str, sentence: str) -> None:
    journal.snapshot(0.0, b"state")
    journal.append(numbered(1, 2, 3), [record(1)], [note(1)], [(1.0, sample(ev.Decision))])
    journal._db.execute(change)
    with pytest.raises(ConfigError, match=f"is damaged .{sentence}.*: put a copy"):
        contents(journal)
        journal.decisions()


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
