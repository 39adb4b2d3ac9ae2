"""The journal, the coordinator's memory: SQLite in its state directory.

Promises: what a call returned from is on the disk, and what it raised from is not kept, so it may be made again;
a crash at any instant leaves whole calls, each after the one before it; one coordinator at a time holds the
directory; a file that is not ours or is damaged is refused with a sentence and left as it is.

Holds the latest snapshot of the state and the events since (a restart is `restore`, then `events`), the commit
records of the newest rounds (`run_records` moves older ones into segments), the decisions against members and the
latest notes, each with its digest, and the join tokens (as hashes, so that the file is no secret door).
"""

import fcntl
import hashlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.errors import ConfigError, Refused, ResourceError
from atoll.comm.files import publish
from atoll.comm.replace import replace
from atoll.coordinator.history import record_codec
from atoll.coordinator.history.record_codec import BadRecord, RecordView
from atoll.coordinator.history.series import Row
from atoll.coordinator.service.invites import ASK, InviteRecord
from atoll.coordinator.state_machine.conduct import Consequence
from atoll.coordinator.state_machine.events import CommitRecord, Decision, Event, Note, Ruling

T = TypeVar("T")
EVENT_TYPES: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}
RULING_TYPES: dict[str, Any] = {kind.__name__: kind for kind in get_args(Ruling)}
MAX_NOTES = 30_000
APPLICATION_ID = 0x61746F6C  # "atol", in the file's header, where tools look for whose a database is
FORMAT_VERSION = 7  # in the file's header
TABLES = (
    "meta (key text primary key, value text not null)",
    "snapshot (id integer primary key, at real not null, body blob not null, digest blob not null)",
    "events (seq integer primary key, at real not null, kind text not null, body blob not null,"
    " digest blob not null)",
    "rounds (round integer primary key, body blob not null, digest blob not null)",
    "notes (seq integer primary key, at real not null, body blob not null, digest blob not null)",
    "decisions (number integer primary key, round integer not null, at real not null, body blob not null,"
    " digest blob not null)",
    "tokens (hash text primary key, number integer not null unique, name text not null, roles text not null,"
    " nodes integer not null, uses integer not null, expires real not null, revoked text not null)",
    "rulings (number integer primary key, kind text not null, body blob not null, taken integer not null,"
    " digest blob not null)",
)
SCHEMA = f"""
pragma application_id = {APPLICATION_ID};
pragma user_version = {FORMAT_VERSION};
{"".join(f"create table {table};" for table in TABLES)}
pragma journal_mode = wal;
"""
# The write-ahead log goes back into the file, and starts over, after about 1 MiB; one long snapshot does not
# leave it long.
SETTINGS = """
pragma journal_mode = wal;
pragma synchronous = full;
pragma wal_autocheckpoint = 256;
pragma journal_size_limit = 1048576;
"""
INVITE_COLUMNS = "number, name, roles, nodes, uses, expires, revoked"
BUSY_TIMEOUT = 10.0  # seconds, with somebody else's transaction: an invite's, a shell's
TRANSIENT_ERRORS = {  # what may go away without harm to the file
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_PROTOCOL,
}


class JournalFull(ResourceError):
    """The disk is full or does not take writes. Nothing of the call is kept: it may be made again.

    One doubt remains: if the process ends before another write succeeds, a restart may find the call on a disk
    that took the bytes and then failed to say so, as after a crash between the write and the answer.
    """


@dataclass(frozen=True, slots=True)
class JournalSnapshot:
    """The state at one moment: `body` stands for every event up to then."""

    at: float  # seconds, the coordinator's clock
    body: bytes


class Journal:
    """One open journal. Methods may be called from several threads; they take turns."""

    def __init__(self, directory: Path, lock: bool = True) -> None:
        """Open or create the journal in `directory`; `lock` says that this is the coordinator itself."""
        self._turn = threading.RLock()
        self.directory, self._path = directory, (path := directory / "journal.sqlite")
        with ExitStack() as opened, _in_sentences(path):
            directory.mkdir(parents=True, exist_ok=True)
            if lock:
                opened.callback(os.close, _lock(directory))
            if not path.exists() or path.stat().st_size == 0:
                if not lock:
                    raise ConfigError(f"{directory} holds no run yet: start the coordinator on it first")
                _create(path)
            if lock:
                _hide(path)
            _inspect(path)
            self._db = sqlite3.connect(path, BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
            opened.callback(self._db.close)
            self._db.executescript(SETTINGS)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close when the last write is on the disk."""
        with self._turn:
            self._opened.close()

    def meta(self, key: str) -> str | None:
        """The value that `set_meta` wrote under `key` last; None: there is none."""
        rows = self._rows("select value from meta where key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def set_meta(self, key: str, value: str) -> None:
        """Keep `value` under `key`, durably. Raises `JournalFull`."""
        with self._transaction():
            self._db.execute("insert or replace into meta values (?, ?)", (key, value))

    def append(
        self,
        entries: Iterable[tuple[float, Event]],
        records: Iterable[CommitRecord],
        notes: Iterable[tuple[float, Note]] = (),
        decisions: Iterable[tuple[float, Decision]] = (),
    ) -> None:
        """Make events, commit records, notes and decisions durable in one transaction, in which the invites of who
        is banned end. Raises `JournalFull`."""
        decisions = list(decisions)
        convicted = [d for _, d in decisions if d.consequence is Consequence.BANNED]
        event_rows = [
            _sealed(float(at), type(event).__name__, msgspec.json.encode(event)) for at, event in entries
        ]
        note_rows = [_sealed(float(at), msgspec.json.encode(note)) for at, note in notes]
        decision_rows = [_sealed(d.number, d.round, float(at), msgspec.json.encode(d)) for at, d in decisions]
        with self._transaction():
            self._db.executemany("insert into events (at, kind, body, digest) values (?, ?, ?, ?)", event_rows)
            self._db.executemany("insert into notes (at, body, digest) values (?, ?, ?)", note_rows)
            self._db.executemany("insert or replace into decisions values (?, ?, ?, ?, ?)", decision_rows)
            round_rows = [_sealed(record.round, self._encoded(record)) for record in records]
            self._db.executemany("insert or replace into rounds values (?, ?, ?)", round_rows)
            for decision in convicted:
                why = f"{decision.name} came with it and was banned in round {decision.round}"
                self._revoke([decision.invite], why)

    def _encoded(self, record: CommitRecord) -> bytes:
        """The record with the decisions of its round."""
        rows = self._db.execute(
            "select number, body from decisions where round = ? order by number", (record.round,)
        )
        made = tuple(self._decode(f"decision {number}", body, Decision) for number, body in rows)
        return record_codec.encode(replace(record, decisions=made))

    def snapshot(self, at: float, body: bytes) -> None:
        """Replace every event so far by `body`, the state at time `at`, in one transaction. Raises `JournalFull`.

        The events go first: their pages make room for the body. Old notes go here too, to spare `append`.
        """
        row = _sealed(float(at), body)
        with self._transaction():
            self._db.execute("delete from events")
            self._db.execute("insert or replace into snapshot values (1, ?, ?, ?)", row)
            self._db.execute("delete from notes where seq <= (select max(seq) from notes) - ?", (MAX_NOTES,))

    def restore(self) -> JournalSnapshot | None:
        """The latest snapshot, whose later events `events` yields; None: there is none yet."""
        rows = self._rows("select at, body, digest from snapshot")
        if not rows:
            return None
        [(at, body, digest)] = rows
        self._check("the snapshot", digest, at, body)
        return JournalSnapshot(at, body)

    def events(self) -> Iterator[tuple[float, Event]]:
        """The events since the snapshot with their times, in order: read at once, decoded one by one."""
        rows = self._rows("select seq, at, kind, body, digest from events order by seq")
        for number, (seq, at, kind, body, digest) in enumerate(rows, 1):
            if seq != number:  # they are counted from the snapshot on
                raise _damaged(self._path, f"event {number} is missing")
            self._check(f"event {number}", digest, at, kind, body)
            yield at, self._decode(f"event {number} ({kind})", body, EVENT_TYPES.get(kind))

    @property
    def events_since_snapshot(self) -> int:
        """The number of events that a restart would replay."""
        return int(self._rows("select coalesce(max(seq), 0) from events")[0][0])

    def rounds(self, since: int = 0, limit: int = 0) -> list[CommitRecord]:
        """Commit records that are here of the rounds after `since`, in order; the first `limit` of them, 0:
        all."""
        return list(self.iter_rounds(since, limit))

    def iter_rounds(self, since: int = 0, limit: int = 0) -> Generator[CommitRecord, None, None]:
        """Commit records that are here of the rounds after `since` one by one; the first `limit`, 0: all.

        Read over a connection of its own, one record at a time: neither do writes wait for a slow reader, nor
        readers for a write. What is committed meanwhile is not seen.
        """
        yield from self._read_rounds(record_codec.decode, since, limit)

    def iter_series(self, since: int) -> Generator[Row, None, None]:
        """The same of their figures alone, which takes a tenth of the time."""
        yield from self._read_rounds(lambda body: RecordView(body).row, since, 0)

    def _read_rounds(self, read: Callable[[bytes], T], since: int, limit: int) -> Generator[T, None, None]:
        for number, body in self.iter_encoded_rounds(since, limit):
            try:
                yield read(body)
            except BadRecord as error:  # it is as it was written: its digest says so
                raise self._other_version(f"the record of round {number}", error) from None

    def iter_encoded_rounds(self, since: int = 0, limit: int = 0) -> Generator[tuple[int, bytes], None, None]:
        """The same, as round and bytes of the record (`record_codec`)."""
        query = "select round, body, digest from rounds where round > ? order by round limit ?"
        with _in_sentences(self._path), closing(_reader(self._path)) as db:
            for number, body, digest in db.execute(query, (since, limit or -1)):
                self._check(f"the record of round {number}", digest, number, body)
                yield number, body

    def round_span(self) -> tuple[int, int]:
        """The first and the last round whose record is here; (0, 0): there is none."""
        [(first, last)] = self._rows("select coalesce(min(round), 0), coalesce(max(round), 0) from rounds")
        return first, last

    def drop_rounds(self, last: int) -> None:
        """Remove the records of rounds up to `last`, which are kept elsewhere. Raises `JournalFull`."""
        with self._transaction():
            self._db.execute("delete from rounds where round <= ?", (last,))

    def notes(self, limit: int = 200) -> list[tuple[float, Note]]:
        """The latest `limit` notes with their times, oldest first."""
        query = "select seq, at, body, digest from notes order by seq desc limit ?"
        return self._notes(reversed(self._rows(query, (min(limit, MAX_NOTES),))))

    def iter_notes(self, before: float) -> Generator[tuple[float, Note], None, None]:
        """The notes of before a time (seconds since 1970), the newest first; read as `iter_rounds` reads."""
        query = "select seq, at, body, digest from notes where at < ? order by seq desc"
        with _in_sentences(self._path), closing(_reader(self._path)) as db:
            for row in db.execute(query, (before,)):
                yield from self._notes([row])

    def notes_between(self, start: float, end: float) -> list[tuple[float, Note]]:
        """The notes of the times from `start` on and before `end`, seconds, oldest first."""
        query = "select seq, at, body, digest from notes where at >= ? and at < ? order by seq"
        return self._notes(self._rows(query, (start, end)))

    def _notes(self, rows: Iterable[tuple[Any, ...]]) -> list[tuple[float, Note]]:
        notes = []
        for number, at, body, digest in rows:
            self._check(f"note {number}", digest, at, body)
            notes.append((at, self._decode(f"note {number}", body, Note)))
        return notes

    def decisions(self) -> list[tuple[float, Decision]]:
        """Every decision against a member with its time, in order."""
        decisions = []
        query = "select number, round, at, body, digest from decisions order by number"
        for number, round_, at, body, digest in self._rows(query):
            self._check(f"decision {number}", digest, number, round_, at, body)
            decisions.append((at, self._decode(f"decision {number}", body, Decision)))
        return decisions

    def issue_token(self, name: str, uses: int, expires: float, roles: Sequence[str] = ()) -> str:
        """A fresh join token of a new invite, good for `uses` nodes of these roles (none: of all) until `expires`
        (seconds since 1970)."""
        token = secrets.token_urlsafe(18)
        with self._transaction():
            number = self._db.execute("select coalesce(max(number), 0) + 1 from tokens").fetchone()[0]
            row = (_hash(token), number, name, " ".join(roles), uses, uses, expires, "")
            self._db.execute("insert into tokens values (?, ?, ?, ?, ?, ?, ?, ?)", row)
        return token

    def invites(self) -> list[InviteRecord]:
        """All invites, in the order in which they were made."""
        return [_invite(row) for row in self._rows(f"select {INVITE_COLUMNS} from tokens order by number")]

    def invite(self, number: int) -> InviteRecord | None:
        """The invite with this number; None: there is none."""
        rows = self._rows(f"select {INVITE_COLUMNS} from tokens where number = ?", (number,))
        return _invite(rows[0]) if rows else None

    def revoke_invites(self, numbers: Iterable[int], why: str) -> None:
        """End what is left of these invites. Raises `JournalFull`."""
        with self._transaction():
            self._revoke(numbers, why)

    def _revoke(self, numbers: Iterable[int], why: str) -> None:
        rows = [(why, number) for number in numbers]
        self._db.executemany("update tokens set revoked = ? where number = ? and revoked = ''", rows)

    def check_token(self, token: str, wall: float) -> InviteRecord:
        """The invite of `token`, which is good for a join at `wall` (seconds since 1970). Raises `Refused` for one
        that is unknown, revoked, expired or used up."""
        rows = self._rows(f"select {INVITE_COLUMNS} from tokens where hash = ?", (_hash(token),))
        if not rows:
            raise Refused(f"the token in the join URL is not one of this run's: {ASK}")
        invite = _invite(rows[0])
        invite.check(wall)
        return invite

    def redeem_token(self, token: str, wall: float) -> InviteRecord:
        """Use up one join of `token` at `wall` (seconds since 1970); return its invite. Raises `Refused`, as
        `check_token` does, and `JournalFull`."""
        with self._transaction():
            invite = self.check_token(token, wall)
            self._db.execute("update tokens set uses = uses - 1 where hash = ?", (_hash(token),))
        return invite

    def leave_ruling(self, ruling: Ruling) -> None:
        """Leave word of what the operator rules for the coordinator, which may be running. Raises
        `JournalFull`."""
        row = _sealed(type(ruling).__name__, msgspec.json.encode(ruling))
        with self._transaction():
            self._db.execute("insert into rulings (kind, body, digest, taken) values (?, ?, ?, 0)", row)

    def rulings(self) -> list[tuple[int, Ruling]]:
        """The operator's rulings that are not taken yet, with their numbers, in order."""
        found = []
        query = "select number, kind, body, digest from rulings where not taken order by number"
        for number, kind, body, digest in self._rows(query):
            self._check(f"ruling {number}", digest, kind, body)
            found.append((number, self._decode(f"ruling {number} ({kind})", body, RULING_TYPES.get(kind))))
        return found

    def take_rulings(self, last: int) -> None:
        """Enter that the rulings up to number `last` are events now. Raises `JournalFull`."""
        with self._transaction():
            self._db.execute("update rulings set taken = 1 where number <= ?", (last,))

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """What the body reads is of one moment, whoever writes meanwhile; nobody waits for it."""
        with self._turn, _in_sentences(self._path):
            self._db.execute("begin")
            try:
                yield
            finally:
                self._db.execute("rollback")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of the body or nothing of it."""
        with self._turn, _in_sentences(self._path):
            self._db.execute("begin immediate")
            try:
                yield
                self._db.execute("commit")
            except BaseException:
                if self._db.in_transaction:  # SQLite takes back by itself what a full disk has cut short
                    self._db.execute("rollback")
                raise

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._turn, _in_sentences(self._path):
            return self._db.execute(query, values).fetchall()

    def _check(self, what: str, digest: bytes, *fields: Any) -> None:
        if digest != _digest(*fields):
            raise _damaged(self._path, f"{what} does not match its digest")

    def _decode(self, what: str, body: bytes, kind: Any) -> Any:
        try:
            if kind is None:
                raise msgspec.DecodeError("no such kind is known")
            return msgspec.json.decode(body, type=kind)
        except DECODE_ERRORS as error:  # it is as it was written: its digest says so
            raise self._other_version(what, error) from None

    def _other_version(self, what: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"{what} in {self._path} cannot be understood ({error}): it is another version's, "
            "start that version of atoll again, or give another --state-dir"
        )


def _lock(directory: Path) -> int:
    handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ResourceError(
            f"another coordinator uses the state directory {directory}: stop it, or give another --state-dir"
        ) from None
    return handle


def _create(path: Path) -> None:
    """A fresh journal appears under its name whole or not at all."""
    for log in (Path(f"{path}-wal"), Path(f"{path}-journal")):  # SQLite would play it into the new file
        if log.exists() and log.stat().st_size > 0:
            raise ConfigError(f"{log} is there without its {path.name}: put that back, or move this away")
    new = path.with_name(path.name + ".new")
    for leftover in path.parent.glob(new.name + "*"):
        leftover.unlink()
    new.touch(0o600)
    with closing(sqlite3.connect(new, BUSY_TIMEOUT, isolation_level=None)) as db:
        db.executescript(SCHEMA)
    publish(new, path)


def _hide(path: Path) -> None:
    """The run's key and the nodes' sessions are in it. What SQLite writes beside it has the same mode."""
    for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(FileNotFoundError):
            file.chmod(0o600)


def _inspect(path: Path) -> None:
    """Refuse a file that is not ours or is damaged; nothing is written to it.

    Done through SQLite, which reads its own log too, and not by opening the file ourselves: whoever closes a file
    loses all locks of the process on it (fcntl), and SQLite would take a living journal for an abandoned one.
    """
    with closing(_reader(path)) as db:
        application, found = (db.execute(f"pragma {n}").fetchone()[0] for n in ("application_id", "user_version"))
        tables = dict(db.execute("select name, sql from sqlite_master where type = 'table'").fetchall())
        if application != APPLICATION_ID:
            if not {"meta", "events", "rounds", "tokens"} <= tables.keys():
                raise _foreign(path, "a database of another program")
            found = 1  # which had no mark of its own
        if found != FORMAT_VERSION:
            raise ConfigError(
                f"{path} has format {found}, this version of atoll reads {FORMAT_VERSION}: "
                "start the version that wrote it, or give another --state-dir"
            )
        [(verdict,)] = db.execute("pragma quick_check(1)").fetchall()
        if verdict == "ok" and set(tables.values()) != {f"CREATE TABLE {table}" for table in TABLES}:
            verdict = "its tables are not as they were made"
        if verdict != "ok":
            raise _damaged(path, " ".join(verdict.split()))


def _reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write; SQLite's log lets it read beside the one that does."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", BUSY_TIMEOUT, uri=True, check_same_thread=False)


@contextmanager
def _in_sentences(path: Path) -> Iterator[None]:
    """What goes wrong with the file at `path`, said in a sentence."""
    try:
        yield
    except UnicodeDecodeError:
        raise _damaged(path, "what SQLite says of it cannot be shown") from None
    except OSError as error:
        raise ResourceError(f"cannot use the state directory {path.parent}: {error}") from None
    except (sqlite3.ProgrammingError, sqlite3.IntegrityError):
        raise  # the caller's fault, not the file's
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in TRANSIENT_ERRORS:
            raise JournalFull(
                f"{path} cannot be written now ({error}), and nothing of this call is kept: "
                "make room on its disk, or make it writable, and the same can be tried again"
            ) from None
        refusal = _foreign if code == sqlite3.SQLITE_NOTADB else _damaged
        raise refusal(path, str(error)) from None


def _foreign(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is not a coordinator's journal ({why}): move it away, or give another --state-dir")


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged ({why}): "
        "put a copy of its directory back, or begin the run anew with another --state-dir"
    )


def _sealed(*fields: float | str | bytes) -> tuple[float | str | bytes, ...]:
    """A row: the fields, as SQLite will give them back, and their digest."""
    return (*fields, _digest(*fields))


def _digest(*fields: Any) -> bytes:
    """128 bits over whatever SQLite may have given back in place of the fields."""
    return hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=16).digest()


def _invite(row: tuple[Any, ...]) -> InviteRecord:
    number, name, roles, nodes, left, expires, revoked = row
    return InviteRecord(number, name, tuple(roles.split()), nodes, left, expires, revoked)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
