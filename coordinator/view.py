"""What one node must know of the run, as the message that its stream carries. Pure.

Most of it is the same for all nodes and encoded once: protobuf messages put end to end merge, so a view is the
shared bytes with the node's own behind them. `Own` is what tells whether a node needs a new view.
"""

from dataclasses import dataclass
from typing import NamedTuple

from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.leases import Lease
from atoll.coordinator.ledger import weights
from atoll.coordinator.membership import MemberState
from atoll.coordinator.state import TRAINING, Phase, State, order

DONORS = 8  # named to a node that lacks the state


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that are the same for every node that gets them."""

    head: bytes
    train: bytes
    plan: bytes
    planned: frozenset[NodeId]  # who gets the plan
    donors: tuple[tuple[str, str], ...]  # (node, address)


class Own(NamedTuple):
    """What only this node is told."""

    you: str
    initialise: bool
    evaluate: bool
    ready: bool
    reached: bool
    closing: bool
    lease: Lease
    planned: bool
    donors: tuple[tuple[str, str], ...]


def shared(state: State, before: Shared | None = None, draining: bool = False) -> Shared:
    """Encode what all nodes are told; what did not change since `before` is the same object."""
    r = state.round
    head = pb.View(
        incarnation=state.incarnation,
        epoch=state.epoch,
        phase=r.phase,
        reason=r.reason,
        has_state=bool(state.holders),
        committed=state.committed,
        state_digest=state.digest,
        sealed=state.sealed,
        finished=r.phase is Phase.FINISHED and state.pending is None,
        draining=draining,
    ).SerializeToString()
    train = _train(state) if r.phase in TRAINING else b""
    plan = _plan(state) if r.plan is not None else b""
    planned = frozenset(r.ledger.members) if r.plan is not None else frozenset[NodeId]()
    here = state.members.here
    able = [n for n in state.holders if state.members.trusted(n)]
    able = able[: 1 << len(able).bit_length() >> 1]  # so that the list is new a few times, not with every holder
    donors = tuple((str(n), here[n].address) for n in able)
    if before is not None:
        head = before.head if before.head == head else head
        train = before.train if before.train == train else train
        plan = before.plan if before.plan == plan else plan
    return Shared(head, train, plan, planned, donors)


def own(state: State, common: Shared, node: NodeId) -> Own:
    r = state.round
    me = state.members.here.get(node)
    if me is None:
        gone = state.members.gone.get(node)
        return Own(gone.state if gone is not None else "", False, False, False, False, False, (), False, ())
    trains = r.phase in TRAINING and me.standing in (MemberState.SYNCED, MemberState.ACTIVE)
    lacks = me.state_round != state.committed
    return Own(
        you=me.standing,
        initialise=state.initialiser == node,
        evaluate=r.evaluator == node,
        ready=node in r.ledger.contributions,
        reached=node in r.reached,
        closing=r.phase in (Phase.COLLECTING, Phase.REDUCING) and node in r.participants,
        lease=state.leases.held.get(node, ()) if trains else (),
        planned=node in common.planned,
        donors=_choose(common.donors, node) if lacks and common.donors else (),
    )


def encode(common: Shared, mine: Own, version: int) -> bytes:
    """A `pb.View`, encoded."""
    message = pb.View(
        version=version,
        you=mine.you,
        initialise=mine.initialise,
        evaluate=mine.evaluate,
        ready=mine.ready,
        reached=mine.reached,
        closing=mine.closing,
    )
    for node, address in mine.donors:
        message.donors.add(node_id=node, address=address)
    for first, count in mine.lease:
        message.train.lease.add(first=first, count=count)
    parts = [common.head, common.train if mine.lease else b"", common.plan if mine.planned else b""]
    return b"".join((*parts, message.SerializeToString()))


def view(state: State, node: NodeId, version: int = 0) -> pb.View:
    """The whole of what `node` must know now."""
    common = shared(state)
    return pb.View.FromString(encode(common, own(state, common, node), version))


def _choose(donors: tuple[tuple[str, str], ...], node: NodeId) -> tuple[tuple[str, str], ...]:
    """A few, other ones for each node."""
    at = order(node) % len(donors)
    return tuple(d for d in (donors[at:] + donors[:at])[: DONORS + 1] if d[0] != node)[:DONORS]


def _train(state: State) -> bytes:
    r, rounds = state.round, state.config.rounds
    order_ = pb.Train(
        round=r.number,
        steps=rounds.inner_steps,
        floor=rounds.floor,
        ceiling=rounds.most_steps,
        tokens=state.tokens,
        fleet=max(len(r.participants), 1),
    )
    return pb.View(train=order_).SerializeToString()


def _plan(state: State) -> bytes:
    r = state.round
    assert r.plan is not None
    fence = r.plan.fence
    plan = pb.Plan(round=fence.round, attempt=fence.attempt, incarnation=fence.incarnation, epoch=fence.epoch)
    weight = weights(r.ledger, state.config.model.seq_len)
    for node in r.ledger.members:
        member = state.members.here.get(node)
        address = member.address if member is not None else ""
        plan.members.add(node_id=node, address=address, weight=weight.get(node, 0.0))
    place = {n: i for i, n in enumerate(r.ledger.members)}
    plan.owners.extend(place[n] for n in r.ledger.owners)
    return pb.View(plan=plan).SerializeToString()
