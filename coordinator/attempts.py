"""The reduce of a round: attempts, who is to blame when one fails, and the commit. Pure.

Every attempt works on the same contributions. It ends in a commit when each chunk is sealed and every member holds
all of them; when a member is lost, the next attempt runs among the others.
"""

from collections import Counter
from dataclasses import replace

from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import Fence
from atoll.coordinator import leases as data
from atoll.coordinator import ledger as book
from atoll.coordinator import membership as who
from atoll.coordinator.events import CommitRecord, Effect, Held, Note, PeerLost, Sealed
from atoll.coordinator.membership import MemberState
from atoll.coordinator.roster import publish
from atoll.coordinator.rounds import MOST_MISSED
from atoll.coordinator.state import (
    Pair,
    Phase,
    Plan,
    RoundState,
    State,
    count,
    order,
    remove,
    with_round,
)

SLOWEST = 30.0  # seconds; the longest pause between attempts that have no better prospect than the last


def able(state: State, now: float) -> tuple[NodeId, ...]:
    """Members for another attempt; none: the run waits. Who could not reach others is left out where enough
    remain."""
    r, need = state.round, max(state.config.members.minimum, 1)
    ready = tuple(n for n in r.participants if n in r.ledger.contributions)
    trusted = tuple(n for n in ready if state.members.trusted(n))
    members = _connected(trusted if len(trusted) >= need else ready, r.lost, need)
    return members if len(members) >= need and now >= r.paused_until else ()


def _connected(members: tuple[NodeId, ...], lost: tuple[Pair, ...], need: int) -> tuple[NodeId, ...]:
    """Leave out whoever broke with one other member twice, or with two: worst first, of two alike the one that
    joined last. If fewer than `need` would remain, nobody is."""
    left = members
    while worst := _worst(left, lost):
        left = tuple(n for n in left if n != worst)
    return left if len(left) >= need else members


def _worst(members: tuple[NodeId, ...], lost: tuple[Pair, ...]) -> NodeId | None:
    times = Counter(pair for pair in lost if set(pair) <= set(members))
    partners = Counter(n for pair in times for n in pair)
    bad = {n for pair, k in times.items() for n in pair if k > 1 or partners[n] > 1}
    return max(bad, key=lambda n: (partners[n], order(n)), default=None)


def plan(state: State, members: tuple[NodeId, ...], now: float, out: list[Effect]) -> State:
    """Put the next attempt in force."""
    assert state.layout is not None
    r, chunks = state.round, -(-state.layout[0] // state.config.reduce.chunk)
    ledger = book.reopen(r.ledger, members, chunks)
    fence = Fence(Incarnation(state.incarnation), Epoch(state.epoch), Round(r.number), ledger.attempt)
    reason = f"{len(members)} members reduce" if len(members) > 1 else "1 member reduces"
    if r.planned_at is not None:
        without = [n for n in r.participants if n not in members]
        reason = f"attempt {ledger.attempt} among {count(len(members), 'member')}"
        reason += f", without {state.names(without)}" if without else ""
        out.append(Note(f"round {r.number}: {reason}; {r.story.rpartition('; ')[2]}"))
    return with_round(
        state,
        phase=Phase.REDUCING,
        reason=reason,
        ledger=ledger,
        plan=Plan(fence, now),
        planned_at=now if r.planned_at is None else r.planned_at,
    )


def sealed(state: State, event: Sealed, now: float) -> State:
    """Enter an owner's seals in the ledger."""
    r = state.round
    if r.plan is None or r.plan.fence != event.fence:
        return state
    ledger = book.seal(r.ledger, event.node, event.seals)
    if ledger.complete and not r.ledger.complete:
        return with_round(state, ledger=ledger, plan=replace(r.plan, sealed_at=now))
    return with_round(state, ledger=ledger)


def held(state: State, event: Held) -> State:
    """A member has every sealed chunk."""
    r = state.round
    if r.plan is None or r.plan.fence != event.fence or event.node not in r.ledger.members:
        return state
    return with_round(state, plan=replace(r.plan, held=r.plan.held | {event.node: event}))


def peer_lost(state: State, event: PeerLost, now: float, out: list[Effect]) -> State:
    """A connection broke. A peer that lost its session too is gone; else it costs the attempt, and the pair is
    remembered for the next ones. What is said of an earlier attempt is remembered, too."""
    r, node, peer = state.round, event.node, event.peer
    if r.planned_at is None or event.fence.round != r.number or node == peer:
        return state
    pair = (node, peer) if order(node) < order(peer) else (peer, node)
    if r.plan is None or r.plan.fence != event.fence:
        known = {node, peer} <= set(r.participants) and event.fence.attempt < r.ledger.attempt
        return with_round(state, lost=(*r.lost, pair)) if known and pair not in r.lost else state
    if not {node, peer} <= set(r.ledger.members):
        return state
    name, other = state.name(node), state.name(peer)
    out.append(Note(f"{name} lost {other} in attempt {r.ledger.attempt}: {event.reason}", node))
    if peer not in r.ledger.contributions:
        return state  # the next attempt is on its way
    blamed = state.members.here[peer]
    if not blamed.connected and blamed.suspect_at <= now:
        return remove(state, peer, MemberState.EVICTED, f"its connections broke ({event.reason})", out)
    state = with_round(state, lost=(*r.lost, pair))
    why = f"{name} could not reach {other}"
    again = _worst(able(state, max(now, r.paused_until)), state.round.lost)
    if again is None:
        return _fail(state, why, now)
    pause = min(SLOWEST, 2.0 ** min(len(state.round.lost), 10) / 2)  # the run needs them both
    reason = f"{why}, and the run needs both: next attempt in {pause:g} s"
    return with_round(_fail(state, why, now), paused_until=now + pause, reason=reason)


def commit_or_retry(state: State, now: float, out: list[Effect]) -> State:
    """REDUCING: the attempt is over when all is held, or when it cannot end."""
    r = state.round
    plan_, members, ledger = r.plan, r.ledger.members, r.ledger
    assert plan_ is not None
    if gone := [n for n in members if n not in ledger.contributions]:
        return _fail(state, f"{state.names(gone)} {'is' if len(gone) == 1 else 'are'} gone", now)
    if now - plan_.opened_at > state.config.rounds.reduce_timeout:
        slow = {ledger.owners[c] for c in ledger.unsealed} or {n for n in members if n not in plan_.held}
        late = sorted(slow, key=order)
        if len(members) - len(late) >= max(state.config.members.minimum, 1):
            for node in late:
                ledger = book.withdraw(ledger, node)
        return _fail(with_round(state, ledger=ledger), f"{state.names(late)} did not finish in time", now)
    if not ledger.complete or len(plan_.held) < len(members):
        return state
    if liar := _liar(state):
        reason = f"its sealed bytes in round {r.number} are not what the others have"
        return remove(state, liar, MemberState.EVICTED, reason, out)
    return _commit(state, now, out)


def _fail(state: State, why: str, now: float) -> State:
    """Give the attempt up. Contributions stay: members keep what they encoded until the round is over."""
    r = state.round
    story = f"{r.story}; attempt {r.ledger.attempt} failed: {why}"
    return with_round(state, phase=Phase.COLLECTING, plan=None, asked_at=now, reason=why, story=story)


def _liar(state: State) -> NodeId | None:
    """A member whose sealed bytes differ from what most members hold; None if all hold what the ledger says.

    When most hold the same bytes and the ledger says otherwise, an owner sealed one thing and sent another: it
    is among those that agree with the ledger; if nobody does, it cannot be told which one, and one must go."""
    plan_, ledger = state.round.plan, state.round.ledger
    assert plan_ is not None
    roots = Counter(held.digest for held in plan_.held.values())
    if set(roots) == {ledger.root}:
        return None
    common, votes = roots.most_common(1)[0]
    honest = common if 2 * votes > len(plan_.held) else ledger.root
    return next((n for n in ledger.members if plan_.held[n].digest != honest), ledger.members[0])


def _commit(state: State, now: float, out: list[Effect]) -> State:
    state = publish(state, out)
    r, ledger = state.round, state.round.ledger
    assert r.plan is not None and r.told_at is not None and r.planned_at is not None
    weights = book.weights(ledger, state.config.model.seq_len)
    leases = data.consume_each(state.leases, {n: ledger.contributions[n].samples for n in ledger.members})
    here = state.members.here
    missed = {n: min(here[n].missed + 1, MOST_MISSED) for n in r.participants if n in here}
    missed |= dict.fromkeys((n for n in weights if n in missed), 0)
    members = who.update_each(state.members, {n: {"missed": rounds} for n, rounds in missed.items()})
    record = CommitRecord(
        round=r.number,
        epoch=state.epoch,
        attempts=ledger.attempt,
        members=r.participants,
        contributors=weights,
        tokens=state.tokens + int(sum(weights.values())),
        train_loss=sum(ledger.contributions[n].loss * w for n, w in weights.items()) / sum(weights.values()),
        seconds={
            "inner": r.told_at - r.started_at,
            "collect": r.planned_at - r.told_at,
            "reduce": r.plan.sealed_at - r.planned_at,
            "commit": now - r.plan.sealed_at,
        },
        bytes_up={n: r.plan.held[n].bytes_up for n in ledger.members},
        bytes_down={n: r.plan.held[n].bytes_down for n in ledger.members},
        reason=r.story,
        sealed_digest=ledger.root.hex(),
    )
    return replace(
        state,
        members=members,
        committed=r.number,
        digest=b"",
        sealed=ledger.root,
        makers=ledger.members,
        tokens=record.tokens,
        leases=leases,
        pending=record,
        round=RoundState(number=r.number + 1, reason="the next round is about to start", started_at=now),
    )
