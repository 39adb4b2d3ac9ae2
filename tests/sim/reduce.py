"""A simulated node's part in the reduce of one round: the real `ReduceProtocol`, `LatePeers` and
`ContributionInbox`, bound together as in `atoll.comm.allreduce.reduction`, with lists of samples for contributions
and their digests for means. It also tells the lies of a host that lies.
"""

import math
from itertools import chain
from typing import TYPE_CHECKING, assert_never

from sim.audit import content
from sim.invariants.violation import hold
from sim.links import Frame, Links, Partial, Payload
from sim.truth import Contribution, Mean, digest, norm, root

from atoll.comm.allreduce import control_frames, routes
from atoll.comm.allreduce.control_frames import CONTROL_KINDS
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
from atoll.comm.allreduce.inbox import ContributionInbox, MergeTerm
from atoll.comm.allreduce.late_peers import AskState, LatePeers, Lost, PeerDeadlines, Ping, PullFrom
from atoll.comm.allreduce.listener import SealReport
from atoll.comm.allreduce.protocol import ReduceProtocol
from atoll.comm.allreduce.seal_lengths import SealLengths
from atoll.comm.ids import NodeId
from atoll.comm.plan import NOBODY, Plan
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.replace import replace
from atoll.comm.transport.frames import FrameKind, QueuedFrame
from atoll.node.state_machine import events as node_ev

if TYPE_CHECKING:
    from sim.node import Node

TICK = 0.3  # seconds between two looks at the clock
DEADLINES = PeerDeadlines(ping_after=0.8, lost_after=1.5, chunk_time=3.5, pull_after=1.0)
DRIP = 2.5  # seconds
VAST = 1e60  # squared length of what is longer than any delta, whose length is 1
MALFORMED = (-1,)

Terms = list[MergeTerm[Contribution | Partial]]


class Reduce:
    """One round's reduce at one node. `begin` it, give it newer plans, `end` it."""

    def __init__(self, node: "Node", links: Links, plan: Plan, contribution: Contribution | None) -> None:
        """`contribution`: None for a node that only owns chunks."""
        self.node, self.world, self.links = node, node.world, links
        self.round, self.plan, self.contribution = plan.round, plan, contribution
        self.exchange = ReduceProtocol(node.me, len(plan.owners), self.world.rng.choice([1, 2, 4]))
        self.late, self.inbox = LatePeers(DEADLINES), ContributionInbox[Contribution | Partial](node.me)
        self.partials: dict[int, Partial] = {}  # of this node's region, by chunk
        self.sealed: dict[int, bytes] = {}  # payloads
        self.held: tuple[bytes, ...] = ()  # the same, once all are here
        self.forged: set[tuple[int, NodeId]] = set()  # chunks of which it sends others than it sealed, to whom
        self.peers: list[NodeId] = []  # in the plan
        self._lengths = SealLengths()
        self._decoy = b""  # what it sealed of a chunk of which it gives others what is too long
        self._told: dict[int, SealReport] = {}  # of the terms of its latest mean of a chunk
        # By chunk: since when it is this member's; place, content and inputs of each term; what was made of them.
        self.merged: dict[int, tuple[int, list[tuple[int, bytes, tuple[int, ...]]], bytes]] = {}
        self._merging: list[tuple[int, Terms]] = []  # chunks, and what is being read
        self._over = False
        self._dripped_at: dict[
            NodeId, float
        ] = {}  # seconds; when the latest contribution of one who drips goes out

    def begin(self) -> None:
        self.links.begin(self)
        self.replan(self.plan)
        self.node.later(TICK, self._look)

    def replan(self, plan: Plan) -> None:
        self.plan, me = plan, self.node.me
        self.peers = [m.node for m in plan.members if not m.gone and m.node != me]
        self.late.replan(self.node.clock, self.peers, plan.patience)
        self.links.expect(routes.links(plan, me))
        self._lengths.begin_attempt()
        self.do(self.exchange.replan(plan))
        self._tell_lengths()
        self.links.release()
        if self.node.host.habit == "accuses":
            self.node.later(TICK, self._accuse, plan)

    def _accuse(self, plan: Plan) -> None:
        """The same member in each round, who joined last."""
        if not self._over and self.plan is plan and self.peers:
            self.lost(max(self.peers, key=lambda n: int(n[1:])), "a lie")

    def end(self) -> None:
        self._over = True
        self.links.end(self)

    def holds(self, sealed: bytes) -> bool:
        """Whether it has the sealed chunks with this root."""
        return len(self.sealed) == self.exchange.chunk_count and root(self.result()) == sealed

    def result(self) -> tuple[bytes, ...]:
        """The sealed chunks, all of them."""
        if len(self.sealed) < self.exchange.chunk_count:
            raise RuntimeError(f"{self.node.me} is to apply what is not here")
        return tuple(self.sealed[c] for c in range(self.exchange.chunk_count))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendFrame(node, FrameKind.CONTRIBUTION, c, since) if self.node.host.habit == "drips":
                    self._drip(node, (FrameKind.CONTRIBUTION, c, since))
                case SendFrame(node, kind, c, since):
                    self.links.post(node, (kind, c, since))
                case MergeChunk() | SumRegion():
                    terms = self.inbox.begin(effect, self.plan)
                    self._merging.append((effect.chunk, terms))
                    took = self.world.seal_time * self.world.rng.uniform(0.2, 1.0)
                    self.node.later(took, self._merged, effect, terms)
                case ReportSeal(c, since, payload, inputs):
                    self._report_seal(replace(self._told[c], since=since, digest=payload, inputs=inputs))
                case FreeContributions(c):
                    self._free(c)
                    self.partials.pop(c, None)
                case FreeSealed(c):
                    self.sealed.pop(c, None)
                    self._lengths.forget(c)
                    self.held = ()
                case ReportOrphans(here):
                    self._report_orphans(here)
                case ReportComplete(root_, proven):
                    self._tell_lengths()
                    self._report_complete(root_, proven)
                case ReportForged(c, node):
                    self.node.reports.forged(self.plan, node, c)
                case ReportMissing(chunks):
                    self.node.reports.lacking(self.plan, chunks)
                case _:
                    assert_never(effect)

    def _drip(self, node: NodeId, frame: QueuedFrame) -> None:
        """Send its contributions one after the other, each just before it would be missed."""
        now = self.node.clock
        self._dripped_at[node] = at = max(self._dripped_at.get(node, now), now) + DRIP
        self.node.later(at - now, self.links.post, node, frame)

    # Merging

    def _free(self, c: int) -> None:
        freed = self.inbox.free(c)
        read = [term.payload for at, terms in self._merging if at == c for term in terms]
        used = any(x is payload for x in freed for payload in read)
        hold(not used, f"{self.node.me} uses memory again that a merge of chunk {c} reads")

    def _merged(self, order: MergeChunk | SumRegion, terms: Terms) -> None:
        if self.contribution is None and self.node.host.sick:
            self.node.later(TICK, self._merged, order, terms)
            return
        self._merging.remove((order.chunk, terms))
        self.inbox.end(order.chunk)
        if self._over:
            return
        c, since, inputs = order.chunk, order.since, order.inputs
        parts = [self._part(term) for term in terms]
        for term, part in zip(terms, parts, strict=True):
            if any(x.samples == MALFORMED for x in part.contributions):
                return self._refuse(c, since, term.place)
        listed = chain(*(zip(p.places, p.contributions, p.weights, strict=True) for p in parts))
        places, contributions, weights = zip(*sorted(listed, key=lambda entry: entry[0]), strict=True)
        if isinstance(order, SumRegion):
            self._tell_of_terms(c, terms, parts)
            self._summed(c, since, inputs, Partial(places, contributions, weights))
        else:
            self._tell_of_terms(c, terms, parts)
            mean = Mean(c, contributions, weights, self.plan.length)
            listed_ = [self._term(c, term, part) for term, part in zip(terms, parts, strict=True)]
            self.merged[c] = since, listed_, self.world.payload(mean)
            self._sealed(c, since, inputs, mean)

    def _term(
        self, c: int, term: MergeTerm[Contribution | Partial], part: Partial
    ) -> tuple[int, bytes, tuple[int, ...]]:
        """A term as a receipt has it: place, content, and of a region's mean what is in it."""
        if isinstance(term.payload, Partial):
            return term.place, digest("mean", c, part), part.places
        return term.place, content(c, part.contributions[0]), ()

    def _part(self, term: MergeTerm[Contribution | Partial]) -> Partial:
        """What is summed of it."""
        found = self.contribution if term.payload is None else term.payload
        assert found is not None
        if isinstance(found, Partial):
            return found
        member = self.plan.members[term.place]
        return Partial((term.place,), (found,), ((member.weight, member.scale),))

    def _tell_of_terms(self, c: int, terms: Terms, parts: list[Partial]) -> None:
        """The norm and the direction of each term, where the plan looks at them."""
        self._told[c] = SealReport(c, 0, b"", ())
        if not self.plan.looks_at_norms:
            return
        chunks = self.world.chunks(self.round)
        part = math.sqrt(chunks.size(c) / chunks.numel)
        norms = [self._length(term, found) * part for term, found in zip(terms, parts, strict=True)]
        if self.node.host.lies_about("frame"):
            self.world.truth.framed.setdefault(self.round, set()).add(self.node.me)
            norms[self.world.rng.randrange(len(norms))] *= 1e4
        self._told[c] = replace(self._told[c], norms=tuple(norms))
        if self.contribution is not None and self.round > 1 and self.world.config.security.outliers:
            dots = [n * self._cosine(c, found) for n, found in zip(norms, parts, strict=True)]
            self._slander(dots, norms, parts)
            self._told[c] = replace(self._told[c], dots=tuple(dots), reference=1.0 + c)

    def _cosine(self, c: int, found: Partial) -> float:
        """To the last round, of a contribution or of a region's mean: all voices see nearly the same."""
        x = found.contributions[0]
        return -0.4 if x.turned else 0.4 + 0.01 * ((int(x.node[1:]) + c) % 3)

    def _slander(self, dots: list[float], norms: list[float], parts: list[Partial]) -> None:
        """A liar says of others that they turned their deltas: of one, or in each round of who joined first."""
        habit = self.node.host.habit == "slanders"
        if habit or self.node.host.lies_about("slander"):
            self.world.truth.slandered.setdefault(self.round, set()).add(self.node.me)
            nodes = [found.contributions[0].node for found in parts]
            others = [i for i, node in enumerate(nodes) if node != self.node.me]
            if others:
                i = min(others, key=lambda i: int(nodes[i][1:])) if habit else self.world.rng.choice(others)
                dots[i] = -norms[i]

    def _length(self, term: MergeTerm[Contribution | Partial], found: Partial) -> float:
        """The norm of a contribution, or of a region's mean."""
        norms = [x.times * norm(x.node, len(x.samples)) for x in found.contributions]
        if not isinstance(term.payload, Partial):
            return norms[0]
        scaled = [n * scale * weight for n, (weight, scale) in zip(norms, found.weights, strict=True)]
        return sum(scaled) / sum(weight for weight, _ in found.weights)

    def _summed(self, c: int, since: int, inputs: tuple[int, ...], mean: Partial) -> None:
        effects = self.exchange.region_summed(c, since, inputs)
        if effects and self._told[c].norms:
            report = replace(self._told[c], since=since, digest=digest("sum", c), inputs=inputs)
            self.node.reports.summed(self.plan, report, False)
        if effects:  # the first of them frees what there was before
            self.do(effects[:1])
            self.partials[c] = mean
            self.do(effects[1:])

    def _sealed(self, c: int, since: int, inputs: tuple[int, ...], mean: Mean) -> None:
        payload = self.world.averaged(mean)
        if not self._decoy and self._lies("decoy"):
            self._decoy = payload
            self.forged |= {(c, node) for node in self.peers}
        elif self._lies("vast"):
            payload = digest("vast", payload)
            self.world.truth.vast.add(payload)
        effects = self.exchange.chunk_merged(c, since, inputs, payload)
        if effects:
            self.world.sealed(self.round, since, c, payload)
            self.sealed[c] = payload
            if self._lies("bytes"):
                self.forged |= {(c, node) for node in self.peers[::2]}
        self.do(effects)

    def _refuse(self, c: int, since: int, place: int) -> None:
        effects = self.exchange.contribution_refused(c, since, place)
        if effects is not None:
            self.inbox.drop(c, place)
            self.lost(self.plan.members[place].node, "its contribution was refused")
            self.do(effects)

    # What the coordinator is told, or what a liar says

    def _lies(self, what: str) -> bool:
        if not self.node.host.lies_about(what):
            return False
        self.world.truth.lied.add(self.round)
        return True

    def _report_seal(self, seal: SealReport) -> None:
        if self.node.host.habit == "never seals":
            return
        x, lies_about = self.exchange, self.node.host.lies_about
        if self._lies("seal"):
            seal = replace(seal, digest=digest("a lie", seal.digest))
        seals, told = [seal], list[SealReport]()
        if lies_about("owner"):
            others = [c for c in range(x.chunk_count) if x.source(c) != self.node.me]
            seals += [replace(seal, chunk=c, digest=digest("not mine", c)) for c in others]
        again = [replace(s, digest=digest("again", s.digest)) for s in seals]
        if lies_about("stale"):
            attempts = {seal.since - 1, seal.since + 1, self.plan.attempt} - {seal.since}
            told += [replace(s, since=attempt) for attempt in attempts for s in again]
        if lies_about("empty"):
            told += [replace(s, inputs=(), norms=(), dots=()) for s in seals]
        told += seals
        if lies_about("seal again"):
            told += again
        for report in told:
            self.node.reports.sealed(self.plan, report, x.chunks_to_seal > 0)

    def _report_orphans(self, here: tuple[tuple[int, bytes], ...]) -> None:
        if self.node.host.lies_about("orphans"):
            here = tuple((c, digest("a lie", c)) for c in range(len(self.plan.owners)))
        self.node.reports.orphans_found(self.plan, here)

    def _report_complete(self, root: bytes, proven: bool) -> None:
        self.held = self.result()
        self.world.truth.held.setdefault((self.node.me, self.round), set()).add(self.held)
        if self.node.host.habit == "never holds":
            return
        told = digest("a lie", root) if self._lies("held") else root
        plan, up = self.plan, self.world.rng.choice([0.0, 1e6, 5e6])
        up = 1e15 if self.node.host.lies_about("rate") else up
        trips, inside, outside = self.world.measured(self.node, self.peers, bool(plan.regions))
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
            seen=[pb.SeenRate(node_id=peer, up=1e6, down=1e6) for peer in self.peers],
        )
        self.node.reports.reduce_complete(plan, complete)

    # What the links ask

    def joined(self, node: NodeId) -> None:
        self.do([control_frames.ask_state(node)])

    def lost(self, node: NodeId, sentence: str) -> None:
        if self.late.may_report(self.node.clock, node):
            self.node.reports.lost(self.plan, node, sentence)

    def frame(self, node: NodeId, queued: QueuedFrame) -> Frame | None:
        kind, c, since = queued
        payload: Payload = None
        if kind is FrameKind.CONTRIBUTION:
            payload = self.contribution
            assert payload is not None
            if self.node.host.lies_about("contribution"):
                payload = replace(payload, samples=MALFORMED)
        elif kind is FrameKind.PARTIAL:
            if (payload := self.partials.get(c)) is None:
                return None
            if self.node.host.lies_about("contribution"):
                payload = replace(payload, contributions=(replace(payload.contributions[0], samples=MALFORMED),))
        elif kind is FrameKind.SEALED:
            if (payload := self.sealed.get(c)) is None or self.node.host.habit == "hoards":
                return None
            if (c, node) in self.forged:
                self.forged.discard((c, node))
                other = self.world.forged(payload)
                if payload == self._decoy:
                    self.world.truth.vast.add(other)
                payload = other
        elif kind is FrameKind.RESYNC:
            payload, since = b"".join(self.exchange.resync_state(node)), self.plan.attempt
        return Frame(kind, self.round, since, c, self.plan.index(self.node.me), payload)

    def arrived(self, node: NodeId, frame: Frame) -> bool:
        kind, c, since, payload = frame.kind, frame.chunk, frame.attempt, frame.payload
        if kind is not FrameKind.RESYNC:
            verdict = self.exchange.verdict(node, frame.place, kind, c, since)
            if verdict is FrameVerdict.HOLD:
                return False
            if kind not in CONTROL_KINDS:
                self.late.chunk_came(self.node.clock, node)
            if verdict is FrameVerdict.DISCARD:
                return True
        match payload:
            case Contribution():
                self.inbox.put(c, frame.place, payload)
                self.do(self.exchange.contribution_arrived(node, c))
            case Partial():
                effects = self.exchange.region_sum_arrived(node, c, payload.places)
                assert effects is not None, f"{self.node.me} refuses the sum of {payload.places}"
                self.inbox.put(c, frame.place, payload)
                self.do(effects)
            case bytes() if kind is FrameKind.SEALED:
                effects = self.exchange.sealed_arrived(c, payload, node)
                if self.exchange.digest(c) == payload:
                    self.sealed[c] = payload
                    self._measure(c, payload)
                self.do(effects)
            case _:
                self.do(control_frames.receive(self.exchange, node, kind, c, since, payload or b""))
        return True

    def _measure(self, c: int, payload: bytes) -> None:
        """Say, before it is held, that a sealed chunk is longer than it can be."""
        if (owner := self.plan.owners[c]) != NOBODY:
            self._lengths.take(c, owner, VAST if payload in self.world.truth.vast else 0.0)
            self._tell_lengths()

    def _tell_lengths(self) -> None:
        plan = self.plan
        for c, times in self._lengths.too_long(1.0):
            since = plan.since[c] if plan.since else plan.attempt
            self.node.reports.outsized(plan, c, since, self.sealed[c], times)

    # The clock

    def _look(self) -> None:
        """See who is late."""
        if self._over:
            return
        self.node.later(TICK, self._look)
        x = self.exchange
        dues, contributors = dict(x.dues()), set(x.contributors_due())
        for order in self.late.look(self.node.clock, dues, contributors, x.holding_up(), self.links.heard):
            match order:
                case Ping(node):
                    self.do([control_frames.ping(node)])
                case AskState(node):
                    self.do([control_frames.ask_state(node)])
                case Lost(node, sentence):
                    self.lost(node, sentence)
                case PullFrom(owners):
                    self.do(x.pull_from(owners))
                case _:
                    assert_never(order)
