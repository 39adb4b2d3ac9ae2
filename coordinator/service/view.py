"""The view: what one node must know of the run, as the message that its stream carries. Pure.

Most of it is the same for all nodes and encoded once: protobuf messages put end to end merge, so a view is the
shared bytes with the node's own behind them. `affected_nodes` and `has_news` say which nodes need a new one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from atoll.comm.bitmap import bitmap, places
from atoll.comm.ids import NO_PIN, NodeId, Pin
from atoll.comm.leases import Range
from atoll.comm.plan import NOBODY, Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto.packed_plan import pack_plan, stray_members, unpack_plan
from atoll.coordinator.service.roster import Roster, no_key, roster_of
from atoll.coordinator.state_machine.conduct import identity, penalty
from atoll.coordinator.state_machine.members import REDUCER, TRAINABLE_STATES, VERIFIER, Member, MemberState
from atoll.coordinator.state_machine.state import CLOSING, TRAINING, Phase, Replay, State, order
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
    plan_message: pb.Plan | None  # the same, as it was when its attempt opened
    strays: frozenset[NodeId]  # of its members: who left or came back since
    fence: Fence | None  # the plan's
    plan_nodes: frozenset[NodeId]  # whom the plan is sent to
    donors: Donors
    serve: Donors  # whom leaves dial, to give them what they have: no one has it who can be dialled
    donors_key: tuple[int, int, int]  # what the donors follow from
    keepers: frozenset[NodeId] | None  # who takes snapshots; None: everybody
    uploaders: tuple[NodeId, ...]  # of them, who sends checkpoints to the remote store, or does if others fail
    # state_0 is only where nobody can fetch it, as on leaves: everybody makes it, who cannot make the same fetches
    # it
    leaves_only: bool
    roster: Roster  # which members alone are told
    roster_key: tuple[int, int]  # what it follows from


class NodeView(NamedTuple):
    """The parts of a view that are one node's own; the names are the message's (`pb.View`)."""

    you: str
    initialise: bool
    witness: bool
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
    member: bool = False  # it is one
    audits: tuple[tuple[int, int, bytes, float], ...] = ()  # chunk, since, inputs, seconds
    auditors: Donors = ()
    replay: Replay | None = None
    replay_plan: bytes = b""  # a frame; empty: it is not needed
    penalty: str = ""
    credit: tuple[int, int] = (0, 0)  # tokens and rounds
    saves_bytes: bool = False
    account: int = 0  # the round of which it is asked for an account


def common_view(
    state: State,
    before: CommonView | None = None,
    draining: bool = False,
    data_key: Callable[[int], bytes] = no_key,
) -> CommonView:
    """Encode what all nodes are told. What did not change since `before` is the same object. `data_key`: the run's
    key by how many were expelled."""
    r = state.round
    facts = pb.View(
        incarnation=state.incarnation,
        epoch=state.epoch,
        phase=r.phase,
        has_state=state.state_held,
        lost=state.state_lost,
        tied=state.tied,
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
    alive = (entry.node for entry in r.ledger.entries if not entry.gone)
    planned = frozenset(alive) if r.plan is not None else frozenset[NodeId]()
    roster_key = state.members.changes, state.expulsions
    if before is not None and before.roster_key == roster_key:
        roster = before.roster
    else:
        roster = roster_of(state, before.roster if before is not None else None, data_key)
    if before is not None and before.fence == fence:
        message, plan, strays = before.plan_message, before.plan, before.strays
    else:
        message, plan, strays = _plan(state) if r.plan is not None else None, b"", frozenset[NodeId]()
    if message is not None and (before is None or roster is not before.roster or not plan):
        strays |= stray_members(message, roster.members)  # for good: a roster may be shown later than it is one
        if before is None or strays != before.strays or not plan:
            plan = pb.View(packed_plan=pack_plan(message, strays)).SerializeToString()
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
    apart = not state.committed and state.state_held and all(_is_out_of_reach(state, n) for n in state.holders)
    return CommonView(
        *(head, facts, train, plan, message, strays, fence, planned, donors, serve, known, keepers, uploaders),
        *(apart, roster, roster_key),
    )


def affected_nodes(before: State, after: State) -> set[NodeId] | None:
    """The nodes whose own part may differ, where nothing but the reason of what they share does; None: all."""
    a, b = after.round, before.round
    if (a.evaluator, a.participants) != (b.evaluator, b.participants):
        return None
    nodes = set[NodeId]()
    if after.beginning != before.beginning:
        nodes.update(after.beginning.asked, before.beginning.asked)
    nodes |= {*(a.reached ^ b.reached), *(a.ledger.contributions.keys() ^ b.ledger.contributions.keys())}
    if (a.wrong, a.ledger.complete) != (b.wrong, b.ledger.complete):
        nodes |= a.wrong | b.wrong
    if after.replays is not before.replays:
        was, now = before.replays.tasks, after.replays.tasks
        fresh = [n for n in was.keys() | now.keys() if was.get(n) is not now.get(n)]
        nodes.update(fresh)
        nodes.update(n for task in map(now.get, fresh) if task is not None for n in _asked_leaves(after, task))
        nodes.update(n for task in map(was.get, fresh) if task is not None for n in _asked_leaves(before, task))
    if a.audits is not b.audits:
        for old, new in ((b.audits, a.audits), (a.audits, b.audits)):
            for audit in (audit for c, audit in new.items() if old.get(c) is not audit):
                nodes.update(audit.named, leaves_of(after, audit.inputs))
    if after.inquiry is not before.inquiry:
        nodes.update(n for asked in (after.inquiry, before.inquiry) if asked is not None for n in asked.asked)
    if (was_held := before.conduct.strikes) is not (held := after.conduct.strikes):
        changed = {who for who in was_held.keys() | held.keys() if was_held.get(who) is not held.get(who)}
        nodes.update(n for n in after.members.here if identity(after, n) in changed)
    for latest, earlier in (
        (after.last_counted, before.last_counted),
        (after.members.here, before.members.here),
        (after.leases.by_node, before.leases.by_node),
    ):
        if latest is not earlier:
            nodes.update(n for n in latest if earlier.get(n) is not latest[n])
            nodes.update(earlier.keys() - latest.keys())
    return nodes


def common_parts(common: CommonView) -> tuple[object, ...]:
    """The common parts whose change may change every node's view."""
    c = common
    return c.head, c.train, c.plan, c.donors, c.serve, c.leaves_only, c.keepers, c.uploaders, c.roster


def has_news(mine: NodeView, was: NodeView) -> bool:
    """Whether a node whose latest view had `was` must be sent `mine`. That its report was taken it knows from the
    report's answer."""
    return mine != was._replace(ready=was.ready or mine.ready, reached=was.reached or mine.reached)


def node_view(state: State, common: CommonView, node: NodeId) -> NodeView:
    """The parts of a view that are one node's own; for a node that is gone, only how it went and
    what is credited to it."""
    r = state.round
    me = state.members.here.get(node)
    if me is None:
        gone = state.members.departed.get(node)
        was = gone.state if gone is not None else ""
        credit = _credit(state, node)
        return NodeView(was, False, False, False, False, False, False, (), False, (), (), False, 0, credit=credit)
    trains = r.phase in TRAINING and me.state in TRAINABLE_STATES
    task = state.replays.tasks.get(node)
    lacks = me.state_round != state.committed and me.role != REDUCER and task is None
    return NodeView(
        you=me.state,
        initialise=node in state.beginning.asked or (lacks and common.leaves_only and not me.state_digest),
        witness=node in state.beginning.asked and state.beginning.has_others(node),
        evaluate=r.evaluator == node,
        ready=node in r.ledger.contributions,
        reached=node in r.reached,
        closing=r.phase in CLOSING and node in r.participants,
        lease=state.leases.by_node.get(node, ()) if trains else (),
        planned=node in common.plan_nodes,
        donors=_sources(common, node) if lacks else (),
        serve=common.serve if _serves(state, me) else (),
        keeps=me.role != REDUCER and (common.keepers is None or node in common.keepers),
        upload=common.uploaders.index(node) + 1 if node in common.uploaders else 0,
        counted=state.last_counted.get(node, (0, b"")),
        ledger=b"".join(r.ledger.digests) if node in r.wrong and r.ledger.complete else b"",
        member=True,
        audits=tuple(
            (c, audit.since, audit.inputs, audit.seconds)
            for c, audit in sorted(r.audits.items())
            if node in audit.named and node not in audit.voices
        )
        if r.plan is not None
        else (),
        auditors=_auditors(state, node) if me.leaf and (r.audits or state.replays.tasks) else (),
        replay=task,
        replay_plan=pb.View.FromString(common.plan).packed_plan
        if task is not None and _asks(state, task)
        else b"",
        penalty=penalty(state, node),
        credit=_credit(state, node),
        saves_bytes=me.saves_bytes,
        account=_asked_for(state, node),
    )


def _asked_for(state: State, node: NodeId) -> int:
    """The round of which the node is asked for an account, and has given none; 0: there is none."""
    asked = state.inquiry
    if asked is None or asked.closed or node not in asked.asked or node in asked.accounts:
        return 0
    return asked.seen.round


def _credit(state: State, node: NodeId) -> tuple[int, int]:
    """Tokens and rounds of the node's account."""
    account = state.credit.nodes.get(identity(state, node)) if state.credit.nodes else None
    return (account.tokens, account.rounds) if account is not None else (0, 0)


def leaves_of(state: State, inputs: bytes) -> list[NodeId]:
    """Who of the round's entries, of which these are in a chunk, cannot be dialled."""
    here, entries = state.members.here, state.round.ledger.entries
    nodes = [entries[place].node for place in places(inputs) if place < len(entries)]
    return [n for n in nodes if n in here and here[n].leaf]


def _auditors(state: State, leaf: NodeId) -> Donors:
    """Whom a leaf dials, to show there what it contributed."""
    here, audits = state.members.here, state.round.audits.values()
    asking = [n for a in audits if leaf in leaves_of(state, a.inputs) for n in a.named if n not in a.voices]
    asking += [n for n, task in state.replays.tasks.items() if leaf in _asked_leaves(state, task)]
    nodes = [n for n in dict.fromkeys(asking) if n in here]
    return tuple((str(n), here[n].address, here[n].pin, here[n].name) for n in nodes)


def _asks(state: State, task: Replay) -> bool:
    """Whether the verifier asks for chunks of the round under way."""
    r = state.round
    return bool(task.since) and not task.shown and task.round == r.number and r.plan is not None


def _asked_leaves(state: State, task: Replay) -> list[NodeId]:
    return leaves_of(state, bitmap(task.places, max(task.places) + 1)) if _asks(state, task) else []


def encode(common: CommonView, mine: NodeView, version: int, known: Roster | None = None) -> bytes:
    """A whole view, as the bytes of a `pb.View`; `known`: the roster that its node has, or will have by then."""
    message = pb.View(
        version=version,
        you=mine.you,
        initialise=mine.initialise,
        witness=mine.witness,
        evaluate=mine.evaluate,
        ready=mine.ready,
        reached=mine.reached,
        closing=mine.closing,
        keeps=mine.keeps,
        upload=mine.upload,
        counted=mine.counted[0],
        lacking=mine.counted[1],
        ledger=mine.ledger,
        penalty=mine.penalty,
        credited_tokens=mine.credit[0],
        credited_rounds=mine.credit[1],
        saves_bytes=mine.saves_bytes,
        account=mine.account,
    )
    for node, address, pin, name in mine.donors:
        message.donors.add(node_id=node, address=address, pin=pin, name=name)
    for node, address, pin, name in mine.serve:
        message.serve.add(node_id=node, address=address, pin=pin, name=name)
    for chunk, since, inputs, seconds in mine.audits:
        message.audits.add(chunk=chunk, since=since, inputs=inputs, seconds=seconds)
    for node, address, pin, name in mine.auditors:
        message.auditors.add(node_id=node, address=address, pin=pin, name=name)
    for first, count in mine.lease:
        message.train.lease.add(first=first, count=count)
    if mine.replay is not None:
        _put_replay(message, mine.replay, mine.replay_plan)
    parts = [common.head, common.train if mine.lease else b"", common.plan if mine.planned else b""]
    if mine.member:
        parts.append(common.roster.encode(known))
    return b"".join((*parts, message.SerializeToString()))


def _put_replay(message: pb.View, task: Replay, plan: bytes) -> None:
    """Keep a verifier at the state that the replayed round began with: what follows in a message counts."""
    message.committed, message.state_digest, message.phase = task.round - 1, task.digest, Phase.INNER
    message.you, message.replay.node_id, message.replay.round = MemberState.SYNCED, task.node, task.round
    order_ = message.train
    order_.round, order_.tokens, order_.fleet = task.round, task.tokens, task.fleet
    order_.steps = order_.floor = order_.ceiling = task.steps
    for first, count in task.lease:
        order_.lease.add(first=first, count=count)
    message.replay.places.extend(task.places)
    if plan:
        message.replay.packed_plan, message.replay.seconds = plan, task.seconds
        for chunk, since in zip(task.chunks, task.since, strict=True):
            message.replay.chunks.add(chunk=chunk, since=since)


def view(state: State, node: NodeId, version: int = 0) -> pb.View:
    """A node's whole view of the state; for the simulation and tests."""
    common = common_view(state)
    found = pb.View.FromString(encode(common, node_view(state, common, node), version))
    unpack_plan(found, common.roster.members)
    return found


def _is_out_of_reach(state: State, node: NodeId) -> bool:
    """Whether nobody can fetch from this member of its own accord."""
    member = state.members.here[node]
    return member.leaf or member.saves_bytes


def _serves(state: State, member: Member) -> bool:
    """Whether it is a leaf that has what others may lack, and gives it."""
    return member.leaf and member.role != REDUCER and not member.saves_bytes and not _left_behind(state, member)


def _donors(state: State) -> Donors:
    here = state.members.here
    able = [n for n in state.holders if state.members.trusted(n) and not _is_out_of_reach(state, n)]
    able = able[: _few_sizes(len(able))]  # so that the list is new a few times, not with every holder
    return tuple((str(n), here[n].address, here[n].pin, here[n].name) for n in able)


def _few_sizes(count: int) -> int:
    """The largest of 1, 2, 4, 8, 16, 128, 1024, ... up to `count`: a list of so many donors serves as well as one
    that is some times longer, and each that is new is told to all who lack the state."""
    bits = max(count.bit_length() - 1, 0)
    return 1 << (bits if bits < 4 else 4 + (bits - 4) // 3 * 3) if count else 0


def _served(state: State) -> Donors:
    """Who can be dialled, where only leaves have the state, or are about to apply the latest round to theirs, and
    some member lacks it, and cannot make it: they pass it on."""
    here, k = state.members.here, state.committed
    giving = (m for m in here.values() if not m.leaf and m.role != REDUCER and not m.saves_bytes)
    if any(not _left_behind(state, m) for m in giving):
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


def _plan(state: State) -> pb.Plan:
    r = state.round
    assert r.plan is not None
    fence = r.plan.fence
    ledger = r.ledger
    plan = pb.Plan(round=fence.round, attempt=fence.attempt, incarnation=fence.incarnation, epoch=fence.epoch)
    plan.numel = state.chunks.numel if state.layout is not None else 0
    plan.length = round_length(ledger, state.config)
    plan.salt, plan.patience = r.salt, r.plan.patience
    if state.config.security.replay:
        plan.verifiers.extend(sorted(n for n, m in state.members.here.items() if m.role == VERIFIER))
    counts = zip(weights(ledger, state.config), scales(ledger, state.config), strict=True)
    for entry, (weight, scale) in zip(ledger.entries, counts, strict=True):
        member = None if entry.gone else state.members.here.get(entry.node)
        looked_at = state.config.outer.clip and entry.contribution is not None
        norm = entry.contribution.norm if looked_at and entry.contribution is not None else inf
        planned = plan.members.add(node_id=entry.node, weight=weight, scale=scale, norm=norm, gone=entry.gone)
        if member is not None:
            planned.address, planned.pin, planned.key = member.address, member.pin, member.key
            planned.leaf, planned.down = member.leaf, member.rates[1]
    place = {entry.node: i for i, entry in enumerate(ledger.entries) if not entry.gone}
    plan.owners.extend(NOBODY if owner is None else place[owner] for owner in ledger.owners)
    plan.since.extend(ledger.since)
    plan.kept = bitmap(ledger.sealed_before, len(ledger.owners))
    plan.regions.extend(ledger.regions)
    if ledger.layered:
        plan.layered = bitmap(ledger.layered, len(ledger.owners))
        for row in ledger.relays:
            plan.relays.extend(row)
    return plan
