"""Members' states of the model: from a member's first word to its being in step with the run. Pure.

Every commit record's digests are settled here: the contributors name the digest of the new state by majority, and
a member that differs fetches it again. Where as many name one as another, nobody is believed (`rollback`).
"""

from itertools import islice

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.comm.rounding import rounded
from atoll.coordinator.causes.observations import Standing
from atoll.coordinator.state_machine import beginning, inquiry, makers, rollback
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.changes import remove, with_member, with_round
from atoll.coordinator.state_machine.events import (
    Effect,
    LayoutReported,
    LossEvaluated,
    Note,
    Publish,
    StateRepaired,
)
from atoll.coordinator.state_machine.members import VERIFIER, Member, MemberState
from atoll.coordinator.state_machine.run_layout import RunLayout
from atoll.coordinator.state_machine.state import TRAINING, Phase, State, count, most_common

VERIFIES = "replays what it is told to"


def record_layout(state: State, event: LayoutReported, out: list[Effect]) -> State:
    """Enter a member's layout. All train one model, in the same fragments; who builds another is evicted."""
    node, layout = event.node, RunLayout(event.numel, event.digest, event.fragments)
    state = with_member(state, replace(state.members.here[node], evaluates=event.evaluates))
    if node == state.round.evaluator and not event.evaluates:
        state = with_round(state, replace(state.round, evaluator=None))
    return beginning.record_layout(state, node, layout, out)


def record_state(state: State, node: NodeId, round_: int, digest: bytes, now: float, out: list[Effect]) -> State:
    """Enter which state a member holds; what is older than its last word, or was never committed, is ignored."""
    if round_ == 0 and node in state.beginning.asked:
        return beginning.record_made(state, node, digest, now, out)
    if not digest or (round_ == 0 and state.committed == 0 and not state.digest):
        return state  # it was not asked to make it: it fetches what others make
    if not makers.may_hold(state, node, round_):
        return state
    if state.tied and round_ == state.committed:  # it holds what nobody can tell to be right
        return rollback.record_opinion(state, node, digest, out)
    if round_ < state.committed and digest == state.digest:
        round_ = state.committed  # the rounds in between are void
    if not state.members.here[node].state_round <= round_ <= state.committed:
        return state  # an older word that came late; or what nobody can hold, for it was not committed
    return replace(state, members=who.report_state(state.members, node, round_, digest))


def note_repair(state: State, event: StateRepaired, out: list[Effect]) -> State:
    """Note that a member's state changed by itself. Nothing follows: what could not be repaired shows in the next
    commit's digests."""
    if event.disk:
        how = "has its state from the rest" if event.whole else "the rest does not have all of its state"
        story = f"{count(event.chunks, 'file')} changed on its disk: {how}"
    else:
        how = "mended from its disk" if event.whole else "its disk could not mend all of it"
        story = f"{count(event.chunks, 'chunk')} of its state of round {event.round} changed in memory: {how}"
    out.append(Note(f"{state.name(event.node)}: {story}", event.node))
    if event.disk:
        return state
    return with_round(state, replace(state.round, changed=state.round.changed | {event.node: event.chunks}))


def record_loss(state: State, event: LossEvaluated) -> State:
    """Enter the validation loss of the newest state, and what the model wrote, if it comes from the evaluator."""
    if event.node != state.round.evaluator or event.round != state.committed:
        return state
    state = with_round(state, replace(state.round, evaluator=None))
    if event.round == 0:
        return replace(state, initial_val_loss=event.loss)
    if state.pending is None or state.pending.round != event.round:
        return state
    record = replace(state.pending, val_loss=rounded(event.loss, 24), passage=event.passage)
    return replace(state, pending=record)


def settled_alike(a: State, b: State, one: bool = False) -> bool:
    """Whether `settle_digests` has as little to do in one as in the other, but for `one` change of a member."""
    return (
        b.members.changes - a.members.changes in (0, int(one))
        and b.members.reports - a.members.reports in (0, int(one))
        and (a.committed, a.digest, a.round.evaluator) == (b.committed, b.digest, b.round.evaluator)
        and (a.round.phase is Phase.FINISHED) == (b.round.phase is Phase.FINISHED)
        and a.pending == b.pending
        and inquiry.is_open(a) == inquiry.is_open(b)
    )


def settle_digests(state: State, out: list[Effect]) -> State:
    """Name the digest of state_committed once it can be known, and hold every member's against it."""
    here, voters = state.members.here, makers.voters(state)
    told = makers.told_digests(state)
    if not state.digest:
        if not state.committed:
            return state  # `beginning` names it
        digest, votes = most_common(told)
        there = max(len(makers.makers_here(state)), len(voters))  # else who is back first names it alone
        if state.tied or not votes or (2 * votes <= there and len(told) < there):
            return state
        if makers.are_too_few(state, votes):
            return state  # else one that stays while the others' streams are broken would name it alone
        if makers.is_equal_vote(told, votes):
            over = state.round.phase is Phase.FINISHED  # one that comes back may tell yet; nothing waits for it
            return state if over else rollback.begin_tie(state, tuple(n for n in told if n in here), out)
        state = replace(state, digest=digest)
    if (pending := state.pending) is not None:
        if len(told.keys() | pending.digests) != len(pending.digests) or not pending.state_digest:
            digests = pending.digests | {n: d.hex() for n, d in told.items()}
            equal = len(set(digests.values())) == 1
            record = replace(pending, state_digest=state.digest.hex(), digests=digests, digests_equal=equal)
            state = inquiry.with_digests(replace(state, pending=record))
    holders = [m for m in here.values() if m.state_round == state.committed]
    for member in holders:
        state = _hold_against(state, member, out)
    complete = told.keys() >= set(voters) and state.round.evaluator is None and not inquiry.is_open(state)
    if complete and state.round.phase is not Phase.FINISHED:
        return publish(state, out)
    return state


def may_settle(state: State) -> bool:
    """Whether enough members have told their state for the digest to be named or the record to be published."""
    told = state.members.holding.get(state.committed, 0)
    lost = state.members.losses - state.losses_at_commit  # at most so many of the makers, and these may have told
    voters = len(state.makers) - lost
    last = told >= voters if state.pending is not None else not state.digest and told > 0
    return last or (not state.digest and 2 * (told + lost) > voters)


def settle_one(state: State, node: NodeId, out: list[Effect]) -> State:
    """Do what `settle_digests` does where only this node changed since the last time, and not `may_settle`: as
    much work whoever else is here."""
    pending, member = state.pending, state.members.here.get(node)
    if not state.digest or member is None or member.state_round != state.committed:
        return state
    if pending is not None and node not in pending.digests and makers.votes(state, member):
        digest = member.state_digest.hex()
        equal = all(pending.digests_equal and digest == first for first in islice(pending.digests.values(), 1))
        record = replace(pending, digests=pending.digests | {node: digest}, digests_equal=equal)
        state = inquiry.with_digests(replace(state, pending=record))
    return _hold_against(state, member, out)


def _hold_against(state: State, member: Member, out: list[Effect]) -> State:
    """A member's state of round `committed` and the run's."""
    if member.state is MemberState.JOINING:
        return state  # first it says which model it has
    if member.state_digest != state.digest:
        return _diverged(state, member.node, out)
    if member.state is MemberState.RECOVERING:
        return _synced(state, member.node, out)
    return state


def _diverged(state: State, node: NodeId, out: list[Effect]) -> State:
    """It fetches the state again. If it trained from its own, it must come back in a new life: what it said of
    those steps may still arrive."""
    differs = f"its state of round {state.committed} differs from the run's"
    member = state.members.here[node]
    if member.state is not MemberState.RECOVERING:
        return remove(state, node, MemberState.EVICTED, differs, out, Standing.DIFFERED)
    reason = f"fetches the state of round {state.committed} again: its own differs from the run's"
    out.append(Note(f"{state.name(node)} {reason}", node))
    return with_member(state, replace(member, reason=reason, state_round=-1))


def _synced(state: State, node: NodeId, out: list[Effect]) -> State:
    """Where a round is under way it trains from now on, though the round does not wait for it; its first
    contribution has that too."""
    out.append(Note(f"{state.name(node)} has the state of round {state.committed}", node))
    if state.members.here[node].role == VERIFIER:
        return with_member(state, replace(state.members.here[node], state=MemberState.SYNCED, reason=VERIFIES))
    trains = state.round.phase in TRAINING
    reason = "trains; counted from the next round boundary on" if trains else "waits for the first round"
    state = with_member(state, replace(state.members.here[node], state=MemberState.SYNCED, reason=reason))
    return replace(state, leases=data.grant(state.leases, node, state.lease))


def publish(state: State, out: list[Effect]) -> State:
    """Publish the commit record of the last round, which is as complete as it will be."""
    record = state.pending
    if record is None:
        return state
    if not state.digest:  # some living contributor has not told: the others speak
        told = {n: d for n, d in makers.told_digests(state).items() if n in record.contributors}
        record = replace(
            record,
            state_digest=makers.believed_digest(state).hex(),
            digests={n: d.hex() for n, d in told.items()},
            digests_equal=len(set(told.values())) == 1 if told else None,
        )
    state, verdict = inquiry.end(state, out)
    out.append(Publish(replace(record, verdict=verdict)))
    return with_round(replace(state, pending=None), replace(state.round, evaluator=None))


def publish_last(state: State, now: float, out: list[Effect]) -> State:
    """Publish the last commit's record when its digests and its validation loss are in, or do not come: where
    nobody who holds the state can evaluate, there is no loss to wait for."""
    pending = state.pending
    if pending is None:
        return state
    if now - state.round.started_at > state.config.members.stall:
        return publish(state, out)
    if inquiry.is_open(state):
        return state
    if not state.holders:
        return state if state.members.here else publish(state, out)
    here = state.members.here
    if pending.val_loss is None and (able := [n for n in state.holders if here[n].measures]):
        evaluator = state.round.evaluator if state.round.evaluator in able else able[0]
        return with_round(state, replace(state.round, evaluator=evaluator))
    return publish(state, out) if state.digest else state
