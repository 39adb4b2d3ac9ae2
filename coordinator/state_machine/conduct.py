"""Conduct of members over rounds: who is held to account for what, and what they may do then. Pure.

`charge` is the one way in which anybody is struck, put in quarantine, evicted for what it did, or banned. What is
held against a member is held against its key, so whoever comes back under the key, as another node too, finds it
again; where a node has no key, against the node. Each decision leaves as an effect with its evidence, which the
journal keeps once; the operator can take it back (`Pardoned`), and put out whom they will (`Banned`).

    proven (forged bytes)    evicted at once, and the key banned: it cannot join
    false statements         strikes of weight 4: it owns nothing, its work is not taken, it is out for a while
    trouble (late, silent)   strikes of weight 1: it owns nothing, its work is not taken; never more
    false work (a replay     strikes of weight 2.5, with the same consequences: it is no proof
    of a round says so)
    unshown (to auditors,    strikes of weight 4, with the same consequences, and its chunks are drawn more often
    by who made it)          (`unaudited_lately`)
    doubtful (accuser,       the same, at the commit, unless it would hit more than half of the round's members:
    outlier)                 then the network, or the run, is the odd one

An offence counts once a round, and what delays a round one strike at most. `strikes` has the weights; the other
parts of the machine ask `may_own` and `may_contribute`, and heed the answer where the run can go on without the
member.

A delay is made up for, beside the strike and where nobody is struck (`lend_time`): who cost the others so many
tenths of a round's inner time *owes time* for as many rounds, and others rely on it for nothing (`owes_time`): it
owns no chunks, nor does anybody wait for what it is to say. So a silent member costs rounds of any length a tenth
in the long run. Its work is taken as ever, so who only paused for a moment loses nothing. Who goes before it is
late, however it goes, owes as much; and who floods the coordinator with reports owes the most at once.
"""

from collections.abc import Iterable, Sequence
from itertools import count

from atoll.comm.evidence import Consequence as Consequence
from atoll.comm.evidence import Evidence as Evidence
from atoll.comm.evidence import Offence as Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.comm.strikes import (
    BANNING,
    DELAYS,
    DOUBTFUL,
    MIN_PART,
    OWNER_LIMIT,
    Strikes,
    left_of_strike,
    remember,
    strike,
)
from atoll.coordinator.state_machine.changes import remove
from atoll.coordinator.state_machine.events import Decision, Effect, Note
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.state import State, exchanges

TRAINERS = (MemberState.JOINING, MemberState.RECOVERING, MemberState.SYNCED, MemberState.ACTIVE)
EXCHANGE_MEMORY_ROUNDS = 20  # committed rounds after which it is forgotten that a member left an exchange
MAX_REMEMBERED = 10_000  # identities of which such a thing is remembered
UNAUDITED_ROUNDS = 30  # committed rounds for which it is remembered that an audit came to no end
MIN_OWED_SECONDS = 1.0  # processes of a busy machine stand still for less
MAX_DEBT_ROUNDS = 20  # rounds for which a member owes the others time, however long they waited for it
# Of a round's inner time: who delays a round by so much has a whole strike. Strikes of six rounds in a row, or of
# every sixth round, have its work not taken: so one member costs a run 2 % of its time in the long run.
WHOLE_STRIKE_SHARE = 0.1
WORDS = {
    Consequence.STRUCK: "this is remembered",
    Consequence.NO_OWNER: "it owns no chunks for now",
    Consequence.NO_CONTRIBUTOR: "its work is not taken for now",
    Consequence.EVICTED: "it is out for now",
    Consequence.BANNED: "it is banned",
}

UNRECORDED = Strikes(NodeId(""))

# What a member is told of it.
PENALTIES = {
    Consequence.NO_OWNER: "this node merges no chunks",
    Consequence.NO_CONTRIBUTOR: "this node's work is not taken",
}


def identity(state: State, node: NodeId, key: bytes = b"") -> str:
    """The identity that things are held against: the key of the node, or what it has for one, else its id."""
    member = state.members.here.get(node) or state.members.departed.get(node)
    key = key or (member.key if member is not None else b"")
    return key.hex() or str(node)


def consequence(state: State, node: NodeId) -> Consequence | None:
    """The consequence, now, of what is held against the node; None: nothing is."""
    if not state.conduct.strikes:
        return None
    record = state.conduct.strikes.get(identity(state, node))
    return None if record is None or record.forgotten(state.committed) else record.consequence(state.committed)


def left_exchange_lately(state: State, node: NodeId) -> bool:
    """Whether the node left an exchange in the middle of it by its own will, and that is not forgotten."""
    if not state.conduct.exchanges_left:
        return False
    left = state.conduct.exchanges_left.get(identity(state, node))
    return left is not None and state.committed - left < EXCHANGE_MEMORY_ROUNDS


def leave_exchange(state: State, node: NodeId, sentence: str, out: list[Effect]) -> State:
    """Remember that the node leaves the exchange under way by its own will, if that counts on it. Where it did so
    lately, too, it is charged with this `sentence`."""
    if not exchanges(state, node):
        return state
    again, who = left_exchange_lately(state, node), identity(state, node)
    left = _with_latest(state.conduct.exchanges_left, who, state.round.number)
    state = replace(state, conduct=replace(state.conduct, exchanges_left=left))
    if again:
        state = charge(state, node, Evidence(state.round.number, Offence.SILENT, f"{sentence}, again"), out)
    return state


def leave_audit(state: State, node: NodeId) -> State:
    """Remember that the node ended its part in the round while what it had made was audited, which it knows that
    is asked for a receipt: it owns nothing for a while. A machine may die then, too, so it is not charged."""
    left = _with_latest(state.conduct.exchanges_left, identity(state, node), state.round.number)
    return replace(state, conduct=replace(state.conduct, exchanges_left=left))


def remember_unaudited(state: State, nodes: Iterable[NodeId]) -> State:
    """Remember that an audit of what these nodes made came to no end, whoever is to blame. Nothing is held against
    them: what they make is drawn more often (`unaudited_lately`)."""
    unaudited = state.conduct.unaudited
    for node in nodes:
        unaudited = _with_latest(unaudited, identity(state, node), state.round.number)
    return replace(state, conduct=replace(state.conduct, unaudited=unaudited))


def unaudited_lately(state: State, node: NodeId) -> bool:
    """Whether an audit of what the node made came to no end, and that is not forgotten."""
    if not state.conduct.unaudited:
        return False
    last = state.conduct.unaudited.get(identity(state, node))
    return last is not None and state.committed - last < UNAUDITED_ROUNDS


def _with_latest(rounds: dict[str, int], who: str, number: int) -> dict[str, int]:
    latest = {w: k for w, k in rounds.items() if w != who} | {who: number}
    return dict(list(latest.items())[-MAX_REMEMBERED:])


def may_own(state: State, node: NodeId) -> bool:
    """Whether the node may be given chunks to merge, if there are others."""
    return is_sound(state, node) and not left_exchange_lately(state, node)


def is_sound(state: State, node: NodeId) -> bool:
    """Whether nothing is held against the node by which it may do less than others."""
    return consequence(state, node) in (None, Consequence.STRUCK)


def may_vote(state: State, node: NodeId) -> bool:
    """Whether the node's word on what others made counts: it said nothing false lately. Trouble is no reason: else
    those who make no other's work count for more, as others are slow or had to leave."""
    if not state.conduct.strikes:
        return True
    record = state.conduct.strikes.get(identity(state, node), UNRECORDED)
    return record.ban is None and record.weights(state.committed)[0] < OWNER_LIMIT


def owes_time(state: State, node: NodeId) -> bool:
    """Whether others waited for the node, and have not had that time back by doing without."""
    if not state.conduct.strikes:
        return False
    record = state.conduct.strikes.get(identity(state, node))
    return record is not None and record.owes(state.committed)


def may_contribute(state: State, node: NodeId) -> bool:
    """Whether the node's work may be taken, if the run has enough others."""
    return consequence(state, node) in (None, Consequence.STRUCK, Consequence.NO_OWNER)


def penalty(state: State, node: NodeId) -> str:
    """What the node may not do for now, until when and why, as it is told itself; empty: nothing."""
    follows = consequence(state, node)
    record = state.conduct.strikes.get(identity(state, node), UNRECORDED)
    if follows not in PENALTIES:
        why = "one waited for it too long, or it sent too many reports"
        debt = f"no round waits for this node before round {record.owes_until + 1}: {why}"
        return debt if record.owes(state.committed) else ""
    until = next(r for r in count(state.committed + 1) if record.consequence(r) is not follows)
    latest = sorted(record.latest.items(), key=lambda said: said[1])
    why = ", ".join(f"{offence.replace('_', ' ')} (round {round_})" for offence, round_ in latest)
    return f"{PENALTIES[follows]} before round {until}: {why}"


def contributors(state: State, nodes: Sequence[NodeId], need: int) -> tuple[NodeId, ...]:
    """The nodes, of `nodes`, whose work may be taken, in the same order; where they are fewer than `need`, also
    those of the others against whom the least is held: a run stands still for nobody's conduct."""
    if not state.conduct.strikes:
        return tuple(nodes)
    able = {n for n in nodes if may_contribute(state, n)}
    if (lacking := need - len(able)) > 0:
        others = sorted((n for n in nodes if n not in able), key=lambda n: _weight(state, n))
        able.update(others[:lacking])
    return tuple(n for n in nodes if n in able)


def refusal(state: State, node: NodeId, key: bytes = b"") -> str:
    """The sentence with which a node is refused that would join under this key, or as this node; empty: it may.
    Who is out for a while may come back where the run has too few members to go on."""
    if not state.conduct.strikes:
        return ""
    who = identity(state, node, key)
    record = state.conduct.strikes.get(who)
    if record is None:
        return ""
    match record.consequence(state.committed):
        case Consequence.BANNED:
            assert record.ban is not None
            return f"this node is banned from the run: in round {record.ban.round} {record.ban.sentence}"
        case Consequence.EVICTED if state.members.count(*TRAINERS) >= state.config.members.minimum:
            return (
                "this node said what is not so too often: it may join again when more rounds are committed; "
                "the operator can tell more (atoll blame)"
            )
        case _:
            return ""


def invite_refusal(state: State, invite: int) -> str:
    """The sentence with which a new node is refused that comes with this invite, as another one that came with it
    is out for what it said; empty: it may."""
    for record in state.conduct.strikes.values():
        member = state.members.here.get(record.node) or state.members.departed.get(record.node)
        if not invite or member is None or member.invite != invite:
            continue
        if record.consequence(state.committed) is Consequence.EVICTED and refusal(state, record.node):
            return (
                f"{member.name} came with this invite too, and is out for what it said: nobody else may join with "
                "it meanwhile; ask the operator for another one"
            )
    return ""


def strike_part(state: State, seconds: float) -> float:
    """The part of a whole strike for a delay of the round by so many seconds: what it cost the others. So a
    machine that sleeps or is out of reach for a moment now and then is not kept out, and who holds up each round
    is."""
    return min(1.0, _whole_strikes(state, seconds))


def lend_time(state: State, node: NodeId, seconds: float) -> State:
    """Have the node, which is here or was, owe the others time, for so many seconds in which they waited for it in
    this round: as many rounds as these are whole strikes, about, nothing for less than a second."""
    if seconds < MIN_OWED_SECONDS or not (node in state.members.here or node in state.members.departed):
        return state
    return _lend(state, node, min(round(_whole_strikes(state, seconds)), MAX_DEBT_ROUNDS))


def floods_anew(state: State, node: NodeId) -> bool:
    """Whether it makes a difference that reports of the node are refused in this round."""
    record = state.conduct.strikes.get(identity(state, node), UNRECORDED)
    return record.owes_until < state.round.number + MAX_DEBT_ROUNDS


def lend_to_who_floods(state: State, node: NodeId, out: list[Effect]) -> State:
    """Have a member that is here, and whose reports are refused as they are too many, owe the others time for as
    many rounds as anybody does: what they need of it comes behind its own flood, in this round and in the next."""
    if not owes_time(state, node):
        out.append(
            Note(f"{state.name(node)} sends more reports than a member has to: nobody waits for it now", node)
        )
    return _lend(state, node, MAX_DEBT_ROUNDS)


def _lend(state: State, node: NodeId, rounds: int) -> State:
    who, until = identity(state, node), state.round.number + rounds
    before = state.conduct.strikes.get(who) or Strikes(node)
    if not rounds or until <= before.owes_until:
        return state
    others = {key: r for key, r in state.conduct.strikes.items() if key != who}
    records = remember(others | {who: replace(before, node=node, owes_until=until)}, state.committed)
    return replace(state, conduct=replace(state.conduct, strikes=records))


def _whole_strikes(state: State, seconds: float) -> float:
    inner = state.inner_time
    return max(seconds, 0.0) / (WHOLE_STRIKE_SHARE * inner) if inner > 0 else 1.0


def charge(state: State, node: NodeId, evidence: Evidence, out: list[Effect]) -> State:
    """Hold evidence against a node that is here or was, and carry out what follows.

    A member that is evicted or banned by it has left the round when this returns; chunks that it owned are dealt
    anew by the next attempt. Doubtful evidence counts when the round is committed. Nothing happens where the same
    offence of the same round is held against it already, or the node is forgotten.
    """
    if node not in state.members.here and node not in state.members.departed:
        return state
    who = identity(state, node)
    if evidence.offence in DOUBTFUL:
        known = any(w == who and _same(e, evidence) for _, w, e in state.conduct.doubtful)
        if known or _charged(state, who, evidence):
            return state
        doubtful = (*state.conduct.doubtful, (node, who, evidence))
        return replace(state, conduct=replace(state.conduct, doubtful=doubtful))
    return _hold(state, node, who, evidence, out)


def settle(state: State, members: int, out: list[Effect]) -> State:
    """Hold the doubtful evidence of a round that is committed, which had so many members, against those it names;
    against nobody, of an offence that more than half of them are named for."""
    doubtful = state.conduct.doubtful
    if not doubtful:
        return state
    state = replace(state, conduct=replace(state.conduct, doubtful=()))
    for offence in (o for o in Offence if o in DOUBTFUL):
        named = [(node, who, evidence) for node, who, evidence in doubtful if evidence.offence is offence]
        if 2 * len({who for _, who, _ in named}) > members:
            sentence = f"{len(named)} of {members} members look alike ({offence}): it is held against nobody"
            out.append(Note(f"round {state.committed}: {sentence}"))
            continue
        for node, who, evidence in named:
            state = _hold(state, node, who, evidence, out)
    return state


def ban(state: State, node: NodeId, reason: str, out: list[Effect]) -> State:
    """Put the node out for good, with its key, as the operator says."""
    sentence = "the operator put it out" + (f": {reason}" if reason else "")
    return charge(state, node, Evidence(state.round.number, Offence.BY_OPERATOR, sentence), out)


def pardon(state: State, node: NodeId, reason: str, out: list[Effect]) -> State:
    """Hold nothing against the node, or who has its key, any more. What it trained meanwhile stays out."""
    who = identity(state, node)
    if who not in state.conduct.strikes:  # it may be so long ago that its key is known from here alone
        who = next((key for key, r in state.conduct.strikes.items() if r.node == node), who)
    record = state.conduct.strikes.get(who)
    if record is None:
        return state
    ban, latest = record.ban, max(record.latest.items(), key=lambda entry: entry[1], default=None)
    about = ban or Evidence(latest[1] if latest else 0, latest[0] if latest else Offence.LATE, "")
    sentence = "the operator pardons it" + (f": {reason}" if reason else "")
    left = {key: r for key, r in state.conduct.strikes.items() if key != who}
    state = replace(state, conduct=replace(state.conduct, strikes=left))
    return _decide(state, node, who, replace(about, sentence=sentence, by=None), Consequence.PARDONED, 0.0, out)


def _weight(state: State, node: NodeId) -> float:
    record = state.conduct.strikes.get(identity(state, node))
    return sum(record.weights(state.committed)) if record is not None else 0.0


def _hold(state: State, node: NodeId, who: str, evidence: Evidence, out: list[Effect]) -> State:
    if _charged(state, who, evidence):
        return state
    before = state.conduct.strikes.get(who) or Strikes(node)
    record = replace(strike(before, evidence, state.committed), node=node)
    others = {key: r for key, r in state.conduct.strikes.items() if key != who}
    records = remember(others | {who: record}, state.committed)
    state = replace(state, conduct=replace(state.conduct, strikes=records))
    follows = record.consequence(state.committed)
    state = _decide(state, node, who, evidence, follows, sum(record.weights(state.committed)), out)
    if follows in (Consequence.EVICTED, Consequence.BANNED):
        state = _put_out(state, who, evidence, out)
    return state


def _put_out(state: State, who: str, evidence: Evidence, out: list[Effect]) -> State:
    """Evict every member with this identity; the run's key, which it knows, is changed."""
    state = replace(state, expulsions=state.expulsions + 1)
    for node in [n for n in state.members.here if identity(state, n) == who]:
        reason = f"in round {evidence.round} {evidence.sentence}"
        state = remove(state, node, MemberState.EVICTED, reason, out)
    return state


def _decide(
    state: State, node: NodeId, who: str, evidence: Evidence, then: Consequence, weight: float, out: list[Effect]
) -> State:
    number = state.conduct.decisions + 1
    member = state.members.here.get(node) or state.members.departed.get(node)
    key = who if who != node else ""
    name, invite = (member.name, member.invite) if member is not None else (str(node), 0)
    out.append(Decision(number, node, key, state.round.number, evidence, then, round(weight, 3), name, invite))
    if then is Consequence.PARDONED:
        out.append(Note(f"{name}: {evidence.sentence}", node))
    else:
        by = f", says {state.name(evidence.by)}" if evidence.by is not None else ""
        out.append(Note(f"{name}: {evidence.sentence}{by}; {WORDS[then]}", node))
    return replace(state, conduct=replace(state.conduct, decisions=number))


def _charged(state: State, who: str, evidence: Evidence) -> bool:
    """Whether the evidence adds nothing to what is held against them already."""
    record = state.conduct.strikes.get(who, UNRECORDED)
    if record.ban is not None:
        return True
    if evidence.offence in DELAYS:
        return min(evidence.part, left_of_strike(record, evidence.round)) < MIN_PART
    return evidence.offence not in BANNING and record.latest.get(evidence.offence) == evidence.round


def _same(a: Evidence, b: Evidence) -> bool:
    return a.offence is b.offence and a.round == b.round
