"""A member that does its part, as the coordinator's state machine hears it; and the run that it is in, which
audits every chunk of every round and replays what it can.

A chunk's sealed content is what its digest says, `sum_of` its number; signatures are real.
"""

from functools import cache

import scenario
from cryptography.hazmat.primitives.asymmetric import ec

from atoll.comm.bitmap import places
from atoll.comm.config.run import MembersConfig, ReduceConfig, RoundsConfig, RunConfig
from atoll.comm.config.security import SecurityConfig
from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.comm.receipts import Receipt, sign_input, sign_receipt
from atoll.comm.signatures import PrivateKey
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.leases import front
from atoll.coordinator.state_machine.makers import may_hold
from atoll.coordinator.state_machine.state import Audit, Phase, Replay, State

CONFIG = RunConfig(
    name="reef",
    rounds=RoundsConfig(inner_steps=4, grace=1.0, quorum=0.5),
    members=MembersConfig(start=2, minimum=1, lease=60.0, reconnect=30.0),
    reduce=ReduceConfig(block=1, chunk=10),
    security=SecurityConfig(audit="4", replay=1.0),  # of 4 chunks
)


@cache
def key_of(node: NodeId) -> PrivateKey:
    """The node's key: the same in every process."""
    return PrivateKey(ec.derive_private_key(int.from_bytes(sum_of(node), "big"), ec.SECP256R1()))


def sum_of(word: object) -> bytes:
    return digest(str(word).encode())


def said_by(state: State, node: NodeId) -> ev.Event | None:
    """What an honest node says next; None: nothing is asked of it."""
    me, r, life = state.members.here[node], state.round, state.members.here[node].life
    ledger = r.ledger
    if (task := state.replays.tasks.get(node)) is not None:
        return replayed(state, node, task)
    if node in state.beginning.asked:
        return ev.StateReported(node, life, 0, sum_of("state 0"))
    if me.state_round != state.committed:
        if not may_hold(state, node, state.committed):
            return None
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
    if (audit := next(iter(asked_of(state, node)), None)) is not None:
        found, fence = sum_of(audit.chunk), r.plan.fence._replace(attempt=audit.since)
        shown = () if found == audit.digest else (receipt(state, audit).pack(),)
        return ev.AuditReported(node, life, fence, audit.chunk, found, shown)
    if ledger.orphans and node not in r.plan.orphans:
        return ev.OrphansFound(
            node, life, r.plan.fence, tuple((c, ledger.sealed[c].digest) for c in ledger.orphans)
        )
    return ev.ReduceComplete(node, life, r.plan.fence, ledger.root, 10, 10, 1e6, 1e6) if ledger.complete else None


def asked_of(state: State, node: NodeId) -> list[Audit]:
    """The audits that the node has yet to answer."""
    return [a for a in state.round.audits.values() if node in a.named and node not in a.voices]


def receipt(state: State, audit: Audit) -> Receipt:
    """The receipt that the owner of an audited chunk gives: it holds, whatever was sealed."""
    r, c = state.round, audit.chunk
    keys = {place: key_of(r.ledger.entries[place].node) for place in places(audit.inputs)}
    records = (sign_input(key, r.salt, c, place, sum_of((place, c))) for place, key in keys.items())
    key, owner = key_of(audit.owner), audit.parties.owner
    return sign_receipt(key, r.salt, c, audit.since, owner, tuple(records), audit.digest)


def replayed(state: State, node: NodeId, task: Replay) -> ev.ReplayReported | None:
    """What a verifier says next of a replay, which is well."""
    life = state.members.here[node].life
    if not task.shown:
        return ev.ReplayReported(node, life, task.round, task.node, True) if task.since else None
    if state.committed < task.round:
        return None
    others = tuple(ev.Likeness(0.3, 1.0) for _ in task.places[1:])
    return ev.ReplayReported(node, life, task.round, task.node, True, ev.Likeness(0.6, 1.0), others)
