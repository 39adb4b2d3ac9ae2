"""Crash points: names of what a batch of events brought about, at which tests with real processes let the
coordinator crash. Pure."""

from collections.abc import Iterable

from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.state import Phase, State

POINT_OF_EVENT = {
    ev.Joined: "join",
    ev.StateReported: "state",
    ev.StepsReached: "reached",
    ev.ContributionReady: "ready",
    ev.ChunksSealed: "seal",
    ev.ReduceComplete: "complete",
}


def crash_points(before: State, after: State, events: Iterable[ev.Event]) -> list[str]:
    """The points that a batch reached: what members said, and what came of it."""
    b, a = before.round, after.round
    attempt = (a.number, a.ledger.attempt) > (b.number, b.ledger.attempt) and a.plan is not None
    decided = {
        "closing": b.phase is Phase.INNER and (a.phase is not Phase.INNER or a.number > b.number),
        "plan": attempt,
        "retry": a.number == b.number and b.plan is not None and (attempt or a.plan is None),
        "sealed-all": not b.ledger.complete and (a.ledger.complete or after.committed > before.committed),
        "commit": after.committed > before.committed,
        "round-start": a.phase is Phase.INNER and (b.phase is Phase.WAITING or a.number > b.number),
        "published": before.pending is not None and after.pending != before.pending,
    }
    said = {name for kind, name in POINT_OF_EVENT.items() if any(isinstance(event, kind) for event in events)}
    return [*said, *(name for name, happened in decided.items() if happened)]
