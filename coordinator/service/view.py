"""The view: what one node must know of the run, as the message that its stream carries. Pure.

Most of it is the same for all nodes and encoded once: protobuf messages put end to end merge, so a view is the
shared bytes with the node's own behind them. `affected_nodes` and `has_news` say which nodes need a new one.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from atoll.comm.bitmap import bitmap
from atoll.comm.ids import NO_PIN, NodeId, Pin
from atoll.comm.leases import Range
from atoll.comm.plan import NOBODY, Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto.packed_plan import pack_plan, unpack_plan
from atoll.coordinator.state_machine.members import REDUCER, TRAINABLE_STATES, Member, MemberState
from atoll.coordinator.state_machine.state import TRAINING, Phase, State, order
from atoll.coordinator.state_machine.weights import round_length, scales, weights

MAX_DONORS = 8  # named to a node that lacks the state
MAX_UPLOADERS = 4  # who may send checkpoints to the remote store: each where those before it do not
Donors = tuple[tuple[str, str, Pin, str], ...]  # (node, address, of its certificate, name)


@dataclass(frozen=True, slots=True)
class CommonView:
    """The parts of a view that are the same for every node that gets them."""

    head: bytes
    facts: bytes  # the head without its reason, which changes with every report
    train: bytes
    plan: bytes
    fence: Fence | None  # the plan's
    plan_nodes: frozenset[NodeId]  # whom the plan is sent to
    donors: Donors
    serve: Donors  # whom leaves dial, to give them what they have: no one has it who can be dialled
    donors_key: tuple[int, int, int]  # what the donors follow from
    keepers: frozenset[NodeId] | None  # who takes snapshots; None: everybody
    uploaders: tuple[NodeId, ...]  # of them, who sends checkpoints to the remote store, or does if others fail
    leaves_only: bool  # state_0 is only on leaves: everybody makes it, who cannot make the same fetches it


class NodeView(NamedTuple):
    """The parts of a view that are one node's own; the names are the message's (`pb.View`)."""

    you: str
    initialise: bool
    evaluate: bool
    ready: bool
    reached: bool
    closing: bool
    lease: tuple[Range, ...]
    planned: bool
    donors: Donors
    serve: Donors
    keeps: bool
    upload: int
    counted: tuple[int, bytes] = (0, b"")
    ledger: bytes = b""


def common_view(state: State, before: CommonView | None = None, draining: bool = False) -> CommonView:
    """Encode what all nodes are told. What did not change since `before` is the same object."""
    r = state.round
    facts = pb.View(
        incarnation=state.incarnation,
        epoch=state.epoch,
        phase=r.phase,
        has_state=state.state_held,
        lost=state.state_lost,
        committed=state.committed,
        state_digest=state.digest,
        sealed=state.sealed,
        finished=r.phase is Phase.FINISHED and state.pending is None,
        draining=draining,
        tokens=state.tokens,
    ).SerializeToString()
    head = facts + pb.View(reason=r.reason).SerializeToString()
    train = _train(state) if r.phase in TRAINING else b""
    fence = r.plan.fence if r.plan is not None else None
    if before is not None and before.fence == fence:
        plan = before.plan
    else:
        plan = _plan(state) if r.plan is not None else b""
    alive = (entry.node for entry in r.ledger.entries if not entry.gone)
    planned = frozenset(alive) if r.plan is not None else frozenset[NodeId]()
    known = state.committed, state.members.changes, state.members.reports
    donors = before.donors if before is not None and before.donors_key == known else _donors(state)
    serve = before.serve if before is not None and before.donors_key == known else _served(state)
    same = before is not None and before.donors_key == known
    keepers = before.keepers if before is not None and same else _keepers(state)
    uploaders = before.uploaders if before is not None and same else _uploaders(state)
    if before is not None:
        head = before.head if before.head == head else head
        facts = before.facts if before.facts == facts else facts
        train = before.train if before.train == train else train
        donors = before.donors if before.donors == donors else donors
        serve = before.serve if before.serve == serve else serve
    apart = not state.committed and state.state_held and all(state.members.here[n].leaf for n in state.holders)
    return CommonView(head, facts, train, plan, fence, planned, donors, serve, known, keepers, uploaders, apart)


def affected_nodes(before: State, after: State) -> set[NodeId] | None:
    """The nodes whose own part may differ, where nothing but the reason of what they share does; None: all."""
    a, b = after.round, before.round
    if (after.initialiser, a.evaluator, a.participants) != (before.initialiser, b.evaluator, b.participants):
        return None
    nodes = {*(a.reached ^ b.reached), *(a.ledger.contributions.keys() ^ b.ledger.contributions.keys())}
    if (a.wrong, a.ledger.complete) != (b.wrong, b.ledger.complete):
        nodes |= a.wrong | b.wrong
    for now, was in (
        (after.last_counted, before.last_counted),
        (after.members.here, before.members.here),
        (after.leases.by_node, before.leases.by_node),
    ):
        if now is not was:
            nodes.update(n for n in now if was.get(n) is not now[n])
            nodes.update(was.keys() - now.keys())
    return nodes


def common_parts(common: CommonView) -> tuple[object, ...]:
    """The common parts whose change may change every node's view."""
    c = common
    return c.head, c.train, c.plan, c.donors, c.serve, c.leaves_only, c.keepers, c.uploaders


def has_news(mine: NodeView, was: NodeView) -> bool:
    """Whether a node whose latest view had `was` must be sent `mine`. That its report was taken it knows from the
    report's answer."""
    return mine != was._replace(ready=was.ready or mine.ready, reached=was.reached or mine.reached)


def node_view(state: State, common: CommonView, node: NodeId) -> NodeView:
    """The parts of a view that are one node's own; for a node that is gone, only how it went."""
    r = state.round
    me = state.members.here.get(node)
    if me is None:
        gone = state.members.departed.get(node)
        was = gone.state if gone is not None else ""
        return NodeView(was, False, False, False, False, False, (), False, (), (), False, 0)
    trains = r.phase in TRAINING and me.state in TRAINABLE_STATES
    lacks = me.state_round != state.committed and me.role != REDUCER
    return NodeView(
        you=me.state,
        initialise=state.initialiser == node or (lacks and common.leaves_only and not me.state_digest),
        evaluate=r.evaluator == node,
        ready=node in r.ledger.contributions,
        reached=node in r.reached,
        closing=r.phase in (Phase.COLLECTING, Phase.REDUCING) and node in r.participants,
        lease=state.leases.by_node.get(node, ()) if trains else (),
        planned=node in common.plan_nodes,
        donors=_sources(common, node) if lacks else (),
        serve=common.serve if me.leaf and me.role != REDUCER and not _left_behind(state, me) else (),
        keeps=me.role != REDUCER and (common.keepers is None or node in common.keepers),
        upload=common.uploaders.index(node) + 1 if node in common.uploaders else 0,
        counted=state.last_counted.get(node, (0, b"")),
        ledger=b"".join(r.ledger.digests) if node in r.wrong and r.ledger.complete else b"",
    )


def encode(common: CommonView, mine: NodeView, version: int) -> bytes:
    """A whole view, as the bytes of a `pb.View`."""
    message = pb.View(
        version=version,
        you=mine.you,
        initialise=mine.initialise,
        evaluate=mine.evaluate,
        ready=mine.ready,
        reached=mine.reached,
        closing=mine.closing,
        keeps=mine.keeps,
        upload=mine.upload,
        counted=mine.counted[0],
        lacking=mine.counted[1],
        ledger=mine.ledger,
    )
    for node, address, pin, name in mine.donors:
        message.donors.add(node_id=node, address=address, pin=pin, name=name)
    for node, address, pin, name in mine.serve:
        message.serve.add(node_id=node, address=address, pin=pin, name=name)
    for first, count in mine.lease:
        message.train.lease.add(first=first, count=count)
    parts = [common.head, common.train if mine.lease else b"", common.plan if mine.planned else b""]
    return b"".join((*parts, message.SerializeToString()))


def view(state: State, node: NodeId, version: int = 0) -> pb.View:
    """A node's whole view of the state; for the simulation and tests."""
    common = common_view(state)
    found = pb.View.FromString(encode(common, node_view(state, common, node), version))
    unpack_plan(found)
    return found


def _donors(state: State) -> Donors:
    here = state.members.here
    able = [n for n in state.holders if state.members.trusted(n) and not here[n].leaf]
    able = able[: 1 << len(able).bit_length() >> 1]  # so that the list is new a few times, not with every holder
    return tuple((str(n), here[n].address, here[n].pin, here[n].name) for n in able)


def _served(state: State) -> Donors:
    """Who can be dialled, where only leaves have the state, or are about to apply the latest round to theirs, and
    some member lacks it, and cannot make it: they pass it on."""
    here, k = state.members.here, state.committed
    if any(not m.leaf and m.role != REDUCER and not _left_behind(state, m) for m in here.values()):
        return ()
    behind = {n for n, m in here.items() if _left_behind(state, m)}
    have = [m for n, m in here.items() if n not in behind and m.role != REDUCER]
    lack = behind if k else {n for n in behind if here[n].state_digest and state.state_held}
    if not lack or not have:
        return ()
    able = sorted((n for n, m in here.items() if not m.leaf and state.members.trusted(n)), key=order)
    return tuple((str(n), here[n].address, here[n].pin, here[n].name) for n in able[:MAX_DONORS])


def _left_behind(state: State, member: Member) -> bool:
    """It lacks the state, and not only until it has applied the latest round, which its makers alone can."""
    if member.state_round == state.committed or member.role == REDUCER:
        return False
    applies = member.state_round == state.committed - 1 and member.node in state.makers
    return member.state is MemberState.RECOVERING or not applies


def _keepers(state: State) -> frozenset[NodeId] | None:
    copies = state.config.checkpoint.copies
    return frozenset(_first(state, copies)) if copies else None


def _uploaders(state: State) -> tuple[NodeId, ...]:
    checkpoint = state.config.checkpoint
    return (
        tuple(_first(state, min(checkpoint.copies or MAX_UPLOADERS, MAX_UPLOADERS))) if checkpoint.remote else ()
    )


def _first(state: State, count: int) -> list[NodeId]:
    """The first to have joined, of those that can be dialled where there are enough: so it stays the same ones."""
    here = state.members.here
    able = [n for n, m in here.items() if m.role != REDUCER]
    return sorted(able, key=lambda n: (here[n].leaf, order(n)))[:count]


def _sources(common: CommonView, node: NodeId) -> Donors:
    """Where a node that lacks the state gets it: at no address, if leaves dial it to offer it."""
    if common.donors:
        return _choose(common.donors, node)
    if any(d[0] == node for d in common.serve):
        return ((str(node), "", NO_PIN, "peers that dial this node"),)
    return _choose(common.serve, node) if common.serve else ()


def _choose(donors: Donors, node: NodeId) -> Donors:
    """A few, other ones for each node."""
    at = order(node) % len(donors)
    return tuple(d for d in (donors[at:] + donors[:at])[: MAX_DONORS + 1] if d[0] != node)[:MAX_DONORS]


def _train(state: State) -> bytes:
    r, rounds = state.round, state.config.rounds
    order_ = pb.Train(
        round=r.number,
        steps=state.steps,
        floor=min(rounds.floor, state.steps),
        ceiling=state.most_steps,
        tokens=state.tokens,
        fleet=max(len(r.participants), 1),
    )
    return pb.View(train=order_).SerializeToString()


def _plan(state: State) -> bytes:
    r = state.round
    assert r.plan is not None
    fence = r.plan.fence
    ledger = r.ledger
    plan = pb.Plan(round=fence.round, attempt=fence.attempt, incarnation=fence.incarnation, epoch=fence.epoch)
    plan.numel = state.chunks.numel if state.layout is not None else 0
    plan.length = round_length(ledger, state.config)
    counts = zip(weights(ledger, state.config), scales(ledger, state.config), strict=True)
    for entry, (weight, scale) in zip(ledger.entries, counts, strict=True):
        member = None if entry.gone else state.members.here.get(entry.node)
        looked_at = state.config.outer.clip and entry.contribution is not None
        norm = entry.contribution.norm if looked_at and entry.contribution is not None else inf
        planned = plan.members.add(node_id=entry.node, weight=weight, scale=scale, norm=norm, gone=entry.gone)
        if member is not None:
            planned.address, planned.pin = member.address, member.pin
            planned.leaf, planned.down = member.leaf, member.down
    place = {entry.node: i for i, entry in enumerate(ledger.entries) if not entry.gone}
    plan.owners.extend(NOBODY if owner is None else place[owner] for owner in ledger.owners)
    plan.since.extend(ledger.since)
    plan.kept = bitmap(ledger.sealed_before, len(ledger.owners))
    plan.regions.extend(ledger.regions)
    if ledger.layered:
        plan.layered = bitmap(ledger.layered, len(ledger.owners))
        for row in ledger.relays:
            plan.relays.extend(row)
    return pb.View(packed_plan=pack_plan(plan)).SerializeToString()
