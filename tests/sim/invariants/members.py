"""What is believed of members, and who is out."""

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from sim.invariants.violation import hold

from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.state import State

if TYPE_CHECKING:
    from sim.service import Service
    from sim.world import World

SILENCE = ("silent for", "it is silent")  # reasons of verdicts
LONG_AWAY = 2.0  # seconds in which the coordinator hears nobody, after which it must not judge
LENIENCY = 5.0  # seconds in which it does not, then


def members_said_what_is_believed(world: "World", before: State, after: State) -> None:
    """What is believed of a member, this life of it has said: the state that it holds, and that it left."""
    said, truth_void = world.truth.said, world.truth.void
    for node, m in after.members.here.items():
        b = before.members.here.get(node)
        if m is b or m.state_round < 0:
            continue
        state = f"state {m.state_round} ({m.state_digest.hex()})"
        told = any(  # under an earlier number, where the rounds since are void
            ev.StateReported(node, m.life, r, m.state_digest) in said
            and truth_void.issuperset(range(r + 1, m.state_round + 1))
            for r in range(m.state_round, -1, -1)
        )
        hold(told, f"{node} is believed to hold {state} in life {m.life}")
        old = b is not None and b.life == m.life and b.state_round > m.state_round
        hold(not old, f"{node} is believed to have gone back to {state}")
    for node in after.members.departed.keys() - before.members.departed.keys():
        m = after.members.departed[node]
        if m.state is MemberState.LEFT:
            left = any(isinstance(e, ev.Leaving) and (e.node, e.life) == (node, m.life) for e in said)
            hold(left, f"{node} is said to have left in life {m.life}")


def members_have_the_runs_state(state: State) -> None:
    """Whoever counts has told the run's digest of the state that it holds; and members are counted right."""
    members, here = state.members, state.members.here.values()
    suspects = {m.node for m in here if m.suspected is not None}
    hold(members.suspects == suspects, f"{suspects} are suspects, known are {members.suspects}")
    idle = {m.node for m in here if m.rests}
    hold(members.idle == idle, f"{idle} are idle, known are {members.idle}")
    saving = {m.node for m in here if m.saves_bytes}
    hold(members.saving == saving, f"{saving} save bytes, known are {members.saving}")
    hold(all(m.paused for m in here if m.saves_bytes), f"of {saving} not all are paused")
    holding = Counter(m.state_round for m in here)
    hold(members.holding == holding, f"states are held as in {holding}, known is {members.holding}")
    trusted = Counter(m.state for m in here if m.suspected is None)
    hold(members.trusted_counts == trusted, f"trusted are {trusted}, known is {members.trusted_counts}")
    for member in state.members.here.values():
        if member.state in (MemberState.ACTIVE, MemberState.SYNCED) and member.state_round == state.committed:
            same = not state.digest or member.state_digest == state.digest
            hold(same, f"{member.node} is {member.state} with another state than the run's")


def epochs_name_memberships(before: State, after: State) -> None:
    """No two memberships in a row have the same epoch."""
    same = before.members.here is after.members.here or before.members.generation == after.members.generation
    hold(same or after.epoch > before.epoch, f"epoch {after.epoch} names two memberships")


def the_late_are_out(service: "Service", then: State, now: float) -> None:
    """Who was silent for its lease, hung while it was waited for, or did not come back is out at the next tick,
    unless the coordinator itself was away not long ago."""
    if now < service.back_at + LENIENCY + 1.0:
        return
    state, limits = service.state, service.state.config.members
    for node, m in then.members.here.items():
        late = now - m.heard_at > limits.lease or (not m.connected and now > m.expire_at + LENIENCY)
        hung = node in then.awaited_members and now - m.moved_at > limits.stall
        here = state.members.here.get(node)
        out = here is None or here.life > m.life or here.heard_at > m.heard_at or here.connected > m.connected
        hold(out or not (late or hung), f"{node} is a member though it is {'late' if late else 'hung'}")


def verdicts_are_on_the_silent(service: "Service", verdicts: Sequence[ev.Event], now: float) -> None:
    """No life of a node is called dead while its heartbeats arrive, or soon after the coordinator was away."""
    for event in verdicts:
        if isinstance(event, ev.Expired | ev.Suspected):
            told = f"{event.node} is judged ({event.reason}) at {now:.1f}"
            hold(now >= service.lenient_until, f"{told}, the coordinator having been away a moment ago")
            spoke = service.heard_at.get((event.node, event.life), -inf)
            silent = now - spoke > service.state.config.members.lease / 2 or "come back" in event.reason
            hold(silent or not event.reason.startswith(SILENCE), f"{told}, and spoke at {spoke:.1f}")


def one_node_a_session(world: "World", asked: str, node: NodeId, life: int, session: str) -> None:
    """A session brings the same node back for good, each time in a life of its own."""
    truth, secret = world.truth, session.partition(".")[0]
    known = truth.sessions.get(asked.partition(".")[0], node)
    hold(known == node == truth.sessions.setdefault(secret, node), f"{known} came back as {node}")
    hold((node, life) not in truth.lives, f"life {life} of {node} is given out twice")
    truth.lives.add((node, life))
