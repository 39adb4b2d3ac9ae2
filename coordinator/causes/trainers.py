"""Explanations by members for whom a round waited before its reduce, or who went: what kept them from their work.
Pure.

What the coordinator saw (who came when, at what pace, who went) says for whom the round waited; why, the member
itself says, if it is there to be asked. A member that says nothing is judged by what was seen of it alone.
"""

from collections.abc import Iterator
from statistics import median

from atoll.comm.ids import NodeId
from atoll.comm.incidents import IncidentKind, mask
from atoll.comm.pause_reasons import PauseReason, words_of
from atoll.coordinator.causes.account import Account, Incident
from atoll.coordinator.causes.explanation import COORDINATOR, DATA_STORE, Confidence, Explanation, Kind, Weight
from atoll.coordinator.causes.observations import GONE, MemberSeen, Observations, Standing, lateness

MIN_LATE_SECONDS = 0.4  # for which a round waited for a member: less is its ordinary unrest
MIN_LATE_SHARE = 0.1  # the same, of what a round usually takes
MIN_AWAY_SECONDS = 1.5  # for which a member missed the coordinator: it lived meanwhile
HUNG_SECONDS, HUNG_STEPS = 3.0, 8.0  # without a step after which a trainer hangs: so many, or such times of a step
SLOW_PACE = 0.8  # times the usual pace: a member that is slower than that is slow
ALL_SLOWER = 0.85  # times the usual pace: members that are all slower than that
STANDS_OUT = 0.7  # times what the others have of their usual paces: whose share is less stands out
SLOW_AMONG_OTHERS = 0.7  # times the others' pace, where nobody's usual one is known
STEPS_SHARE = 0.25  # of what a round took too long: if its steps took less of that, it is not for want of data
DATA_SHARE = 0.4  # share of the seconds that a member was late, or stood still, in which it waited for data


def by_members(seen: Observations) -> Iterator[Explanation]:
    """Explanations by single members, and by the data store where most of those that were late waited for it."""
    late = lateness(seen)
    least = max(MIN_LATE_SECONDS, MIN_LATE_SHARE * seen.usual_total)
    found: list[Explanation] = []
    for node, member in seen.members.items():
        seconds = late.get(node, 0.0)
        missing = not member.counted and not member.rests
        if seen.restarts and (member.back or member.standing is Standing.AWAY):
            continue  # everybody was away then
        if member.standing in GONE:
            found.append(_gone(seen, node, member, max(seconds, seen.excess)))
        elif seconds >= least or missing or member.standing is not Standing.HERE:
            found.append(_late(seen, node, member, seconds))
        elif _stands_out(seen, node, member):  # the round closed without most of its steps, soon after the others
            found.append(
                _late(seen, node, member, max(seconds, _longer(seen, "inner") + _longer(seen, "collect")))
            )
        elif (memory := seen.account(node).had(IncidentKind.OUT_OF_MEMORY)) is not None:
            found.append(_died(seen, node, memory, seconds))  # and it was in time all the same
    if len(starving := _starving(seen)) > 1 and 2 * len(starving) > len(seen.members):
        yield _store(seen, starving)
        found = [e for e in found if e.kind is not Kind.SLOW_DATA_STORE]
    yield from found


def by_pauses(seen: Observations) -> Iterator[Explanation]:
    """Members that no round waits for, as they were paused for most of what the round took too long: where it had
    too few others, it waited all the same."""
    for node, member in seen.members.items():
        account = seen.account(node)
        if member.rests and account.paused >= max(seen.excess / 2, MIN_LATE_SECONDS):
            yield _paused(node, member.name, account, min(account.paused, seen.excess))


def by_all(seen: Observations) -> Iterator[Explanation]:
    """Machines on which all members computed more slowly than usual, and none stands out."""
    at_work = {n: m for n, m in seen.members.items() if m.pace and m.usual and not m.rests}
    shares = [m.pace / m.usual for m in at_work.values()]
    if len(shares) < 2 or max(shares) >= 1 or not STANDS_OUT * median(shares) < min(shares) < ALL_SLOWER:
        return
    inner = seen.seconds.get("inner", 0.0)
    times = (inner if m.reached is None else m.reached for m in at_work.values())
    if (
        median(shares) < ALL_SLOWER
        and (longer := median(times) - seen.usual.get("inner", inner)) > MIN_LATE_SECONDS
    ):
        percent = 100 * (1 - median(shares))
        sentence = f"all members were slower than usual, by {percent:.0f} % in the middle, and none stands out"
        yield Explanation(Kind.SLOW_COMPUTE, "", sentence, Weight.SLOWNESS, longer, Confidence.SEEN)


def _longer(seen: Observations, phase: str) -> float:
    """Seconds by which a phase took longer than usual."""
    took = seen.seconds.get(phase, 0.0)
    return max(took - seen.usual.get(phase, took), 0.0)


def _stands_out(seen: Observations, node: NodeId, member: MemberSeen) -> bool:
    """Whether a member did not come to its steps, being slower than usual, and than the others are by theirs."""
    if member.rests or member.reached is not None or not 0 < member.pace < SLOW_PACE * member.usual:
        return False
    others = [m.pace / m.usual for n, m in seen.members.items() if n != node and m.pace and m.usual]
    return not others or member.pace / member.usual <= STANDS_OUT * median(others)


def _starving(seen: Observations) -> dict[NodeId, float]:
    """The members that waited for data for a good part of what the round's steps took too long, each with how
    long: where all do, none is later than the others."""
    longer = seen.seconds.get("inner", 0.0) - seen.usual.get("inner", 0.0)
    if longer < max(MIN_LATE_SECONDS, STEPS_SHARE * seen.excess):  # they wait so long in each round
        return {}
    least = max(MIN_LATE_SECONDS, DATA_SHARE * longer)
    return {n: account.data for n, account in seen.accounts.items() if account.data >= least}


def _gone(seen: Observations, node: NodeId, member: MemberSeen, seconds: float) -> Explanation:
    name, away = member.name, seen.account(node).away
    if member.back and away >= MIN_AWAY_SECONDS:
        sentence = f"{name} and the coordinator could not reach each other for {away:.1f} s; it lived, and is back"
        return Explanation(
            Kind.PARTITION, node, sentence, Weight.BREAK, seconds, Confidence.AGREED, peer=COORDINATOR
        )
    silent = "nothing is heard of it any more: it, its machine or its network is gone"
    how = "its connection broke" if member.standing is Standing.BROKE else silent
    sentence = f"{name} died: {how}" + (", and it is back in another life" if member.back else "")
    lost = {x for x, y in seen.broken if y == node}
    facts = (("lost by", seen.names(lost)),) if lost else ()
    known = Confidence.AGREED if lost else Confidence.SEEN
    return Explanation(Kind.DEAD, node, sentence, Weight.BREAK, seconds, known, facts=facts)


def _late(seen: Observations, node: NodeId, member: MemberSeen, seconds: float) -> Explanation:
    """Why the round waited for a member that is there, or went on without it."""
    account, name = seen.account(node), member.name
    told = node in seen.accounts
    match member.standing:
        case Standing.LEFT if member.incidents & mask([IncidentKind.OUT_OF_MEMORY]):
            sentence = f"{name}'s trainer ran out of memory, and it left"
            return _plain(Kind.OUT_OF_MEMORY, node, sentence, seconds, Confidence.TOLD)
        case Standing.LEFT if member.incidents & mask([IncidentKind.TRAINER_DIED]):
            sentence = f"{name}'s trainer could not go on, and it left"
            return _plain(Kind.TRAINER_DIED, node, sentence, seconds, Confidence.TOLD)
        case Standing.LEFT:
            return _plain(Kind.LEFT, node, f"{name} left in the middle of the round", seconds, Confidence.SEEN)
        case Standing.SAVING:
            sentence = f"{name} left the exchange to save bytes"
            return _plain(Kind.PAUSED, node, sentence, seconds, Confidence.SEEN)
        case Standing.PUT_OUT:
            return _plain(Kind.PUT_OUT, node, f"{name} was put out for what it did", seconds, Confidence.SEEN)
        case Standing.DOUBTED:
            sentence = f"{name}'s work was left out for what another told of it"
            return _plain(Kind.PUT_OUT, node, sentence, seconds, Confidence.TOLD)
    if (died := account.had(IncidentKind.OUT_OF_MEMORY, IncidentKind.TRAINER_DIED)) is not None:
        return _died(seen, node, died, seconds)
    if member.standing is Standing.AWAY:
        sentence = f"{name} and the coordinator could not reach each other for a while"
        known = Confidence.AGREED if account.away else Confidence.SEEN
        return Explanation(Kind.PARTITION, node, sentence, Weight.SLOWNESS, seconds, known, peer=COORDINATOR)
    if account.paused > seconds / 2:
        return _paused(node, name, account, seconds)
    still = max(account.still, 0.0 if told else member.still)
    if told and account.data >= DATA_SHARE * max(seconds, account.still) and account.data > MIN_LATE_SECONDS:
        facts = (("seconds without data", f"{account.data:.1f}"), ("steps", str(account.steps)))
        sentence = f"{name} waited {account.data:.1f} s for data that its store did not give in time"
        return Explanation(
            Kind.SLOW_DATA_STORE, node, sentence, Weight.SLOWNESS, seconds, Confidence.TOLD, facts=facts
        )
    if account.had(IncidentKind.STATE_DIFFERED) is not None or member.standing is Standing.DIFFERED:
        sentence = f"{name} had another state than the run, and fetched it again"
        return _plain(Kind.DIVERGED_STATE, node, sentence, seconds, Confidence.AGREED)
    hung = account.had(IncidentKind.TRAINER_HUNG)
    if member.standing is Standing.STALLED or hung is not None or still > _hung_after(seen, node):
        return _hung(name, node, account, member, max(still, hung.value if hung else 0.0), told, seconds)
    if account.had(IncidentKind.WORK_DROPPED) is not None:
        sentence = f"{name} dropped its steps, whose arithmetic was of no use, and began anew"
        return _plain(Kind.TRAINER_DIED, node, sentence, seconds, Confidence.TOLD)
    return _slow(seen, node, member, account, told, seconds)


def _plain(kind: Kind, node: NodeId, sentence: str, seconds: float, known: Confidence) -> Explanation:
    return Explanation(kind, node, sentence, Weight.BREAK, seconds, known)


def _died(seen: Observations, node: NodeId, died: Incident, seconds: float) -> Explanation:
    name, code = seen.name(node), int(died.value)
    facts = (("exit code" if code >= 0 else "signal", str(abs(code))),)
    known = Confidence.AGREED if seconds > 0 else Confidence.TOLD  # that it took no steps the coordinator saw, too
    if died.kind is IncidentKind.OUT_OF_MEMORY:
        sentence = f"{name}'s trainer ran out of memory and was started again"
        return Explanation(Kind.OUT_OF_MEMORY, node, sentence, Weight.BREAK, seconds, known, facts=facts)
    sentence = f"{name}'s trainer died ({facts[0][0]} {facts[0][1]}) and was started again"
    return Explanation(Kind.TRAINER_DIED, node, sentence, Weight.BREAK, seconds, known, facts=facts)


def _paused(node: NodeId, name: str, account: Account, seconds: float) -> Explanation:
    pause = account.had(IncidentKind.PAUSED)
    why = f": {words_of(int(pause.value))}" if pause is not None else " since an earlier round"
    if account.clock and pause is not None and pause.value == PauseReason.HOURS:
        sentence = f"{name} rests by its hours, and its clock is {_off(account.clock)}"
        return Explanation(Kind.CLOCK, node, sentence, Weight.SLOWNESS, seconds, Confidence.TOLD)
    return Explanation(Kind.PAUSED, node, f"{name} was paused{why}", Weight.SLOWNESS, seconds, Confidence.TOLD)


def _hung_after(seen: Observations, node: NodeId) -> float:
    """Seconds without a step after which this member's trainer hangs."""
    paces = [m.usual or m.pace for n, m in seen.members.items() if n == node or not seen.members[node].usual]
    pace = median([p for p in paces if p] or [0.0])
    return max(HUNG_SECONDS, HUNG_STEPS / pace) if pace else HUNG_SECONDS


def _hung(
    name: str, node: NodeId, account: Account, member: MemberSeen, still: float, told: bool, seconds: float
) -> Explanation:
    steps = account.steps if told else member.steps
    known = Confidence.AGREED if told else Confidence.SEEN  # its heartbeats tell the same as its account
    facts = (("steps taken", str(steps)), ("seconds without one", f"{still:.1f}"))
    sentence = f"{name}'s trainer hung after step {steps}: {still:.1f} s without another"
    if not still:
        sentence = f"{name}'s trainer hung, and was given up"
    return Explanation(Kind.HUNG_TRAINER, node, sentence, Weight.BREAK, seconds, known, facts=facts)


def _slow(
    seen: Observations, node: NodeId, member: MemberSeen, account: Account, told: bool, seconds: float
) -> Explanation:
    pace, usual = member.pace, member.usual
    others = [m.pace for n, m in seen.members.items() if n != node and m.pace]
    among = median(others) if others else 0.0
    if pace and usual and pace < SLOW_PACE * usual:
        facts = (("steps a second", f"{pace:.3g}"), ("usually", f"{usual:.3g}"))
        sentence = f"{member.name} computed slowly: {pace:.3g} steps a second, usually {usual:.3g}"
        known = Confidence.AGREED if told else Confidence.SEEN
        return Explanation(Kind.SLOW_COMPUTE, node, sentence, Weight.SLOWNESS, seconds, known, facts=facts)
    if pace and among and not usual and pace < SLOW_AMONG_OTHERS * among:
        facts = (("steps a second", f"{pace:.3g}"), ("the others", f"{among:.3g}"))
        sentence = f"{member.name} computed slowly: {pace:.3g} steps a second, the others {among:.3g}"
        return Explanation(
            Kind.SLOW_COMPUTE, node, sentence, Weight.SLOWNESS, seconds, Confidence.SEEN, facts=facts
        )
    if seconds > MIN_LATE_SECONDS:
        sentence = f"the round waited {seconds:.1f} s for {member.name}, and nothing says why"
    else:
        sentence = f"the round went on without {member.name}, and nothing says why"
    return Explanation(Kind.UNKNOWN, node, sentence, Weight.SLOWNESS, seconds, Confidence.SEEN)


def _store(seen: Observations, starving: dict[NodeId, float]) -> Explanation:
    longer = max(seen.seconds.get("inner", 0.0) - seen.usual.get("inner", 0.0), 0.0)
    sentence = f"the data store was slow: {seen.names(starving)} waited for it"
    facts = tuple((f"{seen.name(n)} waited", f"{seconds:.1f} s") for n, seconds in starving.items())
    explained = min(longer, max(starving.values()))
    return Explanation(
        Kind.SLOW_DATA_STORE, DATA_STORE, sentence, Weight.SLOWNESS, explained, Confidence.AGREED, facts=facts
    )


def _off(seconds: float) -> str:
    return f"{abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}"
