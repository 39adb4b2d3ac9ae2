"""One thing goes wrong in a run, and who is named for it, how soon."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from blame.cases import Culprit, harmed
from blame.fleet import Fleet, shown

from atoll.coordinator.causes.explanation import Kind, Verdict

MAX_WAIT = 75.0  # seconds for a verdict
IN_TIME = 10.0  # seconds from a round's end to its verdict that are soon enough


@dataclass(frozen=True)
class Trial:
    """What came of it."""

    kind: Kind
    repetition: int
    right: bool  # the first verdict after the harm named it
    found: str  # the verdict, in a few words
    sentence: str
    named_after: float  # seconds from the round's end; -1: it never was
    on_record: bool  # the round's record says the same
    rounds: int  # that ended after the harm, up to that one
    settled: bool  # the run was as usual before


def trial(fleet: Fleet, kind: Kind, repetition: int) -> Trial:
    """Do harm of this kind, wait for the first verdict on a round that ended after that, and undo it."""
    settled = fleet.settle()
    before = {(v.round, v.at) for v in fleet.noted()}
    since = fleet.records()[-1].round
    began = time.time()
    with harmed(fleet, kind, repetition) as culprit:
        judged = next(_verdicts(fleet, before, began), None)
    if judged is None:
        return Trial(kind, repetition, False, "none", "", -1.0, False, 0, settled)
    number, at, verdict = judged
    ended, recorded = _record(fleet, number)
    right = is_right(verdict, kind, culprit)
    return Trial(
        *(kind, repetition, right, shown(verdict), verdict.sentence, max(at - ended, 0.0)),
        *(recorded is not None and _same(recorded, verdict), number - since, settled),
    )


def is_right(verdict: Verdict, kind: Kind, culprit: Culprit) -> bool:
    """Whether a verdict names the kind, the culprit and its peer."""
    named = verdict.kind is kind and verdict.name == culprit.name
    return named and (culprit.peer is None or verdict.peer_name == culprit.peer)


def _same(a: Verdict, b: Verdict) -> bool:
    return (a.kind, a.culprit, a.peer) == (b.kind, b.culprit, b.peer)


def _verdicts(fleet: Fleet, before: set[tuple[int, float]], since: float) -> Iterator[tuple[int, float, Verdict]]:
    """New verdicts as they are noted, on rounds that ended after `since`, seconds since 1970."""
    deadline = time.monotonic() + MAX_WAIT
    while time.monotonic() < deadline:
        for judged in fleet.noted():
            if (judged.round, judged.at) not in before and judged.at > since:
                yield judged.round, judged.at, judged.verdict
        time.sleep(0.2)


def _record(fleet: Fleet, number: int) -> tuple[float, Verdict | None]:
    """When the round ended, and the verdict of its record, once there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := [r for r in fleet.records(number - 1) if r.round == number]:
            return found[0].committed_at, found[0].verdict
        time.sleep(0.2)
    return 0.0, None
