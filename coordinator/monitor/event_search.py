"""Events of a run as they are looked for: by time and words, page by page, in bounded time."""

import re
from collections.abc import Iterable
from typing import Any

from atoll.coordinator.state_machine.events import Note

DEFAULT_EVENTS, MAX_EVENTS = 100, 500  # in an answer
MAX_LOOKED_AT = 20_000  # for one answer; the next one goes on from there
MAX_SEARCH = 100  # characters
OF_ROUND = re.compile(r"round (\d{1,15})\b")
ROUTINE = re.compile(OF_ROUND.pattern + " closes:")


def is_routine(note: Note) -> bool:
    """Whether it says what is to be said of any round: that it closes, and who contributes what it has."""
    return ROUTINE.match(note.sentence) is not None


def round_of(note: Note) -> int:
    """The round that it is about, by itself or by its first words; 0: it does not say."""
    said = OF_ROUND.match(note.sentence)
    return note.round or (int(said[1]) if said is not None else 0)


def found_events(
    notes: Iterable[tuple[float, Note]],
    search: str = "",
    after: float = 0.0,
    limit: int = DEFAULT_EVENTS,
    routine: bool = False,
) -> dict[str, Any]:
    """The newest `limit` of `notes` (which come newest first) of the time from `after` on that have all words of
    `search` in them; `routine`: also what is noted of any round. `before`: the time to ask on from; None: there is
    nothing older. Notes of one moment stay together."""
    words = search.casefold().split()
    events, oldest = list[dict[str, Any]](), 0.0
    for looked_at, (at, note) in enumerate(notes):
        if at < after:
            return {"events": events, "before": None}
        if (len(events) >= limit or looked_at >= MAX_LOOKED_AT) and at < oldest:
            return {"events": events, "before": oldest}
        oldest = at
        text = f"{note.sentence} {note.node or ''}".casefold()
        if all(word in text for word in words) and (routine or not is_routine(note)):
            events.append({"at": at, "node": note.node, "sentence": note.sentence})
    return {"events": events, "before": None}
