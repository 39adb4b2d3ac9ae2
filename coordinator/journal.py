"""The coordinator's memory: SQLite in its state directory.

Promises: what `append` returned from is on the disk; one coordinator at a time holds the directory; a file
that is not this run's journal is refused with a sentence. Holds the events that rebuild the state, the commit
records, and the join tokens (as hashes, so that the file is no secret door).
"""

import fcntl
import hashlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import msgspec

from atoll.comm.errors import ConfigError, Refused, ResourceError
from atoll.coordinator import events
from atoll.coordinator.events import CommitRecord, Event

KINDS = {kind.__name__: kind for kind in get_args(events.Event)}
FORMAT = "1"
SCHEMA = """
create table if not exists meta (key text primary key, value text not null);
create table if not exists events (
    seq integer primary key, at real not null, kind text not null, body blob not null);
create table if not exists rounds (round integer primary key, body blob not null);
create table if not exists tokens (
    hash text primary key, name text not null, uses integer not null, expires real not null);
"""


class Journal:
    """One open journal. Methods may be called from several threads; they take turns."""

    def __init__(self, directory: Path, lock: bool = True) -> None:
        """Open or create the journal in `directory`; `lock` says that this is the coordinator itself."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(f"cannot use the state directory {directory}: {error}") from None
        self._turn = threading.RLock()
        self._lock = _lock(directory) if lock else -1
        path = directory / "journal.sqlite"
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=full")
            self._db.executescript(SCHEMA)
            found = self.meta("format")
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path} is not a coordinator's journal ({error}): move it away") from None
        if found not in (None, FORMAT):
            raise ConfigError(f"{path} has format {found}, this version reads {FORMAT}")
        self.set_meta("format", FORMAT)

    def close(self) -> None:
        """Close when the last write is on the disk."""
        with self._turn:
            self._db.close()
        if self._lock >= 0:
            os.close(self._lock)

    def meta(self, key: str) -> str | None:
        with self._turn:
            row = self._db.execute("select value from meta where key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        with self._turn:
            self._db.execute("insert or replace into meta values (?, ?)", (key, value))

    def append(self, entries: Iterable[tuple[float, Event]], records: Iterable[CommitRecord]) -> None:
        """Make events and commit records durable in one transaction."""
        rows = [(at, type(e).__name__, msgspec.json.encode(e)) for at, e in entries]
        with self._transaction():
            self._db.executemany("insert into events (at, kind, body) values (?, ?, ?)", rows)
            for record in records:
                body = msgspec.json.encode(record)
                self._db.execute("insert or replace into rounds values (?, ?)", (record.round, body))

    def events(self) -> Iterator[tuple[float, Event]]:
        for at, kind, body in self._db.execute("select at, kind, body from events order by seq"):
            yield at, msgspec.json.decode(body, type=KINDS[kind])

    def rounds(self, since: int = 0) -> list[CommitRecord]:
        """Complete commit records of the rounds after `since`."""
        with self._turn:
            query = "select body from rounds where round > ? order by round"
            rows = self._db.execute(query, (since,)).fetchall()
        return [msgspec.json.decode(body, type=CommitRecord) for (body,) in rows]

    def issue_token(self, name: str, uses: int, expires: float) -> str:
        """A fresh join token, good for `uses` joins until `expires` (seconds since 1970)."""
        token = secrets.token_urlsafe(18)
        with self._turn:
            self._db.execute("insert into tokens values (?, ?, ?, ?)", (_hash(token), name, uses, expires))
        return token

    def redeem_token(self, token: str, wall: float) -> str:
        """Use up one join of `token`; return the name it was issued for. Raises `Refused`."""
        with self._transaction():
            query = "select name, uses, expires from tokens where hash = ?"
            row = self._db.execute(query, (_hash(token),)).fetchone()
            if row is None:
                raise Refused("the token in the join URL is not one of this run's: ask the operator for an invite")
            name, uses, expires = row
            if wall > expires:
                raise Refused("the token in the join URL has expired: ask the operator for a new invite")
            if uses < 1:
                raise Refused("the token in the join URL is used up: ask the operator for a new invite")
            self._db.execute("update tokens set uses = uses - 1 where hash = ?", (_hash(token),))
        return str(name)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of the body or nothing of it."""
        with self._turn:
            self._db.execute("begin immediate")
            try:
                yield
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")


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


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
