"""What one node must know of the run, as the message that its stream carries. Pure."""

from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.machine import Phase, State


def view(state: State, node: NodeId) -> pb.View:
    """The whole of what `node` must know now; `version` is left to the shell."""
    r = state.round
    out = pb.View(
        incarnation=state.incarnation,
        epoch=state.epoch,
        phase=r.phase,
        reason=r.reason,
        has_state=bool(state.holders),
        committed=state.committed,
        state_digest=state.digest,
        sealed_digests=b"".join(state.sealed),
        initialise=state.initialiser == node,
        closing=r.closing,
        ready=node in r.ready,
        evaluate=r.evaluator == node,
        finished=r.phase is Phase.FINISHED and state.pending is None,
    )
    for member in state.members.here.values():
        out.members.add(
            node_id=member.node,
            name=member.name,
            address=member.address,
            state=member.state,
            state_round=max(member.state_round, 0),
        )
    me = state.members.here.get(node) or state.members.gone.get(node)
    out.you = me.state if me is not None else ""
    if r.phase in (Phase.INNER, Phase.REDUCING) and node in r.participants and node in state.leases.held:
        out.train.round = r.number
        out.train.steps = state.config.rounds.inner_steps
        out.train.tokens = state.tokens
        out.train.fleet = len(r.participants)
        out.train.first_sample = state.leases.held[node][0]
    if r.plan is not None and r.phase is Phase.REDUCING and node in r.plan.members:
        out.plan.round = r.number
        out.plan.attempt = r.plan.attempt
        out.plan.incarnation = r.plan.incarnation
        out.plan.epoch = r.plan.epoch
        place = {n: i for i, n in enumerate(r.plan.members)}
        for n in r.plan.members:
            member_ = state.members.here.get(n)
            address = member_.address if member_ is not None else ""
            weight = float(r.ready[n].tokens) if n in r.ready else 0.0
            out.plan.members.add(node_id=n, address=address, weight=weight)
        out.plan.owners.extend(place[n] for n in r.plan.ledger.owners)
    return out
