"""The coordinator's edge: reports as bytes, between what honest members say, through validation into the state
machine. What the simulation demands of a coordinator's state must hold after each of them.

Every chunk of every round is audited, and a verifier replays what it can. Keys and signatures are real, and nobody
has another's key: so no proof may convict a member that only did what its view asked it to, and nor may the word
of others, unless half of those who are asked about a chunk lie.

A script for `play` is one step after another, each of these:

    0 mod 7     a quarter of a second passes
    1 mod 7     each honest member says what its view asks it to
    2 mod 7     member, u16 length, and as many bytes: a report as it is
    3 mod 7     the same, under the fence of the round at hand
    4 mod 7     a number, u16 length, and as many bytes: its answer to an audit, see `Edge.answer`
    5 mod 7     member: it seals something else than it should
    6 mod 7     member, u16 length, and as many bytes: from now on these bits differ in what it signs
"""

import struct
from collections import Counter
from contextlib import suppress
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import DecodeError, Message
from honest_member import CONFIG as PLAIN
from honest_member import asked_of, key_of, receipt, said_by, sum_of
from sim.invariants.members import epochs_name_memberships, members_have_the_runs_state
from sim.invariants.rounds import fences_grow, no_round_waits_for_suspects, rounds_close_at_a_quorum

from atoll.comm.bitmap import places
from atoll.comm.config.outer import OuterConfig
from atoll.comm.evidence import Consequence, Offence
from atoll.comm.ids import NodeId
from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.receipts import (
    InputRecord,
    MalformedReceipt,
    Receipt,
    sign_input,
    sign_receipt,
    unpack_receipt,
    unpack_record,
)
from atoll.comm.replace import replace
from atoll.coordinator.service import validation, view
from atoll.coordinator.service.journaled_machine import decode, encode
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.audit_voices import VoiceKind, voice_of
from atoll.coordinator.state_machine.conduct import refusal
from atoll.coordinator.state_machine.ledger import seal_terms
from atoll.coordinator.state_machine.members import VERIFIER
from atoll.coordinator.state_machine.state import Audit, State
from atoll.coordinator.state_machine.step import step
from atoll.node.control.reports import plan_of

CONFIG = replace(PLAIN, outer=OuterConfig(damping=True), reduce=replace(PLAIN.reduce, levels=2))
MEMBERS = 5  # the last one is a verifier
MANY = 8  # of a script: of seven contributors three may be banned, and the others still audit one another
MAX_STEPS = 150  # of a script
# What nobody may be charged with that told the truth.
LIES = (Offence.FORGED_SEAL, Offence.FORGED_INPUT, Offence.FALSE_AUDIT)


class Edge:
    """A coordinator's machine whose members are in, and whose invariants are checked after every event."""

    def __init__(self, members: int = MEMBERS) -> None:
        self.state, self.now = State(CONFIG), 0.0
        self.nodes = [NodeId(f"n{i}") for i in range(1, members + 1)]
        self.consumed: set[int] = set()
        self.signs: dict[NodeId, bytes] = {}  # bits that differ in what each signs
        self.dishonest: set[NodeId] = set()  # who said anything but what its view asked it to
        self.voices = Counter[VoiceKind]()  # what answers to audits came to, so far
        self.replays = 0  # that came to an end
        self.convicted: set[Offence] = set()  # of what somebody was
        self._world: Any = SimpleNamespace(truth=SimpleNamespace(fences={}))
        self.feed(ev.Started(1, b"nonce"))
        for node in self.nodes:
            self.join(node, 1)

    def join(self, node: NodeId, life: int) -> None:
        role, key = VERIFIER if node == self.nodes[-1] else "", key_of(node).public
        self.feed(ev.Joined(node, life, f"node {node}", f"h{node}:1", f"session {node}", role=role, key=key))
        self.feed(ev.Connected(node, life))
        self.feed(ev.LayoutReported(node, life, 40, sum_of("layout")))

    def feed(self, event: ev.Event) -> None:
        """Step one event, and check what must hold behind it."""
        before = self.state
        self.state, effects = step(before, event, self.now)
        after = self.state
        for decision in (effect for effect in effects if isinstance(effect, ev.Decision)):
            proven = decision.consequence is Consequence.BANNED or decision.evidence.offence in LIES
            by_majority = decision.evidence.by is None and self._outvoted(before)
            assert not proven or decision.node in self.dishonest or by_majority, decision
            if decision.consequence is Consequence.BANNED:
                self.convicted.add(decision.evidence.offence)
        self._count(before, event)
        rounds_close_at_a_quorum(before, after)
        no_round_waits_for_suspects(after)
        epochs_name_memberships(before, after)
        members_have_the_runs_state(after)
        if after.round.plan is not None and after.round.plan is not before.round.plan:
            fences_grow(self._world, after.round.plan.fence)
            plan_of(view.view(after, after.round.ledger.members[0]).plan).validate()
        assert after.committed - before.committed in (0, 1)
        leased = [*after.leases.free, *(part for lease in after.leases.by_node.values() for part in lease)]
        samples = [s for first, count in leased for s in range(first, first + count)]
        assert len(samples) == len(set(samples)), "a sample has two places"
        assert self.consumed.isdisjoint(samples), "a sample that was consumed is leased again"
        if after.committed > before.committed:
            self.consumed |= set(range(after.leases.next)).difference(samples)

    def _outvoted(self, state: State) -> bool:
        """Whether as many as half of those who are asked about a chunk lie: then their word is the verdict."""
        return any(2 * len(self.dishonest & a.named.keys()) >= len(a.named) for a in state.round.audits.values())

    def _count(self, before: State, event: ev.Event) -> None:
        """Count what is reached, so that a test can tell that it is."""
        if isinstance(event, ev.AuditReported) and event.chunk in {a.chunk for a in asked_of(before, event.node)}:
            audit = before.round.audits[event.chunk]
            if (event.fence.round, event.fence.attempt) == (before.round.number, audit.since):
                self.voices[voice_of(audit, before.round.salt, event).kind] += 1
        self.replays += sum(t.shown and n not in self.state.replays.tasks for n, t in before.replays.tasks.items())

    def tick(self, seconds: float = 0.25) -> None:
        self.now += seconds
        self.feed(ev.Tick())

    def behave(self) -> None:
        """Every member says one thing that its view asks for; who is out comes back."""
        for node in self.nodes:
            if node not in self.state.members.here:
                if self.may_come(node):
                    self.join(node, self.state.members.departed[node].life + 1)
            elif (event := said_by(self.state, node)) is not None:
                self.feed(event)

    @property
    def audit(self) -> Audit | None:
        """The first audit that a member has yet to answer: of the first member that has any. None: none has."""
        return next((audits[0] for n in self.nodes if (audits := asked_of(self.state, n))), None)

    @property
    def forged(self) -> bool:
        """Whether a chunk is sealed as something else than it should be."""
        return any(seal.digest != sum_of(c) for c, seal in self.state.round.ledger.sealed.items())

    def may_come(self, node: NodeId) -> bool:
        """Whether the coordinator would let the node in."""
        return not refusal(self.state, node, key_of(node).public)

    @property
    def fence(self) -> Fence:
        """The fence of the plan in force, or of the round that has none yet."""
        r, state = self.state.round, self.state
        if r.plan is not None:
            return r.plan.fence
        return Fence(state.incarnation, state.epoch, r.number, r.ledger.attempt)  # type: ignore[arg-type]

    def report(self, node: NodeId, request: pb.ReportRequest) -> None:
        """A report by a member's valid session, which is refused with a sentence or is an event."""
        member = self.state.members.here.get(node)
        if member is None:
            return
        try:
            event = validation.event(node, member.life, request)
        except ValueError as error:
            assert len(str(error)) > 10
            return
        self.dishonest.add(node)
        self.feed(event)

    def answer(self, first: int, said: pb.AuditReported) -> None:
        """A member's answer to one of the audits that it is asked for, which `chunk` chooses: of the first member,
        from the one with this number on, that is asked for any. The first receipt is the owner's, and `shown` the
        record of the first that is in it, but for those bits that are set."""
        first %= len(self.nodes)
        nodes = (*self.nodes[first:], *self.nodes[:first])
        if (node := next((n for n in nodes if asked_of(self.state, n)), None)) is None:
            return
        audits = asked_of(self.state, node)
        audit, r = audits[said.chunk % len(audits)], self.state.round
        given = self.signed(audit)
        if said.receipts:
            said.receipts[0] = differing(given.pack(), said.receipts[0])
        if said.shown and given.records:
            said.shown = differing(self.shown(audit, given.records[0]).pack(), said.shown)
        said.chunk = audit.chunk
        fence = Fence(self.state.incarnation, self.state.epoch, r.number, audit.since)  # type: ignore[arg-type]
        self.report(node, fenced(pb.ReportRequest(audit_reported=said), fence))

    def signed(self, audit: Audit) -> Receipt:
        """The receipt that the owner of the chunk signs."""
        given, bits = receipt(self.state, audit), self.signs.get(audit.owner, b"")
        with suppress(MalformedReceipt):
            other = unpack_receipt(differing(given.pack(), bits))
            what = self.state.round.salt, audit.chunk, audit.since, audit.parties.owner, other.records, other.mean
            return sign_receipt(key_of(audit.owner), *what)
        return given

    def shown(self, audit: Audit, sent: InputRecord) -> InputRecord:
        """The record that its contributor signs when it is asked for what it sent."""
        entries = self.state.round.ledger.entries
        node = entries[sent.place].node if sent.place < len(entries) else NodeId("n1")
        with suppress(MalformedReceipt):
            other = unpack_record(differing(sent.pack(), self.signs.get(node, b"")))
            what = self.state.round.salt, audit.chunk, other.place, other.digest, other.inputs
            return sign_input(key_of(node), *what)
        return sent

    def sign_otherwise(self, node: NodeId, bits: bytes) -> None:
        """From now on these bits differ in what the node signs."""
        self.signs[node] = bits
        self.dishonest.add(node)

    def forge(self, node: NodeId) -> None:
        """A member seals something else than it should, if it is to seal anything."""
        said = said_by(self.state, node) if node in self.state.members.here else None
        if isinstance(said, ev.ChunksSealed):
            self.dishonest.add(node)
            ((chunk, _, inputs),) = said.seals
            self.feed(replace(said, seals=((chunk, sum_of("a lie"), inputs),)))

    def tell(self, node: NodeId, x: float, y: float) -> None:
        """What an honest member would say next, with these numbers in it."""
        member, ledger = self.state.members.here.get(node), self.state.round.ledger
        match said_by(self.state, node) if member is not None else None:
            case ev.ContributionReady(contribution=work):
                numbers: Any = {"loss": y, "delta_norm": x, "damping": y}
                ready = pb.ContributionReady(steps=4, samples=4, front=work.front, **numbers)
                self.report(node, fenced(pb.ReportRequest(contribution_ready=ready), self.fence))
            case ev.ChunksSealed(fence=fence, seals=((chunk, digest, inputs),)):
                terms = len(sum(seal_terms(ledger, chunk, inputs), []))
                one = pb.Seal(chunk=chunk, digest=digest, inputs=inputs)
                one.norms.extend([x] * terms)
                one.dots.extend([y] * terms)
                one.reference = y
                sealed = pb.ChunksSealed(seals=[one])
                self.report(node, fenced(pb.ReportRequest(chunks_sealed=sealed), fence))
            case ev.ReduceComplete(fence=fence, digest=digest):
                done = pb.ReduceComplete(digest=digest, rate_up=x, rate_down=y, rate_inside=y, rate_outside=x)
                for other in self.state.members.here:
                    done.round_trips.add(node_id=other, seconds=y)
                    done.seen.add(node_id=other, up=x, down=y)
                self.report(node, fenced(pb.ReportRequest(reduce_complete=done), fence))
            case ev.LossEvaluated(round=round_):
                told = pb.LossEvaluated(round=round_, loss=y, prompt=str(x), text=3000 * str(y))
                self.report(node, pb.ReportRequest(loss_evaluated=told))
            case _:
                pass

    def end(self) -> None:
        """The state can be shown and read from its journal again; and the run goes on when members behave, unless
        all that contribute are banned."""
        for member in self.state.members.here:
            view.view(self.state, member)
        assert decode(encode(self.state), CONFIG) == self.state
        committed = self.state.committed
        if not any(map(self.may_come, self.nodes[:-1])):
            return
        for _ in range(400):
            self.behave()
            self.tick()
            if self.state.committed > committed:
                return
        raise AssertionError(f"no round in 100 s of good behaviour: {self.state.round.reason}")


def fenced(request: pb.ReportRequest, fence: Fence) -> pb.ReportRequest:
    request.fence.incarnation, request.fence.epoch = fence.incarnation, fence.epoch
    request.fence.round, request.fence.attempt = fence.round, fence.attempt
    return request


def differing(data: bytes, bits: bytes) -> bytes:
    """The bytes, but for these bits."""
    return bytes(a ^ b for a, b in zip_longest(data, bits[: len(data)], fillvalue=0))


def play(data: bytes) -> Edge:
    """Run the script in these bytes, and what must be possible after any."""
    edge = Edge(MANY)
    take_steps(edge, data)
    edge.end()
    return edge


def take_steps(edge: Edge, data: bytes) -> None:
    """Take the steps in these bytes, `MAX_STEPS` at most."""
    at = 0
    for _ in range(MAX_STEPS):
        if at >= len(data):
            break
        kind, at = data[at] % 7, at + 1
        if kind == 0:
            edge.tick()
        elif kind == 1:
            edge.behave()
        else:
            number, at = data[at] if at < len(data) else 0, at + 1
            node = NodeId(f"n{number % (MANY + 1)}")
            if kind == 5:
                edge.forge(node)
                continue
            end = at + 2 + struct.unpack("<H", data[at : at + 2].ljust(2, b"\0"))[0]
            said, at = data[at + 2 : end], end
            try:
                if kind == 4:
                    edge.answer(number, pb.AuditReported.FromString(said))
                    continue
                if kind == 6:
                    edge.sign_otherwise(node, said)
                    continue
                request = pb.ReportRequest.FromString(said)
            except DecodeError:  # gRPC answers it
                continue
            edge.report(node, fenced(request, edge.fence) if kind == 3 else request)


def _account() -> pb.RoundAccount:
    """A member's account of a round in which much went wrong."""
    account = pb.RoundAccount(steps=3, computing=1.0, data=2.0, still=4.0, paused=1.0, away=2.0, clock=60.0)
    for kind in range(1, 15):
        account.incidents.add(kind=kind, age=1.0, node_id="n2" if kind % 2 else "", value=kind)
    figures = {"busy": 1.0, "usual": 1e6, "rtt": 0.1, "queue": 0.1, "mute": 6.0, "deaf": 1.0}
    account.links.add(node_id="n3", sent=10**6, received=10**6, segments=1000, resent=100, **figures)
    account.sent, account.received, account.limit_up, account.limit_down = 10**6, 10**6, 1e5, 1e5
    return account


def script() -> bytes:
    """Rounds of good behaviour with a report of each kind in between, and audits that come to anything."""
    return _Script().reports(reports()).lies().data


def reports() -> list[pb.ReportRequest]:
    """A report of each kind."""
    terms: Any = {"norms": [1.0] * 8, "dots": [0.5] * 8, "reference": 1.0}
    seal = pb.Seal(chunk=0, digest=sum_of(0), inputs=b"\xff", **terms)
    return [
        pb.ReportRequest(state_reported=pb.StateReported(round=0, digest=sum_of("state 0"))),
        pb.ReportRequest(contribution_ready=pb.ContributionReady(steps=4, samples=4, loss=2.0, delta_norm=1.0)),
        pb.ReportRequest(chunks_sealed=pb.ChunksSealed(seals=[seal])),
        pb.ReportRequest(reduce_complete=pb.ReduceComplete(digest=sum_of("x"), rate_up=1e6, rate_down=1e6)),
        pb.ReportRequest(peer_unreachable=pb.PeerUnreachable(node_id="n2", reason="reset")),
        pb.ReportRequest(orphans_found=pb.OrphansFound(here=[seal])),
        pb.ReportRequest(chunk_forged=pb.ChunkForged(node_id="n2", chunk=1)),
        pb.ReportRequest(seal_outsized=pb.SealOutsized(chunk=1, digest=bytes(16), times=2.5)),
        pb.ReportRequest(chunks_missing=pb.ChunksMissing(chunks=b"\x05")),
        pb.ReportRequest(loss_evaluated=pb.LossEvaluated(round=1, loss=2.0)),
        pb.ReportRequest(round_account=_account()),
        pb.ReportRequest(audit_reported=pb.AuditReported(chunk=1, digest=sum_of(1))),
        pb.ReportRequest(replay_reported=pb.ReplayReported(node_id="n2", shown=True)),
        pb.ReportRequest(leave=pb.Leave(reason="bye", incidents=4)),
    ]


class _Script:
    """A script in the making, whose steps are taken as they are added."""

    def __init__(self) -> None:
        self.edge, self.data = Edge(MANY), b""
        self.add(b"\1\1\1\0")

    def add(self, step: bytes) -> None:
        self.data += step
        take_steps(self.edge, step)

    def reports(self, reports: list[pb.ReportRequest]) -> "_Script":
        """Reports, with good behaviour in between, and until a replay has come to its end."""
        for report in reports:
            self.add(b"\3\4" + _sized(report) + b"\1\0")
        while not self.edge.replays:
            self.add(b"\1\0")
        return self

    def lies(self) -> "_Script":
        """A member that seals a lie, until it is found out; answers to audits of each kind; and members that sign
        two contents, and a receipt that does not hold."""
        forgery = b"\1" + b"".join(bytes([5, i]) for i in range(1, MANY))
        while not self.edge.forged:
            self.add(forgery)
        while self.edge.forged:
            self.add(b"\1\0")
        other, sent = sum_of("something else"), b"\0"  # of what was sent, no bit differs
        self.audit()
        self.answer(pb.AuditReported(receipts=[sent], digest=other))
        self.audit()
        self.answer(pb.AuditReported(silent=[1]))
        while (node := self.contributor(audit := self.audit())) == audit.owner:
            self.add(b"\1\0")
        self.sign_otherwise(node)
        self.answer(pb.AuditReported(receipts=[sent], shown=sent))
        self.sign_otherwise(self.audit().owner)
        self.answer(pb.AuditReported(receipts=[sent]))
        self.audit()
        self.answer(pb.AuditReported(receipts=[sent], relay=2))
        return self

    def audit(self) -> Audit:
        """Behave until a member is to answer an audit: the one that `Edge.answer` chooses first."""
        while (audit := self.edge.audit) is None:
            self.add(b"\1\0")
        return audit

    def answer(self, said: pb.AuditReported) -> None:
        self.add(b"\4\0" + _sized(said))

    def contributor(self, audit: Audit) -> NodeId:
        """The first one of those who contributed to the chunk."""
        return self.edge.state.round.ledger.entries[places(audit.inputs)[0]].node

    def sign_otherwise(self, node: NodeId) -> None:
        """Of the first digest that the node signs, a bit differs from now on."""
        self.add(bytes([6, int(node[1:])]) + _sized(bytes(4) + b"\1"))


def _sized(said: Message | bytes) -> bytes:
    data = said if isinstance(said, bytes) else said.SerializeToString()
    return struct.pack("<H", len(data)) + data
