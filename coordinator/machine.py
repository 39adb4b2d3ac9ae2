"""The run as one pure state machine: `step(state, event, now) -> (state, effects)`.

                 enough members                all ready, or quorum + grace
    waiting ----------------------> inner ------------------------------------> reducing
       ^                             ^  |                                        |  |  ^
       |      members below minimum  |  |                     member lost: next  |  +--+
       +-----------------------------|--+                     attempt, same deltas  |
                                     +------- every chunk sealed and held: commit --+----> finished

No clock, no socket, no randomness: the same events in the same order give the same state, so replaying the
journal rebuilds it. Membership, leases and the ledger are small machines of their own; this one decides when
rounds start, close and commit, and says why.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import ceil
from typing import assert_never

from atoll.comm.config import RunConfig
from atoll.comm.ids import NodeId
from atoll.coordinator import leases as data
from atoll.coordinator import membership as who
from atoll.coordinator.events import (
    BecameReady,
    CommitRecord,
    Connected,
    Disconnected,
    Effect,
    Evaluated,
    Event,
    Expired,
    Heard,
    Held,
    Joined,
    LayoutKnown,
    Leaving,
    Note,
    PeerLost,
    Publish,
    Sealed,
    Started,
    StateAt,
    Tick,
)
from atoll.coordinator.leases import Leases
from atoll.coordinator.ledger import Ledger, assign, seal
from atoll.coordinator.membership import Members, MemberState


class Phase(StrEnum):
    WAITING = "waiting"
    INNER = "inner"
    REDUCING = "reducing"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Plan:
    """Who reduces what in one attempt."""

    attempt: int
    incarnation: int
    epoch: int
    members: tuple[NodeId, ...]
    planned_at: float  # seconds
    ledger: Ledger
    held: dict[NodeId, Held] = field(default_factory=dict)
    sealed_at: float = 0.0
    lost: frozenset[frozenset[NodeId]] = frozenset()  # pairs whose connection broke in this or an earlier attempt


@dataclass(frozen=True, slots=True)
class RoundState:
    number: int = 1
    phase: Phase = Phase.WAITING
    reason: str = "no member yet"
    started_at: float = 0.0
    participants: tuple[NodeId, ...] = ()
    ready: dict[NodeId, BecameReady] = field(default_factory=dict)
    first_ready_at: float = 0.0
    closing_at: float | None = None  # when the grace window ends; None: no quorum yet
    closing: bool = False  # members were told to finish with what they have
    plan: Plan | None = None
    attempts: int = 0
    evaluator: NodeId | None = None  # measures the validation loss of the state this round starts from


@dataclass(frozen=True, slots=True)
class State:
    config: RunConfig
    incarnation: int = 0
    epoch: int = 0
    members: Members = Members()
    layout: tuple[int, bytes] | None = None  # numel and digest of the run's flat vector
    committed: int = 0  # the last committed round; 0: the initial state
    digest: bytes = b""  # of state_committed; empty: no member has told yet
    sealed: tuple[bytes, ...] = ()  # digests of the sealed chunks of round `committed`
    tokens: int = 0  # committed
    initialiser: NodeId | None = None  # makes state_0, while nobody holds it
    initial_val_loss: float | None = None
    round: RoundState = RoundState()
    leases: Leases = Leases()
    pending: CommitRecord | None = None  # the last commit, until its digests and validation loss are in

    @property
    def holders(self) -> tuple[NodeId, ...]:
        """Living members that hold state_committed."""
        return tuple(n for n, m in self.members.here.items() if m.state_round == self.committed)

    @property
    def awaited(self) -> frozenset[NodeId]:
        """Members whose trainers the run waits for."""
        r = self.round
        late = {n for n in r.participants if n not in r.ready} if r.phase is Phase.INNER else set()
        return frozenset(late | {n for n in (self.initialiser, r.evaluator) if n is not None})


def step(state: State, event: Event, now: float) -> tuple[State, list[Effect]]:
    """Take in one event; return the new state and what must leave the coordinator because of it."""
    effects: list[Effect] = []
    before, awaited = state.members.active, state.awaited
    state = _take(state, event, now, effects)
    if isinstance(event, Heard):  # moves no decision; the next tick judges it
        return state, effects
    state = _advance(state, now, effects)
    for node in state.awaited - awaited:  # its clock starts when the run begins to wait for it
        state = _with(state, node, moved_at=now)
    if state.members.active != before:
        state = replace(state, epoch=state.epoch + 1)
    return state, effects


def _take(state: State, event: Event, now: float, out: list[Effect]) -> State:
    if not isinstance(event, Started | Joined | Tick) and event.node not in state.members.here:
        return state
    match event:
        case Started(incarnation):
            return _restarted(state, incarnation, now)
        case Joined(node, name, address, session):
            out.append(Note(f"{name} joins as {node}", node))
            if node in state.members.here:  # it comes back before it was missed, with nothing of the round
                state = _drop_from_round(state, node)
            return replace(state, members=who.join(state.members, node, name, address, session, now))
        case Connected(node):
            return _with(state, node, connected=True, heard_at=now)
        case Disconnected(node):
            return _with(state, node, connected=False, lost_at=now)
        case Heard(node, phase, round_, inner_step):
            members = who.heard(state.members, node, phase, (round_, inner_step), now)
            return replace(state, members=members)
        case LayoutKnown(node, numel, digest):
            return _layout(state, node, numel, digest, out)
        case StateAt(node, round_, digest):
            return _state_at(state, node, round_, digest, out)
        case BecameReady():
            return _ready(state, event, now, out)
        case Sealed(node, round_, attempt, seals):
            plan = _plan_in_force(state, round_, attempt)
            if plan is None:
                return state
            ledger = seal(plan.ledger, node, seals)
            sealed_at = now if ledger.complete and not plan.ledger.complete else plan.sealed_at
            return _with_plan(state, replace(plan, ledger=ledger, sealed_at=sealed_at))
        case Held(node, round_, attempt):
            plan = _plan_in_force(state, round_, attempt)
            if plan is None or node not in plan.members:
                return state
            return _with_plan(state, replace(plan, held=plan.held | {node: event}))
        case Evaluated(node, round_, loss):
            return _evaluated(state, node, round_, loss)
        case PeerLost(node, peer, round_, attempt, reason):
            return _peer_lost(state, node, peer, round_, attempt, reason, now, out)
        case Leaving(node, reason):
            return _remove(state, node, MemberState.LEFT, reason or "left", out)
        case Expired(node, reason):
            return _remove(state, node, MemberState.EVICTED, reason, out)
        case Tick():
            return state
        case _:
            assert_never(event)


def _advance(state: State, now: float, out: list[Effect]) -> State:
    """Make every transition that is due."""
    while True:
        after = _settle_digests(_choose_initialiser(state), out)
        match after.round.phase:
            case Phase.WAITING:
                after = _start_if_enough(after, now, out)
            case Phase.INNER:
                after = _close_if_due(after, now, out)
            case Phase.REDUCING:
                after = _commit_or_retry(after, now, out)
            case Phase.FINISHED:
                after = _publish_last(after, now, out)
            case _:
                assert_never(after.round.phase)
        if after == state:
            return state
        state = after


# What members report


def _restarted(state: State, incarnation: int, now: float) -> State:
    """Nobody is connected to a fresh coordinator; every member gets one whole lease to come back."""
    members = state.members
    grace = state.config.members.lease - state.config.members.reconnect
    for node in members.here:
        members = who.update(members, node, connected=False, lost_at=now + grace, heard_at=now, moved_at=now)
    r = state.round
    closing_at = None if r.closing_at is None else max(r.closing_at, now + grace)
    plan = None if r.plan is None else replace(r.plan, planned_at=now)
    return replace(
        state, incarnation=incarnation, members=members, round=replace(r, closing_at=closing_at, plan=plan)
    )


def _layout(state: State, node: NodeId, numel: int, digest: bytes, out: list[Effect]) -> State:
    if state.layout is not None and state.layout != (numel, digest):
        reason = (
            f"its model has {numel:,} parameters in layout {digest.hex()[:8]}, the run's has "
            f"{state.layout[0]:,} in layout {state.layout[1].hex()[:8]}"
        )
        return _remove(state, node, MemberState.EVICTED, reason, out)
    state = replace(state, layout=(numel, digest))
    if state.members.here[node].state is not MemberState.JOINING:
        return state
    return _with(state, node, state=MemberState.RECOVERING, reason="fetches the live state")


def _state_at(state: State, node: NodeId, round_: int, digest: bytes, out: list[Effect]) -> State:
    if round_ == 0 and state.committed == 0 and not state.digest and node != state.initialiser:
        return state  # it was not the one to make it: it fetches what the initialiser makes
    state = _with(state, node, state_round=round_, state_digest=digest)
    if round_ == 0 and state.committed == 0 and not state.digest:
        out.append(Note(f"{state.members.here[node].name} initialised the model", node))
        return replace(state, digest=digest)
    return state


def _diverged(state: State, node: NodeId, out: list[Effect]) -> State:
    reason = f"its state of round {state.committed} differs from the run's: it fetches it again"
    out.append(Note(f"{state.members.here[node].name}: {reason}", node))
    state = _with(state, node, state=MemberState.RECOVERING, state_round=-1, reason=reason)
    return _drop_from_round(state, node)


def _ready(state: State, event: BecameReady, now: float, out: list[Effect]) -> State:
    r = state.round
    fits = r.phase is Phase.INNER and event.round == r.number and event.node in r.participants
    lease = state.leases.held.get(event.node)
    if not fits or event.node in r.ready or lease is None:
        return state
    if event.first_sample != lease[0] or not 0 <= event.samples <= lease[1]:
        return state  # trained on samples of another lease: it takes these steps again
    most = state.config.rounds.inner_steps * state.config.inner.batch_size * state.config.model.seq_len
    if not 0 < event.tokens <= most:
        reason = f"claims {event.tokens} tokens for a round of at most {most}"
        return _remove(state, event.node, MemberState.EVICTED, reason, out)
    first = r.first_ready_at if r.ready else now
    return _with_round(state, ready=r.ready | {event.node: event}, first_ready_at=first)


def _evaluated(state: State, node: NodeId, round_: int, loss: float) -> State:
    if node != state.round.evaluator or round_ != state.committed:
        return state
    state = _with_round(state, evaluator=None)
    if round_ == 0:
        return replace(state, initial_val_loss=loss)
    if state.pending is None or state.pending.round != round_:
        return state
    return replace(state, pending=replace(state.pending, val_loss=loss))


def _peer_lost(
    state: State, node: NodeId, peer: NodeId, round_: int, attempt: int, reason: str, now: float, out: list[Effect]
) -> State:
    """A connection broke. A peer that lost its session too is gone. Else one report only costs an attempt; when
    a pair breaks again, or a member breaks with a second one, the member in most broken pairs is left out."""
    plan = _plan_in_force(state, round_, attempt)
    if plan is None or node not in plan.members or peer not in plan.members or node == peer:
        return state
    name = state.members.here[node].name
    other = _name(state, peer)
    out.append(Note(f"{name} lost {other} in attempt {attempt}: {reason}", node))
    if peer in state.members.gone:
        return state  # the next attempt is on its way
    blamed = state.members.here[peer]
    if not blamed.connected and blamed.lost_at <= now:
        return _remove(state, peer, MemberState.EVICTED, f"its connections broke ({reason})", out)
    pairs = plan.lost | {frozenset((node, peer))}
    broken = Counter(n for pair in pairs for n in pair if n in plan.members)
    worst = max(plan.members, key=lambda n: (broken[n], n == peer))
    leave_out = worst if pairs == plan.lost or broken[worst] > 1 else None
    members = tuple(n for n in plan.members if n != leave_out)
    lost = frozenset(pair for pair in pairs if leave_out not in pair)
    return _retry(_with_plan(state, replace(plan, lost=lost)), members, f"{name} could not reach {other}", out)


def _remove(state: State, node: NodeId, how: MemberState, reason: str, out: list[Effect]) -> State:
    member = state.members.here[node]
    out.append(Note(f"{member.name} {how}: {reason}", node))
    state = replace(state, members=who.remove(state.members, node, how, reason))
    state = _drop_from_round(state, node)
    if state.committed == 0 and not state.holders:
        others = any(m.state is not MemberState.JOINING for m in state.members.here.values())
        layout = state.layout if others else None
        state = replace(state, digest=b"", layout=layout)  # state_0 died with its last holder: it is made again
    return state


def _drop_from_round(state: State, node: NodeId) -> State:
    r = state.round
    return replace(
        state,
        leases=data.release(state.leases, node),
        round=replace(
            r,
            participants=tuple(n for n in r.participants if n != node),
            ready={n: e for n, e in r.ready.items() if n != node},
            evaluator=None if r.evaluator == node else r.evaluator,
        ),
    )


# What is due


def _choose_initialiser(state: State) -> State:
    """Somebody must make state_0; who was asked stays asked while it lives."""
    able = state.members.of(MemberState.RECOVERING)
    if state.committed or state.holders:
        return replace(state, initialiser=None)
    return state if state.initialiser in able else replace(state, initialiser=next(iter(able), None))


def _settle_digests(state: State, out: list[Effect]) -> State:
    """Name the digest of state_committed once it can be known, and hold every member's against it."""
    voters = _voters(state)
    told = {n: m.state_digest for n in voters if (m := state.members.here[n]).state_round == state.committed}
    if not state.digest:
        digest, votes = Counter(told.values()).most_common(1)[0] if told else (b"", 0)
        if 2 * votes <= len(voters) and len(told) < len(voters) or not told:
            return state
        state = replace(state, digest=digest)
    if (pending := state.pending) is not None:
        digests = pending.digests | {n: d.hex() for n, d in told.items()}
        equal = len(set(digests.values())) == 1
        record = replace(pending, state_digest=state.digest.hex(), digests=digests, digests_equal=equal)
        state = replace(state, pending=record)
    for node in state.holders:
        member = state.members.here[node]
        if member.state_digest != state.digest:
            state = _diverged(state, node, out)
        elif member.state is MemberState.RECOVERING:
            out.append(Note(f"{member.name} has the state of round {state.committed}", node))
            state = _with(state, node, state=MemberState.SYNCED, reason="enters at the next round boundary")
    if len(told) == len(voters) and state.round.evaluator is None and state.round.phase is not Phase.FINISHED:
        return _publish(state, out)
    return state


def _voters(state: State) -> tuple[NodeId, ...]:
    """Who names the digest of state_committed: the contributors that live, or whoever else holds it."""
    contributors = state.pending.contributors if state.pending is not None else {}
    return tuple(n for n in contributors if n in state.members.here) or state.holders


def _publish(state: State, out: list[Effect]) -> State:
    record = state.pending
    if record is not None and not state.digest:  # some living contributor has not told: the others speak
        here = state.members.here
        told = {n: here[n].state_digest.hex() for n in state.holders if n in record.contributors}
        digest = Counter(told.values()).most_common(1)[0][0] if told else ""
        record = replace(record, state_digest=digest, digests=told, digests_equal=len(set(told.values())) == 1)
    if record is not None:
        out.append(Publish(record))
    return replace(state, pending=None)


def _start_if_enough(state: State, now: float, out: list[Effect]) -> State:
    limits = state.config.members
    able = state.members.of(MemberState.SYNCED, MemberState.ACTIVE)
    need = max(limits.start, limits.minimum) if state.committed == 0 else limits.minimum
    if len(able) >= need:
        return _start_round(state, able, now, out)
    if state.committed and not state.holders:
        reason = f"no living member holds state {state.committed}: waiting for one to return"
    else:
        reason = f"{len(able)} of the {need} members the run needs are here"
    return _with_round(state, reason=reason)


def _start_round(state: State, members: tuple[NodeId, ...], now: float, out: list[Effect]) -> State:
    number = state.committed + 1
    participants = tuple(sorted(members, key=_order))
    samples = state.config.rounds.inner_steps * state.config.inner.batch_size
    leases = state.leases
    for node in tuple(leases.held):
        leases = data.release(leases, node)
    for node in participants:
        leases = data.grant(leases, node, samples)
        if state.members.here[node].state is not MemberState.ACTIVE:
            out.append(Note(f"{state.members.here[node].name} is active from round {number} on", node))
            state = _with(state, node, state=MemberState.ACTIVE, reason="")
    again = state.round.number == number
    due = state.committed % state.config.data.eval_every == 0 and not _evaluated_before(state)
    evaluator = participants[number % len(participants)] if due else None
    return replace(
        state,
        leases=leases,
        round=RoundState(
            number=number,
            phase=Phase.INNER,
            reason=f"{len(participants)} members take inner steps",
            started_at=now,
            participants=participants,
            attempts=state.round.attempts if again else 0,
            evaluator=evaluator,
        ),
    )


def _evaluated_before(state: State) -> bool:
    if state.committed == 0:
        return state.initial_val_loss is not None
    return state.pending is None or state.pending.val_loss is not None


def _close_if_due(state: State, now: float, out: list[Effect]) -> State:
    r, rounds = state.round, state.config.rounds
    if len(r.participants) < state.config.members.minimum:
        return _refill(state, now, out)
    missing = [n for n in r.participants if n not in r.ready]
    if not missing:
        return _plan(state, "every member was ready", now)
    quorum = max(ceil(rounds.quorum * len(r.participants)), min(2, len(r.participants)))
    if len(r.ready) < quorum:  # of two at least: what one alone commits would die with it
        return state
    if r.closing_at is None:
        grace = rounds.grace * max(now - r.started_at, 1.0)
        return _with_round(state, closing_at=now + grace)
    names = ", ".join(state.members.here[n].name for n in missing)
    if not r.closing and now >= r.closing_at:
        out.append(Note(f"round {r.number} closes: {names} should send what they have"))
        patience = max(5.0, 0.25 * (now - r.started_at))
        return _with_round(state, closing=True, closing_at=now + patience, reason=f"closing; waits for {names}")
    if r.closing and now >= r.closing_at:
        out.append(Note(f"round {r.number} goes on without {names}"))
        return _plan(state, f"quorum and grace; {names} left out", now)
    return state


def _refill(state: State, now: float, out: list[Effect]) -> State:
    """Too few members: the ones that wait at the boundary enter this round, or it waits."""
    r = state.round
    synced = state.members.of(MemberState.SYNCED)
    if not r.participants:
        return _with_round(state, phase=Phase.WAITING)
    if not synced:
        need = state.config.members.minimum
        return _with_round(state, reason=f"{len(r.participants)} of the {need} members the run needs are here")
    leases = state.leases
    for node in synced:
        out.append(Note(f"{state.members.here[node].name} enters round {r.number}", node))
        state = _with(state, node, state=MemberState.ACTIVE, reason="")
        leases = data.grant(leases, node, state.config.rounds.inner_steps * state.config.inner.batch_size)
    participants = tuple(sorted((*r.participants, *synced), key=_order))
    return replace(state, leases=leases, round=replace(r, participants=participants))


def _plan(state: State, reason: str, now: float) -> State:
    r = state.round
    assert state.layout is not None
    members = tuple(n for n in r.participants if n in r.ready)
    chunks = -(-state.layout[0] // state.config.reduce.chunk)
    plan = Plan(r.attempts + 1, state.incarnation, state.epoch, members, now, Ledger(assign(chunks, members)))
    return _with_round(state, phase=Phase.REDUCING, reason=reason, plan=plan, attempts=r.attempts + 1)


def _commit_or_retry(state: State, now: float, out: list[Effect]) -> State:
    plan = state.round.plan
    assert plan is not None
    alive = tuple(n for n in plan.members if n in state.round.ready)
    if alive != plan.members:
        gone = ", ".join(_name(state, n) for n in plan.members if n not in alive)
        return _retry(state, alive, f"{gone} was lost", out, now)
    if now - plan.planned_at > state.config.rounds.reduce_timeout:
        unsealed = {n for c, n in enumerate(plan.ledger.owners) if c not in plan.ledger.sealed}
        slow = unsealed or {n for n in alive if n not in plan.held}
        names = ", ".join(state.members.here[n].name for n in sorted(slow, key=_order))
        rest = tuple(n for n in alive if n not in slow) or alive
        return _retry(state, rest, f"{names} did not finish the reduce in time", out, now)
    if not plan.ledger.complete or len(plan.held) < len(plan.members):
        return state
    if liar := _liar(plan):
        reason = f"its sealed bytes in round {state.round.number} are not what the others have"
        return _remove(state, liar, MemberState.EVICTED, reason, out)
    return _commit(state, plan, now, out)


def _liar(plan: Plan) -> NodeId | None:
    """A member whose sealed bytes differ from what most members hold; None if all hold what the ledger says.

    When most hold the same bytes and the ledger says otherwise, an owner sealed one thing and sent another: it
    is among those that agree with the ledger; if nobody does, it cannot be told which one, and one must go."""
    roots = Counter(held.digest for held in plan.held.values())
    if set(roots) == {plan.ledger.root}:
        return None
    common, votes = roots.most_common(1)[0]
    honest = common if 2 * votes > len(plan.held) else plan.ledger.root
    return next((n for n in plan.members if plan.held[n].digest != honest), plan.members[0])


def _retry(
    state: State, members: tuple[NodeId, ...], reason: str, out: list[Effect], now: float | None = None
) -> State:
    """Run the reduce again among `members` with the deltas they already encoded."""
    r = state.round
    assert r.plan is not None
    if not members:
        out.append(Note(f"round {r.number} starts again: {reason}, no contributor is left"))
        return _with_round(state, phase=Phase.WAITING, plan=None, ready={}, reason=reason)
    attempt = r.attempts + 1
    out.append(Note(f"round {r.number}, attempt {attempt} with {len(members)} members: {reason}"))
    owners = assign(len(r.plan.ledger.owners), members)
    planned_at = r.plan.planned_at if now is None else now
    plan = Plan(attempt, state.incarnation, state.epoch, members, planned_at, Ledger(owners), lost=r.plan.lost)
    return _with_round(state, plan=plan, attempts=attempt)


def _commit(state: State, plan: Plan, now: float, out: list[Effect]) -> State:
    state = _publish(state, out)
    r = state.round
    weights = {n: float(r.ready[n].tokens) for n in plan.members}
    tokens = sum(r.ready[n].tokens for n in plan.members)
    leases = state.leases
    for node in plan.members:
        leases = data.consume(leases, node, r.ready[node].samples)
    record = CommitRecord(
        round=r.number,
        epoch=state.epoch,
        attempts=plan.attempt,
        members=r.participants,
        contributors=weights,
        tokens=state.tokens + tokens,
        train_loss=sum(r.ready[n].loss * w for n, w in weights.items()) / tokens,
        seconds={
            "inner": r.first_ready_at - r.started_at,
            "collect": plan.planned_at - r.first_ready_at,
            "reduce": plan.sealed_at - plan.planned_at,
            "commit": now - plan.sealed_at,
        },
        bytes_up={n: plan.held[n].bytes_up for n in plan.members},
        bytes_down={n: plan.held[n].bytes_down for n in plan.members},
        reason=r.reason,
        sealed_digest=plan.ledger.root.hex(),
    )
    state = replace(
        state,
        committed=r.number,
        digest=b"",
        sealed=plan.ledger.digests,
        tokens=record.tokens,
        leases=leases,
        pending=record,
    )
    return _next(state, now, out)


def _next(state: State, now: float, out: list[Effect]) -> State:
    total = state.config.rounds.total
    if total and state.committed >= total:
        out.append(Note(f"the run is finished after {total} rounds"))
        round_ = RoundState(state.committed + 1, Phase.FINISHED, "all rounds are committed", started_at=now)
        return replace(state, round=round_)
    able = state.members.of(MemberState.SYNCED, MemberState.ACTIVE)
    if len(able) < state.config.members.minimum:
        return replace(state, round=RoundState(number=state.committed + 1))
    return _start_round(state, able, now, out)


def _publish_last(state: State, now: float, out: list[Effect]) -> State:
    """The last commit is complete when its digests and its validation loss are in, or do not come."""
    pending = state.pending
    if pending is None:
        return state
    if now - state.round.started_at > state.config.members.stall:
        return _publish(state, out)
    if not state.holders:
        return state if state.members.here else _publish(state, out)
    if pending.val_loss is None:
        return _with_round(state, evaluator=state.round.evaluator or state.holders[0])
    return _publish(state, out) if state.digest else state


# Small helpers


def _order(node: NodeId) -> int:
    return int(node[1:])


def _name(state: State, node: NodeId) -> str:
    members = state.members
    return (members.here.get(node) or members.gone[node]).name


def _with(state: State, node: NodeId, /, **changes: object) -> State:
    return replace(state, members=who.update(state.members, node, **changes))


def _with_round(state: State, **changes: object) -> State:
    return replace(state, round=replace(state.round, **changes))  # type: ignore[arg-type]


def _with_plan(state: State, plan: Plan) -> State:
    return _with_round(state, plan=plan)


def _plan_in_force(state: State, round_: int, attempt: int) -> Plan | None:
    """The plan a report speaks of; None when it is fenced off."""
    plan = state.round.plan
    fits = plan is not None and round_ == state.round.number and attempt == plan.attempt
    return plan if fits and state.round.phase is Phase.REDUCING else None
