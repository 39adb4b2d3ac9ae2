"""What a journal holds: entries, notes and records to write into one, and all that is read back."""

import types
from contextlib import closing
from enum import EnumType
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.service.journal import MAX_NOTES, Journal, JournalSnapshot
from atoll.coordinator.state_machine import events as ev

PLAIN = {int: 3, float: 0.1, str: "naïve", bytes: b"\x00\xff" * 8, bool: True}


def sample(kind: Any) -> Any:
    """Some value of this type."""
    if kind is NodeId:
        return NodeId("n3")
    kind = getattr(kind, "__supertype__", kind)  # of a NewType
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, EnumType):
        return next(iter(kind))
    if isinstance(kind, type):
        return kind(**{name: sample(hint) for name, hint in get_type_hints(kind).items()})
    inner = [sample(arg) for arg in get_args(kind) if arg not in (..., types.NoneType)]
    origin = get_origin(kind)
    if origin in (tuple, frozenset):
        return origin(inner)
    if origin is dict:
        return dict([inner])
    assert origin in (Union, types.UnionType), f"no sample of {kind}"
    return inner[0]


def numbered(*numbers: int) -> list[tuple[float, ev.Event]]:
    return [(float(k), ev.Started(k)) for k in numbers]


def note(k: int, length: int = 0) -> tuple[float, ev.Note]:
    return float(k), ev.Note(f"note {k} " + "." * length)


def record(k: int) -> ev.CommitRecord:
    commit: ev.CommitRecord = sample(ev.CommitRecord)
    digests: dict[str, Any] = dict.fromkeys(("sealed_digest", "state_digest", "config_digest"), "c0ffee00")
    told = {NodeId("n3"): "beef", NodeId("n4"): "c0ffee00"}
    return replace(commit, round=k, digests=told, decisions=(), **digests)  # the journal adds decisions


Contents = tuple[
    JournalSnapshot | None, list[tuple[float, ev.Event]], list[ev.CommitRecord], list[tuple[float, ev.Note]]
]


def contents(journal: Journal) -> Contents:
    return journal.restore(), list(journal.events()), journal.rounds(), journal.notes(MAX_NOTES)


def reopened(directory: Path) -> Contents:
    with closing(Journal(directory)) as journal:
        return contents(journal)
