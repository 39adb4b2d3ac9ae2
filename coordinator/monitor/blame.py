"""What went wrong in a run (`blame_of`, the answer of `/api/blame`), and text for a terminal about it: verdicts on
rounds that were slow, or in which something failed (`verdict_lines`), decisions against members with their
evidence (`blame_lines`), and invites (`invite_lines`). `atoll blame` and `atoll invite --list` print it."""

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Protocol

from atoll.comm.ids import MIN_KEY_PREFIX, is_meant
from atoll.coordinator.causes.explanation import Confidence, Verdict
from atoll.coordinator.service.invites import InviteRecord
from atoll.coordinator.state_machine.events import CommitRecord, Decision, Note

MAX_NOTES = 20_000  # the latest, that are looked at for verdicts
KNOWN_HOW = {
    Confidence.SEEN: "the coordinator saw it",
    Confidence.AGREED: "two sides say the same",
    Confidence.TOLD: "one member says so",
    Confidence.GUESSED: "a guess",
}


@dataclass(frozen=True, slots=True)
class RoundVerdict:
    """The verdict on a round, and when it was given."""

    at: float  # seconds since 1970
    round: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Blame:
    """What is known of a round, of a node, or of the whole run."""

    run: str
    verdicts: list[RoundVerdict]  # in order
    decisions: list[tuple[float, Decision]]  # in order, with their times, seconds since 1970
    seconds: float | None = None  # that the round took which was asked about; None: no record of it
    left_out: int = 0  # earlier verdicts and decisions, for which there was no room


class Records(Protocol):
    """The records of a run, as far as they are asked for here. All calls block, and may raise `ResourceError`."""

    def iter_rounds(self, since: int = 0, limit: int = 0) -> Generator[CommitRecord, None, None]: ...
    def iter_notes(self, before: float = inf) -> Iterator[tuple[float, Note]]: ...
    def decisions(self, since: float = -inf, until: float = inf) -> list[tuple[float, Decision]]: ...


def blame_of(records: Records, run: str, what: str, most: int | None = None) -> Blame:
    """What is known about a round (its number), about a node (its id, its name, the beginning of its key), or
    about all, where `what` is empty; the latest `most` of the verdicts and of the decisions. Blocks."""
    record = None
    if number := round_number(what):
        with closing(records.iter_rounds(number - 1, 1)) as found:
            record = next(found, None)
    if record is not None and record.round != number:
        record = None
    told = record is not None and record.verdict is not None  # then no note has more
    notes = [] if told else list(islice(records.iter_notes(), MAX_NOTES))
    judged = verdicts(record, reversed(notes), what)
    decided = about(records.decisions(), what)
    most = max(len(judged), len(decided), 1) if most is None else most
    left_out = len(judged[:-most]) + len(decided[:-most])
    seconds = sum(record.seconds.values()) if record is not None else None
    return Blame(run, judged[-most:], decided[-most:], seconds, left_out)


def round_number(what: str) -> int:
    """The round that `atoll blame` is asked about; 0: it is asked about something else."""
    return int(what) if what.isascii() and what.isdigit() and len(what) < MIN_KEY_PREFIX else 0


def verdicts(record: CommitRecord | None, notes: Iterable[tuple[float, Note]], what: str) -> list[RoundVerdict]:
    """The verdicts on a round (its number), by its record, or while that is not complete by what was noted; or
    those that name a node, by its id or its name; of notes the latest on each round. All, where `what` is
    empty."""
    found = {
        note.round: RoundVerdict(at, note.round, note.verdict)
        for at, note in notes
        if note.verdict is not None and (not what or _names(note, what))
    }
    if record is not None and record.verdict is not None:
        found[record.round] = RoundVerdict(record.committed_at, record.round, record.verdict)
    return [found[number] for number in sorted(found)]


def _names(note: Note, what: str) -> bool:
    verdict = note.verdict
    assert verdict is not None
    if number := round_number(what):
        return note.round == number
    return what in (verdict.culprit, verdict.name, verdict.peer, verdict.peer_name)


def verdict_lines(found: Iterable[RoundVerdict]) -> Iterator[str]:
    """Lines that say who or what was to blame for which round, how that is known, and what else was found."""
    for judged in found:
        v = judged.verdict
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(judged.at))
        who = f": {v.name}" if v.name else ""
        who += f" to {v.peer_name}" if v.peer else ""
        slower = f", {v.slower:.1f} s slower than usual" if v.slower else ""
        yield f"round {judged.round}  {when}{slower}: {v.kind}{who} ({KNOWN_HOW[v.confidence]})"
        yield f"     {v.sentence}"
        if v.facts:
            yield "     " + ", ".join(f"{name} {value}" for name, value in v.facts)
        for sentence in v.beside:
            yield f"     besides: {sentence}"


def about(decisions: Iterable[tuple[float, Decision]], what: str) -> list[tuple[float, Decision]]:
    """The decisions, with their times, about a round (its number), or about a node: by its id, its name, or the
    beginning of its key in hex. All, where `what` is empty."""
    if number := round_number(what):
        return [(at, d) for at, d in decisions if number in (d.round, d.evidence.round)]
    return [(at, d) for at, d in decisions if not what or is_meant(what, d.node, d.name, d.key)]


def blame_lines(decisions: Iterable[tuple[float, Decision]]) -> Iterator[str]:
    """Lines that say who did what in which round, how that is known, and what followed."""
    for at, d in decisions:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
        key = f", key {d.key[:16]}" if d.key else ""
        yield (
            f"{d.number}. {when}  {d.name} ({d.node}{key}), round {d.evidence.round}: {d.evidence.offence}, "
            f"{d.consequence} (weight {d.weight:g})"
        )
        by = f" (says {d.evidence.by})" if d.evidence.by is not None else ""
        yield f"     {d.evidence.sentence}{by}"
        if d.evidence.facts:
            yield "     " + ", ".join(f"{name} {value}" for name, value in d.evidence.facts)


def invite_lines(invites: Sequence[InviteRecord], wall: float) -> Iterator[str]:
    """One line for each invite, as it stands at `wall` (seconds since 1970)."""
    for invite in invites:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(invite.expires, 1e11)))
        roles = " or ".join(invite.roles) or "trainer or reducer"
        yield (
            f"{invite.number}. {invite.name or '(no name)'}: {invite.left} of {invite.nodes} nodes left, {roles}, "
            f"until {until}: {invite.state(wall)}"
        )
