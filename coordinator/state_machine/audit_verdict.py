"""The verdict on a sealed chunk of which not every auditor says that it is well, and what follows from it. Pure.

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

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from atoll.comm.evidence import Evidence, Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.audit_voices import Voice, VoiceKind, given_alike, given_by_others, voice_of
from atoll.coordinator.state_machine.auditors import MIN_VOICES, electorate
from atoll.coordinator.state_machine.changes import fail_attempt, with_round
from atoll.coordinator.state_machine.conduct import charge
from atoll.coordinator.state_machine.events import Effect, Note
from atoll.coordinator.state_machine.state import Audit, Phase, State, order

_Accusers = dict[int, list[NodeId]]  # by the place of whom they speak


def is_decided(state: State, audit: Audit) -> bool:
    """Whether most of all who could audit the chunk say the same of it, whatever the others would."""
    said = (voice_of(audit, state.round.salt, event) for event in audit.voices.values())
    votes = Counter((voice.kind, voice.place) for voice in said)
    return any(2 * k > len(electorate(state) - {audit.owner}) for k in votes.values())


def reach_verdict(state: State, audit: Audit, now: float, out: list[Effect]) -> State:
    """Everybody who could has spoken, and not all say that it is well."""
    c = audit.chunk
    voices = {node: voice_of(audit, state.round.salt, event) for node, event in audit.voices.items()}
    total, enough = len(voices), len(voices) >= MIN_VOICES
    # of all who could speak, so that not those decide who are the first to, or who had others left out
    able = max(total, len(electorate(state) - {audit.owner}))
    of = {kind: [n for n, voice in voices.items() if voice.kind is kind] for kind in VoiceKind}
    if 2 * len(of[VoiceKind.WELL]) > total:
        state = found_well(state, audit)
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
            silent = _accused(state, voices)
            if silent and (makers := _found_by_those_who_could(state, voices, silent)):
                return _hold_to_account(state, audit, makers, silent, now, out)
            why = f"{state.names(against)} found another chunk {c} than {state.name(audit.owner)} sealed"
            return void_seals(state, audit, why, now, out, doubted=True)
        for node in of[VoiceKind.WELL]:
            if given_alike(audit, state.round.salt, node, against[0]):
                state = _charge_false(state, audit, node, out)
        found = (("sealed", audit.digest.hex()), ("recomputed", audit.voices[against[0]].digest.hex()))
        said = (("by", " ".join(against)), ("of", str(total)))
        same = audit.voices[against[0]].digest == audit.digest
        if kind is VoiceKind.RELAY and same:
            what = "other norms" if audit.sums.get(place) else "of other inputs"
            sentence = f"it told {what} of what it summed of chunk {c} for its region than that has"
        elif kind is VoiceKind.RELAY:
            sentence = f"it summed chunk {c} for its region as something other than its inputs come to"
        elif same:
            sentence = f"it told other norms of what it merged in chunk {c} than that has"
        else:
            sentence = f"it sealed chunk {c} as something other than its inputs come to"
        return convict(state, audit, place, sentence, found + said, None, now, out)
    return _without_end(state, audit, voices, now, out)


def _without_end(
    state: State, audit: Audit, voices: Mapping[NodeId, Voice], now: float, out: list[Effect]
) -> State:
    """No majority says that it is well, or what else it is."""
    makers, against = {audit.parties.owner, *audit.parties.relays}, _Accusers()
    silent, able = _accused(state, voices), electorate(state) - {audit.owner}
    for node, voice in voices.items():
        if voice.kind is not VoiceKind.WELL and state.round.ledger.entries[voice.place].node != node:
            against.setdefault(voice.place, []).append(node)  # nobody speaks of itself
    # Who made it, and gives some its receipt and others none, so that neither are a majority, is found by both.
    for place, of in (*((place, against[place]) for place in sorted(makers & against.keys())), *silent.items()):
        node = state.round.ledger.entries[place].node
        others = max(len(voices.keys() - {node}), len(able - {node}))
        if len(voices) >= MIN_VOICES and 2 * len(of) > others:
            return go_on_without(state, audit, place, True, now, out)
        if len(voices) >= MIN_VOICES and 2 * len(of) == others and place not in makers:
            return go_on_without(state, audit, place, True, now, out)  # who shows half of them what it has, too
    accused = max(silent, key=lambda p: len(silent[p]), default=-1)
    if silent and (liars := _found_by_those_who_could(state, voices, silent)):
        return _hold_to_account(state, audit, liars, silent, now, out)
    told = sum(voice.kind in (VoiceKind.OTHER, VoiceKind.RELAY) for voice in voices.values())
    if accused >= 0 and len(silent[accused]) >= told:
        well = any(voice.kind is VoiceKind.WELL for voice in voices.values())
        if len(voices) < MIN_VOICES and well and accused not in makers:
            return found_well(state, audit)  # it shows it to the other one
        return go_on_without(state, audit, accused, False, now, out)
    why = f"the members that audited chunk {audit.chunk} do not agree"
    return void_seals(state, audit, why, now, out, doubted=True)


def _accused(state: State, voices: Mapping[NodeId, Voice]) -> _Accusers:
    """Of whom some say that they show nothing."""
    found = _Accusers()
    for node, voice in voices.items():
        if voice.kind is VoiceKind.SILENT and state.round.ledger.entries[voice.place].node != node:
            found.setdefault(voice.place, []).append(node)
    return found


def _found_by_those_who_could(state: State, voices: Mapping[NodeId, Voice], silent: _Accusers) -> list[NodeId]:
    """Who made what most of those who could recompute it found to be something else, three of them or more. Who
    shows some what it does not show others does not keep these from being a majority by calling it well."""
    entries = state.round.ledger.entries
    hiding = {entries[place].node for place in silent}
    kept = ((n, v) for n, v in voices.items() if v.kind is not VoiceKind.SILENT)
    able = [v for n, v in kept if v.kind is not VoiceKind.WELL or n not in hiding]
    against = Counter(voice.place for voice in able if voice.kind in (VoiceKind.OTHER, VoiceKind.RELAY))
    return [entries[place].node for place, k in against.items() if k >= MIN_VOICES and 2 * k > len(able)]


def _hold_to_account(
    state: State, audit: Audit, makers: Iterable[NodeId], silent: _Accusers, now: float, out: list[Effect]
) -> State:
    """Those who made what is not well, as most of those found who could, and who hid from most of the others what
    it is made of."""
    sentence = f"most auditors that were shown all of chunk {audit.chunk} found something else than it made of it"
    for node in makers:
        state = charge(state, node, Evidence(state.round.number, Offence.UNSHOWN, sentence), out)
    accused = max(silent, key=lambda place: len(silent[place]))
    return go_on_without(state, audit, accused, len(silent[accused]) > 1, now, out)


def _charge_false(state: State, audit: Audit, node: NodeId, out: list[Effect]) -> State:
    sentence = f"its audit of chunk {audit.chunk} is not what the majority found"
    said = (("said", audit.voices[node].digest.hex()), ("sealed", audit.digest.hex()))
    return charge(state, node, Evidence(state.round.number, Offence.FALSE_AUDIT, sentence, said), out)


def found_well(state: State, audit: Audit) -> State:
    """The audit is over, and the chunk stands."""
    r = state.round
    return close(with_round(state, replace(r, audited=r.audited | {audit.chunk: audit})), [audit.chunk])


def close(state: State, chunks: Iterable[int]) -> State:
    r, over = state.round, set(chunks)
    return with_round(state, replace(r, audits={c: a for c, a in r.audits.items() if c not in over}))


def convict(
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
    state = withdraw_seals(state, {audit.owner, culprit}, [audit.chunk])
    state = charge(state, culprit, Evidence(r.number, Offence.FORGED_SEAL, sentence, facts, by), out)
    return start_over(state, f"{state.name(culprit)} forged chunk {audit.chunk}", now)


def convict_contributor(
    state: State, audit: Audit, voice: Voice, by: NodeId, now: float, out: list[Effect]
) -> State:
    """The member at the voice's place signed two contents of the chunk."""
    r = state.round
    culprit = r.ledger.entries[voice.place].node
    sentence = f"it showed another contribution to chunk {audit.chunk} than it had sent"
    state = withdraw_seals(state, {audit.owner, culprit}, [audit.chunk])
    state = charge(state, culprit, Evidence(r.number, Offence.FORGED_INPUT, sentence, voice.facts, by), out)
    return start_over(state, f"{state.name(culprit)} forged its contribution to chunk {audit.chunk}", now)


def go_on_without(state: State, audit: Audit, place: int, most: bool, now: float, out: list[Effect]) -> State:
    """Most, or as many as say otherwise, say that the member at this place does not show what it should: the round
    goes on without it."""
    r = state.round
    node = r.ledger.entries[place].node
    sentence = f"it did not show most auditors of chunk {audit.chunk} what it had of it"
    state = with_round(state, replace(r, distrusted=r.distrusted | {node, audit.owner}))
    state = withdraw_seals(state, {audit.owner, node}, [audit.chunk])
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
    return start_over(state, f"{state.name(node)} showed nothing of chunk {audit.chunk} to its auditors", now)


def void_seals(
    state: State, audit: Audit, why: str, now: float, out: list[Effect], doubted: bool = False
) -> State:
    """What the owner sealed cannot be trusted, and nobody is to blame. `doubted`: others own its chunks."""
    out.append(Note(f"round {state.round.number}: {why}: it is reduced again", audit.owner))
    if doubted:
        state = with_round(state, replace(state.round, distrusted=state.round.distrusted | {audit.owner}))
    return start_over(withdraw_seals(state, {audit.owner}, [audit.chunk]), why, now)


def withdraw_seals(state: State, nodes: set[NodeId], chunks: Sequence[int]) -> State:
    """Nothing that these nodes sealed, or summed, in this round counts; nor do these chunks. Who is in doubt owns
    nothing any more."""
    r = state.round
    void = book.made_by(r.ledger, nodes).union(chunks)
    void |= {c for c, owner in enumerate(r.ledger.owners) if owner in r.distrusted}
    audits = {c: a for c, a in r.audits.items() if c not in void}
    return with_round(state, replace(r, ledger=book.unseal(r.ledger, void), audits=audits))


def start_over(state: State, why: str, now: float) -> State:
    """The next attempt deals what is void."""
    r = state.round
    if r.phase is not Phase.REDUCING or r.plan is None:
        return state
    return fail_attempt(state, why, now)
