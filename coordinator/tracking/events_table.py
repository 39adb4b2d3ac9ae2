"""The run's events as the rows of a table. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

import numpy as np

from atoll.comm.ids import NodeId
from atoll.coordinator.history.series import F64
from atoll.coordinator.state_machine.events import Note

COLUMNS = ("time", "round", "node", "name", "event")
Cells = tuple[str, int, str, str, str]


def event_rows(
    notes: Iterable[tuple[float, Note]], rounds: F64, committed_at: F64, names: Mapping[NodeId, str]
) -> list[Cells]:
    """A row for each note: when (UTC), the round that it is about or that was under way, whom it is about (id, and
    name where that is known), what it says. `rounds` and `committed_at` (seconds since 1970): of the commits,
    ascending."""
    return [
        (
            datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="seconds"),
            note.round or under_way(at, rounds, committed_at),
            note.node or "",
            names.get(note.node, "") if note.node is not None else "",
            note.sentence,
        )
        for at, note in notes
    ]


def under_way(at: float, rounds: F64, committed_at: Sequence[float] | F64) -> int:
    """The round that was under way at a time."""
    place = int(np.searchsorted(committed_at, at))
    if place < len(rounds):
        return int(rounds[place])
    return int(rounds[-1]) + 1 if len(rounds) else 1
