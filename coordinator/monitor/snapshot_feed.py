"""The run's snapshots as a stream of changes, for pages that stay open. Pure.

    id: LIFE.NUMBER
    event: run         data: the whole snapshot, without `last_heard_s`
    event: change      data: {"set": {what changed}, "members": {node_id: {what changed}}, "gone": [node_id, ...]}

A page that comes back with the id that it had last is told what changed since, if that is not too long ago, or
all.
"""

from collections import deque
from typing import Any

import msgspec

MAX_CHANGES = 30  # that are kept for those who come back; many are more bytes than the whole
MAX_EVENTS = 40  # the latest, in each snapshot
VOLATILE = ("last_heard_s",)  # of a member: what changes by the clock alone
Snapshot = dict[str, Any]


class SnapshotFeed:
    """The latest snapshot and the changes that led to it."""

    def __init__(self, life: str) -> None:
        """`life` tells this feed from one of an earlier process."""
        self._life, self._number = life, 0
        self._rest: Snapshot = {}
        self._members: dict[str, Snapshot] = {}
        self._changes: deque[tuple[int, bytes]] = deque(maxlen=MAX_CHANGES)

    @property
    def id(self) -> str:
        """The id of the latest event; empty: there is none yet."""
        return f"{self._life}.{self._number}" if self._number else ""

    def take(self, snapshot: Snapshot) -> bool:
        """Take in the run as it is now; returns whether anything changed."""
        members = {
            m["node_id"]: {name: value for name, value in m.items() if name not in VOLATILE}
            for m in snapshot["members"]
        }
        rest = {name: value for name, value in snapshot.items() if name != "members"}
        rest["events"] = rest["events"][-MAX_EVENTS:]
        change: Snapshot = {}
        if differing := {name: value for name, value in rest.items() if self._rest.get(name, ...) != value}:
            change["set"] = differing
        if moved := {n: d for n, m in members.items() if (d := _differing(self._members.get(n, {}), m))}:
            change["members"] = moved
        if gone := [n for n in self._members if n not in members]:
            change["gone"] = gone
        if not change:
            return False
        self._number += 1
        self._rest, self._members = rest, members
        self._changes.append((self._number, _event("change", self.id, change)))
        return True

    def since(self, id_: str) -> bytes:
        """The events that bring a page from the one with this id (empty: from nothing) to the latest."""
        life, _, number = id_.rpartition(".")
        if life == self._life and number.isdecimal() and len(number) < 12:
            after = int(number)
            if after == self._number:
                return b""
            if self._changes and self._changes[0][0] - 1 <= after < self._number:
                return b"".join(event for n, event in self._changes if n > after)
        return _event("run", self.id, self._rest | {"members": list(self._members.values())})


def _differing(before: Snapshot, now: Snapshot) -> Snapshot:
    return {name: value for name, value in now.items() if before.get(name, ...) != value}


def _event(kind: str, id_: str, data: Snapshot) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (id_.encode(), kind.encode(), msgspec.json.encode(data))
