"""A node's data plane: the real `ReduceProtocol` of one round, on links that break, delay and reorder. Around it
is what `atoll.comm.transport.peer_links` and `atoll.comm.allreduce.reduction` do, with contributions and means for
bytes; and the state for those who lack it.
"""

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, assert_never

from sim.truth import Contribution, Mean, digest, root

from atoll.comm.allreduce.effects import (
    Effect,
    FrameVerdict,
    FreeContributions,
    FreeSealed,
    MergeChunk,
    ReportComplete,
    ReportForged,
    ReportMissing,
    ReportOrphans,
    ReportSeal,
    SendFrame,
    SumRegion,
)
from atoll.comm.allreduce.listener import SealReport
from atoll.comm.allreduce.protocol import ReduceProtocol
from atoll.comm.digest import DIGEST_SIZE
from atoll.comm.ids import NodeId
from atoll.comm.plan import Plan
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.transport.frames import FrameKind
from atoll.node.control.reports import plan_of
from atoll.node.state_machine import effects
from atoll.node.state_machine import events as node_ev

if TYPE_CHECKING:
    from sim.node import Node
    from sim.world import World

HOLD_TIME = 4.0  # seconds that a frame of a round, or attempt, to come is held
DONOR_TIMEOUT = 1.5  # seconds that a donor has to answer
TICK = 0.3  # seconds between two looks at the clock
PING_AFTER = 0.8  # seconds of silence after which a peer is asked what it has
LOST_AFTER = 2.0  # seconds of silence after which a peer is lost
MAX_CHUNK_TIME = 3.5  # seconds that the next chunk of a peer may take
PULL_AFTER = 1.2  # seconds without a chunk after which others are asked for it
OTHER_SIDE_DIALS_AFTER = 0.5  # seconds after which the side that was not to dial does
MALFORMED = (-1,)
CHUNKS = (FrameKind.CONTRIBUTION, FrameKind.PARTIAL, FrameKind.SEALED)

QueuedFrame = tuple[FrameKind, int, int]  # kind, chunk, attempt


@dataclass(frozen=True, slots=True)
class Partial:
    """A region's mean."""

    places: tuple[int, ...]
    contributions: tuple[Contribution, ...]
    weights: tuple[tuple[float, float], ...]  # and scales


Payload = Contribution | Partial | bytes | tuple[bytes, bytes, bytes] | None


class Frame(NamedTuple):
    kind: FrameKind
    round: int
    attempt: int
    chunk: int
    place: int  # of its sender in its plan
    payload: Payload


class Link:
    """A connection of two processes; each learns for itself that it broke."""

    def __init__(self, world: "World", a: "Node", b: "Node") -> None:
        self.world, self.ends = world, (a, b)
        self.broken = False

    def other(self, end: "Node") -> "Node":
        return self.ends[0] if end is self.ends[1] else self.ends[1]

    def carry(self, source: "Node", frame: Frame) -> None:
        """Bring it over, unless the link breaks before."""
        world, to = self.world, self.other(source)
        if self.broken:
            return
        network, fate = world.network, world.rng.random()
        if not to.alive or (source.place, to.place) in network.cut or (to.place, source.place) in network.cut:
            if fate < 0.5:
                self.snap()
            else:  # sent again, until somebody has enough of it
                world.engine.after(world.rng.uniform(0.5, 2.0), self.carry, source, frame)
            return
        late = world.rng.uniform(0.3, 1.5) if fate < network.loss else network.delay(source, to)
        world.engine.after(late, to.wake, to.plane.receive, self, source.me, frame)

    def snap(self) -> None:
        """What is on it may be lost."""
        if not self.broken:
            self.broken = True
            for end in self.ends:
                end.later(self.world.rng.choice([0.0, 0.1, 1.0]) * self.world.rng.random(), end.plane.broke, self)


@dataclass(slots=True)
class Peer:
    """Another node, as `atoll.comm.transport.peer_links` knows it."""

    node: NodeId
    address: str = ""
    leaf: bool = False  # it dials this node, or nobody does
    links: list[Link] = field(default_factory=list)
    waiting: dict[QueuedFrame, None] = field(default_factory=dict)  # to be sent
    heard: float = 0.0  # seconds
    dialling: bool = False


class Reduce:
    """One round's reduce at one node."""

    def __init__(self, plan: Plan, me: NodeId, contribution: Contribution | None, window: int) -> None:
        self.round, self.plan, self.contribution = plan.round, plan, contribution
        self.exchange = ReduceProtocol(me, len(plan.owners), window)
        self.inbox: dict[tuple[int, int], Contribution | Partial] = {}  # by chunk and place
        self.partials: dict[int, Partial] = {}  # of this node's region, by chunk
        self.sealed: dict[int, bytes] = {}  # payloads
        self.came: dict[NodeId, float] = {}  # seconds; when a peer's last chunk did
        self.reported: dict[NodeId, float] = {}  # seconds; when a peer was said to be lost
        self.pulled = self.began = 0.0  # seconds; the last plan
        self.forged: set[tuple[int, NodeId]] = set()  # chunks of which it sends others than it sealed, to whom


class Plane:
    def __init__(self, node: "Node") -> None:
        self.node, self.world = node, node.world
        self.reduce: Reduce | None = None
        self.held: tuple[bytes, ...] = ()  # the payloads of the last round that is complete here
        self.peers: dict[NodeId, Peer] = {}
        self._early: list[tuple[float, NodeId, Frame]] = []  # whose round, or attempt, has not begun here
        self._asked = 0  # number of the latest request to a donor

    # The reduce

    def begin(self, wire: pb.Plan, contribution: Contribution | None) -> None:
        """Take part in the round's reduce, or go on with it under this plan. None: it only owns chunks."""
        plan = plan_of(wire)
        plan.validate()
        reduce = self.reduce
        if reduce is None or reduce.round != plan.round:
            window = self.world.rng.choice([1, 2, 4])
            reduce = self.reduce = Reduce(plan, self.node.me, contribution, window)
            self.held = ()
            for peer in self.peers.values():
                peer.waiting.clear()
            self.node.later(TICK, self._look, reduce)
        elif plan.attempt <= reduce.plan.attempt:
            self.node.say(f"is asked for an attempt that is not newer: {plan.fence}")
            return
        reduce.plan = plan
        now = reduce.began = self.node.clock
        here = {m.node: m for m in plan.members if not m.gone and m.node != self.node.me}
        reduce.came = {node: reduce.came.get(node, now) for node in here}
        reduce.reported.clear()
        order = list(here)
        for peer in self.peers.values():
            if peer.node not in here:
                for link in list(peer.links):
                    link.snap()
        for node, member in here.items():
            peer = self._peer(node)
            peer.address, peer.leaf = member.address, member.leaf
            first = self.node.host.leaf or plan.index(self.node.me) < order.index(node) + 1
            self._tend(peer, self.world.rng.uniform(0, 0.02) + (0.0 if first else OTHER_SIDE_DIALS_AFTER))
        self._do(reduce, reduce.exchange.replan(plan))
        early, self._early = self._early, []
        for until, node, frame in early:
            if now < until:
                self._take(node, frame, until)

    def cancel(self) -> None:
        self.reduce = None

    def prove(self, round_: int, ledger: bytes) -> None:
        """The digests of the round's sealed chunks, one after the other."""
        if (reduce := self.reduce) is not None and reduce.round == round_:
            digests = [ledger[i : i + DIGEST_SIZE] for i in range(0, len(ledger), DIGEST_SIZE)]
            if len(digests) == reduce.exchange.chunk_count:
                self._do(reduce, reduce.exchange.prove(digests))

    def holds(self, sealed: bytes) -> bool:
        """Whether it has the sealed chunks with this root."""
        reduce = self.reduce
        return (
            reduce is not None
            and len(reduce.sealed) == reduce.exchange.chunk_count
            and root(self.result()) == sealed
        )

    def result(self) -> tuple[bytes, ...]:
        """The sealed chunks, all of them."""
        reduce = self.reduce
        if reduce is None or len(reduce.sealed) < reduce.exchange.chunk_count:
            raise RuntimeError(f"{self.node.me} is to apply what is not here")
        return tuple(reduce.sealed[c] for c in range(reduce.exchange.chunk_count))

    def _do(self, reduce: Reduce, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendFrame(node, kind, c, since):
                    self._post(self._peer(node), (kind, c, since))
                case MergeChunk(c, since, inputs, sums):
                    inside = {i for _, listed in sums for i in listed}
                    senders = [i for i in inputs if i not in inside] + [relay for relay, _ in sums]
                    took = self.world.seal_time * self.world.rng.uniform(0.2, 1.0)
                    terms = {i: self._term(reduce, c, i) for i in senders}
                    self.node.later(took, self._merged, reduce, c, since, inputs, terms)
                case SumRegion(c, since, inputs):
                    took = self.world.seal_time * self.world.rng.uniform(0.2, 1.0)
                    terms = {i: self._term(reduce, c, i) for i in inputs}
                    self.node.later(took, self._summed, reduce, c, since, inputs, terms)
                case ReportSeal(c, since, payload, inputs):
                    self._tell(reduce, SealReport(c, since, payload, inputs))
                case FreeContributions(c):
                    reduce.inbox = {key: x for key, x in reduce.inbox.items() if key[0] != c}
                    reduce.partials.pop(c, None)
                case FreeSealed(c):
                    reduce.sealed.pop(c, None)
                    self.held = ()
                case ReportOrphans(here):
                    self._tell_orphans(reduce, here)
                case ReportComplete(root_, proven):
                    self._tell_held(reduce, root_, proven)
                case ReportForged(c, node):
                    self.node.reports.forged(reduce.plan, node, c)
                case ReportMissing(chunks):
                    self.node.reports.lacking(reduce.plan, chunks)
                case _:
                    assert_never(effect)

    def _term(self, reduce: Reduce, c: int, place: int) -> Partial:
        """What is summed of the sender at `place`."""
        found = self._sent(reduce, c, place)
        member = reduce.plan.members[place]
        return (
            Partial((place,), (found,), ((member.weight, member.scale),))
            if isinstance(found, Contribution)
            else found
        )

    def _sent(self, reduce: Reduce, c: int, place: int) -> Contribution | Partial:
        if (c, place) in reduce.inbox:
            return reduce.inbox[c, place]
        assert reduce.contribution is not None and reduce.plan.members[place].node == self.node.me
        return reduce.contribution

    def _sum(self, reduce: Reduce, c: int, since: int, terms: dict[int, Partial]) -> Partial | None:
        """All of it, in plan order; None: something of it was refused."""
        if reduce is not self.reduce:
            return None
        for place, term in terms.items():
            if any(x.samples == MALFORMED for x in term.contributions):
                self._refuse(reduce, c, since, place)
                return None
        parts = (zip(t.places, t.contributions, t.weights, strict=True) for t in terms.values())
        places, contributions, weights = zip(*sorted(chain(*parts), key=lambda part: part[0]), strict=True)
        return Partial(places, contributions, weights)

    def _summed(
        self, reduce: Reduce, c: int, since: int, inputs: tuple[int, ...], terms: dict[int, Partial]
    ) -> None:
        if (partial := self._sum(reduce, c, since, terms)) is not None:
            effects = reduce.exchange.region_summed(c, since, inputs)
            if effects:  # the first of them frees what there was before
                self._do(reduce, effects[:1])
                reduce.partials[c] = partial
                self._do(reduce, effects[1:])

    def _merged(
        self, reduce: Reduce, c: int, since: int, inputs: tuple[int, ...], terms: dict[int, Partial]
    ) -> None:
        if reduce.contribution is None and self.node.host.sick:
            self.node.later(TICK, self._merged, reduce, c, since, inputs, terms)
            return
        if (total := self._sum(reduce, c, since, terms)) is None:
            return
        mean = Mean(c, total.contributions, total.weights, reduce.plan.length)
        payload = self.world.averaged(mean)
        effects = reduce.exchange.chunk_merged(mean.chunk, since, inputs, payload)
        if effects:
            self.world.sealed(reduce.round, since, mean.chunk, payload)
            reduce.sealed[mean.chunk] = payload
            if self._lies(reduce, "bytes"):
                reduce.forged |= {(mean.chunk, node) for node in list(reduce.came)[::2]}
        self._do(reduce, effects)

    def _refuse(self, reduce: Reduce, c: int, since: int, place: int) -> None:
        effects = reduce.exchange.contribution_refused(c, since, place)
        if effects is not None:
            reduce.inbox.pop((c, place), None)
            self.lost(reduce, reduce.plan.members[place].node, "its contribution was refused")
            self._do(reduce, effects)

    # What the coordinator is told, or what a liar says

    def _lies(self, reduce: Reduce, what: str) -> bool:
        if not self.node.host.lies_about(what):
            return False
        self.world.truth.lied.add(reduce.round)
        return True

    def _tell(self, reduce: Reduce, seal: SealReport) -> None:
        plan, x, lies_about = reduce.plan, reduce.exchange, self.node.host.lies_about
        if self._lies(reduce, "seal"):
            seal = replace(seal, digest=digest("a lie", seal.digest))
        seals, told = [seal], list[SealReport]()
        if lies_about("owner"):
            others = [c for c in range(x.chunk_count) if x.source(c) != self.node.me]
            seals += [replace(seal, chunk=c, digest=digest("not mine", c)) for c in others]
        again = [replace(s, digest=digest("again", s.digest)) for s in seals]
        if lies_about("stale"):
            attempts = {seal.since - 1, seal.since + 1, plan.attempt} - {seal.since}
            told += [replace(s, since=attempt) for attempt in attempts for s in again]
        if lies_about("empty"):
            told += [replace(s, inputs=()) for s in seals]
        told += seals
        if lies_about("seal again"):
            told += again
        for report in told:
            self.node.reports.sealed(plan, report, x.chunks_to_seal > 0)

    def _tell_orphans(self, reduce: Reduce, here: tuple[tuple[int, bytes], ...]) -> None:
        if self.node.host.lies_about("orphans"):
            plan = reduce.plan
            here = tuple((c, digest("a lie", c)) for c in range(len(plan.owners)))
        self.node.reports.orphans_found(reduce.plan, here)

    def _tell_held(self, reduce: Reduce, root: bytes, proven: bool) -> None:
        self.held = self.result()
        self.world.truth.held.setdefault((self.node.me, reduce.round), set()).add(self.held)
        told = digest("a lie", root) if self._lies(reduce, "held") else root
        plan, up = reduce.plan, self.world.rng.choice([0.0, 1e6, 5e6])
        trips, inside, outside = self.world.measured(self.node, list(reduce.came), bool(plan.regions))
        self.node.later(0.0, self.node.feed, node_ev.AttemptComplete((plan.round, plan.attempt), root))
        complete = pb.ReduceComplete(
            digest=told,
            proven=proven,
            bytes_up=1000,
            bytes_down=1000,
            rate_up=up,
            rate_down=1e6,
            rate_inside=inside,
            rate_outside=outside,
            round_trips=[pb.RoundTrip(node_id=peer, seconds=seconds) for peer, seconds in trips],
        )
        self.node.reports.reduce_complete(plan, complete)

    def lost(self, reduce: Reduce, node: NodeId, reason: str) -> None:
        now = self.node.clock
        if node in reduce.came and now - reduce.reported.get(node, now - LOST_AFTER) >= LOST_AFTER:
            reduce.reported[node] = now
            self.node.reports.lost(reduce.plan, node, reason)

    # Frames

    def _post(self, peer: Peer, queued: QueuedFrame) -> None:
        peer.waiting[queued] = None
        self._pump(peer)

    def _pump(self, peer: Peer) -> None:
        """Send what waits, if there is a link."""
        while peer.links and peer.waiting:
            waiting = next(iter(peer.waiting))
            del peer.waiting[waiting]
            if self.reduce is not None and (frame := self._frame(self.reduce, peer.node, *waiting)) is not None:
                self.world.rng.choice(peer.links).carry(self.node, frame)

    def _frame(self, reduce: Reduce, node: NodeId, kind: FrameKind, c: int, since: int) -> Frame | None:
        payload: Payload = None
        if kind is FrameKind.CONTRIBUTION:
            payload = reduce.contribution
            assert payload is not None
            if self.node.host.lies_about("contribution"):
                payload = replace(payload, samples=MALFORMED)
        elif kind is FrameKind.PARTIAL:
            if (payload := reduce.partials.get(c)) is None:
                return None
            if self.node.host.lies_about("contribution"):
                payload = replace(payload, contributions=(replace(payload.contributions[0], samples=MALFORMED),))
        elif kind is FrameKind.SEALED:
            if (payload := reduce.sealed.get(c)) is None:
                return None
            if (c, node) in reduce.forged:
                reduce.forged.discard((c, node))
                payload = self.world.forged(payload)
        elif kind is FrameKind.RESYNC:
            payload, since = reduce.exchange.resync_state(node), reduce.plan.attempt
        return Frame(kind, reduce.round, since, c, reduce.plan.index(self.node.me), payload)

    def receive(self, link: Link, node: NodeId, frame: Frame) -> None:
        peer = self._peer(node)
        if link in peer.links:  # else this end is closed
            peer.heard = self.node.clock
            self._take(node, frame, self.node.clock + HOLD_TIME)

    def _take(self, node: NodeId, frame: Frame, until: float) -> None:
        reduce, kind, c = self.reduce, frame.kind, frame.chunk
        if reduce is None or reduce.round < frame.round:
            self._early.append((until, node, frame))
            return
        if reduce.round > frame.round:
            return
        x = reduce.exchange
        if kind is FrameKind.RESYNC:
            assert isinstance(frame.payload, tuple)
            self._do(reduce, x.resync(node, frame.attempt, *frame.payload))
            if c:
                self._post(self._peer(node), (FrameKind.RESYNC, 0, 0))
            return
        verdict = x.verdict(node, frame.place, kind, c, frame.attempt)
        if verdict is FrameVerdict.HOLD:
            self._early.append((until, node, frame))
        elif kind in CHUNKS and node in reduce.came:
            reduce.came[node] = self.node.clock
        if verdict is FrameVerdict.TAKE:
            self._use(reduce, node, frame)

    def _use(self, reduce: Reduce, node: NodeId, frame: Frame) -> None:
        x, c, payload = reduce.exchange, frame.chunk, frame.payload
        match frame.kind:
            case FrameKind.CONTRIBUTION:
                assert isinstance(payload, Contribution)
                reduce.inbox[c, frame.place] = payload
                self._do(reduce, x.contribution_arrived(node, c))
            case FrameKind.PARTIAL:
                assert isinstance(payload, Partial)
                effects = x.region_sum_arrived(node, c, payload.places)
                assert effects is not None, f"{self.node.me} refuses the sum of {payload.places}"
                reduce.inbox[c, frame.place] = payload
                self._do(reduce, effects)
            case FrameKind.SEALED:
                assert isinstance(payload, bytes)
                effects = x.sealed_arrived(c, payload, node)
                if x.digest(c) == payload:
                    reduce.sealed[c] = payload
                self._do(reduce, effects)
            case FrameKind.MERGED:
                self._do(reduce, x.peer_merged(node, c))
            case FrameKind.WANT:
                self._do(reduce, x.chunk_wanted(node, c))
            case FrameKind.LACK:
                self._do(reduce, x.chunk_lacked(node, c))
            case _:
                raise AssertionError(f"a frame {frame.kind.name}")

    # Links

    def _peer(self, node: NodeId) -> Peer:
        if node not in self.peers:
            self.peers[node] = Peer(node)
        return self.peers[node]

    def _tend(self, peer: Peer, after: float) -> None:
        """See to it that there is a link."""
        if peer.links or peer.dialling or (peer.leaf and self.node.host.leaf):
            return
        peer.dialling = True
        if peer.leaf:
            self.node.later(HOLD_TIME, self._did_not_dial, peer, self.reduce)
        else:
            self.node.later(after, self._dial, peer)

    def _did_not_dial(self, peer: Peer, reduce: Reduce | None) -> None:
        peer.dialling = False
        if peer.links or self.reduce is None or peer.node not in self.reduce.came:
            return
        if reduce is self.reduce:
            self.lost(self.reduce, peer.node, "it is a leaf and did not dial")
        self._tend(peer, 0.0)

    def _dial(self, peer: Peer) -> None:
        peer.dialling = False
        if peer.links or self.reduce is None or peer.node not in self.reduce.came:
            return
        node, to, network = self.node, self.world.at(peer.address), self.world.network
        if to is None or not to.alive or to.me != peer.node or to.control.left:
            self.lost(self.reduce, peer.node, "refused")
        elif to.stopped or {(node.place, to.place), (to.place, node.place)} & network.cut:
            self.node.later(1.0, self._unanswered, peer, self.reduce)
        else:
            link = Link(self.world, node, to)
            to.plane.adopt(node.me, link)
            self.adopt(to.me, link)
            return
        self._tend(peer, self.world.rng.uniform(0.2, 1.0))

    def _unanswered(self, peer: Peer, reduce: Reduce) -> None:
        if not peer.links:
            self.lost(reduce, peer.node, "no answer")

    def adopt(self, node: NodeId, link: Link) -> None:
        """Use a link until it breaks. What was on those before it may be lost."""
        peer = self._peer(node)
        peer.links.append(link)
        peer.heard = self.node.clock
        if self.reduce is not None:
            self._post(peer, (FrameKind.RESYNC, 1, 0))
        self._pump(peer)

    def broke(self, link: Link) -> None:
        for peer in self.peers.values():
            if link in peer.links:
                peer.links.remove(link)
                if self.reduce is not None and peer.links:
                    self._post(peer, (FrameKind.RESYNC, 1, 0))
                self._tend(peer, self.world.rng.uniform(0.0, 0.3))

    # The clock

    def _look(self, reduce: Reduce) -> None:
        """See who is late."""
        if reduce is not self.reduce:
            return
        self.node.later(TICK, self._look, reduce)
        x, now = reduce.exchange, self.node.clock
        owed, owing = dict(x.dues()), set(x.contributors_due())
        for node in [n for n in owed if n in reduce.came]:
            peer = self._peer(node)
            heard, came = max(peer.heard, reduce.began), max(reduce.came[node], reduce.began)
            if not peer.links:
                self._tend(peer, 0.0)
            elif now - heard > LOST_AFTER:
                self.lost(reduce, node, "it is silent")
            elif now - peer.heard > PING_AFTER:
                self._post(peer, (FrameKind.RESYNC, 1, 0))
            if peer.links and node in owing and now - came > MAX_CHUNK_TIME:
                self.lost(reduce, node, f"its {owed[node]} did not come")
        if now - reduce.pulled > PULL_AFTER:
            reduce.pulled = now
            late = {n for n, came in reduce.came.items() if now - came > PULL_AFTER}
            for c in x.missing() if late else ():
                if x.source(c) in late:
                    self._do(reduce, x.pull(c))

    # The state

    def recover(self, order: effects.Recover) -> None:
        self.cancel()
        self._ask(order, 0)

    def _ask(self, order: effects.Recover, i: int) -> None:
        donors = order.view.donors
        self._asked += 1
        if i >= len(donors):
            self.node.later(0.2, self.node.not_recovered)
            return
        process = self.world.at(donors[i].address) if donors[i].address else self.node  # to which leaves offer it
        if process is not None and process.alive and process.me == donors[i].node_id:
            call = process.plane.give
            self.world.network.send(self.node, process, call, self.node, self._asked, order, i)
        self.node.later(DONOR_TIMEOUT, self._next, self._asked, order, i)

    def _next(self, number: int, order: effects.Recover, i: int) -> None:
        if number == self._asked:
            self._ask(order, i + 1)

    def give(self, to: "Node", number: int, order: effects.Recover, i: int) -> None:
        state = self.node.passed_on(order.view.committed)
        self.world.network.send(self.node, to, to.plane.given, number, order, i, state)

    def given(self, number: int, order: effects.Recover, i: int, state: bytes) -> None:
        if number != self._asked:
            return
        if state != order.view.state_digest:
            self._ask(order, i + 1)
        else:
            self._asked += 1
            self.node.later(self.world.seal_time, self.node.recovered, order)
