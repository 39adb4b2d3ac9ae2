"""A world in which the coordinator's machine audits members, honest ones and liars: no bytes travel, a content is
its digest, and what an auditor finds is computed from what the others would show it. Keys and signatures are real.

The lies, of which a node may have several:

    seal            it seals something else, of all its chunks
    vast            what it seals so is longer than any delta, and others see that
    no receipt      it gives auditors no receipt
    half receipt    it gives one to every other auditor
    bad receipt     it signs one that lacks an input
    two receipts    it gives every other auditor another one
    deceive first   it gives the auditor that is named first another one, which holds, for another content of its
                    own, and shows it that: of a chunk that it owns, or sums for its region
    deceive last    the same, of the auditor that is named last
    only as relay   it deceives so of no chunk that it owns
    input           it shows another contribution than it sent, signed
    no input        it shows none
    half input      it shows it to every other auditor
    split shield    it shows its contribution to what a partner sealed falsely to half of the honest auditors, or
                    to one more: neither they nor the others are a majority
    shield          it shows none of what a partner sealed falsely
    sum             as a relay it signs something else than its region's mean
    nested sum      as a relay it signs that its region's mean is made of another mean
    longer          its delta is longer than it told, in each chunk
    long            its delta is longer than it told, in one chunk
    norm            it tells so of the first contributor's, of the first chunk that it owns, or in two levels sums
    sum told short  as a relay it tells that the deltas that it averages have no length
    sum of others   as a relay it tells nothing of its own delta, which it averages
    late sum        as a relay it tells what it does when the chunk is sealed
    sum untold      as a relay it tells nothing
    seals unsummed  of what relays did not sum for it it seals means, for which it has no receipt
    no sum          as a relay it signs a mean of contributions of which there is none
    audit           it says that what is well is not
    cover           it says that what a partner sealed, or summed, is well
    invention       it says that somebody signed two contents, without proof
    busy            it says that it came to an audit too late
    slander         it says that the first contributor shows nothing
    mute            it answers no audit
    alarm           it says that what others sealed is too long, chunk by chunk
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

from scenario import sums_of

from atoll.comm.bitmap import bitmap, places
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.outer import OuterConfig
from atoll.comm.config.run import InnerConfig, MembersConfig, ReduceConfig, RoundsConfig, RunConfig
from atoll.comm.config.security import SecurityConfig
from atoll.comm.digest import digest
from atoll.comm.evidence import Consequence, Offence
from atoll.comm.ids import NodeId
from atoll.comm.plan import Fence
from atoll.comm.receipts import InputRecord, Receipt, sign_input, sign_receipt
from atoll.comm.replace import replace
from atoll.comm.signatures import PrivateKey
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.changes import fail_attempt
from atoll.coordinator.state_machine.members import put
from atoll.coordinator.state_machine.state import Audit, Phase, State
from atoll.coordinator.state_machine.step import step

CHUNKS = 16
MAX_STEPS = 400  # of one round; none came near
LATE = 60.0  # seconds after which whoever has not answered an audit is late
Lies = Mapping[NodeId, frozenset[str]]
Reports = dict[int, list[ev.AuditReported]]  # by chunk


@cache
def key_of(node: NodeId) -> PrivateKey:
    return PrivateKey.generate()


def config(audit: str, members: int, norms: bool = False) -> RunConfig:
    return RunConfig(
        model=ModelConfig(seq_len=1),
        inner=InnerConfig(batch_size=1),
        rounds=RoundsConfig(inner_steps=10, quorum=0.5, grace=0.5, ceiling=2.0, collect=20.0, reduce_timeout=60.0),
        members=MembersConfig(start=members, minimum=2, lease=1e6, reconnect=2.0, stall=1e6),
        reduce=ReduceConfig(block=1, chunk=1),
        security=SecurityConfig(audit=audit),
        outer=OuterConfig(clip=norms),
    )


@lru_cache(8)
def reducing(count: int, leaves: int, audit: str, chunks: int, norms: bool) -> State:
    """The state of a run of so many members, the last ones leaves, whose first attempt is about to open."""
    state, now = State(config(audit, count, norms)), 0.0
    nodes = [NodeId(f"n{i + 1}") for i in range(count)]
    events: list[ev.Event] = [ev.Started(1, b"nonce")]
    for i, node in enumerate(nodes):
        leaf = i >= count - leaves
        key = key_of(node).public
        events += [
            ev.Joined(node, 1, str(node), f"{node}:1", f"session of {node}", leaf=leaf, key=key),
            ev.Connected(node, 1),
            ev.LayoutReported(node, 1, chunks, digest(b"layout")),
        ]
    events += [ev.StateReported(node, 1, 0, digest(b"state 0")) for node in (nodes[0], *nodes)]
    for event in events:
        state, _ = step(state, event, now)
    assert state.round.phase is Phase.INNER
    now = 10.0
    for node in nodes:
        state, _ = step(state, ev.StepsReached(node, 1, 1), now)
    for node in nodes[:-1]:
        state, _ = step(state, ready(state, node), now)
    return state


def ready(state: State, node: NodeId) -> ev.ContributionReady:
    return ev.ContributionReady(
        node, 1, state.round.number, ev.Contribution(10, 10, 2.0, 1.0, data.front(state.leases.by_node[node]))
    )


@dataclass
class AuditWorld:
    """One round of one run."""

    nonce: bytes
    lies: Lies = field(default_factory=dict)
    count: int = 8
    leaves: int = 0
    audit: str = "auto"
    chunks: int = CHUNKS
    norms: bool = (
        False  # are told, by owners and relays, and looked at; each chunk of a delta is as long as the others
    )
    levels: int = 1  # 2: the second half of the members is a region of its own, and each region has relays
    decisions: list[ev.Decision] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    published: list[ev.CommitRecord] = field(default_factory=list)
    audited: set[int] = field(default_factory=set)  # chunks
    committed: dict[int, bytes] = field(default_factory=dict)  # digests of the sealed chunks

    def __post_init__(self) -> None:
        before = reducing(self.count, self.leaves, self.audit, self.chunks, self.norms)
        self.state, self.now = replace(before, nonce=self.nonce), 10.0
        self._dealt: tuple[int, tuple[NodeId | None, ...]] = (0, ())
        self.told: set[tuple[NodeId, int | NodeId, int]] = set()
        self.mute: set[tuple[NodeId, int]] = set()
        self.first: dict[tuple[int, int], tuple[NodeId, ...]] = {}  # (chunk, since): who was named first of all
        self.feed(ready(self.state, NodeId(f"n{self.count}")))  # the last one: the first attempt opens
        if self.levels == 2:
            self.divide()

    def divide(self) -> None:
        """Make two regions of the members, with relays by turns."""
        r = self.state.round
        nodes, half = [e.node for e in r.ledger.entries], self.count // 2
        regions = {node: int(i >= half) for i, node in enumerate(nodes)}
        owners = [node for node in r.ledger.owners if node is not None]
        near = [
            [o if regions[o] == g else nodes[g * half + c % half] for c, o in enumerate(owners)] for g in (0, 1)
        ]
        self.state = replace(self.state, round=replace(r, ledger=book.divide(r.ledger, regions, near)))

    def feed(self, event: ev.Event) -> None:
        before = self.state
        self.state, effects = step(before, event, self.now)
        if self.state.committed > before.committed:
            self.committed = {c: seal.digest for c, seal in before.round.ledger.sealed.items()}
        for effect in effects:
            if isinstance(effect, ev.Decision):
                self.decisions.append(effect)
            elif isinstance(effect, ev.Note):
                self.notes.append(effect.sentence)
            elif isinstance(effect, ev.Publish):
                self.published.append(effect.record)

    def run(self) -> "AuditWorld":
        """Play the round to its commit."""
        before = self.state.round.number - 1
        for _ in range(MAX_STEPS):
            if self.state.committed > before:
                return self
            events = list(self.due())
            if not events:
                self.now += 1.0
                events = [ev.Tick()]
            for event in events:
                self.feed(event)
                if self.state.committed > before:
                    return self
        raise AssertionError(f"the round is not committed: {self.state.round.reason}, {self.notes[-3:]}")

    def go_on(self) -> "AuditWorld":
        """Everybody has the state and trains, and the next round's first attempt opens."""
        nodes = tuple(self.state.members.here)
        for node in nodes:
            self.feed(ev.StateReported(node, 1, self.state.committed, digest(b"%d" % self.state.committed)))
        self.now += 10.0
        number = self.state.round.number
        for node in self.state.round.participants:
            self.feed(ev.StepsReached(node, 1, number))
        for node in tuple(self.state.round.participants):
            self.feed(ready(self.state, node))
        self.told = set()
        return self

    def due(self) -> Iterator[ev.Event]:
        """What members say now."""
        r = self.state.round
        if r.plan is None:
            return
        ledger, here = r.ledger, self.state.members.here
        everybody = [i for i, e in enumerate(ledger.entries) if e.contribution is not None and not e.gone]
        for c in ledger.unsealed:
            owner = ledger.owners[c]
            if owner in here and owner is not None:
                fence = r.plan.fence._replace(attempt=ledger.since[c])
                sealed = self.lie(c) if "seal" in self.lies_of(owner) else self.mean(c, everybody)
                seals = ((c, sealed, bitmap(everybody, len(ledger.entries))),)
                told = (self.told_norms(c, everybody, owner),) if self.norms else ()
                sums = list(self.sums(owner, fence, seals)) if self.norms else []
                late = [said for said in sums if "late sum" in self.lies_of(said.node)]
                yield from (said for said in sums if said not in late)
                yield ev.ChunksSealed(owner, 1, fence, seals, told)
                yield from late
        yield from self.alarms()
        for c, audit in list(r.audits.items()):
            self.audited.add(c)
            self.first.setdefault((c, audit.since), tuple(audit.named))
            for node in audit.named:
                if node not in audit.voices and "mute" not in self.lies_of(node):
                    yield self.finding(node, audit)
        if ledger.complete:
            for node in ledger.members:
                if node not in r.completions and node in here:
                    yield ev.ReduceComplete(node, 1, r.plan.fence, ledger.root, 1, 1)

    @property
    def dealt(self) -> tuple[NodeId | None, ...]:
        """The chunks' owners in the first attempt: a delta is what it is whoever owns its chunks later."""
        round_, owners = self._dealt
        if round_ != self.state.round.number:
            owners = self.state.round.ledger.owners
            self._dealt = self.state.round.number, owners
        return owners

    def norm(self, place: int, c: int, by: NodeId | None = None) -> float:
        """The norm of a chunk of a delta, as it is, or as `by` tells it."""
        owners, maker = self.dealt, self.node(place)
        long = "long" in self.lies_of(maker) and c == next(i for i, owner in enumerate(owners) if owner != maker)
        false = by is not None and place == 0 and "norm" in self.lies_of(by)
        makers = owners if self.levels == 1 else [self.node(self.relay(i)[0]) for i in range(len(owners))]
        told = (i for i, node in enumerate(makers) if node == by)
        if "longer" in self.lies_of(maker):
            return 2.0 * math.sqrt(1.0 / self.chunks)
        return 3.0 if long or (false and c == next(told, -1)) else math.sqrt(1.0 / self.chunks)

    def told_norms(self, c: int, inputs: Sequence[int], by: NodeId | None = None) -> bytes:
        """The norms of a seal's terms."""
        ledger = self.state.round.ledger
        direct, relays = book.seal_terms(ledger, c, bitmap(inputs, len(ledger.entries)))
        norms = {i: self.norm(i, c, by) for i in direct} | dict.fromkeys(relays, math.sqrt(1.0 / self.chunks))
        return struct.pack(f"<{len(norms)}f", *(norms[i] for i in sorted(norms)))

    def sum_norms(self, c: int, inputs: bytes, by: NodeId | None = None) -> bytes:
        norms = [self.norm(i, c, by) for i in places(inputs)]
        return struct.pack(f"<{len(norms)}f", *norms)

    def sums(
        self, owner: NodeId, fence: Fence, seals: tuple[tuple[int, bytes, bytes], ...]
    ) -> Iterator[ev.ChunksSealed]:
        """What relays tell of what they averaged for an owner."""
        for relay, sums in sums_of(self.state.round.ledger, seals).items():
            lies, place = self.lies_of(relay), self.place(relay)
            sums = tuple((c, inputs, self.sum_norms(c, inputs, relay)) for c, inputs, _ in sums)
            if "sum of others" in lies:  # and its own delta is not among them
                size = len(self.state.round.ledger.regions)
                sums = tuple(
                    (c, bitmap([i for i in places(inputs) if i != place], size), norms[4:])
                    for c, inputs, norms in sums
                )
            elif "sum told short" in lies:
                sums = tuple((c, inputs, bytes(len(norms))) for c, inputs, norms in sums)
            if "sum untold" not in lies and "seals unsummed" not in self.lies_of(owner):
                yield ev.ChunksSealed(relay, 1, fence, (), sums=sums)

    def alarms(self) -> Iterator[ev.Event]:
        """Who says that a sealed chunk is too long, once for each owner; liars for each chunk."""
        r = self.state.round
        assert r.plan is not None
        for c, seal in r.ledger.sealed.items():
            since, by = r.ledger.since[c], seal.by
            for node in r.ledger.members:
                lies = self.lies_of(node)
                vast = "vast" in self.lies_of(by) and seal.digest == self.lie(c) and not lies & {"cover", "mute"}
                key = (node, c if "alarm" in lies else by, since)
                if node != by and (vast or "alarm" in lies) and key not in self.told:
                    self.told.add(key)
                    yield ev.SealOutsized(node, 1, r.plan.fence._replace(attempt=since), c, seal.digest, 1e30)

    def lies_of(self, node: NodeId) -> frozenset[str]:
        return self.lies.get(node, frozenset())

    # Contents

    def sent(self, place: int, c: int) -> bytes:
        return digest(b"input of %d to %d" % (place, c))

    def lie(self, c: int) -> bytes:
        return digest(b"-12345 for %d" % c)

    def mean(self, c: int, inputs: list[int]) -> bytes:
        """What an honest owner seals of what it is given."""
        relay, summed = self.relay(c)
        lies = self.lies_of(self.node(relay)) if summed else frozenset[str]()
        given = [self.sent(place, c) for place in inputs if place not in summed]
        return digest(b"mean", *given, *([self.sum(relay, c, "sum" in lies)] if summed else []))

    def relay(self, c: int) -> tuple[int, tuple[int, ...]]:
        """The place of whom the chunk's owner is given a mean by, and the places in it; no places: it is given
        none."""
        ledger = self.state.round.ledger
        owner = ledger.owners[c]
        if c not in ledger.layered or owner is None:
            return -1, ()
        other = 1 - ledger.regions[self.place(owner)]
        return ledger.relays[other][c], tuple(i for i, g in enumerate(ledger.regions) if g == other)

    def sum(self, relay: int, c: int, lie: bool) -> bytes:
        return digest(b"a lie" if lie else b"sum", *(self.sent(place, c) for place in self.relay(c)[1]))

    def node(self, place: int) -> NodeId:
        return self.state.round.ledger.entries[place].node

    def place(self, node: NodeId) -> int:
        return next(i for i, e in enumerate(self.state.round.ledger.entries) if e.node == node and not e.gone)

    def record(self, place: int, c: int, content: bytes) -> InputRecord:
        return sign_input(key_of(self.node(place)), self.state.round.salt, c, place, content)

    def deceived(self, maker: int, audit: Audit, auditor: NodeId) -> bool:
        """Whether the member at the place `maker`, which owns the chunk or sums for it, deceives the auditor."""
        lies, named = self.lies_of(self.node(maker)), self.first.get((audit.chunk, audit.since), ())
        if "only as relay" in lies and self.node(maker) == audit.owner:
            return False
        return bool(named) and (
            ("deceive first" in lies and auditor == named[0]) or ("deceive last" in lies and auditor == named[-1])
        )

    def records(self, maker: int, audit: Audit, inputs: Sequence[int], auditor: NodeId) -> list[InputRecord]:
        """What goes into a receipt of the member at the place `maker`, as the auditor is given it."""
        deceived, c = self.deceived(maker, audit, auditor), audit.chunk
        content = {place: self.sent(place, c) for place in inputs}
        if deceived:
            content[maker] = digest(b"what nobody merged")
        return [self.record(place, c, content[place]) for place in inputs]

    def receipt(self, audit: Audit, inputs: list[int], auditor: NodeId) -> Receipt:
        lies, c, owner = self.lies_of(audit.owner), audit.chunk, self.place(audit.owner)
        relay, summed = self.relay(c)
        records = self.records(owner, audit, [place for place in inputs if place not in summed], auditor)
        if summed:
            sum_ = self.sum(relay, c, "sum" in self.lies_of(self.node(relay)))
            records.append(sign_input(key_of(self.node(relay)), self.state.round.salt, c, relay, sum_, summed))
            records.sort(key=lambda record: record.place)
        if "bad receipt" in lies or ("two receipts" in lies and int(auditor[1:]) % 2):
            records = records[1:]
        salt, mean = self.state.round.salt, audit.digest
        return sign_receipt(key_of(audit.owner), salt, c, audit.since, owner, tuple(records), mean)

    def relayed(self, audit: Audit, auditor: NodeId) -> list[bytes]:
        """The receipt of the relay, if there is one."""
        c, salt = audit.chunk, self.state.round.salt
        relay, summed = self.relay(c)
        if not summed:
            return []
        key, lies = key_of(self.node(relay)), self.lies_of(self.node(relay))
        sum_ = self.sum(relay, c, "sum" in lies)
        if "nested sum" in lies:
            records = [sign_input(key, salt, c, relay, sum_, summed)]
        else:
            records = self.records(relay, audit, summed, auditor)
        return [sign_receipt(key, salt, c, audit.since, relay, tuple(records), sum_).pack()]

    # What an auditor finds

    def finding(self, node: NodeId, audit: Audit) -> ev.AuditReported:
        lies, c, r = self.lies_of(node), audit.chunk, self.state.round
        assert r.plan is not None
        fence = r.plan.fence._replace(attempt=audit.since)

        def said(found: bytes = b"", **rest: object) -> ev.AuditReported:
            told = self.found_norms(audit) if found and self.norms else {}
            return replace(ev.AuditReported(node, 1, fence, c, found), **told | rest)  # type: ignore[arg-type]

        if "busy" in lies:
            return said(busy=True)
        inputs = list(places(audit.inputs))
        mean = self.mean(c, inputs)
        relay, summed = self.relay(c)
        false_sum = summed and self.lies_of(self.node(relay)) & {"sum", "nested sum", "no sum"}
        if "cover" in lies and (false_sum or "seal" in self.lies_of(audit.owner)):
            return said(audit.digest)
        owner = self.lies_of(audit.owner)
        if owner & {"no receipt", "seals unsummed"} or ("half receipt" in owner and int(node[1:]) % 2):
            return said(silent=(self.place(audit.owner),))
        honest = not lies & {"audit", "invention", "slander"}
        liars = [
            i for i in inputs if self.shows_no(self.node(i), node, owner) or "input" in self.lies_of(self.node(i))
        ]
        liars = [i for i in liars if self.node(i) != node]
        by_owner = self.deceived(self.place(audit.owner), audit, node)
        by_relay = bool(summed) and self.deceived(relay, audit, node)
        if (
            honest
            and not by_owner
            and not by_relay
            and not false_sum
            and not liars
            and mean == audit.digest
            and not owner & {"bad receipt", "two receipts"}
        ):
            return said(mean, receipts=(self.receipt(audit, inputs, node).pack(), *self.relayed(audit, node)))
        receipt = self.receipt(audit, inputs, node).pack()
        if "audit" in lies:
            return said(digest(b"nonsense"), receipts=(receipt,))
        if "slander" in lies:
            return said(receipts=(receipt,), silent=(inputs[0],))
        if "invention" in lies:
            forged = self.record(inputs[0], c, digest(b"never"))
            shown = replace(forged, signature=self.record(inputs[0], c, self.sent(0, c)).signature)
            return said(receipts=(receipt,), shown=shown.pack())
        if owner & {"bad receipt", "two receipts"}:
            return said(receipts=(receipt,))
        if false_sum and "nested sum" in false_sum:
            return said(receipts=(receipt, *self.relayed(audit, node)))
        if false_sum:
            return said(receipts=(receipt, *self.relayed(audit, node)), relay=relay)
        for place in liars:
            if "input" in self.lies_of(self.node(place)):
                shown = self.record(place, c, digest(b"another"))
                return said(receipts=(receipt,), shown=shown.pack())
            return said(receipts=(receipt,), silent=(place,))
        if by_relay:
            return said(receipts=(receipt, *self.relayed(audit, node)), relay=relay)
        return said(digest(b"deceived", mean) if by_owner else mean, receipts=(receipt,))

    def found_norms(self, audit: Audit) -> dict[str, object]:
        """The norms that an auditor finds."""
        c = audit.chunk
        found = sums_of(self.state.round.ledger, ((c, audit.digest, audit.inputs),)).items()
        sums = tuple((self.place(relay), self.sum_norms(c, inputs)) for relay, ((_, inputs, _),) in found)
        return {"norms": self.told_norms(c, list(places(audit.inputs))), "sums": sums}

    def shows_no(self, node: NodeId, auditor: NodeId, owner: frozenset[str]) -> bool:
        """Whether a member shows its contributions to no auditor of what an owner with these lies sealed."""
        lies = self.lies_of(node)
        if "shield" in lies and "seal" in owner:
            return True
        if "split shield" in lies and "seal" in owner:
            honest = [
                n for n in self.state.members.here if not self.lies_of(n) and not self.state.members.here[n].leaf
            ]
            return auditor in honest[len(honest) - len(honest) // 2 :]
        return "no input" in lies or ("half input" in lies and int(auditor[1:]) % 2 == 0)

    # What came of it

    def charged(self) -> dict[NodeId, set[Offence]]:
        found: dict[NodeId, set[Offence]] = {}
        for decision in self.decisions:
            found.setdefault(decision.node, set()).add(decision.evidence.offence)
        return found

    def convicted(self) -> set[NodeId]:
        return {d.node for d in self.decisions if d.consequence is Consequence.BANNED}

    def wrong(self) -> set[int]:
        """Chunks that were committed as no honest owner would have sealed them."""
        assert len(self.committed) == self.chunks
        return {c for c, sealed in self.committed.items() if sealed == self.lie(c)}


def liar(node: int, *lies: str) -> dict[NodeId, frozenset[str]]:
    return {NodeId(f"n{node}"): frozenset(lies)}


def nonces(first: int, count: int) -> Iterator[bytes]:
    return (b"%d" % i for i in range(first, first + count))


def caught_at_once(lies: Lies, count: int = 8, leaves: int = 0) -> list[AuditWorld]:
    """Worlds in which every chunk is audited."""
    worlds = [AuditWorld(nonce, lies, count, leaves, "1000").run() for nonce in nonces(0, 3)]
    for world in worlds:
        assert world.charged().keys() <= lies.keys(), (world.charged(), world.notes)
    return worlds


def sealed_by_all(world: AuditWorld, besides: NodeId | None = None) -> None:
    """Feed what owners seal."""
    for event in list(world.due()):
        if isinstance(event, ev.ChunksSealed) and event.node != besides:
            world.feed(event)


def put_exchanged(world: AuditWorld, *besides: NodeId) -> None:
    """Make all but these members that were in exchanges before."""
    here = world.state.members.here
    new = (replace(member, exchanged=node not in besides) for node, member in here.items())
    world.state = replace(world.state, members=put(world.state.members, *new))


def between_two_attempts(world: AuditWorld, pause: float = 1.0) -> Reports:
    """Have every chunk sealed, and the attempt fail; the next one follows after so many seconds. Returns what
    auditors found, by chunk: it is on its way."""
    sealed_by_all(world)
    audits = world.state.round.audits.items()
    assert len(audits) == world.chunks
    found = {c: [world.finding(node, audit) for node in audit.named] for c, audit in audits}
    failed = fail_attempt(world.state, "a test says so", world.now)
    world.state = replace(failed, round=replace(failed.round, paused_until=world.now + pause))
    return found
