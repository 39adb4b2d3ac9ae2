"""The changes of the run's state that several parts of its machine make. Pure."""

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.causes.observations import Standing
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.events import Effect, Note
from atoll.coordinator.state_machine.leases import Leases
from atoll.coordinator.state_machine.ledger import Ledger, contributed_samples, withdraw
from atoll.coordinator.state_machine.members import Member, MemberState
from atoll.coordinator.state_machine.state import WITHOUT_MODEL, Moments, Phase, RoundState, State


def with_member(state: State, member: Member) -> State:
    """The state with this one in the place of the member of the same id."""
    return replace(state, members=who.put(state.members, member))


def with_round(state: State, round_: RoundState) -> State:
    """The state with this round; the same object if the round is as it was."""
    return state if round_ == state.round else replace(state, round=round_)


def fail_attempt(state: State, why: str, now: float) -> State:
    """Give the attempt up. Contributions stay: members keep what they encoded until the round is over."""
    r = state.round
    story = f"{r.story}; attempt {r.ledger.attempt} failed: {why}"
    return with_round(
        state, replace(state.round, phase=Phase.COLLECTING, plan=None, asked_at=now, reason=why, story=story)
    )


def marked(r: RoundState, node: NodeId, **now: float) -> RoundState:
    """The round with the moment at which a participant did something entered; the first such moment counts, but
    for `sealed`."""
    known = r.moments.get(node, Moments())
    new = {what: at for what, at in now.items() if what == "sealed" or not getattr(known, what)}
    return replace(r, moments=r.moments | {node: replace(known, **new)}) if new else r


def drop_from_round(state: State, node: NodeId, standing: Standing) -> State:
    """Neither its contribution nor its vote counts in this round any more. It keeps its lease. `standing`: how it
    went, for who asks later."""
    r = state.round
    return with_round(
        state,
        replace(
            state.round,
            participants={n: at for n, at in r.participants.items() if n != node},
            reached=r.reached - {node},
            completions={n: h for n, h in r.completions.items() if n != node},
            settled=r.settled - {node},
            wrong=r.wrong - {node},
            stragglers={n: at for n, at in r.stragglers.items() if n != node},
            ledger=withdraw(r.ledger, node),
            evaluator=None if r.evaluator == node else r.evaluator,
            gone=r.gone | {node: standing} if _takes_part(r, node) else r.gone,
        ),
    )


def _takes_part(r: RoundState, node: NodeId) -> bool:
    return node in r.participants or any(e.node == node and not e.gone for e in r.ledger.entries)


def remove(
    state: State,
    node: NodeId,
    how: MemberState,
    reason: str,
    out: list[Effect],
    standing: Standing = Standing.PUT_OUT,
) -> State:
    """The member is out. What it trained on is free again when it left for good; else it may come back with it.
    `standing`: how it went, for who asks later why the round was slow."""
    out.append(Note(f"{state.name(node)} {how}: {reason}", node))
    state = drop_from_round(replace(state, members=who.remove(state.members, node, how, reason)), node, standing)
    if how is MemberState.LEFT:
        state = replace(state, leases=data.release(_used(state, node), node))
    forgotten = _forgettable(state)
    for old in forgotten:
        state = replace(state, leases=data.release(state.leases, old))
    if forgotten:
        counted = {n: c for n, c in state.last_counted.items() if n not in forgotten}
        earlier = {n: e for n, e in state.earlier.items() if n not in forgotten}
        members = who.forget(state.members, forgotten)
        state = replace(state, members=members, last_counted=counted, earlier=earlier)
    if state.committed == 0 and all(m.state in WITHOUT_MODEL for m in state.members.here.values()):
        state = start_over(replace(state, layout=None, fragments=()))  # nobody is left who has built this model
    return state


def _forgettable(state: State) -> tuple[NodeId, ...]:
    """Members that are gone and need not be remembered: not those whose work may be in the round's sealed chunks,
    which its commit consumes from their leases and credits to their keys."""
    oldest = who.oldest_departed(state.members)
    entered = {e.node for e in state.round.ledger.entries if e.contribution} if oldest else ()
    return tuple(n for n in oldest if n not in entered)


def start_over(state: State) -> State:
    """The state with a round that nobody is in any more: nothing of it will be committed, what comes late of it is
    of no round."""
    r = state.round
    ledger = Ledger(attempt=r.ledger.attempt)
    return with_round(
        state,
        replace(r, phase=Phase.WAITING, plan=None, ledger=ledger, completions={}, audits={}, audited={}, salt=b""),
    )


def _used(state: State, node: NodeId) -> Leases:
    """The leases, when what the node contributed to the reduce under way counts as consumed: it is in sealed
    chunks, or may be."""
    lease = state.leases.by_node.get(node, ())
    samples = contributed_samples(state.round.ledger, node, data.front(lease)) if lease else 0
    return data.consume(state.leases, node, samples)
