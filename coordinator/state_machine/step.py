"""The run as one pure state machine: `step(state, event, now) -> (state, effects)`.

            enough members       a quorum has its steps         all ready, or late
    waiting -------------> inner ----------------------> collecting -------------> reducing <--+ a member is lost:
       ^                                                     ^                      |  |  |    | next attempt, with
       |                                                     +---- too few left ----+  |  +----+ the same deltas
       |                                                                               |
       +-------------------- every chunk sealed and held: commit ----------------------+---> finished

No clock, no socket, no randomness: the same events in the same order give the same state, so replaying the
journal rebuilds it. This file takes events to the part they concern: `beginning` (the model and state 0),
`state_sync` (who holds which state), `rounds` (when a round starts and closes), `reduce` (attempts and commit),
`audit` (whether what was sealed is what went in), `replay` (whether contributors train what they were told to),
`disputes` (sealed chunks that cannot be had), `rollback` (when the state is gone with all who held it), `conduct`
(what is held against members), `byte_saving` (who exchanges nothing for now), on the small machines `members`,
`leases`, `ledger` and `strikes`. Each decision says why in a `Note`.
"""

from collections.abc import Iterable
from typing import assert_never

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.causes.observations import Standing
from atoll.coordinator.state_machine import (
    audit,
    beginning,
    broken_paths,
    byte_saving,
    conduct,
    credit,
    disputes,
    inquiry,
    late_work,
    lateness,
    reduce,
    replay,
    rollback,
    rounds,
    slow_links,
    state_sync,
    unreachable_peers,
)
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.attempt_members import attempt_members
from atoll.coordinator.state_machine.changes import drop_from_round, remove, with_member, with_round
from atoll.coordinator.state_machine.chunk_owners import reachable
from atoll.coordinator.state_machine.events import (
    AuditReported,
    Banned,
    ChunkForged,
    ChunksMissing,
    ChunksSealed,
    Connected,
    ContributionReady,
    Disconnected,
    Effect,
    Event,
    Expired,
    HeardNobody,
    Heartbeat,
    Joined,
    LayoutReported,
    Leaving,
    LossEvaluated,
    Note,
    OrphansFound,
    Pardoned,
    Paused,
    PeerUnreachable,
    ReduceComplete,
    ReplayReported,
    ReportsRefused,
    Resumed,
    RoundAccounted,
    SealOutsized,
    Started,
    StateRepaired,
    StateReported,
    Stepped,
    StepsReached,
    Suspected,
    SuspicionCleared,
    Tick,
    TrainersSeen,
    WritesResumed,
)
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.participants import counted
from atoll.coordinator.state_machine.state import Phase, State

# Events that change one member at most: then only its state is settled (`state_sync.settle_one`).
EVENTS_OF_ONE_MEMBER = (
    Joined,
    Connected,
    Disconnected,
    Suspected,
    SuspicionCleared,
    Expired,
    Leaving,
    LayoutReported,
    StateReported,
)
# Events with which a member's part in what it is waited for ends, or may have ended.
GOING = (Joined, Disconnected, Suspected, Paused, Expired, Leaving)


def step(state: State, event: Event, now: float) -> tuple[State, list[Effect]]:
    """Take in one event; return the new state and what must leave the coordinator because of it."""
    effects: list[Effect] = []
    if _late(state, event):
        return state, effects
    if isinstance(event, Heartbeat):
        return hear(state, (event,), now), effects
    before = state
    state = _with_epoch(before, _take(before, event, now, effects))
    state = _with_epoch(state, _advance(before, state, event, now, effects))
    state = audit.remember_whose_audit_ended(before, state, event)
    return _watched(before, state, event, now), effects


def hear(state: State, beats: Iterable[Heartbeat], now: float) -> State:
    """Take in heartbeats. They move no decision; the next tick judges them."""
    return replace(state, members=who.record_heartbeats(state.members, beats, now))


def _with_epoch(before: State, state: State) -> State:
    """A new generation of members has a new epoch."""
    if state.members.generations == before.members.generations:
        return state
    return replace(state, epoch=state.epoch + 1)


def _watched(before: State, state: State, event: Event, now: float) -> State:
    """Trainers are held to making progress while, and only while, the run waits for them."""
    did = (
        event.node if isinstance(event, StepsReached | ContributionReady | LossEvaluated | StateReported) else None
    )
    reports = state.members.reports - before.members.reports
    earlier, later = frozenset[NodeId](), frozenset[NodeId]()
    if _waits_for(before) != _waits_for(state) or reports > isinstance(event, StateReported):
        earlier, later = before.awaited_members, state.awaited_members
    elif did is not None and reports:  # only this one may have what it lacked
        earlier, later = (frozenset({did}) if s.awaits(did) else frozenset() for s in (before, state))
    elif did is not None:  # for the same ones, but perhaps for the one that spoke
        earlier = frozenset({did})
    left, came = earlier - later, later - earlier
    if not left and not came:
        return state
    members = who.stop_stall_clocks(state.members, left, did, now)
    return replace(state, members=who.start_stall_clocks(members, came, now))


def _waits_for(state: State) -> tuple[object, ...]:
    r = state.round
    there = state.digest, state.state_given
    return (
        state.members.changes,
        there,
        (*state.beginning.asked,),
        r.number,
        r.phase,
        r.participants,
        r.evaluator,
    )


def _late(state: State, event: Event) -> bool:
    """It speaks of a node that is gone, or of an earlier life of it; or of a model that it cannot have."""
    if isinstance(event, Started | HeardNobody | Tick | TrainersSeen | Banned | Pardoned | WritesResumed):
        return False
    member = state.members.here.get(event.node) or state.members.departed.get(event.node)
    if isinstance(event, Joined):
        again = member is not None and event.life <= member.life
        return again or bool(conduct.refusal(state, event.node, event.key))
    if event.node not in state.members.here or member is None or event.life != member.life:
        return True
    return member.role == who.REDUCER and isinstance(event, LayoutReported | StateReported)


def _take(state: State, event: Event, now: float, out: list[Effect]) -> State:
    if isinstance(event, GOING) and event.node in state.members.here:
        state = late_work.lend_to_who_goes(state, event.node, now)
        state = lateness.lend_to_who_goes(state, event.node, now)
    match event:
        case Started(incarnation, nonce):
            return _restarted(replace(state, nonce=nonce or state.nonce), incarnation, now)
        case HeardNobody(seconds):
            if seconds:
                out.append(Note(f"the coordinator stood still for {seconds:.0f} s: all have their time anew"))
            return _with_time_anew(state, now)
        case Joined():
            return _joined(state, event, now, out)
        case Connected(node):
            member = replace(state.members.here[node], connected=True, heard_at=now)
            state = with_member(state, member)
            return _trust(state, node, out)
        case Disconnected(node):
            if state.members.here[node].connected:
                out.append(Note(f"{state.name(node)} is suspected: its connection broke", node))
            return replace(state, members=who.disconnect(state.members, node, state.config.members, now))
        case LayoutReported():
            return state_sync.record_layout(state, event, out)
        case StateReported(node, _, round_, digest):
            return state_sync.record_state(state, node, round_, digest, now, out)
        case StateRepaired():
            return state_sync.note_repair(state, event, out)
        case StepsReached(node, _, round_):
            return rounds.record_steps(state, node, round_, now)
        case ContributionReady():
            return rounds.record_contribution(state, event, now, out)
        case ChunksSealed():
            return reduce.record_seals(state, event, now)
        case OrphansFound():
            return reduce.record_orphans(state, event)
        case ReduceComplete():
            return reduce.record_completion(state, event, now)
        case ChunkForged():
            return disputes.record_forgery(state, event, out)
        case ChunksMissing():
            return disputes.record_missing_chunks(state, event)
        case LossEvaluated():
            return state_sync.record_loss(state, event)
        case SealOutsized():
            return audit.doubt(state, event, now, out)
        case AuditReported():
            return audit.record(state, event, now, out)
        case ReplayReported():
            return replay.record(state, event, out)
        case RoundAccounted():
            return inquiry.record(state, event)
        case TrainersSeen():
            return inquiry.hear(state, event)
        case PeerUnreachable():
            return unreachable_peers.record_unreachable_peer(state, event, now, out)
        case ReportsRefused(node):
            return conduct.lend_to_who_floods(state, node, out)
        case Leaving(node, _, reason, incidents):
            if incidents and node in state.round.participants:
                state = replace(
                    state, round=replace(state.round, farewells=state.round.farewells | {node: incidents})
                )
            state = conduct.leave_exchange(state, node, "it left the run in the middle of an exchange", out)
            return remove(state, node, MemberState.LEFT, reason or "it said good-bye", out, Standing.LEFT)
        case Suspected(node, _, reason):
            out.append(Note(f"{state.name(node)} is suspected: {reason}", node))
            return replace(state, members=who.suspect(state.members, node, reason))
        case SuspicionCleared(node):
            return _trust(state, node, out)
        case Stepped(node):
            return replace(state, members=who.enter_step(state.members, node))
        case Paused():
            return byte_saving.record_pause(state, event, now, out)
        case Resumed(node):
            out.append(Note(f"{state.name(node)} is no longer paused", node))
            return replace(state, members=who.resume(state.members, node))
        case Expired(node, _, reason, stalled, silence):
            if stalled and node in state.round.participants:  # it is idle in its next life, until it steps
                state = replace(state, members=who.set_idle(state.members, [node]))
            lost = Standing.SILENT if state.members.here[node].connected else Standing.BROKE
            state = lateness.charge_who_is_gone(state, node, silence, now, out)
            return remove(state, node, MemberState.EVICTED, reason, out, Standing.STALLED if stalled else lost)
        case Banned(node, reason):
            return conduct.ban(state, node, reason, out)
        case Pardoned(node, reason):
            return conduct.pardon(state, node, reason, out)
        case WritesResumed(seconds):
            return with_round(state, replace(state.round, stalled=state.round.stalled + seconds))
        case Tick() | Heartbeat():
            return state
        case _:
            assert_never(event)


def _advance(settled: State, state: State, event: Event, now: float, out: list[Effect]) -> State:
    """Make every transition that is due. `settled`: the state before the event, where none was."""
    one = (
        event.node if isinstance(event, EVENTS_OF_ONE_MEMBER) else None
    )  # only this member may have changed since `settled`
    while True:
        chosen = beginning.ask_makers(rollback.go_on_without(state, now, out), now, out)
        chosen = inquiry.advance(replay.advance(chosen, now, out), now, out)
        after = chosen
        if not state_sync.settled_alike(settled, chosen):
            if one is not None and state_sync.settled_alike(settled, chosen, one=True):
                one = None if state_sync.may_settle(chosen) else one
            else:
                one = None
            if one is not None:
                after = state_sync.settle_one(chosen, one, out)
                whole = after.members is chosen.members and after.digest == chosen.digest
            else:
                after = state_sync.settle_digests(chosen, out)
                whole = after == chosen
            settled = after if whole else settled
        members = after.members
        match after.round.phase:
            case Phase.WAITING:
                after = rounds.start_if_enough(after, now, out)
            case Phase.INNER:
                after = rounds.close_if_due(after, now, isinstance(event, Tick), out)
            case Phase.COLLECTING:
                after = _reduce_if_due(after, now, isinstance(event, Tick), out)
            case Phase.REDUCING:
                after = reduce.commit_or_retry(after, now, isinstance(event, Tick), out)
            case Phase.FINISHED:
                after = state_sync.publish_last(after, now, out)
            case _:
                assert_never(after.round.phase)
        if after is state or after == state:
            return state
        one = one if after.members is members else None
        state = after


def _reduce_if_due(state: State, now: float, tick: bool, out: list[Effect]) -> State:
    if counted(state) < max(state.config.members.minimum, 1):
        return rounds.refill(state, now, out)
    if not reachable(state, state.round.participants):
        if reachable(state, rounds.trainers(state)):
            return rounds.refill(state, now, out)
        return with_round(
            state,
            replace(
                state.round,
                reason="no member can be dialled by the others, so nobody can reduce: have one join "
                "without --leaf, or with --role reducer",
            ),
        )
    if rollback.is_in_doubt(state):
        return with_round(
            state, replace(state.round, asked_at=now, patient_until=now, reason=rollback.wait_reason(state))
        )
    first = state.round.planned_at is None
    if first and rounds.many_are_away(state):
        state, waits = rounds.wait_for_many(state, now)
        if waits:
            return state
    members = rounds.reduce_members(state, now, tick, out) if first else attempt_members(state, now)
    if members:
        if first:
            state, members = slow_links.in_turn(rounds.go_on_without(state, now, out), members, out)
        opened = reduce.open_attempt(state, members, now, out)
        return replay.draw(opened, now) if first else opened
    return with_round(state, replace(state.round, reason=rounds.collect_reason(state))) if first else state


def _restarted(state: State, incarnation: int, now: float) -> State:
    """Nobody is connected to a fresh coordinator; nobody is left out before all had time to come back."""
    members = who.disconnect_all(state.members, state.config.members, now)
    state = replace(state, incarnation=incarnation, members=members)
    round_ = replace(state.round, restarts=state.round.restarts + (incarnation > 1))
    return _with_time_anew(with_round(replace(state, lost_state=None), round_), now)


def _with_time_anew(state: State, now: float) -> State:
    """The coordinator was away: whom it waits for could tell it nothing, and has its time from `now` on."""
    r, patient_until = state.round, now + who.RECONNECT_GRACE_SECONDS
    plan = None if r.plan is None else replace(r.plan, opened_at=now, stage_at=now)
    r = replace(r, patient_until=patient_until, asked_at=now, plan=plan, half_told=r.ledger.attempt)
    return audit.give_time_anew(with_round(state, r), now)


def _joined(state: State, event: Joined, now: float, out: list[Effect]) -> State:
    node = event.node
    again = node in state.members.here or node in state.members.departed
    out.append(Note(f"{event.name} {'is back' if again else 'joins'} as {node}", node))
    if node in state.members.here:  # before it was missed, but with nothing that the round could use
        state = lateness.charge_who_breaks_off(state, node, "it began anew", now, out)
        state = broken_paths.charge_who_broke_off(state, node, "it began anew", out)
        state = drop_from_round(state, node, Standing.BROKE)
    members = who.join(
        state.members,
        node,
        event.life,
        event.name,
        event.address,
        event.session,
        now,
        event.leaf,
        event.role,
        event.pin,
        event.key,
        event.invite,
        event.owner,
        event.version,
    )
    state = replace(state, members=members)
    as_, owner = conduct.identity(state, node), members.here[node].owner
    return replace(state, credit=credit.rename(state.credit, as_, node, event.name, owner))


def _trust(state: State, node: NodeId, out: list[Effect]) -> State:
    if state.members.trusted(node):
        return state
    out.append(Note(f"{state.name(node)} is heard again", node))
    return replace(state, members=who.trust(state.members, node))
