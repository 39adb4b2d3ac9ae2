"""Text for a terminal about what is held against members: decisions with their evidence (`blame_lines`), and
invites (`invite_lines`). `atoll blame` and `atoll invite --list` print it."""

import time
from collections.abc import Iterable, Iterator, Sequence

from atoll.coordinator.service.invites import InviteRecord
from atoll.coordinator.state_machine.events import Decision

MIN_KEY_PREFIX = 8  # hex digits of a key that name a node


def about(decisions: Iterable[tuple[float, Decision]], what: str) -> list[tuple[float, Decision]]:
    """The decisions, with their times, about a round (its number), or about a node: by its id, its name, or the
    beginning of its key in hex. All, where `what` is empty."""
    if what.isdigit() and len(what) < MIN_KEY_PREFIX:
        return [(at, d) for at, d in decisions if int(what) in (d.round, d.evidence.round)]
    return [(at, d) for at, d in decisions if not what or _is(d, what)]


def _is(decision: Decision, what: str) -> bool:
    by_key = len(what) >= MIN_KEY_PREFIX and decision.key.startswith(what.lower())
    return what in (decision.node, decision.name) or by_key


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
        roles = " or ".join(invite.roles) or "any role"
        yield (
            f"{invite.number}. {invite.name or '(no name)'}: {invite.left} of {invite.nodes} nodes left, {roles}, "
            f"until {until}: {invite.state(wall)}"
        )
