"""A world in which a `ReduceProtocol` meets every order of events that a seed can think of.

`World` is what `Reduction`, `Peers` and the coordinator are to a `ReduceProtocol`: frames between two members
come in any order (several links lead to one peer), links break and take frames with them, plans come late or are
skipped, members die, join and come back, merges take their time. In two of five worlds chunks are reduced in two
levels. What must hold is checked after every event.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from atoll.comm.allreduce import protocol
from atoll.comm.allreduce.effects import (
    FreeContributions,
    FreeSealed,
    MergeChunk,
    ReportComplete,
    ReportOrphans,
    ReportSeal,
    SendFrame,
    SumRegion,
)
from atoll.comm.digest import digest, root
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import NOBODY, Plan, PlanMember
from atoll.comm.transport.frames import FrameKind

EVENTS_LIMIT = 30_000  # of one world; none came near


@dataclass(frozen=True)
class Frame:
    sender: int  # a life
    node: NodeId  # of the sender
    to: int  # a life
    kind: FrameKind
    chunk: int
    since: int
    place: int  # of the sender, in its plan
    data: Any


@dataclass
class Entry:
    """A place in the plan."""

    life: int
    node: NodeId
    weight: float
    leaf: bool
    gone: bool = False


Partial = tuple[tuple[int, ...], tuple[bytes, ...]]  # places, and their deltas


@dataclass
class Life:
    """A member from its start to its death: what `Reduction` and `Peers` keep for it."""

    life: int
    node: NodeId
    weight: float
    leaf: bool
    liar: bool
    exchange: Any  # a ReduceProtocol, or a mutant of it
    alive: bool = True
    noticed: bool = False  # its death, by the coordinator
    inbox: dict[tuple[int, int], tuple[bytes, ...]] = field(default_factory=dict)  # deltas
    partials: dict[int, Partial] = field(default_factory=dict)
    sealed: dict[int, bytes] = field(default_factory=dict)
    merges: list[Any] = field(default_factory=list)
    outbox: dict[tuple[NodeId, FrameKind, int, int], None] = field(default_factory=dict)
    outgoing: list[tuple[Plan, Any]] = field(default_factory=list)  # on its way to the coordinator, in order
    early: list[Frame] = field(default_factory=list)  # frames whose sender has a newer plan


class World:
    def __init__(self, seed: int, module: Any = protocol) -> None:
        self.random, self.x = Random(seed), module
        r = self.random
        self.chunks, self.window = r.randint(6, 20), r.choice((1, 1, 2, 3, 8))
        self.lives: list[Life] = []
        self.entries: list[Entry] = []
        self.attempt = 0
        self.owners, self.since = [-1] * self.chunks, [1] * self.chunks
        self.ledger: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.contents: dict[bytes, list[bytes]] = {}  # the deltas in a sealed chunk, by its digest
        self.levels = Random(seed) if seed % 5 in (0, 3) else None
        self.regions: list[int] = []
        self.relays: list[list[int]] = []
        self.layered: set[int] = set()
        self.reports: dict[int, dict[int, bytes]] = {}  # of orphans, by life
        self.roots: dict[int, tuple[int, bytes]] = {}  # (attempt, root) of those that hold everything, by life
        self.flying: list[Frame] = []
        self.stalled: list[Frame] = []  # the same, on links that are slow
        self.left_out: int | None = None
        self.budget = dict.fromkeys(("kill", "join", "back", "leave out"), r.randint(0, 2)) | {
            "break": r.choice((0, 3, 12)),
            "pull": r.randint(0, 8),
        }
        nodes = r.randint(3, 6)
        liar = r.randrange(nodes * 8)
        for i in range(nodes):
            weight = 0.0 if i == 2 and r.random() < 0.3 else r.choice((1.0, 2.5))
            self.start(NodeId(f"n{i}"), weight, leaf=i > 2 and r.random() < 0.4, liar=i == liar and i > 0)
        self.reopen()

    # The coordinator

    def start(self, node: NodeId, weight: float, leaf: bool, liar: bool = False) -> Life:
        life = Life(
            len(self.lives), node, weight, leaf, liar, self.x.ReduceProtocol(node, self.chunks, self.window)
        )
        self.lives.append(life)
        return life

    @property
    def here(self) -> list[Entry]:
        return [e for e in self.entries if not e.gone]

    def reopen(self) -> None:
        """The next attempt, among those who live, by what the coordinator knows."""
        self.attempt += 1
        out = {w.life for w in self.lives if w.noticed} | {self.left_out}
        for e in self.entries:
            e.gone = e.gone or e.life in out
        places, known = {e.life for e in self.here}, {e.node for e in self.entries if e.weight}
        new = [w for w in self.lives if w.life not in places and not w.noticed and w.life != self.left_out]
        returned = any(w.node in known for w in new)
        self.entries += [Entry(w.life, w.node, w.weight, w.leaf) for w in new]
        able = [i for i, e in enumerate(self.entries) if not e.gone and not e.leaf]
        for c, owner in enumerate(self.owners):
            if owner == NOBODY or owner < 0 or self.entries[owner].gone:
                self.owners[c] = NOBODY if c in self.ledger else self.random.choice(able)
                self.since[c] = self.attempt
                self.layered.discard(c)
        for c in sorted(self.layered):
            if (returned and c not in self.ledger) or any(self.entries[row[c]].gone for row in self.relays):
                self.since[c] = self.attempt
                self.layered.discard(c)
        if self.attempt == 1 and self.levels is not None:
            self.divide(self.levels, able)
        self.publish()

    def divide(self, r: Random, able: list[int]) -> None:
        """Into regions, which have one member at least that can be dialled."""
        count = r.randint(2, min(3, len(able)))
        heads = r.sample(able, count)
        self.regions = [heads.index(i) if i in heads else r.randrange(count) for i in range(len(self.entries))]
        for g in range(count):
            mine = [i for i in able if self.regions[i] == g]
            row = [o if o in mine else r.choice(mine) for o in self.owners]
            self.relays.append(row)
        self.layered = {c for c in range(self.chunks) if r.random() < 0.85}

    def adopt(self) -> None:
        """Everybody told which orphans are there: give them to holders, or reopen them."""
        self.attempt += 1
        able = [i for i, e in enumerate(self.entries) if not e.gone and not e.leaf]
        for c in [c for c, owner in enumerate(self.owners) if owner == NOBODY]:
            wanted = self.ledger[c][0]
            holders = [i for i in able if self.reports.get(self.entries[i].life, {}).get(c) == wanted]
            if not holders:
                del self.ledger[c]
            self.owners[c] = self.random.choice(holders or able)
            self.since[c] = self.attempt
        self.publish()

    def publish(self) -> None:
        self.reports.clear()
        members = tuple(
            PlanMember(e.node, f"life{e.life}:1", e.weight, gone=e.gone, leaf=e.leaf) for e in self.entries
        )
        kept = frozenset(self.ledger)
        self.plan = Plan(
            *(Incarnation(1), Epoch(1), Round(1), self.attempt, members),
            *(tuple(self.owners), tuple(self.since), kept),
            *(tuple(self.regions), tuple(map(tuple, self.relays)), frozenset(self.layered)),
        )
        self.plan.validate()

    def hear(self, life: Life) -> None:
        plan, report = life.outgoing.pop(0)
        match report:
            case ReportSeal(c, since, digest_, inputs):
                owner = self.owners[c]
                owns = owner != NOBODY and self.entries[owner].life == life.life and self.since[c] == since
                if owns and not self.entries[owner].gone and c not in self.ledger:
                    self.ledger[c] = digest_, inputs
            case ReportOrphans(here):
                if plan.attempt == self.attempt:
                    self.reports[life.life] = dict(here)
                    if NOBODY in self.owners and all(e.life in self.reports for e in self.here if e.weight):
                        self.adopt()
            case ReportComplete(root_):
                self.roots[life.life] = plan.attempt, root_

    @property
    def over(self) -> bool:
        newest = max(self.since)
        return (
            len(self.ledger) == self.chunks
            and not any(not w.alive and not w.noticed for w in self.lives)
            and all(self.roots.get(e.life, (0, b""))[0] >= newest for e in self.here if e.weight)
        )

    # The members

    def learn(self, life: Life) -> None:
        """The newest plan comes to a member."""
        self.do(life, life.exchange.replan(self.plan))
        frames, life.early = life.early, []
        for frame in frames:
            self.deliver(frame)

    def do(self, life: Life, effects: list[Any]) -> None:
        plan = life.exchange.plan
        contributors = {i for i, m in enumerate(plan.members) if m.weight and not m.gone} if plan else set()
        for effect in effects:
            match effect:
                case SendFrame(node, kind, c, since):
                    to = plan.members[plan.index(node)]
                    assert node != life.node and not (to.leaf and life.leaf), f"{effect}: nobody to send it to"
                    self.post(life, node, kind, c, since)
                case SumRegion(c, since, inputs):
                    region = {plan.region(i) for i in inputs}
                    assert region == {plan.region(plan.index(life.node))}, f"{effect} of several regions"
                    mine = {i for i in contributors if plan.region(i) in region}
                    assert mine <= set(inputs), f"{effect} too soon"
                    life.merges.append(effect)
                case MergeChunk(c, since, inputs):
                    assert contributors <= set(inputs), f"{effect} without all living contributors"
                    nodes = [plan.members[i].node for i in inputs]
                    assert len(set(nodes)) == len(nodes), f"{effect} has a node twice"
                    life.merges.append(effect)
                case FreeContributions(c):
                    life.inbox = {key: data for key, data in life.inbox.items() if key[0] != c}
                    life.partials.pop(c, None)
                case FreeSealed(c):
                    life.sealed.pop(c, None)
                case _:
                    life.outgoing.append((plan, effect))

    def post(self, life: Life, node: NodeId, kind: FrameKind, c: int = 0, since: int = 0) -> None:
        life.outbox[node, kind, c, since] = None

    def target(self, life: Life, node: NodeId) -> Life | None:
        found = [w for w in self.lives if w.node == node and w.alive]
        return found[0] if found and not (found[0].leaf and life.leaf) else None

    def transmit(self, life: Life, waiting: tuple[NodeId, FrameKind, int, int]) -> None:
        del life.outbox[waiting]
        node, kind, c, since = waiting
        to = self.target(life, node)
        assert to is not None
        data: Any = None
        match kind:
            case FrameKind.CONTRIBUTION:
                data = (delta(life.life, c),)
            case FrameKind.PARTIAL:
                if (data := life.partials.get(c)) is None:
                    return
            case FrameKind.SEALED:
                if (data := life.sealed.get(c)) is None:
                    return
            case FrameKind.RESYNC:
                data, since = life.exchange.resync_state(node), life.exchange.plan.attempt
        place = life.exchange.plan.index(life.node)
        link = self.stalled if self.random.random() < 0.04 else self.flying
        link.append(Frame(life.life, life.node, to.life, kind, c, since, place, data))

    def deliver(self, frame: Frame) -> None:
        life = self.lives[frame.to]
        x, node, kind, c, since = life.exchange, frame.node, frame.kind, frame.chunk, frame.since
        if x.plan is None:  # its reduce has not begun
            life.early.append(frame)
            return
        if kind is not FrameKind.RESYNC:
            verdict = x.verdict(node, frame.place, kind, c, since).value
            if verdict == "hold":
                life.early.append(frame)
            if verdict != "take":
                return
        match kind:
            case FrameKind.CONTRIBUTION:
                place = x.plan.index(node)
                assert self.entries[place].life == frame.sender, "the contribution of another life"
                life.inbox[c, place] = frame.data
                self.do(life, x.contribution_arrived(node, c))
            case FrameKind.PARTIAL:
                inputs, deltas = frame.data
                effects = x.region_sum_arrived(node, c, inputs)
                assert effects is not None, f"the sum of {inputs} was refused"
                life.inbox[c, x.plan.index(node)] = deltas
                self.do(life, effects)
            case FrameKind.SEALED:
                life.sealed[c] = frame.data
                self.do(life, x.sealed_arrived(c, digest(frame.data)))
            case FrameKind.MERGED:
                self.do(life, x.peer_merged(node, c))
            case FrameKind.WANT:
                self.do(life, x.chunk_wanted(node, c))
            case FrameKind.LACK:
                self.do(life, x.chunk_lacked(node, c))
            case FrameKind.RESYNC:
                self.do(life, x.resync(node, since, *frame.data))
                if c:
                    self.post(life, node, FrameKind.RESYNC)

    def merge(self, life: Life, order: Any) -> None:
        """A merge ends."""
        life.merges.remove(order)
        c, since, inputs = order.chunk, order.since, order.inputs
        total = isinstance(order, MergeChunk)
        sums = dict(order.sums) if total else {}
        inside = {i for listed in sums.values() for i in listed}
        terms: list[bytes] = []
        for i in [*(i for i in inputs if i not in inside), *sums]:
            mine = self.entries[i].life == life.life
            if not mine and (c, i) not in life.inbox:
                void = (
                    life.exchange.chunk_merged(c, since, inputs, b"")
                    if total
                    else life.exchange.region_summed(c, since, inputs)
                )
                assert void == [], f"{order} without its inputs"
                return
            terms += (delta(life.life, c),) if mine else life.inbox[c, i]
            if not mine and self.lives[self.entries[i].life].liar:
                self.refuse(life, c, since, i)
                return
        if not total:
            effects = life.exchange.region_summed(c, since, inputs)
            self.do(life, effects)
            if effects:
                life.partials[c] = inputs, tuple(terms)
            return
        payload = repr((c, life.life, since, inputs, terms)).encode()
        effects = life.exchange.chunk_merged(c, since, inputs, digest(payload))
        if effects:
            life.sealed[c] = payload
            self.contents[digest(payload)] = terms
        self.do(life, effects)

    def refuse(self, life: Life, c: int, since: int, place: int) -> None:
        if (effects := life.exchange.contribution_refused(c, since, place)) is not None:
            life.inbox.pop((c, place), None)
            self.do(life, effects)
        self.kill(self.lives[self.entries[place].life])

    # What happens

    def kill(self, life: Life) -> None:
        """Some of what it sent still comes; what was for it does not."""
        life.alive = False
        life.merges, life.early, life.outbox = [], [], {}
        for _ in range(self.random.randint(0, len(life.outgoing))):
            self.hear(life)
        life.outgoing.clear()
        keep = self.random.random()
        self.lose(lambda f: f.to == life.life or (f.sender == life.life and self.random.random() > keep))

    def fault(self) -> None:
        alive = [w for w in self.lives if w.alive]
        nodes = {w.node for w in alive}
        dead = [w for w in self.lives if w.noticed and w.node not in nodes]
        kind = self.random.choice([k for k, n in self.budget.items() if n])
        if kind == "back" and not dead:
            return
        self.budget[kind] -= 1
        life = self.random.choice(alive)
        solid = [w for w in alive if w.weight and not w.leaf and not w.liar and w.life != self.left_out]
        spare = life not in solid or len(solid) > 2
        match kind:
            case "kill" if spare:
                self.kill(life)
            case "join":
                self.start(NodeId(f"n{len(self.lives)}"), self.random.choice((1.0, 3.0, 0.0)), False)
                self.reopen()
            case "back":
                old = self.random.choice(dead)
                for before in self.lives:  # that it is here again says it
                    before.noticed = before.noticed or before.node == old.node
                new = self.start(old.node, old.weight, old.leaf)
                self.reopen()
                for other in alive:
                    if other.exchange.plan and self.target(other, new.node) and self.random.random() < 0.5:
                        self.post(other, new.node, FrameKind.RESYNC, 1)
            case "leave out" if spare and self.left_out is None:
                self.left_out = life.life
                self.reopen()
            case "break":
                other = self.random.choice(alive)
                if other is not life and not (other.leaf and life.leaf):
                    self.break_link(life, other)
            case "pull" if life.exchange.plan and (lacking := life.exchange.missing()):
                self.do(life, life.exchange.pull(self.random.choice(lacking)))

    def break_link(self, a: Life, b: Life) -> None:
        """One of the links between two members breaks, and takes with it what was on it."""
        share = self.random.random()
        self.lose(lambda f: {f.sender, f.to} == {a.life, b.life} and self.random.random() < share)
        for x, y in ((a, b), (b, a)):
            if x.exchange.plan is not None:
                self.post(x, y.node, FrameKind.RESYNC, 1)

    def lose(self, lost: Callable[[Frame], bool]) -> None:
        for frames in (self.flying, self.stalled, *(w.early for w in self.lives)):
            frames[:] = [f for f in frames if not lost(f)]

    def events(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """What can happen next, with weights."""
        r, alive = self.random, [w for w in self.lives if w.alive]
        if self.flying:
            yield 4, lambda: self.arrive(self.flying)
        if self.stalled:
            yield 0.1, lambda: self.arrive(self.stalled)
        if ready := [(w, key) for w in alive for key in w.outbox if self.target(w, key[0])]:
            yield 4, lambda: self.transmit(*r.choice(ready))
        if merging := [(w, m) for w in alive for m in w.merges]:
            yield 1, lambda: self.merge(*r.choice(merging))
        if telling := [w for w in alive if w.outgoing]:
            yield 1, lambda: self.hear(r.choice(telling))
        places = {e.life for e in self.here}
        late = [w for w in alive if w.life in places and w.exchange.plan is not self.plan]
        if late:
            yield 0.3, lambda: self.learn(r.choice(late))
        if dead := [w for w in self.lives if not w.alive and not w.noticed]:
            yield 0.1, lambda: self.notice(r.choice(dead))
        if self.left_out is not None:
            yield 0.1, self.let_in
        if any(self.budget.values()):
            yield 0.05, self.fault

    def arrive(self, frames: list[Frame]) -> None:
        i = self.random.randrange(len(frames))
        frames[i], frames[-1] = frames[-1], frames[i]
        self.deliver(frames.pop())

    def notice(self, life: Life) -> None:
        life.noticed = True
        if self.left_out == life.life:
            self.left_out = None
        self.reopen()

    def let_in(self) -> None:
        self.left_out = None
        self.reopen()

    def check(self) -> None:
        for life in self.lives:
            count: dict[int, int] = {}
            for _, place in life.inbox:
                count[place] = count.get(place, 0) + 1
            most = self.window * (2 if self.regions else 1)  # chunks may start anew at the same owner
            assert max(count.values(), default=0) <= most, f"{life.node} holds {count}"

    def run(self) -> None:
        for _ in range(EVENTS_LIMIT):
            if self.over:
                break
            events = list(self.events())
            assert events, f"nothing happens any more; {self.waiting()}"
            weights = [weight for weight, _ in events]
            self.random.choices([event for _, event in events], weights)[0]()
            self.check()
        else:
            raise AssertionError(f"no end; {self.waiting()}")
        self.verify()

    def waiting(self) -> str:
        lives = {e.life for e in self.here}
        return "; ".join(
            f"{w.node} (life {w.life}) waits for {w.exchange.dues()}"
            for w in self.lives
            if w.life in lives and w.exchange.plan
        )

    def verify(self) -> None:
        wanted = [self.ledger[c][0] for c in range(self.chunks)]
        for e in self.here:
            if e.weight:
                life = self.lives[e.life]
                assert life.exchange.digests == wanted, f"{e.node} holds other digests"
                assert [digest(life.sealed[c]) for c in range(self.chunks)] == wanted, (
                    f"{e.node} holds other bytes"
                )
                assert self.roots[e.life][1] == root(wanted), f"{e.node} told of another root"
        for c, (sum_, inputs) in self.ledger.items():
            listed = sorted(delta(self.entries[i].life, c) for i in inputs)
            assert sorted(self.contents[sum_]) == listed, f"chunk {c} is not the sum of what its seal lists"
            nodes = [self.entries[i].node for i in inputs]
            assert len(set(nodes)) == len(nodes), "a node is in it twice"


def delta(life: int, c: int) -> bytes:
    return f"delta of life {life}, chunk {c}".encode()
