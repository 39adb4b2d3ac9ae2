"""Explanations by what happened to machines: the coordinator's, and members' states, disks and clocks. Pure."""

from collections.abc import Iterator
from statistics import median

from atoll.comm.incidents import IncidentKind
from atoll.coordinator.causes.explanation import COORDINATOR, Confidence, Explanation, Kind, Weight
from atoll.coordinator.causes.observations import Observations

SAME_CLOCK_SECONDS = 2.0  # by which clocks differ that go alike


def by_coordinator(seen: Observations) -> Iterator[Explanation]:
    """The coordinator was started again, or could not write."""
    if seen.restarts:
        away = sorted(account.away for account in seen.accounts.values() if account.away)
        long = median(away) if away else 0.0
        times = "was started again" if seen.restarts == 1 else f"was started again {seen.restarts} times"
        members = f"{len(away)} member{'' if len(away) == 1 else 's'}"
        missed = f", and {members} missed it for {long:.1f} s" if away else ""
        yield Explanation(
            *(Kind.COORDINATOR_RESTARTED, COORDINATOR, f"the coordinator {times}{missed}", Weight.BREAK),
            *(max(long, 0.0), Confidence.AGREED if away else Confidence.SEEN),
        )
    if seen.stalled:
        sentence = f"the coordinator's disk took no writes for {seen.stalled:.1f} s"
        yield Explanation(Kind.DISK_FULL, COORDINATOR, sentence, Weight.BREAK, seen.stalled, Confidence.SEEN)


def by_states(seen: Observations) -> Iterator[Explanation]:
    """Members whose state was not the run's, or changed by itself."""
    told = {n: a.had(IncidentKind.STATE_CHANGED) for n, a in seen.accounts.items()}
    changed = seen.changed | {n: int(i.value) for n, i in told.items() if i is not None}
    for node in changed.keys() - seen.differed:
        what = "1 chunk" if changed[node] == 1 else f"{changed[node]} chunks"
        sentence = f"{what} of {seen.name(node)}'s state changed in memory by itself, and was made again"
        yield Explanation(Kind.DIVERGED_STATE, node, sentence, Weight.BREAK, 0.0, Confidence.TOLD)
    for node in sorted(seen.differed, key=lambda n: int(n[1:])):
        sentence = f"{seen.name(node)} came to another state than the others, from the same bytes"
        yield Explanation(Kind.DIVERGED_STATE, node, sentence, Weight.BREAK, seen.excess, Confidence.SEEN)


def by_disks(seen: Observations) -> Iterator[Explanation]:
    """Members whose disks take no writes."""
    for node, account in seen.accounts.items():
        if (trouble := account.had(IncidentKind.DISK_FULL, IncidentKind.DISK_FAILED)) is None:
            continue
        full = trouble.kind is IncidentKind.DISK_FULL
        kind = Kind.DISK_FULL if full else Kind.DISK_FAILED
        sentence = (
            f"{seen.name(node)}'s disk {'is full' if full else 'takes no writes'}: its state is not kept there"
        )
        yield Explanation(kind, node, sentence, Weight.CONDITION, 0.0, Confidence.TOLD)


def by_clocks(seen: Observations) -> Iterator[Explanation]:
    """Members whose clocks are off; where most are off alike, it is the coordinator's."""
    off = {node: account.clock for node, account in seen.accounts.items() if account.clock}
    if not off:
        return
    middle = median(off.values())
    alike = [s for s in off.values() if abs(s - middle) <= SAME_CLOCK_SECONDS]
    if len(alike) > 1 and 2 * len(alike) > len(seen.accounts):
        sentence = (
            f"the coordinator's clock is {_off(-middle)}, as {len(alike)} of {len(seen.accounts)} members see it"
        )
        yield Explanation(Kind.CLOCK, COORDINATOR, sentence, Weight.CONDITION, 0.0, Confidence.AGREED)
        off = {node: s for node, s in off.items() if abs(s - middle) > SAME_CLOCK_SECONDS}
    for node, seconds in off.items():
        sentence = f"{seen.name(node)}'s clock is {_off(seconds)} of the coordinator's"
        facts = (("seconds", f"{seconds:+.1f}"),)
        yield Explanation(Kind.CLOCK, node, sentence, Weight.CONDITION, 0.0, Confidence.TOLD, facts=facts)


def _off(seconds: float) -> str:
    return f"{abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}"
