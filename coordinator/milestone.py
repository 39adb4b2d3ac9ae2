"""Which transition a batch of events made: the names of the points at which tests with real processes let the
coordinator crash. Pure."""

from atoll.coordinator.state import Phase, State


def milestone(before: State, after: State) -> str:
    """The most important one; empty: none of them."""
    return next((name for name, happened in _transitions(before, after) if happened), "")


def _transitions(before: State, after: State) -> list[tuple[str, bool]]:
    b, a = before.round, after.round
    attempt = (a.number, a.ledger.attempt) > (b.number, b.ledger.attempt) and a.plan is not None
    here, joined = before.members.here, after.members.here
    return [
        ("commit", after.committed > before.committed),
        ("retry", a.number == b.number and b.plan is not None and (attempt or a.plan is None)),
        ("plan", attempt),
        ("sealed-all", a.ledger.complete and not b.ledger.complete),
        ("closing", a.phase is Phase.COLLECTING and b.phase is Phase.INNER),
        ("round-start", a.phase is Phase.INNER and b.phase is Phase.WAITING),
        ("published", before.pending is not None and after.pending is None),
        ("held", len(a.plan.held if a.plan else ()) > len(b.plan.held if b.plan else ())),
        ("seal", len(a.ledger.sealed) > len(b.ledger.sealed)),
        ("ready", len(a.ledger.contributions) > len(b.ledger.contributions)),
        ("reached", len(a.reached) > len(b.reached)),
        ("state", any(n in here and here[n].state_digest != m.state_digest for n, m in joined.items())),
        ("join", any(n not in here or here[n].life != m.life for n, m in joined.items())),
    ]
