"""A member that does its part, as the coordinator's state machine hears it; and the run that it is in."""

import scenario

from atoll.comm.config.run import MembersConfig, ReduceConfig, RoundsConfig, RunConfig
from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.leases import front
from atoll.coordinator.state_machine.state import Phase, State

CONFIG = RunConfig(
    name="reef",
    rounds=RoundsConfig(inner_steps=4, grace=1.0, quorum=0.5),
    members=MembersConfig(start=2, minimum=1, lease=60.0, reconnect=30.0),
    reduce=ReduceConfig(block=1, chunk=10),
)


def sum_of(word: object) -> bytes:
    return digest(str(word).encode())


def said_by(state: State, node: NodeId) -> ev.Event | None:
    """What an honest node says next; None: nothing is asked of it."""
    me, r, life = state.members.here[node], state.round, state.members.here[node].life
    ledger = r.ledger
    if node in state.beginning.asked:
        return ev.StateReported(node, life, 0, sum_of("state 0"))
    if me.state_round != state.committed:
        return ev.StateReported(node, life, state.committed, state.digest or sum_of(f"state {state.committed}"))
    if r.evaluator == node:
        return ev.LossEvaluated(node, life, state.committed, 2.0)
    lease = state.leases.by_node.get(node)
    if node in r.participants and r.phase in (Phase.INNER, Phase.COLLECTING) and lease:
        if node not in ledger.contributions:
            return ev.ContributionReady(node, life, r.number, ev.Contribution(4, 4, 2.0, 1.0, front(lease)))
    if r.plan is None or node not in ledger.members:
        return None
    if mine := [c for c in ledger.unsealed if ledger.owners[c] == node]:
        fence = r.plan.fence._replace(attempt=ledger.since[mine[0]])
        seals = ((mine[0], sum_of(mine[0]), b"\xff"),)
        return ev.ChunksSealed(node, life, fence, seals, scenario.norms_of(ledger, seals))
    if ledger.orphans and node not in r.plan.orphans:
        return ev.OrphansFound(
            node, life, r.plan.fence, tuple((c, ledger.sealed[c].digest) for c in ledger.orphans)
        )
    return ev.ReduceComplete(node, life, r.plan.fence, ledger.root, 10, 10, 1e6, 1e6) if ledger.complete else None
