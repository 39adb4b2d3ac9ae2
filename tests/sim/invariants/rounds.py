"""Rounds, their plans and attempts."""

from typing import TYPE_CHECKING

from sim.invariants.violation import hold

from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.service.journaled_machine import Batch
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.rounds import many_are_away
from atoll.coordinator.state_machine.state import Phase, State

if TYPE_CHECKING:
    from sim.world import World


def rounds_close_at_a_quorum(before: State, after: State) -> None:
    """A round is closed when its quorum has its inner steps, or has stopped; others may enter at that, also as one
    leaves, and who takes no steps is none of it."""
    r, there = after.round, before.round.participants.keys() & after.round.participants.keys()
    if r.phase is Phase.COLLECTING and before.round.phase is Phase.INNER:
        done = r.reached | r.ledger.contributions.keys()
        need = after.config.rounds.quorum * len(there - (after.members.idle - done))
        hold(len(done) >= need, f"round {r.number} closes with {len(done)} of {len(there)} members")


def no_round_waits_for_suspects(state: State) -> None:
    """A round that closes and has its quorum waits only for members that may still answer, unless so many may be
    dead that the others would be few."""
    r = state.round
    if r.phase is not Phase.COLLECTING or r.planned_at is not None or many_are_away(state):
        return
    saving = state.members.saving
    trusted = [n for n in r.participants if state.members.trusted(n) and n not in saving]
    ready = [n for n in trusted if n in r.ledger.contributions]
    need = max(state.config.rounds.quorum * len(r.participants), min(2, len(r.participants)))
    reducers = (m for m in state.members.here.values() if m.trusted_as(MemberState.REDUCER) and not m.paused)
    dialled = any(not state.members.here[n].leaf for n in ready) or any(reducers)
    enough = len(ready) >= max(need, state.config.members.minimum) and dialled
    hold(not enough or len(ready) < len(trusted), f"round {r.number} has all that it can wait for, and waits")


def plans_leave_out_who_saves_bytes(state: State) -> None:
    """Nobody who exchanges nothing, as it says, is a part of an attempt."""
    here = {e.node for e in state.round.ledger.entries if not e.gone}
    wrong = here & state.members.saving
    hold(not wrong, f"{wrong} save bytes, and are in {state.round.plan and state.round.plan.fence}")


def fences_grow(world: "World", fence: Fence) -> None:
    """Each attempt's fence is above all earlier ones."""
    fences = world.truth.fences
    if fences.get((fence.round, fence.attempt)) != fence:
        newest = max(fences.values(), default=None)
        hold(newest is None or fence > newest, f"{fence} is planned after {newest}")
        one_plan_an_attempt(world, fence)


def a_plan_is_of_its_rounds_fragment(world: "World", plan: pb.Plan) -> None:
    """A plan has an owner for each chunk of the fragment that the round's number says, and for no other."""
    grid, told = world.chunks(plan.round), f"round {plan.round} has {len(plan.owners)} chunks of {plan.numel}"
    hold((len(plan.owners), plan.numel) == (grid.count, grid.numel), f"{told}, its fragment {grid}")


def a_round_has_its_inner_steps(world: "World", order: pb.Train) -> None:
    """The rounds of all fragments together have the inner steps of the run's config."""
    rounds = world.config.rounds
    steps = 1 if order.round <= rounds.data_parallel else world.turns.steps(order.round, rounds.inner_steps)
    hold(order.steps == steps <= order.ceiling, f"round {order.round} has {order.steps} inner steps, not {steps}")


def one_plan_an_attempt(world: "World", fence: Fence) -> None:
    """At most one plan is in force for (round, attempt), whoever saw it."""
    known = world.truth.fences.setdefault((fence.round, fence.attempt), fence)
    hold(known == fence, f"attempt {fence.attempt} of round {fence.round} is {known} and {fence}")


def one_result_an_attempt(world: "World", round_: int, since: int, chunk: int, payload: bytes) -> None:
    """No two different sealed results of a chunk since one attempt."""
    known = world.truth.sealed.setdefault((round_, since, chunk), payload)
    hold(known == payload, f"chunk {chunk} of {round_}/{since} was sealed twice, with different bytes")


def attempts_end_in_time(world: "World", batch: Batch) -> None:
    """No attempt is in force for longer than it may: it has its time until all is sealed, and as much until all is
    held."""
    plan, limit = batch.state.round.plan, world.config.rounds.reduce_timeout
    assert plan is not None
    took = batch.now - plan.stage_at
    if batch.state.round.audits:  # each of their auditors has its own time
        return
    hold(took < limit + 1.0, f"{plan.fence} waits for {took:.1f} s of {limit:g}")
