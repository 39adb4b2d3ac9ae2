"""Audits of sealed chunks, before the commit: what was sealed is recomputed by members that the run draws. Pure.

    sealed --drawn, in secret--> two members recompute it --both find what was sealed--> well
                                           | anything else
                                           v
                             all able members recompute it --verdict--> it stands, or is void

A draw follows from a nonce that no member knows, and from what was sealed: an owner cannot tell which of its
chunks will be looked at, nor by whom. Two look at each: one that is in league with its owner hides nothing. What
is longer than a merge can be is audited without a draw, by three. Auditors can be dialled and are not the owner.
The commit waits for what was drawn; who does not answer in time is charged, and another is named in its place,
with more time; for some rounds the silent one is named only where others are too few. How long an answer may take
follows from what the round's exchange shows, so that a slow member has its time, and a silent one costs the round
little.

`auditors` names them, `audit_voices` says what the word of each comes to, `audit_verdict` what follows from all.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import log

from atoll.comm.digest import digest
from atoll.comm.evidence import Evidence, Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.audit_verdict import (
    close,
    convict,
    convict_contributor,
    found_well,
    is_decided,
    reach_verdict,
    start_over,
    void_seals,
    withdraw_seals,
)
from atoll.coordinator.state_machine.audit_voices import VoiceKind, is_well, parties, two_receipts, voice_of
from atoll.coordinator.state_machine.auditors import (
    AUDITORS,
    MIN_VOICES,
    REPORT_SECONDS,
    able_auditors,
    ask,
    in_turn,
    is_too_slow,
    lend_to_auditor,
    lot,
    name_auditors,
    possible_auditors,
    seconds_to_answer,
)
from atoll.coordinator.state_machine.changes import with_round
from atoll.coordinator.state_machine.conduct import (
    charge,
    leave_audit,
    lend_time,
    remember_unaudited,
    strike_part,
    unaudited_lately,
)
from atoll.coordinator.state_machine.events import (
    AuditReported,
    Effect,
    Event,
    Expired,
    Joined,
    LayoutReported,
    Leaving,
    Note,
    Paused,
    SealOutsized,
    StateReported,
)
from atoll.coordinator.state_machine.ledger import Ledger
from atoll.coordinator.state_machine.newcomers import excused
from atoll.coordinator.state_machine.state import Audit, RoundState, SealedBytes, State, order

MIN_ABLE = 3  # members that can be dialled, for any audit
UNAUDITED_FACTOR = 8.0  # times as often as others' chunks are drawn, where an audit came to no end lately
DOUBTS = 2  # chunks of an attempt that one member has audited by saying that they are too long
UNTOLD_SECONDS = 2.0  # in which a relay's word may be on its way
LEAST_LOT = 2.0**-128
ENOUGH_VOICES = 2  # that a chunk is too long
MAX_DOUBLINGS = 2  # of the time for an answer, with each in a row that does not come
# Events with which a member's part in the round ends by what it does itself.
ENDING = (Joined, Leaving, Expired, Paused, LayoutReported, StateReported)


# Drawing


def salt(state: State, members: Iterable[NodeId]) -> bytes:
    """What contributions of a round are signed with that is planned for the first time, among these; empty: the
    run has no audits, or not all of them have keys."""
    here = state.members.here
    if state.config.security.audits == 0 or not all(n in here and here[n].key for n in members):
        return b""
    r = state.round
    return digest(b"salt", state.nonce, b"%d.%d" % (r.number, r.ledger.attempt))


def draw(state: State, fresh: Sequence[int], now: float) -> State:
    """Draw among the chunks that are sealed, with all that relays tell of them, since just now; what somebody said
    of them before is looked into."""
    r = state.round
    if not r.salt:
        return state
    told = {what for _, what, _ in r.outsized}
    limit = state.config.security.audits / len(r.ledger.owners)
    for c in dict.fromkeys(fresh):
        if c not in state.round.ledger.sealed:
            continue  # with what its owner sealed besides
        if (c, r.ledger.since[c], r.ledger.sealed[c].digest) in told:
            state = _look_into(state, c, now)
        elif lot(state, b"draw", c) < limit * _factor(state, c) and _can_be_audited(state, c):
            state = _open(state, c, AUDITORS, now)
    return state


def _factor(state: State, c: int) -> float:
    """How many times as often as others' this chunk is drawn: one of whom no audit comes to an end, as it shows
    nothing or another one for it, could go on forging, as silence is no proof."""
    ledger = state.round.ledger
    makers = {ledger.sealed[c].by, *(ledger.entries[row[c]].node for row in ledger.relays if c in ledger.layered)}
    return UNAUDITED_FACTOR if any(unaudited_lately(state, node) for node in makers) else 1.0


def doubt(state: State, event: SealOutsized, now: float, out: list[Effect]) -> State:
    """A member tells that what an owner sealed is longer than any merge of the deltas, perhaps before its owner
    tells that it did: the chunk is audited, drawn or not.

    All honest members tell the same, of what was sealed: who was given something else is told so (`disputes`), and
    its word on that does not count. One that lies has `DOUBTS` chunks audited that are as they should be, which
    costs the round as much as if they were drawn. Nothing is held against it: what an honest owner merged may be
    too long, where a contributor told its norm too short (`norms`)."""
    r, c, since = state.round, event.chunk, event.fence.attempt
    known = any(e.node == event.node and not e.gone for e in r.ledger.entries)
    if event.fence.round != r.number or not known or c >= len(r.ledger.owners) or r.ledger.since[c] != since:
        return state
    if r.plan is None:  # it is said again in the next attempt, in which the chunk may have another owner
        return state
    seal, attempt, what = r.ledger.sealed.get(c), r.ledger.attempt, (c, since, event.digest)
    by = r.ledger.owners[c] if seal is None else seal.by
    outsized = frozenset(told for told in r.outsized if _may_be(r, told[1]))
    said = [of for node, of, at in outsized if node == event.node and (at == attempt or of == what)]
    if by == event.node or what in said or len(said) >= DOUBTS or not _may_be(r, what):
        return state
    voices = 1 + sum(of == what for _, of, _ in outsized)
    state = with_round(state, replace(r, outsized=outsized | {(event.node, what, attempt)}))
    if voices == 1:
        follows = "it is looked into" if r.salt else "nothing is audited in this run"
        sentence = f"what {'somebody' if by is None else state.name(by)} sealed, of chunk {c} most, is "
        sentence += f"{event.times:.3g} times as long as any delta: {follows}"
        out.append(Note(f"round {r.number}: {state.name(event.node)} says: {sentence}", by))
    if seal is None or not r.salt or voices > ENOUGH_VOICES:
        return state
    return _look_into(state, c, now)


def compare_told(state: State, chunks: Iterable[int], now: float) -> State:
    """Relays told of what they summed of these chunks: hold it to what auditors found of them, or will."""
    for c in dict.fromkeys(chunks):
        if c in state.round.ledger.sealed and c in state.round.audits.keys() | state.round.audited.keys():
            if is_shown(state, c):
                state = _open(state, c, MIN_VOICES, now)
    return state


def untold(state: State) -> list[int]:
    """The sealed chunks of which a relay whose mean is in them did not tell what that is of, or told it of other
    inputs."""
    ledger = state.round.ledger
    return sorted(c for c in ledger.layered if c in ledger.sealed and not book.is_told(ledger, c))


def look_into_untold(state: State, chunks: Sequence[int], now: float, out: list[Effect]) -> State:
    """All hold all that is sealed, and still a relay tells nothing of what it is to have summed. It may be on its
    way, for a moment; else three look whether it did: its owner may have sealed what nobody summed. If it did, the
    round goes on without its sums, and it is charged with the time; what it told of other inputs convicts it."""
    r, ledger = state.round, state.round.ledger
    assert r.plan is not None
    c, held = chunks[0], max(r.plan.held_at.values(), default=r.plan.opened_at)
    if now < held + UNTOLD_SECONDS:
        return state
    by, told = ledger.sealed[c].by, book.told_by_relays(ledger, c)
    who = [ledger.entries[i].node for i, norms in told.items() if not norms]
    why = f"{state.names(who)} told nothing of what it is to have summed of chunk {c}, sealed by {state.name(by)}"
    if c not in r.untold and is_shown(state, c):
        out.append(Note(f"round {r.number}: {why}: it is looked into"))
        return _open(with_round(state, replace(r, untold=r.untold | {c})), c, MIN_VOICES, now)
    summed = c in r.untold and was_found_well(state, c)
    nodes = who if summed else [*who, by]
    state = remember_unaudited(with_round(state, replace(r, distrusted=r.distrusted.union(nodes))), nodes)
    for node in who if summed else ():
        state = lend_time(state, node, now - held)
        sentence = f"it told nothing of what it summed of chunk {c}"
        part = strike_part(state, now - held)
        state = charge(state, node, Evidence(r.number, Offence.SILENT, sentence, part=part), out)
    out.append(Note(f"round {r.number}: {why}: it is reduced again"))
    return start_over(withdraw_seals(state, set(nodes), chunks), why, now)


def look_closer(
    state: State, weights: Mapping[int, float], count: int, now: float
) -> tuple[State, tuple[int, ...]]:
    """Have so many of these sealed chunks audited, drawn by their weights, by three; and which these are: of those
    that can be audited, and were not found well."""
    able = [c for c, w in weights.items() if w > 0 and is_shown(state, c) and not was_found_well(state, c)]
    # Efraimidis & Spirakis 2006, algorithm A: u**(1 / w), of which the largest are drawn
    able.sort(key=lambda c: log(max(lot(state, b"norm", c), LEAST_LOT)) / weights[c], reverse=True)
    for c in able[:count]:
        state = _open(state, c, MIN_VOICES, now)
    return state, tuple(able[:count])


def can_be(state: State) -> bool:
    """Whether the round has audits, and enough members for any."""
    return bool(state.round.salt) and len(possible_auditors(state)) >= MIN_ABLE


def was_found_well(state: State, c: int) -> bool:
    """Whether an audit found what is sealed of the chunk, and the norms that its owner and its relays told."""
    audit, seal = state.round.audited.get(c), state.round.ledger.sealed.get(c)
    if audit is None or seal is None or (audit.since, audit.digest) != (seal.since, seal.digest):
        return False
    return audit.norms == seal.norms and audit.sums == _sums(state.round.ledger, c)


def _sums(ledger: Ledger, c: int) -> dict[int, bytes]:
    """What relays told of a sealed chunk, those that told something."""
    return {place: norms for place, norms in book.told_by_relays(ledger, c).items() if norms is not None}


def is_shown(state: State, c: int) -> bool:
    """Whether the chunk can be audited, and its owner has a receipt of it."""
    ledger = state.round.ledger
    if (seal := ledger.sealed.get(c)) is None:
        return False
    own = (ledger.owners[c], ledger.since[c]) == (seal.by, seal.since)
    return bool(state.round.salt) and own and _can_be_audited(state, c)


def _may_be(r: RoundState, what: SealedBytes) -> bool:
    """Whether this is what the ledger has of a chunk, or what it may yet get."""
    c, since, sum_ = what
    seal = r.ledger.sealed.get(c)
    return r.ledger.since[c] == since and (seal is None or seal.digest == sum_)


def _look_into(state: State, c: int, now: float) -> State:
    """Audit a sealed chunk that is said to be too long, unless it cannot be: too few can, or somebody is gone that
    has to show something of it, or it has another owner now, or the same one anew, who has no receipt of it."""
    return _open(state, c, MIN_VOICES, now) if is_shown(state, c) else _reduce_again(state, c, now)


def _reduce_again(state: State, c: int, now: float) -> State:
    """What is too long and cannot be audited may not pass for that: where two say so, others reduce again what its
    maker sealed. One alone could have everything undone that is sealed; and two could hold the round up for ever,
    so it is once, whoever seals it then."""
    r = state.round
    seal, since = r.ledger.sealed[c], r.ledger.since[c]
    voices = sum(what == (c, since, seal.digest) for _, what, _ in r.outsized)
    if voices < min(ENOUGH_VOICES, len(r.ledger.members)) or seal.by in r.distrusted:
        return state
    state = with_round(state, replace(r, distrusted=r.distrusted | {seal.by}))
    why = f"chunk {c} is too long, and cannot be audited"
    return start_over(withdraw_seals(state, {seal.by}, [c]), why, now)


def _open(state: State, c: int, auditors: int, now: float) -> State:
    """Begin the audit of a sealed chunk, or have it done by more. Who has looked at it has spoken."""
    ledger, audit = state.round.ledger, state.round.audits.get(c, state.round.audited.get(c))
    seal, shown_by = ledger.sealed[c], parties(state, c, ledger.sealed[c].inputs)
    assert shown_by is not None  # else it cannot be audited
    known = audit is not None and (audit.since, audit.digest, audit.parties) == (
        ledger.since[c],
        seal.digest,
        shown_by,
    )
    if audit is None or not known:
        seconds = seconds_to_answer(state, c, now)
        audit = Audit(
            c, ledger.since[c], seal.by, seal.digest, seal.inputs, shown_by, seconds, auditors, seal.norms
        )
    audit = replace(audit, wanted=max(auditors, audit.wanted), sums=_sums(ledger, c))
    return _put(state, name_auditors(state, audit, auditors, now))


def _can_be_audited(state: State, c: int) -> bool:
    """Whether all who contributed to the chunk, or summed for it, are there to be asked, and enough others to
    ask."""
    owner, seal = state.round.ledger.owners[c], state.round.ledger.sealed[c]
    if owner is None or parties(state, c, seal.inputs) is None:
        return False
    possible = possible_auditors(state)  # else who is back first when all are away chooses its moment
    return len(possible) >= MIN_ABLE and len(possible - {owner}) >= MIN_ABLE - 1


def _put(state: State, audit: Audit) -> State:
    r = state.round
    return with_round(state, replace(r, audits=r.audits | {audit.chunk: audit}))


# Reports


def record(state: State, event: AuditReported, now: float, out: list[Effect]) -> State:
    """Take in what an auditor found. Proof has its consequences at once."""
    r = state.round
    audit = r.audits.get(event.chunk)
    asked = audit is not None and event.node in audit.named and event.node not in audit.voices
    if audit is None or not asked or event.fence.round != r.number or event.fence.attempt != audit.since:
        return state
    if not _stands(r, audit):
        return state
    if event.busy:  # another is asked instead
        named = {n: until for n, until in audit.named.items() if n != event.node}
        busy, silent = audit.busy | {event.node}, audit.silent | {event.node}
        return _put(state, replace(audit, named=named, busy=busy, silent=silent))
    audit = replace(audit, took=(*audit.took, now - audit.asked.get(event.node, now)))
    voice = voice_of(audit, r.salt, event)
    if voice.kind is VoiceKind.FALSE:
        sentence = f"its audit of chunk {audit.chunk} has nothing that shows what it says"
        named = {n: until for n, until in audit.named.items() if n != event.node}
        state = _put(state, replace(audit, named=named, silent=audit.silent | {event.node}))
        return charge(state, event.node, Evidence(r.number, Offence.FALSE_AUDIT, sentence), out)
    audit = replace(audit, voices=audit.voices | {event.node: event})
    state = _put(state, audit)
    if voice.kind is VoiceKind.TWO_INPUTS:
        return convict_contributor(state, audit, voice, event.node, now, out)
    if voice.kind is VoiceKind.UNSOUND:
        sentence = f"its receipt for chunk {audit.chunk} does not hold"
        return convict(state, audit, voice.place, sentence, voice.facts, event.node, now, out)
    if (twice := two_receipts(audit, r.salt)) is not None:
        place, facts = twice
        sentence = f"it signed two receipts for chunk {audit.chunk}"
        return convict(state, audit, place, sentence, facts, event.node, now, out)
    return state


def remember_whose_audit_ended(before: State, state: State, event: Event) -> State:
    """What was audited, and is not any more, though nobody found it well: whatever the reason, it may be the doing
    of who made it, or of a friend's. What these make is drawn more often. Who ended its own part in the round so
    owns nothing for a while."""
    if not before.round.audits or state.round.number != before.round.number:
        return state
    ledger, r = before.round.ledger, state.round
    makers = dict[NodeId, None]()
    for c, audit in before.round.audits.items():
        if c not in r.audits and not _found_well(r, audit):
            relays = (ledger.entries[place].node for place in sorted(audit.parties.relays))
            makers |= dict.fromkeys((audit.owner, *relays))
    state = remember_unaudited(state, makers)
    if not isinstance(event, ENDING) or event.node not in makers or _takes_part(r.ledger, event.node):
        return state
    return leave_audit(state, event.node)


def _found_well(r: RoundState, audit: Audit) -> bool:
    found = r.audited.get(audit.chunk)
    return found is not None and (found.since, found.digest) == (audit.since, audit.digest)


def _takes_part(ledger: Ledger, node: NodeId) -> bool:
    there = (e for e in ledger.entries if e.node == node and not e.gone)
    return any(e.contribution is None or node in ledger.contributions for e in there)


# The clock


def give_time_anew(state: State, now: float) -> State:
    """Let those who have not answered have their time from `now` on: nobody could tell the coordinator anything,
    or no attempt was in force, without which no view names an audit."""
    audits = dict[int, Audit]()
    for c, audit in state.round.audits.items():
        audits[c] = ask(state, audit, audit.named.keys() - audit.voices.keys(), now)
    return with_round(state, replace(state.round, audits=audits)) if audits else state


def advance(state: State, now: float, out: list[Effect]) -> State:
    """Close the audits that are over; name other auditors in the place of those that do not answer."""
    for audit in state.round.audits.values():
        if state.round.audits.get(audit.chunk) is audit:
            state = _advance(state, audit, now, out)
    return state


def _stands(r: RoundState, audit: Audit) -> bool:
    """Whether what is audited is still what the ledger has, whoever owns it now."""
    seal = r.ledger.sealed.get(audit.chunk)
    return seal is not None and seal.digest == audit.digest


def _advance(state: State, audit: Audit, now: float, out: list[Effect]) -> State:
    r = state.round
    if not _stands(r, audit):
        return close(state, [audit.chunk])
    same = (r.ledger.owners[audit.chunk], r.ledger.since[audit.chunk]) == (audit.owner, audit.since)
    if not same or parties(state, audit.chunk, audit.inputs) != audit.parties:
        why = f"chunk {audit.chunk} was drawn for an audit, and one that has to show something of it is gone"
        return void_seals(state, audit, why, now, out)
    able, possible = able_auditors(state), possible_auditors(state)
    gone = {n for n in audit.named if n not in audit.voices and n not in able}
    late = {n for n, until in audit.named.items() if n not in audit.voices and n not in gone and now >= until}
    if gone or late:
        named = {n: until for n, until in audit.named.items() if n not in gone and n not in late}
        back = gone & possible - audit.away  # it may be, and is named again then, once
        silent = audit.silent | (gone - back) | late
        missing = max(audit.wanted - len(audit.voices), 1)
        longer = 2.0 if late and len(silent) <= MAX_DOUBLINGS * missing else 1.0
        waited, seconds = audit.seconds, min(longer * audit.seconds, state.config.rounds.reduce_timeout)
        slow = excused(state, late).union(n for n in late if is_too_slow(state, audit, n))
        for node in sorted(gone | late, key=order):
            state = lend_to_auditor(state, audit, node, now)
        audit = replace(audit, named=named, silent=silent, away=audit.away | back, seconds=seconds)
        state = _put(state, audit)
        for node in sorted(late - slow, key=order):
            sentence = f"it did not answer an audit of chunk {audit.chunk} in time"
            part = strike_part(state, waited + REPORT_SECONDS)
            state = charge(state, node, Evidence(r.number, Offence.SILENT, sentence, part=part), out)
        if state.round.audits.get(audit.chunk) is not audit:
            return state
    doubt = not all(is_well(audit, event) for event in audit.voices.values())
    everybody = len(able) + len(audit.named)
    if doubt and not audit.wide:
        audit = replace(audit, wide=True, seconds=in_turn(state, audit.seconds, everybody))
        differs = any(not e.silent for e in audit.voices.values() if not is_well(audit, e))
        found = "does not come to the same" if differs else "lacks what somebody did not show"
        sentence = f"an audit of chunk {audit.chunk}, sealed by {state.name(audit.owner)}, {found}"
        out.append(Note(f"round {r.number}: {sentence}: all able members repeat it", audit.owner))
    audit = name_auditors(state, audit, everybody if doubt else audit.wanted, now)
    state = _put(state, audit)
    if any(n not in audit.voices for n in audit.named):
        return state
    enough = is_decided(state, audit) if doubt else len(audit.voices) >= min(audit.wanted, AUDITORS)
    if not enough and possible - able - {audit.owner} - audit.silent:
        return state  # who may be back: else few could choose a moment in which nobody else is there
    if doubt:
        return reach_verdict(state, audit, now, out)
    if not audit.voices and audit.busy:
        why = f"nobody had the time to audit chunk {audit.chunk}"
        return void_seals(state, audit, why, now, out, doubted=True)
    if not audit.voices:
        out.append(Note(f"round {r.number}: nobody could audit chunk {audit.chunk}"))
        return close(_reduce_again(state, audit.chunk, now), [audit.chunk])
    return found_well(state, audit)
