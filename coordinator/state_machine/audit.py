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

What an auditor says counts by what others can see of it (`audit_voices`):

    proof         two contents of one chunk that a contributor signed; a receipt that its owner or relay signed and
                  that does not hold, or two that differ: who signed is convicted, whoever says so
    recomputed    the receipt holds, and the inputs come to something else than was sealed (or than a relay signed
                  of its region), or have other norms than the owner told, of its own delta, too: the majority of
                  three voices or more, and of all who could be asked, convicts the owner (or the relay), or else
                  those that said so were false
    silence       who does not give an auditor what it asks for cannot be told from one whom that auditor slanders:
                  the majority decides, and it costs strikes, but is no conviction: more of them where it made what
                  is audited, and what it makes is drawn more often from then on. Where there is no majority, as if
                  who is spoken of shows some what it does not show others, the round goes on without it, at no
                  charge; where two looked, and the other got what it asked for, with it

Whatever does not come to "well" or "it stands" makes all seals of the owner in this round void: its chunks start
anew, at others if it is not beyond doubt, and the round goes on. Nothing wrong was ever applied.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from atoll.comm.bitmap import places
from atoll.comm.digest import digest
from atoll.comm.evidence import Evidence, Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.audit_voices import (
    Voice,
    VoiceKind,
    given_alike,
    given_by_others,
    is_well,
    parties,
    two_receipts,
    voice_of,
)
from atoll.coordinator.state_machine.conduct import (
    charge,
    identity,
    lend_time,
    may_own,
    owes_time,
    remember_unaudited,
    strike_part,
    unaudited_lately,
)
from atoll.coordinator.state_machine.events import AuditReported, Effect, Note, SealOutsized
from atoll.coordinator.state_machine.newcomers import excused
from atoll.coordinator.state_machine.state import (
    Audit,
    Phase,
    RoundState,
    SealedBytes,
    State,
    fail_attempt,
    order,
    with_round,
)

MIN_ABLE = 3  # members that can be dialled, for any audit
AUDITORS = 2  # of a chunk that is drawn
UNAUDITED_FACTOR = 8.0  # times as often as others' chunks are drawn, where an audit came to no end lately
DOUBTS = 2  # chunks of an attempt that one member has audited by saying that they are too long
ENOUGH_VOICES = 2  # that a chunk is too long
MIN_VOICES = 3  # for a conviction
MIN_SECONDS = 3.0  # for an auditor's answer
EXCHANGE_FACTOR = 4.0  # times the seconds in which the round's exchange moves as much
MAX_BASE_SECONDS = 10.0  # for an answer, besides those of the transfer at SLOW_RATE
SLOW_RATE = 0.5e6  # bytes a second at which an auditor that is slow fetches the inputs
ASK_SHARE = 0.1  # of the time for an answer, in which a chunk on its way lets a request pass
AUDITS_AT_ONCE = 4  # that a member works at; others wait
REPORT_SECONDS = 1.0  # that an order and its answer may be on the way
MAX_DOUBLINGS = 2  # of the time for an answer, with each in a row that does not come
MUTE_ROUNDS = 5  # in which others are named before a member that was silent


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
    """Draw among the chunks that were sealed just now; what somebody said of them before is looked into."""
    r = state.round
    if not r.salt:
        return state
    told = {what for _, what, _ in r.outsized}
    limit = state.config.security.audits / len(r.ledger.owners)
    for c in fresh:
        if c not in state.round.ledger.sealed:
            continue  # with what its owner sealed besides
        if (c, r.ledger.since[c], r.ledger.sealed[c].digest) in told:
            state = _look_into(state, c, now)
        elif _lot(state, b"draw", c) < limit * _factor(state, c) and _can_be_audited(state, c):
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


def _may_be(r: RoundState, what: SealedBytes) -> bool:
    """Whether this is what the ledger has of a chunk, or what it may yet get."""
    c, since, sum_ = what
    seal = r.ledger.sealed.get(c)
    return r.ledger.since[c] == since and (seal is None or seal.digest == sum_)


def _look_into(state: State, c: int, now: float) -> State:
    """Audit a sealed chunk that is said to be too long, unless it cannot be: too few can, or somebody is gone that
    has to show something of it, or it has another owner now, or the same one anew, who has no receipt of it."""
    ledger = state.round.ledger
    seal = ledger.sealed[c]
    by_owner = (ledger.owners[c], ledger.since[c]) == (seal.by, seal.since)
    if by_owner and parties(state, c, seal.inputs) is not None and len(_able(state)) >= MIN_ABLE:
        return _open(state, c, MIN_VOICES, now)
    return _reduce_again(state, c, now)


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
    return _start_over(_withdraw_seals(state, {seal.by}, [c]), why, now)


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
        seconds = _seconds(state, c, now)
        audit = Audit(
            c, ledger.since[c], seal.by, seal.digest, seal.inputs, shown_by, seconds, auditors, seal.norms
        )
    return _put(state, _name(state, replace(audit, wanted=auditors), auditors, now))


def _lot(state: State, what: bytes, c: int, node: str = "") -> float:
    """A number in [0, 1) that nobody can foretell who does not know the nonce."""
    r = state.round
    sealed = r.ledger.sealed[c].digest
    about = b"%d.%d.%s" % (c, r.ledger.since[c], node.encode())
    return int.from_bytes(digest(what, state.nonce, r.salt, about, sealed), "big") / 2**128


def _can_be_audited(state: State, c: int) -> bool:
    """Whether all who contributed to the chunk, or summed for it, are there to be asked, and enough others to
    ask."""
    owner, seal = state.round.ledger.owners[c], state.round.ledger.sealed[c]
    if owner is None or parties(state, c, seal.inputs) is None:
        return False
    able = _able(state)
    return len(able) >= MIN_ABLE and len(able - {owner}) >= MIN_ABLE - 1


def _able(state: State) -> set[NodeId]:
    """Members of the attempt that can audit."""
    here, trusted = state.members.here, state.members.trusted
    nodes = {e.node for e in state.round.ledger.entries if not e.gone}
    sound = {n for n in nodes if n in here and not here[n].leaf and here[n].key and trusted(n)}
    return {n for n in sound if may_own(state, n)}


def _seconds(state: State, c: int, now: float) -> float:
    """Seconds that an auditor of the chunk has, which was sealed just now: a multiple of those in which the
    exchange moves a chunk's inputs, as the plan predicts it, or as the chunks that were sealed so far show it."""
    r, ledger = state.round, state.round.ledger
    inputs = sum(e.contribution is not None for e in ledger.entries)
    size = state.chunks.size(c) * state.config.reduce.bytes_per_element
    seconds = most = MAX_BASE_SECONDS + inputs * size / SLOW_RATE
    if r.plan is not None:  # else the attempt is over, and what it showed with it
        begun = r.plan.opened_at if r.planned_at is None else r.planned_at
        shown = (now - begun) * min(len(ledger.members) / len(ledger.sealed), 1.0)
        predicted = r.plan.predicted * min(inputs / (2 * len(ledger.owners)), 1.0)
        seconds = MIN_SECONDS + EXCHANGE_FACTOR * max(shown, predicted)
    wanted = sum(audit.wanted for audit in r.audits.values()) + 1
    orders = wanted / max(len(_able(state)), 1)  # that a member has, about
    turns = 1.0 + orders / AUDITS_AT_ONCE if orders > AUDITS_AT_ONCE else 1.0
    return min(turns * min(seconds, most), state.config.rounds.reduce_timeout)


def _name(state: State, audit: Audit, count: int, now: float) -> Audit:
    """Name auditors until there are so many that have answered or may; of those who were silent lately, or whose
    links are too slow for it, only as many as a conviction needs, unless it is for all to repeat it."""
    able = _able(state) - {audit.owner} - audit.silent - audit.named.keys()
    by_lot = sorted(able, key=lambda n: _lot(state, b"auditor", audit.chunk, n))
    unlikely = [n for n in by_lot if _is_unlikely(state, audit, n)]
    chosen = [n for n in by_lot if n not in unlikely][: max(count - len(audit.named), 0)]
    least = 1 if count == AUDITORS and len(_able(state) - {audit.owner}) < MIN_VOICES else MIN_VOICES
    least = count if audit.wide else min(count, least)  # two may not outvote those who are few only for being slow
    chosen += unlikely[: max(least - len(audit.named) - len(chosen), 0)]
    return _asked(state, audit, chosen, now)


def _asked(state: State, audit: Audit, nodes: Iterable[NodeId], now: float) -> Audit:
    """The audit with these to answer it, who have their time from now on; where the coordinator was away, from
    when all had time to come back."""
    begun = max(now, state.round.patient_until)
    named = audit.named | dict.fromkeys(nodes, begun + audit.seconds + REPORT_SECONDS)
    return replace(audit, named=named, asked=audit.asked | dict.fromkeys(nodes, begun))


def _is_unlikely(state: State, audit: Audit, node: NodeId) -> bool:
    """Whether others are to be asked rather: the node is likely to be late, as far as is known, or owes the others
    time."""
    unknown = bool(excused(state, [node]))
    return unknown or owes_time(state, node) or _was_silent(state, node) or _is_too_slow(state, audit, node)


def _was_silent(state: State, node: NodeId) -> bool:
    """Whether the node did not do, in one of the last rounds, what others waited for."""
    record = state.conduct.strikes.get(identity(state, node))
    last = None if record is None else record.latest.get(Offence.SILENT)
    return last is not None and state.round.number - last < MUTE_ROUNDS


def _is_too_slow(state: State, audit: Audit, node: NodeId) -> bool:
    """Whether the node's link, as far as it is known, does not bring it the chunk's inputs in time, or not what it
    asks for them with, which waits for what is on its way."""
    up, down = state.members.here[node].rates
    size = state.chunks.size(audit.chunk) * state.config.reduce.bytes_per_element
    late = up > 0 and size > up * ASK_SHARE * audit.seconds
    return late or (down > 0 and len(places(audit.inputs)) * size > down * audit.seconds)


def _put(state: State, audit: Audit) -> State:
    r = state.round
    return with_round(state, replace(r, audits=r.audits | {audit.chunk: audit}))


def _close(state: State, chunks: Iterable[int]) -> State:
    r, over = state.round, set(chunks)
    return with_round(state, replace(r, audits={c: a for c, a in r.audits.items() if c not in over}))


def _found_well(state: State, audit: Audit) -> State:
    """The audit is over, and the chunk stands."""
    r = state.round
    return _close(with_round(state, replace(r, audited=r.audited | {audit.chunk: audit})), [audit.chunk])


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
        return _convict_contributor(state, audit, voice, event.node, now, out)
    if voice.kind is VoiceKind.UNSOUND:
        sentence = f"its receipt for chunk {audit.chunk} does not hold"
        return _convict(state, audit, voice.place, sentence, voice.facts, event.node, now, out)
    if (twice := two_receipts(audit, r.salt)) is not None:
        place, facts = twice
        sentence = f"it signed two receipts for chunk {audit.chunk}"
        return _convict(state, audit, place, sentence, facts, event.node, now, out)
    return state


# The clock, and the verdict


def give_time_anew(state: State, now: float) -> State:
    """Let those who have not answered have their time from `now` on: nobody could tell the coordinator anything,
    or no attempt was in force, without which no view names an audit."""
    audits = dict[int, Audit]()
    for c, audit in state.round.audits.items():
        audits[c] = _asked(state, audit, audit.named.keys() - audit.voices.keys(), now)
    return with_round(state, replace(state.round, audits=audits)) if audits else state


def advance(state: State, now: float, out: list[Effect]) -> State:
    """Close the audits that are over; name other auditors in the place of those that do not answer."""
    for audit in state.round.audits.values():
        if state.round.audits.get(audit.chunk) is audit:
            state = _advance(state, audit, now, out)
    return state


def _lend(state: State, audit: Audit, node: NodeId, now: float) -> State:
    """Have an auditor that has not answered, and will not, owe the time for which it was waited for, beyond twice
    what the others took, or where nobody has answered what anybody has, and beyond half of what slow links have.
    Who answers owes nothing, however late it does: whoever contributed may show it its part in the last moment."""
    beyond = max(2 * median(audit.took) if audit.took else MIN_SECONDS, (audit.seconds - MIN_SECONDS) / 2)
    return lend_time(state, node, now - audit.asked.get(node, now) - beyond)


def _stands(r: RoundState, audit: Audit) -> bool:
    """Whether what is audited is still what the ledger has, whoever owns it now."""
    seal = r.ledger.sealed.get(audit.chunk)
    return seal is not None and seal.digest == audit.digest


def _advance(state: State, audit: Audit, now: float, out: list[Effect]) -> State:
    r = state.round
    if not _stands(r, audit):
        return _close(state, [audit.chunk])
    same = (r.ledger.owners[audit.chunk], r.ledger.since[audit.chunk]) == (audit.owner, audit.since)
    if not same or parties(state, audit.chunk, audit.inputs) != audit.parties:
        why = f"chunk {audit.chunk} was drawn for an audit, and one that has to show something of it is gone"
        return _void(state, audit, why, now, out)
    able = _able(state)
    gone = {n for n in audit.named if n not in audit.voices and n not in able}
    late = {n for n, until in audit.named.items() if n not in audit.voices and n not in gone and now >= until}
    if gone or late:
        named = {n: until for n, until in audit.named.items() if n not in gone and n not in late}
        silent = audit.silent | gone | late
        missing = max(audit.wanted - len(audit.voices), 1)
        longer = 2.0 if late and len(silent) <= MAX_DOUBLINGS * missing else 1.0
        waited, seconds = audit.seconds, min(longer * audit.seconds, state.config.rounds.reduce_timeout)
        slow = excused(state, late).union(n for n in late if _is_too_slow(state, audit, n))
        for node in sorted(gone | late, key=order):
            state = _lend(state, audit, node, now)
        audit = replace(audit, named=named, silent=silent, seconds=seconds)
        state = _put(state, audit)
        for node in sorted(late - slow, key=order):
            sentence = f"it did not answer an audit of chunk {audit.chunk} in time"
            part = strike_part(state, waited + REPORT_SECONDS)
            state = charge(state, node, Evidence(r.number, Offence.SILENT, sentence, part=part), out)
        if state.round.audits.get(audit.chunk) is not audit:
            return state
    doubt = not all(is_well(audit, event) for event in audit.voices.values())
    if doubt and not audit.wide:
        everybody = len(able) + len(audit.named)
        audit = _name(state, replace(audit, wide=True), everybody, now)
        differs = any(not e.silent for e in audit.voices.values() if not is_well(audit, e))
        found = "does not come to the same" if differs else "lacks what somebody did not show"
        sentence = f"an audit of chunk {audit.chunk}, sealed by {state.name(audit.owner)}, {found}"
        out.append(Note(f"round {r.number}: {sentence}: all able members repeat it", audit.owner))
    elif not doubt:
        audit = _name(state, audit, audit.wanted, now)
    state = _put(state, audit)
    if any(n not in audit.voices for n in audit.named):
        return state
    if doubt:
        return _verdict(state, audit, now, out)
    if not audit.voices:
        out.append(Note(f"round {r.number}: nobody could audit chunk {audit.chunk}"))
        return _close(_reduce_again(state, audit.chunk, now), [audit.chunk])
    return _found_well(state, audit)


def _verdict(state: State, audit: Audit, now: float, out: list[Effect]) -> State:
    """Everybody who could has spoken, and not all say that it is well."""
    c = audit.chunk
    voices = {node: voice_of(audit, state.round.salt, event) for node, event in audit.voices.items()}
    total, enough = len(voices), len(voices) >= MIN_VOICES
    able = max(total, len(_able(state) - {audit.owner}))  # so that not those decide who were the first to speak
    of = {kind: [n for n, voice in voices.items() if voice.kind is kind] for kind in VoiceKind}
    if 2 * len(of[VoiceKind.WELL]) > total:
        state = _found_well(state, audit)
        for node in (*of[VoiceKind.OTHER], *of[VoiceKind.RELAY]):
            known = 2 * len(of[VoiceKind.WELL]) > able and enough
            if known and given_by_others(audit, state.round.salt, node, of[VoiceKind.WELL]):
                state = _charge_false(state, audit, node, out)
        return state
    for place in sorted({voices[n].place for n in (*of[VoiceKind.OTHER], *of[VoiceKind.RELAY])}):
        kind = VoiceKind.OTHER if place == audit.parties.owner else VoiceKind.RELAY
        against = sorted((n for n in of[kind] if voices[n].place == place), key=order)
        if 2 * len(against) <= total:
            continue
        if not enough or 2 * len(against) <= able:
            why = f"{state.names(against)} found another chunk {c} than {state.name(audit.owner)} sealed"
            return _void(state, audit, why, now, out, doubted=True)
        for node in of[VoiceKind.WELL]:
            if given_alike(audit, state.round.salt, node, against[0]):
                state = _charge_false(state, audit, node, out)
        found = (("sealed", audit.digest.hex()), ("recomputed", audit.voices[against[0]].digest.hex()))
        said = (("by", " ".join(against)), ("of", str(total)))
        if kind is VoiceKind.RELAY:
            sentence = f"it summed chunk {c} for its region as something other than its inputs come to"
        elif audit.voices[against[0]].digest == audit.digest:
            sentence = f"it told other norms of what it merged in chunk {c} than that has"
        else:
            sentence = f"it sealed chunk {c} as something other than its inputs come to"
        return _convict(state, audit, place, sentence, found + said, None, now, out)
    return _without_end(state, audit, voices, now, out)


def _without_end(
    state: State, audit: Audit, voices: Mapping[NodeId, Voice], now: float, out: list[Effect]
) -> State:
    """No majority says that it is well, or what else it is."""
    makers, silent, against = {audit.parties.owner, *audit.parties.relays}, _Accusers(), _Accusers()
    for node, voice in voices.items():
        if voice.kind is VoiceKind.WELL or state.round.ledger.entries[voice.place].node == node:
            continue  # nobody speaks of itself
        against.setdefault(voice.place, []).append(node)
        if voice.kind is VoiceKind.SILENT:
            silent.setdefault(voice.place, []).append(node)
    # Who made it, and gives some its receipt and others none, so that neither are a majority, is found by both.
    for place, of in (*((place, against[place]) for place in sorted(makers & against.keys())), *silent.items()):
        others = [n for n in voices if n != state.round.ledger.entries[place].node]
        if len(voices) >= MIN_VOICES and 2 * len(of) > len(others):
            return _without(state, audit, place, True, now, out)
        if len(voices) >= MIN_VOICES and 2 * len(of) == len(others) and place not in makers:
            return _without(state, audit, place, True, now, out)  # who shows half of them what it has, too
    accused = max(silent, key=lambda p: len(silent[p]), default=-1)
    told = sum(voice.kind in (VoiceKind.OTHER, VoiceKind.RELAY) for voice in voices.values())
    if accused >= 0 and len(silent[accused]) >= told:
        well = any(voice.kind is VoiceKind.WELL for voice in voices.values())
        if len(voices) < MIN_VOICES and well and accused not in makers:
            return _found_well(state, audit)  # it shows it to the other one
        return _without(state, audit, accused, False, now, out, told > 1)
    why = f"the members that audited chunk {audit.chunk} do not agree"
    return _void(state, audit, why, now, out, doubted=True)


_Accusers = dict[int, list[NodeId]]  # by the place of whom they speak


def _charge_false(state: State, audit: Audit, node: NodeId, out: list[Effect]) -> State:
    sentence = f"its audit of chunk {audit.chunk} is not what the majority found"
    said = (("said", audit.voices[node].digest.hex()), ("sealed", audit.digest.hex()))
    return charge(state, node, Evidence(state.round.number, Offence.FALSE_AUDIT, sentence, said), out)


# Consequences


def _convict(
    state: State,
    audit: Audit,
    place: int,
    sentence: str,
    facts: tuple[tuple[str, str], ...],
    by: NodeId | None,
    now: float,
    out: list[Effect],
) -> State:
    """The owner, or the relay, at `place` forged what it merged."""
    r = state.round
    culprit = r.ledger.entries[place].node
    state = _withdraw_seals(state, {audit.owner, culprit}, [audit.chunk])
    state = charge(state, culprit, Evidence(r.number, Offence.FORGED_SEAL, sentence, facts, by), out)
    return _start_over(state, f"{state.name(culprit)} forged chunk {audit.chunk}", now)


def _convict_contributor(
    state: State, audit: Audit, voice: Voice, by: NodeId, now: float, out: list[Effect]
) -> State:
    """The member at the voice's place signed two contents of the chunk."""
    r = state.round
    culprit = r.ledger.entries[voice.place].node
    sentence = f"it showed another contribution to chunk {audit.chunk} than it had sent"
    state = _withdraw_seals(state, {audit.owner, culprit}, [audit.chunk])
    state = charge(state, culprit, Evidence(r.number, Offence.FORGED_INPUT, sentence, voice.facts, by), out)
    return _start_over(state, f"{state.name(culprit)} forged its contribution to chunk {audit.chunk}", now)


def _without(
    state: State, audit: Audit, place: int, most: bool, now: float, out: list[Effect], differs: bool = False
) -> State:
    """Most, or too many to know better, say that the member at this place does not show what it should: the round
    goes on without it. `differs`: others found something else."""
    r = state.round
    node = r.ledger.entries[place].node
    sentence = f"it did not show most auditors of chunk {audit.chunk} what it had of it"
    state = with_round(state, replace(r, distrusted=r.distrusted | {node, audit.owner}))
    makers = {audit.owner, *(r.ledger.entries[i].node for i in audit.parties.relays)}
    state = remember_unaudited(state, makers) if most or differs or node in makers else state
    state = _withdraw_seals(state, {audit.owner, node}, [audit.chunk])
    ledger = state.round.ledger
    if node in ledger.contributions and node != audit.owner:
        state = with_round(state, replace(state.round, ledger=book.withdraw(ledger, node)))
    if most and place in {audit.parties.owner, *audit.parties.relays}:
        state = charge(state, node, Evidence(r.number, Offence.UNSHOWN, sentence), out)
    elif most:  # a whole strike, however little time it cost: it may be for a friend that forges
        state = charge(state, node, Evidence(r.number, Offence.SILENT, sentence), out)
    else:
        out.append(
            Note(f"round {r.number}: {state.name(node)} showed some auditors nothing of chunk {audit.chunk}", node)
        )
    return _start_over(state, f"{state.name(node)} showed nothing of chunk {audit.chunk} to its auditors", now)


def _void(state: State, audit: Audit, why: str, now: float, out: list[Effect], doubted: bool = False) -> State:
    """What the owner sealed cannot be trusted, and nobody is to blame. `doubted`: others own its chunks."""
    out.append(Note(f"round {state.round.number}: {why}: it is reduced again", audit.owner))
    if doubted:
        state = remember_unaudited(state, [audit.owner])
        state = with_round(state, replace(state.round, distrusted=state.round.distrusted | {audit.owner}))
    return _start_over(_withdraw_seals(state, {audit.owner}, [audit.chunk]), why, now)


def _withdraw_seals(state: State, nodes: set[NodeId], chunks: Sequence[int]) -> State:
    """Nothing that these nodes sealed, or summed, in this round counts; nor do these chunks. Who is in doubt owns
    nothing any more."""
    r = state.round
    void = book.made_by(r.ledger, nodes).union(chunks)
    void |= {c for c, owner in enumerate(r.ledger.owners) if owner in r.distrusted}
    audits = {c: a for c, a in r.audits.items() if c not in void}
    return with_round(state, replace(r, ledger=book.unseal(r.ledger, void), audits=audits))


def _start_over(state: State, why: str, now: float) -> State:
    """The next attempt deals what is void."""
    r = state.round
    if r.phase is not Phase.REDUCING or r.plan is None:
        return state
    return fail_attempt(state, why, now)
