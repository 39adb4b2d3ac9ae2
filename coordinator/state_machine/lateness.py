"""Lateness in a reduce: how long an attempt may take, and who is held to account when it took longer. Pure.

An attempt has two stages: the owners seal all chunks, then the members say that they hold them. Each has a clock
of its own, so that nobody pays in the second for what was lost in the first: an owner that seals at the last
moment would else have those struck who are far from it.

A stage may take ten times what the plan predicts, time for the arithmetic of a slow machine, and a moment, for
processes pause and links stand still: as long as rounds take of late, from 5 s to 30 s. A prediction is believed
as far as exchanges of late took so long: what is exchanged in a moment shows less than links carry. What it adds
to what they took in the middle is one slow link's, or somebody's who says that his is slow and then stands still:
of that a stage has three times as much, so that a link is in time that carries a third of what it did. Where
nothing is predicted, what exchanges took of late, in the middle, stands for it; where that is not known either,
and at most, a stage takes `rounds.reduce_timeout`. Each further attempt of a round may take twice as long: what is
slow for everybody is no member's fault, and must end in a commit. A prediction knows nothing of members that were
in no exchange yet (`newcomers`): where they are most, a stage takes its `rounds.reduce_timeout`.

An owner cannot seal before all have contributed: whose contributions hold it up for longer than its `patience` in
all it names (`comm.allreduce.late_peers`), and it is not late itself, as it has half of what exchanges are usually
given for its own part; that path is as good as broken (`broken_paths`). Before that nobody else can know who of
the two was late: the owner owes the time, and nothing is held against it.

Who is late owes the others the time (`conduct.lend_time`): for some rounds it owns nothing, and no commit waits
for it to hold the chunks (`spared`); what it lacks then it fetches. It is held against it over rounds, too
(`conduct.charge`), as far as it is certain that it is that member: others did the same in time, and the
coordinator hears it; and an owner may give a member its chunks one after the other, just before it would ask
others for them, so that it asks them all before anything is held against it (`to_be_told`). Who was in time, and
yet behind all others, owes that at the commit, and beyond some seconds it is held against it: else it could hold
up every round at no cost. Who ends its part before it is late, or the attempt by saying that it cannot reach
another one, or may be dead, owes the time until then (`lend_to_who_goes`).

`reduce` calls it; `late_work` does as much for those who are late with a round's work.
"""

from collections.abc import Collection, Mapping
from statistics import median

from atoll.comm.ids import NodeId
from atoll.coordinator.causes import slowness
from atoll.coordinator.state_machine.chunk_owners import reachable
from atoll.coordinator.state_machine.conduct import (
    MIN_OWED_SECONDS,
    Evidence,
    Offence,
    charge,
    lend_time,
    owes_time,
    strike_part,
)
from atoll.coordinator.state_machine.events import Effect
from atoll.coordinator.state_machine.members import REDUCER
from atoll.coordinator.state_machine.newcomers import excused, is_blameless, most_are_new
from atoll.coordinator.state_machine.state import State, count, exchanges, order

MIN_MOMENT_SECONDS, MAX_MOMENT_SECONDS = 5.0, 30.0  # for which a process pauses, or a link stands still
SECONDS_PER_ELEMENT = 1e-7  # of the flat vector: encoding, merging and decoding on a slow and busy machine
EXPECTED_FACTOR = 10.0  # times the seconds that an exchange is to take, as far as they usually take so long
# Times the seconds that it is to take beyond that. A link's rate is what it carried at best, and comes down by a
# quarter of the way in a round: a bad day is no reason to strike anybody.
ADDED_FACTOR = 3.0
MAX_DOUBLINGS = 10
# Beyond twice what the others took, in seconds: then who does not hold everything is told what to ask for; after
# so much more, or if it has not sealed, a member that was in time is a straggler.
ASK_SECONDS, STRAGGLER_SECONDS = 3.0, 10.0
MIN_COMPARED = 3  # members, to tell which of them are stragglers
MIN_MAKERS = 3  # members that make a round's state, of whom two can tell which is right
OWED_SHARE = 0.02  # of a round's inner time, beyond twice what the others took: for who owes them time


def reduce_timeout(state: State) -> float:
    """Seconds that each stage of the attempt in force may take. Only while there is one."""
    r, most = state.round, state.config.rounds.reduce_timeout
    assert r.plan is not None
    if not r.plan.expected:
        return most
    return min(most, sum(_stage(state, r.plan.expected)) * 2.0 ** min(r.ledger.attempt - 1, MAX_DOUBLINGS))


def patience(state: State, seconds: float) -> float:
    """Seconds for which the contributions of one member alone may hold up an owner, in an exchange that is to take
    so many `seconds`, before the owner says so: a stage, but for half of what that has without slow links. 0:
    there is no limit, as the links of most are not known."""
    if not seconds or most_are_new(state):
        return 0.0
    usual, added = _stage(state, seconds)
    stage = min(state.config.rounds.reduce_timeout, usual + added)
    return stage - min(usual, stage) / 2


def expected(state: State, predicted: float) -> float:
    """Seconds that an exchange among the members of the ledger's attempt is to take: what its plan predicts, but
    no more than the longest of late did, or else what those took in the middle. 0: neither is known."""
    usual = _usual_exchange(state)
    if not predicted or not usual:
        return predicted or usual
    here = state.members.here
    few = (n for n in state.round.ledger.members if n in here and here[n].measured < slowness.MIN_ROUNDS)
    if any(is_blameless(state, n) for n in few):  # a slow one was not in those
        return predicted
    return min(predicted, max(pace.reduce + pace.commit for pace in state.paces)) or predicted


def _stage(state: State, seconds: float) -> tuple[float, float]:
    """Seconds that a stage may take of an exchange that is to take so many `seconds`: as far as exchanges usually
    take so long, and for what this one is to take beyond that."""
    known = min(seconds, _usual_exchange(state) or seconds)
    usual = _moment(state) + SECONDS_PER_ELEMENT * state.chunks.numel + EXPECTED_FACTOR * known
    return usual, ADDED_FACTOR * (seconds - known)


def _usual_exchange(state: State) -> float:
    """Seconds that exchanges took of late, in the middle; 0: not known."""
    usual = slowness.usual(state.paces)
    return sum(usual.get(phase, 0.0) for phase in ("reduce", "commit"))


def _moment(state: State) -> float:
    """Seconds in which nobody is late yet of whom nothing is heard: those of a round, of late, in the middle."""
    usual = slowness.usual(state.paces)
    return min(max(sum(usual.values()), MIN_MOMENT_SECONDS), MAX_MOMENT_SECONDS) if usual else MAX_MOMENT_SECONDS


def is_overdue(state: State, now: float) -> bool:
    """Whether the stage of the attempt in force has taken longer, by `now` in seconds, than it may."""
    assert state.round.plan is not None
    elapsed = now - state.round.plan.stage_at
    if elapsed <= reduce_timeout(state):
        return False
    return elapsed > state.config.rounds.reduce_timeout or not most_are_new(state)


def waited_for(state: State) -> set[NodeId]:
    """Those for whom the attempt in force waits: who is yet to seal, or, where all is sealed, to say that it holds
    everything."""
    r = state.round
    assert r.plan is not None
    if r.ledger.unsealed:
        return {node for c in r.ledger.unsealed for node in _sealing(state, c)}
    return {n for n in r.ledger.members if n not in r.completions and n not in r.plan.missing_chunks}


def to_be_told(state: State, now: float) -> set[NodeId]:
    """The few that are far behind the others, at `now` in seconds, in saying that they hold everything, all being
    sealed: they are to be told what to ask for."""
    r = state.round
    assert r.plan is not None
    begun = r.plan.stage_at
    usual = _usual(state, [at - begun for at in r.plan.held_at.values()])
    if now - begun <= min(reduce_timeout(state) / 2, 2 * usual + ASK_SECONDS):
        return set()
    lacking = waited_for(state)
    return lacking if 2 * len(lacking) <= len(r.ledger.members) else set()


def spared(state: State, now: float) -> set[NodeId]:
    """The members for which the commit does not wait at `now`, in seconds, all being sealed: they owe time, and
    are behind the others, be it by a moment where the round before had their work, and they did not hold it in
    time. None, where fewer are left than half, or than the run needs, or than three of four or more, for of two
    that make different states nobody can tell which is right; or nobody to be dialled."""
    r = state.round
    assert r.plan is not None
    ledger, members, there = r.ledger, r.ledger.members, len(r.completions) + len(r.plan.missing_chunks)
    # before most are there, no look at each is worth it
    if not ledger.complete or there + len(state.conduct.strikes) < len(members):
        return set()
    if ledger.orphans:  # of which it may be the only one that holds some
        return set()
    if not (owing := [n for n in waited_for(state) if owes_time(state, n)]):
        return set()
    begun = r.plan.stage_at
    over = now - begun >= brief(state, median([at - begun for at in r.plan.held_at.values()] or [0.0]))
    here = state.members.here
    behind = {n for n in owing if over or (n not in state.makers and not here[n].missed)}
    others = [n for n in members if n not in behind]
    enough = max(state.config.members.minimum, len(members) / 2, min(MIN_MAKERS, len(members) - 1), 1)
    return behind if len(others) >= enough and reachable(state, others) else set()


def brief(state: State, usual: float) -> float:
    """Seconds that those have who owe the others time, for what takes these so many."""
    return 2 * usual + OWED_SHARE * state.inner_time


def hold_to_account(state: State, late: Collection[NodeId], now: float, out: list[Effect]) -> State:
    """Charge those for whom an attempt waited in vain: owners that did not seal, or members that did not say that
    they hold everything, where at least half of them did: so what they needed was there. Who is suspected owes the
    time, and is not charged: its connection is at fault. Nor is a newcomer among others: its link may be slow."""
    r = state.round
    assert r.plan is not None
    seconds = now - r.plan.stage_at
    waited, part = f"{seconds:.0f}", strike_part(state, seconds)
    if 2 * len(late) > len(_due(state)):
        return state
    facts = (("attempt", str(r.ledger.attempt)), ("seconds", waited), ("predicted", f"{r.plan.predicted:.3g}"))
    new = excused(state, late)
    for node in sorted(late, key=order):
        member = state.members.here.get(node)
        if member is None or member.role != REDUCER:  # that owns nothing in any case, until it joins anew
            state = lend_time(state, node, seconds)
        if not state.members.trusted(node) or node in new:
            continue
        offence, what = Offence.LATE, f"say within {waited} s that it holds the sealed chunks"
        if not r.ledger.unsealed:
            offence = Offence.SILENT
        elif own := sum(r.ledger.owners[c] == node for c in r.ledger.unsealed):
            what = f"seal {count(own, 'chunk')} of its own in {waited} s"
        else:
            summed = sum(node in _sealing(state, c) for c in r.ledger.unsealed)
            what = f"sum {count(summed, 'chunk')} for its region in {waited} s"
        evidence = Evidence(r.number, offence, f"it did not {what}, as others did", facts, part=part)
        state = charge(state, node, evidence, out)
    return state


def charge_who_is_gone(state: State, node: NodeId, silence: float, now: float, out: list[Effect]) -> State:
    """Charge a member that is about to be put out after so many seconds of silence, where an attempt waited for
    it, and most others had done their part: who falls silent in every reduce costs each round the time until that
    is noticed. One that is not connected is silent, whatever its heartbeats say."""
    r, member = state.round, state.members.here[node]
    if not _holds_up(state, node):
        return state
    assert r.plan is not None
    silence = silence if member.connected else max(silence, now - member.suspect_at)
    seconds = min(now - r.plan.stage_at, silence)
    sentence = f"it fell silent in a reduce, which waited {seconds:.0f} s for it"
    evidence = Evidence(r.number, Offence.SILENT, sentence, part=strike_part(state, seconds))
    return charge(state, node, evidence, out)


def lend_to_who_goes(state: State, node: NodeId, now: float) -> State:
    """Have a member that is about to end its part in the attempt in force, or all of that, or may be dead, owe the
    time for which that waited for it until `now`, in seconds, beyond twice what the others took."""
    r = state.round
    if r.plan is None or now < r.patient_until or (waited := now - r.plan.stage_at) < MIN_OWED_SECONDS:
        return state
    if waited - 2 * r.plan.expected < MIN_OWED_SECONDS or not _holds_up(state, node):
        return state
    done = r.plan.held_at if r.ledger.complete else r.plan.sealed_at
    return lend_time(state, node, waited - 2 * _usual(state, [at - r.plan.stage_at for at in done.values()]))


def _holds_up(state: State, node: NodeId) -> bool:
    """Whether the attempt in force waits for the node, and not for most of those of whom it asks something."""
    r, ledger = state.round, state.round.ledger
    if r.plan is None or node in r.completions:
        return False
    # Where all go at once, no look at each is worth it.
    if ledger.complete:
        there = len(r.completions) + len(r.plan.missing_chunks)
        if 2 * (len(ledger.members) - there) > len(ledger.members):
            return False
    elif node not in ledger.owners and not ledger.layered:
        return False
    late = waited_for(state)
    return node in late and 2 * len(late) <= len(_due(state))


def charge_who_breaks_off(state: State, node: NodeId, what: str, now: float, out: list[Effect]) -> State:
    """Charge a member whose life is about to end, as `what` says, while the attempt in force counts on it. The
    others do again what it had done in that, if nothing was left of it: that long they may be held up at most."""
    r = state.round
    if r.plan is None or not exchanges(state, node):
        return state
    seconds = now - r.plan.opened_at
    sentence = f"{what} in the middle of an exchange, {seconds:.0f} s after that was planned"
    evidence = Evidence(r.number, Offence.SILENT, sentence, part=strike_part(state, seconds))
    return charge(state, node, evidence, out)


def charge_stragglers(state: State, out: list[Effect]) -> State:
    """Charge those who did their part of the attempt in force, which is about to be committed, in time, but long
    after the others."""
    r = state.round
    assert r.plan is not None
    sealed = {n: at - r.plan.opened_at for n, at in r.plan.sealed_at.items()}
    # So long one contributor may hold an owner up, which does not name it then.
    forgiven = max(STRAGGLER_SECONDS, r.plan.patience)
    state = _charge_last(state, sealed, {}, forgiven, "sealed its chunks", Offence.LATE, out)
    begun = max(r.plan.opened_at, r.sealed_at)
    held = {n: at - begun for n, at in r.plan.held_at.items()}
    told = {n: max(at - begun, 0.0) for n, at in r.stragglers.items()}
    return _charge_last(state, held, told, STRAGGLER_SECONDS, "held the sealed chunks", Offence.SILENT, out)


def _charge_last(
    state: State,
    took: Mapping[NodeId, float],
    told: Mapping[NodeId, float],
    forgiven: float,
    what: str,
    offence: Offence,
    out: list[Effect],
) -> State:
    """`took`: seconds of each; `told`: of which of them what it lacked was its own affair after so many only;
    `forgiven`: seconds beyond twice what the others took that are owed alone."""
    if len(took) < MIN_COMPARED:
        return state
    usual = _usual(state, took.values())
    new = excused(state, took)
    for node in sorted(took.keys() - new, key=order):
        behind = took[node] - told.get(node, 0.0) - 2 * usual
        state = lend_time(state, node, behind)
        if (beyond := behind - forgiven) > 0:
            sentence = f"it {what} after {took[node]:.0f} s, where most had after {usual:.0f} s"
            evidence = Evidence(state.round.number, offence, sentence, part=strike_part(state, beyond))
            state = charge(state, node, evidence, out)
    return state


def _usual(state: State, took: Collection[float]) -> float:
    """The seconds that members take, by those that some took, or as it is to be."""
    assert state.round.plan is not None
    return max(median(took or (0.0,)), state.round.plan.expected)


def _due(state: State) -> Collection[NodeId]:
    """Those of whom the stage of the attempt in force asks something."""
    ledger = state.round.ledger
    if not ledger.unsealed:
        return ledger.members
    owners = {owner for owner in ledger.owners if owner is not None}
    return owners | {node for c in ledger.unsealed for node in _sealing(state, c)}


def _sealing(state: State, c: int) -> set[NodeId]:
    """Who is yet to do something before a chunk is sealed: its owner; in two levels first the relays that have
    something to sum and have not told that they did, where members tell such things."""
    ledger = state.round.ledger
    owner = ledger.owners[c]
    owners = set() if owner is None else {owner}
    if c not in ledger.layered or not state.config.outer.clip:
        return owners
    able = zip(ledger.entries, ledger.regions, strict=False)
    regions = {g for entry, g in able if entry.contribution is not None and not entry.gone}
    relays = {ledger.entries[row[c]].node for g, row in enumerate(ledger.relays) if g in regions}
    done = {told.by for told in ledger.sums.get(c, ()) if told.since == ledger.since[c]}
    return relays - done - owners or owners
