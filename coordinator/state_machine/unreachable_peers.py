"""A member says that it cannot reach another one in an exchange: what becomes of the attempt. Pure.

What is remembered of such paths over rounds is in `broken_paths`.
"""

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import broken_paths, lateness
from atoll.coordinator.state_machine.attempt_members import attempt_members, worst_of
from atoll.coordinator.state_machine.changes import fail_attempt, with_round
from atoll.coordinator.state_machine.events import Effect, Note, PeerUnreachable
from atoll.coordinator.state_machine.members import REDUCER
from atoll.coordinator.state_machine.state import State, order

MAX_PAUSE_SECONDS = 30.0  # between attempts that have no better prospect than the last


def record_unreachable_peer(state: State, event: PeerUnreachable, now: float, out: list[Effect]) -> State:
    """A connection broke: it costs the attempt, and the pair is remembered for the next ones. A peer that lost its
    session, too, may come back: until then they are without it, and the clock puts it out. What that cost is held
    against it where a third say so, or it begins anew. What is said of an earlier attempt is remembered, too."""
    r, node, peer = state.round, event.node, event.peer
    if r.planned_at is None or event.fence.round != r.number or node == peer:
        return state
    if not state.members.saving.isdisjoint((node, peer)):
        return state  # it exchanges nothing, as it says
    if r.plan is None or r.plan.fence != event.fence:
        if not {node, peer} <= r.participants.keys() or event.fence.attempt >= r.ledger.attempt:
            return state
        if _lost_its_session(state, peer, now):
            return _interrupted(state, event, out)
        return _with_lost(state, event, again=False)
    if not {node, peer} <= {e.node for e in r.ledger.entries if not e.gone}:
        return state
    if not broken_paths.needed(r.ledger, node, peer):
        return state  # neither merges what the other sends
    state = lateness.lend_to_who_goes(state, node, now)  # that the attempt ends is its word
    name, other = state.name(node), state.name(peer)
    out.append(Note(f"{name} lost {other} in attempt {r.ledger.attempt}: {event.reason}", node))
    blamed = state.members.here.get(peer)
    if blamed is None or (peer not in r.ledger.contributions and blamed.role != REDUCER):
        return state  # the next attempt is on its way
    why = f"{name} could not reach {other}"
    if gone := _lost_its_session(state, peer, now):
        lost = r.interrupted | {peer: r.interrupted.get(peer, 0.0) + now - r.plan.opened_at}
        known = replace(
            state.round, interrupted=lost, broke_off=r.broke_off | {peer: r.broke_off.get(peer, 0) + 1}
        )
        state = _interrupted(with_round(state, known), event, out)
    else:
        state = _with_lost(state, event, again=True)
    members = attempt_members(state, max(now, r.paused_until))
    if not (peer in members if gone else worst_of(state, members)):
        return fail_attempt(state, why, now)
    pause = min(MAX_PAUSE_SECONDS, 2.0 ** min(len(state.round.lost), 10) / 2)  # the run needs them both
    reason = f"{why}, and the run needs both: next attempt in {pause:g} s"
    state = fail_attempt(state, why, now)
    return with_round(state, replace(state.round, paused_until=now + pause, reason=reason))


def _lost_its_session(state: State, node: NodeId, now: float) -> bool:
    member = state.members.here.get(node)
    return member is not None and not member.connected and member.suspect_at <= now


def _interrupted(state: State, event: PeerUnreachable, out: list[Effect]) -> State:
    """A member says that a peer which has no session either cannot be reached: where a third do, it is so."""
    said = state.round.accused | {(event.node, event.peer)}
    state = with_round(state, replace(state.round, accused=said))
    if not broken_paths.is_known(state, sum(peer == event.peer for _, peer in said)):
        return state
    return broken_paths.charge_who_broke_off(state, event.peer, "its connections broke", out)


def _with_lost(state: State, event: PeerUnreachable, *, again: bool) -> State:
    """Enter that the path of a pair broke, and which of the two said so of the other; `again`: once more if it
    broke before. Of an attempt whose plan some may not have had in time it is not entered."""
    r, said = state.round, (event.node, event.peer)
    if event.fence.attempt <= r.half_told:
        return state
    pair = said if order(event.node) < order(event.peer) else (event.peer, event.node)
    lost = (*r.lost, pair) if again or pair not in r.lost else r.lost
    return with_round(state, replace(r, lost=lost, accused=r.accused | {said}))
