"""The auditors of a sealed chunk: who is named, by lot, and how long an answer may take. Pure.

They can be dialled, and are not the owner; those who were silent lately, who are new, or whose links are too slow
are only as many as a conviction needs. `audit` has them named, and charges who does not answer.
"""

from collections.abc import Iterable
from statistics import median

from atoll.comm.bitmap import places
from atoll.comm.digest import digest
from atoll.comm.evidence import Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.conduct import identity, is_sound, lend_time, may_vote, owes_time
from atoll.coordinator.state_machine.newcomers import excused
from atoll.coordinator.state_machine.participants import saving_bytes, without_steps
from atoll.coordinator.state_machine.state import Audit, State

AUDITORS = 2  # of a chunk that is drawn
MIN_VOICES = 3  # for a conviction
MIN_SECONDS = 3.0  # for an auditor's answer
EXCHANGE_FACTOR = 4.0  # times the seconds in which the round's exchange moves as much
MAX_BASE_SECONDS = 10.0  # for an answer, besides those of the transfer at SLOW_RATE
SLOW_RATE = 0.5e6  # bytes a second at which an auditor that is slow fetches the inputs
ASK_SHARE = 0.1  # of the time for an answer, in which a chunk on its way lets a request pass
AUDITS_AT_ONCE = 4  # that a member works at; others wait
REPORT_SECONDS = 1.0  # that an order and its answer may be on the way
MUTE_ROUNDS = 5  # in which others are named before a member that was silent


def able_auditors(state: State) -> set[NodeId]:
    """Members of the attempt that can audit."""
    return {n for n in possible_auditors(state) if state.members.trusted(n)}


def possible_auditors(state: State) -> set[NodeId]:
    """Members of the attempt that can audit, or could if they came back."""
    there = {e.node for e in state.round.ledger.entries if not e.gone}
    return electorate(state) & there


def electorate(state: State) -> set[NodeId]:
    """Members of the round that can audit, or could if they were in the attempt: a majority of all of these
    convicts, so that nobody gains by having others left out, nor by being back before them, nor by others' having
    left or been late lately."""
    here, r = state.members.here, state.round
    others = (
        r.participants.keys() - r.slow - saving_bytes(state) - without_steps(state)
    )  # these may be in no attempt
    nodes = {e.node for e in r.ledger.entries}.union(others).intersection(here)
    return {n for n in nodes if not here[n].leaf and here[n].key and may_vote(state, n)}


def lot(state: State, what: bytes, c: int, node: str = "") -> float:
    """A number in [0, 1) that nobody can foretell who does not know the nonce."""
    r = state.round
    sealed = r.ledger.sealed[c].digest
    about = b"%d.%d.%s" % (c, r.ledger.since[c], node.encode())
    return int.from_bytes(digest(what, state.nonce, r.salt, about, sealed), "big") / 2**128


def name_auditors(state: State, audit: Audit, count: int, now: float) -> Audit:
    """Name auditors until there are so many that have answered or may; of those who were silent lately, or whose
    links are too slow for it, only as many as a conviction needs, unless it is for all to repeat it."""
    able = able_auditors(state) - {audit.owner} - audit.silent - audit.named.keys()
    by_lot = sorted(able, key=lambda n: lot(state, b"auditor", audit.chunk, n))
    unlikely = [n for n in by_lot if _is_unlikely(state, audit, n)]
    chosen = [n for n in by_lot if n not in unlikely][: max(count - len(audit.named), 0)]
    least = 1 if count == AUDITORS and len(able_auditors(state) - {audit.owner}) < MIN_VOICES else MIN_VOICES
    least = count if audit.wide else min(count, least)  # two may not outvote those who are few only for being slow
    chosen += unlikely[: max(least - len(audit.named) - len(chosen), 0)]
    return ask(state, audit, chosen, now)


def ask(state: State, audit: Audit, nodes: Iterable[NodeId], now: float) -> Audit:
    """The audit with these to answer it, who have their time from now on; where the coordinator was away, from
    when all had time to come back."""
    begun = max(now, state.round.patient_until)
    named = audit.named | dict.fromkeys(nodes, begun + audit.seconds + REPORT_SECONDS)
    return replace(audit, named=named, asked=audit.asked | dict.fromkeys(nodes, begun))


def _is_unlikely(state: State, audit: Audit, node: NodeId) -> bool:
    """Whether others are to be asked rather: the node is likely to be late, as far as is known, or owes the others
    time, or is in quarantine."""
    unknown = bool(excused(state, [node])) or not is_sound(state, node)
    return unknown or owes_time(state, node) or _was_silent(state, node) or is_too_slow(state, audit, node)


def _was_silent(state: State, node: NodeId) -> bool:
    """Whether the node did not do, in one of the last rounds, what others waited for."""
    record = state.conduct.strikes.get(identity(state, node))
    last = None if record is None else record.latest.get(Offence.SILENT)
    return last is not None and state.round.number - last < MUTE_ROUNDS


def is_too_slow(state: State, audit: Audit, node: NodeId) -> bool:
    """Whether the node's link, as far as it is known, does not bring it the chunk's inputs in time, or not what it
    asks for them with, which waits for what is on its way."""
    up, down = state.members.here[node].rates
    size = state.chunks.size(audit.chunk) * state.config.reduce.bytes_per_element
    late = up > 0 and size > up * ASK_SHARE * audit.seconds
    return late or (down > 0 and len(places(audit.inputs)) * size > down * audit.seconds)


def seconds_to_answer(state: State, c: int, now: float) -> float:
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
    return in_turn(state, min(seconds, most), AUDITORS)


def in_turn(state: State, seconds: float, more: int) -> float:
    """The time for an answer where so many more auditors are named: a member works at few audits at once, and may
    be kept waiting at each."""
    waited_for = sum(max(a.wanted, len(a.named.keys() - a.voices.keys())) for a in state.round.audits.values())
    orders = (waited_for + more) / max(len(able_auditors(state)), 1)  # that a member has, about
    turns = 1.0 + orders / AUDITS_AT_ONCE if orders > AUDITS_AT_ONCE else 1.0
    return min(turns * seconds, state.config.rounds.reduce_timeout)


def lend_to_auditor(state: State, audit: Audit, node: NodeId, now: float) -> State:
    """Have an auditor that has not answered, and will not, owe the time for which it was waited for, beyond twice
    what the others took, or where nobody has answered what anybody has, and beyond half of what slow links have.
    Who answers owes nothing, however late it does: whoever contributed may show it its part in the last moment."""
    beyond = max(2 * median(audit.took) if audit.took else MIN_SECONDS, (audit.seconds - MIN_SECONDS) / 2)
    return lend_time(state, node, now - audit.asked.get(node, now) - beyond)
