"""The verdict on a slow or failed round: what was to blame, with a name. Pure.

Each rule (`trainers`, `paths`, `limits`, `machines`) tells what it finds and how many seconds of the round that
explains; `explanation.choose` says which is to blame. What else was found is told beside it. Nobody is charged for
a verdict (`state_machine.conduct` charges, on evidence of its own): it is for people, and how it is known is said
with it.
"""

from atoll.coordinator.causes.explanation import (
    MIN_EXCESS_SECONDS,
    Confidence,
    Explanation,
    Kind,
    Verdict,
    Weight,
    choose,
    verdict_of,
)
from atoll.coordinator.causes.limits import by_limits
from atoll.coordinator.causes.machines import by_clocks, by_coordinator, by_disks, by_states
from atoll.coordinator.causes.observations import Observations
from atoll.coordinator.causes.paths import by_exchange, by_paths
from atoll.coordinator.causes.slowness import SLOW_TIMES
from atoll.coordinator.causes.trainers import by_all, by_members, by_pauses

RULES = (by_coordinator, by_states, by_members, by_all, by_paths, by_limits, by_exchange, by_disks, by_clocks)


def verdict(seen: Observations) -> Verdict | None:
    """Who or what was to blame for a round; None: it was as usual, and nothing is wrong with anybody."""
    long = bool(seen.usual) and seen.excess >= max(MIN_EXCESS_SECONDS, (SLOW_TIMES - 1) * seen.usual_total)
    told = (e for rule in RULES for e in rule(seen) if long or not _is_vague(e))
    found = choose(told, seen.excess, seen.usual_total)
    known = [e for e in found if e.kind is not Kind.UNKNOWN]
    known = known or choose(by_pauses(seen), seen.excess, seen.usual_total)
    if not known and (long or seen.attempts > 1 or found):
        known = [_unknown(seen, found)]
    names = {node: member.name for node, member in seen.members.items()}
    return verdict_of(known, seen.excess if seen.usual else 0.0, names) if known else None


def of_void(names: str, differed: bool) -> Verdict:
    """The verdict on a round that is void: its state was lost with `names`, who held it, or, `differed`,
    nobody can tell which of theirs is right."""
    if differed:
        sentence = f"nobody can tell which state is right that {names} came to: they differ, or most are gone"
        return Verdict(Kind.DIVERGED_STATE, "", "", "", "", sentence, Confidence.SEEN)
    sentence = f"its state was lost with all who held it: {names} went before their disks had it"
    return Verdict(Kind.DEAD, "", "", "", "", sentence, Confidence.SEEN)


def _is_vague(explanation: Explanation) -> bool:
    """Whether it is that the round took long, and nobody is named."""
    return explanation.weight is Weight.SLOWNESS and not explanation.culprit


def _unknown(seen: Observations, found: list[Explanation]) -> Explanation:
    """What can be said where no rule says more: for whom the round waited, or in what phase."""
    if found:
        return found[0]
    if seen.attempts > 1:
        sentence = f"its reduce took {seen.attempts} attempts; {seen.story or 'nothing says why'}"
        return Explanation(Kind.UNKNOWN, "", sentence, Weight.BREAK, seen.excess, Confidence.SEEN)
    phase = max(seen.seconds, key=lambda p: seen.seconds[p] - seen.usual.get(p, 0.0))
    sentence = f"nothing that was gathered says why; most of the time went into its phase {phase}"
    return Explanation(Kind.UNKNOWN, "", sentence, Weight.SLOWNESS, seen.excess, Confidence.GUESSED)
