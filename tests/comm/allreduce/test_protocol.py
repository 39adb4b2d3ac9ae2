"""The protocol of one round's reduce, under every order of events that a seed can think of.

`World` is what `Reduction`, `Peers` and the coordinator are to a `ReduceProtocol`: frames between two members
come in any order (several links lead to one peer), links break and take frames with them, plans come late or are
skipped, members die, join and come back, merges take their time. In two of five worlds chunks are reduced in two
levels. What must hold is checked after every event.
"""

import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from atoll.comm.allreduce import protocol
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
from atoll.comm.allreduce.protocol import ReduceProtocol
from atoll.comm.bitmap import bitmap
from atoll.comm.digest import digest, root
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import NOBODY, Plan, PlanMember
from atoll.comm.transport.frames import FrameKind

FIRST, SEEDS = int(os.environ.get("ATOLL_FUZZ_FIRST", "0")), int(os.environ.get("ATOLL_EXCHANGE_SEEDS", "250"))
EVENTS = 30_000  # of one world; none came near


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
    told: list[tuple[Plan, Any]] = field(default_factory=list)  # on its way to the coordinator, in order
    held: list[Frame] = field(default_factory=list)  # whose sender has a newer plan


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
        plan, told = life.told.pop(0)
        match told:
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
        held, life.held = life.held, []
        for frame in held:
            self.deliver(frame)

    def do(self, life: Life, effects: list[Any]) -> None:
        plan = life.exchange.plan
        for effect in effects:
            match effect:
                case SendFrame(node, kind, c, since):
                    to = plan.members[plan.index(node)]
                    assert node != life.node and not (to.leaf and life.leaf), f"{effect}: nobody to send it to"
                    self.post(life, node, kind, c, since)
                case SumRegion(c, since, inputs):
                    region = {plan.region(i) for i in inputs}
                    assert region == {plan.region(plan.index(life.node))}, f"{effect} of several regions"
                    contributors = {i for i, m in enumerate(plan.members) if m.weight and not m.gone}
                    assert {i for i in contributors if plan.region(i) in region} <= set(inputs), (
                        f"{effect} too soon"
                    )
                    life.merges.append(effect)
                case MergeChunk(c, since, inputs):
                    contributors = {i for i, m in enumerate(plan.members) if m.weight and not m.gone}
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
                    life.told.append((plan, effect))

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
            life.held.append(frame)
            return
        if kind is not FrameKind.RESYNC:
            verdict = x.verdict(node, frame.place, kind, c, since).value
            if verdict == "hold":
                life.held.append(frame)
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
        life.merges, life.held, life.outbox = [], [], {}
        for _ in range(self.random.randint(0, len(life.told))):
            self.hear(life)
        life.told.clear()
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
        for frames in (self.flying, self.stalled, *(w.held for w in self.lives)):
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
        if telling := [w for w in alive if w.told]:
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
        for _ in range(EVENTS):
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


@pytest.mark.parametrize("block", range(10))
def test_whatever_happens_survivors_hold_what_the_ledger_says(block: int) -> None:
    for seed in range(FIRST + block, FIRST + SEEDS, 10):
        try:
            World(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


# The rules one by one, without chance.

A, B, C, D = (NodeId(name) for name in "abcd")


def plan_of(attempt: int, owners: list[int], gone: str = "", since: tuple[int, ...] = (), kept: int = 0) -> Plan:
    """Among a, b, c and d; the first `kept` chunks are."""
    members = tuple(PlanMember(NodeId(n), f"{n}:1", 1.0, gone=n in gone) for n in "abcd")
    ids = Incarnation(1), Epoch(1), Round(1)
    return Plan(*ids, attempt, members, tuple(owners), since, frozenset(range(kept)))


def begun(me: NodeId, owners: list[int], window: int = 8) -> ReduceProtocol:
    x = ReduceProtocol(me, len(owners), window)
    x.replan(plan_of(1, owners))
    return x


def sends(effects: Sequence[Effect], kind: FrameKind) -> list[tuple[NodeId, int]]:
    return [(e.node, e.chunk) for e in effects if isinstance(e, SendFrame) and e.kind is kind]


def contribute(x: ReduceProtocol, c: int, *nodes: NodeId) -> list[Effect]:
    out: list[Effect] = []
    for node in nodes:
        assert x.verdict(node, "abcd".index(node), FrameKind.CONTRIBUTION, c, 1) is FrameVerdict.TAKE
        out += x.contribution_arrived(node, c)
    return out


def test_a_chunk_is_merged_in_plan_order_once_everybody_has_contributed_and_sent_to_all() -> None:
    x = begun(B, [1])
    assert contribute(x, 0, D, A) == []
    assert contribute(x, 0, C) == [MergeChunk(0, 1, (0, 1, 2, 3))]
    out = x.chunk_merged(0, 1, (0, 1, 2, 3), b"digest")
    assert out[0] == ReportSeal(0, 1, b"digest", (0, 1, 2, 3)) and FreeContributions(0) in out
    assert out[-1] == ReportComplete(root([b"digest"]))
    assert sends(out, FrameKind.SEALED) == [(A, 0), (C, 0), (D, 0)]


def test_contributors_hear_of_a_merge_while_contributions_may_wait_for_room() -> None:
    x = begun(B, [1, 1, 1, 1], window=2)
    told = []
    for c in range(4):
        contribute(x, c, A, C, D)
        told.append(sends(x.chunk_merged(c, 1, (0, 1, 2, 3), b"digest"), FrameKind.MERGED))
    everybody = [(A, 0), (C, 0), (D, 0)]
    assert told == [everybody, [(n, 1) for n, _ in everybody], [], []]


def test_a_late_frame_is_known_by_the_attempt_in_which_its_chunk_got_its_owner() -> None:
    x = begun(A, [1])
    assert x.verdict(B, 1, FrameKind.SEALED, 0, 1) is FrameVerdict.TAKE
    x.replan(plan_of(2, [2], gone="b", since=(2,)))
    x.pull(0)
    for node, place in ((B, 1), (C, 2), (D, 3)):
        assert x.verdict(node, place, FrameKind.SEALED, 0, 1) is FrameVerdict.DISCARD
    assert x.verdict(C, 2, FrameKind.SEALED, 0, 2) is FrameVerdict.TAKE


def test_a_frame_of_a_newer_attempt_or_of_a_member_not_known_yet_is_held() -> None:
    x = ReduceProtocol(A, 1, 1)
    assert x.verdict(B, 1, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.HOLD
    x.replan(plan_of(1, [0]))
    assert x.verdict(B, 1, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.TAKE
    assert x.verdict(B, 1, FrameKind.CONTRIBUTION, 0, 2) is FrameVerdict.HOLD
    assert x.verdict(NodeId("e"), 4, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.HOLD
    assert x.verdict(B, 4, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.HOLD, "b came back"


def test_what_comes_twice_is_taken_once() -> None:
    x = begun(A, [0, 1])
    contribute(x, 0, B)
    assert x.verdict(B, 1, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD
    x.sealed_arrived(1, b"digest")
    assert x.verdict(B, 1, FrameKind.SEALED, 1, 1) is FrameVerdict.DISCARD
    assert x.verdict(C, 2, FrameKind.CONTRIBUTION, 1, 1) is FrameVerdict.DISCARD, "a does not own it"


def test_a_sealed_chunk_is_taken_from_where_it_should_come_from_and_from_whoever_was_asked() -> None:
    x = begun(A, [1])
    assert x.verdict(B, 1, FrameKind.SEALED, 0, 1) is FrameVerdict.TAKE
    assert [x.verdict(n, i, FrameKind.SEALED, 0, 1) for n, i in ((C, 2), (D, 3))] == [FrameVerdict.DISCARD] * 2
    ((asked, _),) = sends(x.pull(0), FrameKind.WANT)
    taken = {n: x.verdict(n, i, FrameKind.SEALED, 0, 1) for n, i in ((B, 1), (C, 2), (D, 3))}
    assert {n for n, verdict in taken.items() if verdict is FrameVerdict.TAKE} == {B, asked}


def test_a_chunk_that_is_not_the_ledgers_is_given_up_and_asked_for_elsewhere_and_who_gave_it_is_named() -> None:
    x = begun(A, [1, 2])
    x.sealed_arrived(0, b"right", B)
    assert x.sealed_arrived(1, b"forged", C)[-1] == ReportComplete(root([b"right", b"forged"]))
    forget, forged, ask = x.prove([b"right", b"as sealed"])
    assert (forget, forged) == (FreeSealed(1), ReportForged(1, C))
    assert isinstance(ask, SendFrame) and ask.kind is FrameKind.WANT and ask.node in (B, D)
    assert x.prove([b"right", b"as sealed"]) == [], "it is told once"
    again = x.sealed_arrived(1, b"forged", ask.node)
    assert again[0] == ReportForged(1, ask.node)
    assert x.digests == [b"right", None] and [n != ask.node for n, _ in sends(again, FrameKind.WANT)] == [True]
    assert x.sealed_arrived(1, b"as sealed", B)[-1] == ReportComplete(root([b"right", b"as sealed"]), proven=True)


def test_that_what_is_here_is_the_ledgers_is_said_again() -> None:
    x = begun(A, [1])
    x.sealed_arrived(0, b"right", B)
    assert x.prove([b"right"]) == [ReportComplete(root([b"right"]), proven=True)]


def test_what_was_told_of_a_chunk_is_void_once_that_is_reduced_anew() -> None:
    x = begun(A, [1])
    x.prove([b"right"])
    x.replan(plan_of(2, [2], gone="b", since=(2,)))
    assert x.sealed_arrived(0, b"another", C)[-1] == ReportComplete(root([b"another"]))


def test_a_chunk_that_nobody_had_right_is_asked_for_again_under_the_next_plan() -> None:
    x = begun(A, [1])
    x.sealed_arrived(0, b"forged", B)
    asked = [node for node, _ in sends(x.prove([b"right"]), FrameKind.WANT)]
    while found := sends(x.sealed_arrived(0, b"forged", asked[-1]), FrameKind.WANT):
        asked.append(found[0][0])
    assert sorted(asked) == [B, C, D] and asked[0] != B
    assert x.sealed_arrived(0, b"forged", B) == [ReportForged(0, B)], "that it is lacking was said"
    out = x.replan(plan_of(2, [1], since=(1,)))
    assert len(sends(out, FrameKind.WANT)) == 1


def test_what_everybody_was_asked_for_in_vain_is_said_to_be_lacking_once_nothing_else_is_missing() -> None:
    x = begun(A, [1, 2])
    x.sealed_arrived(0, b"forged", B)
    x.sealed_arrived(1, b"forged too", C)
    out = x.prove([b"right", b"as sealed"])
    asked = {c: [n for n, chunk in sends(out, FrameKind.WANT) if chunk == c] for c in range(2)}
    while found := sends(out := x.chunk_lacked(asked[0][-1], 0), FrameKind.WANT):
        asked[0].append(found[0][0])
    assert out == [], "the other chunk may still come"
    while found := sends(out := x.sealed_arrived(1, b"forged too", asked[1][-1]), FrameKind.WANT):
        asked[1].append(found[0][0])
    assert out == [ReportForged(1, asked[1][-1]), ReportMissing((0, 1))]
    assert sorted(asked[0]) == sorted(asked[1]) == [B, C, D]
    assert x.sealed_arrived(1, b"as sealed", C)[-1] == ReportMissing((0,)), "late, it is here after all"
    assert x.sealed_arrived(0, b"right", C)[-1] == ReportComplete(root([b"right", b"as sealed"]), proven=True)


def test_an_owner_that_sealed_what_it_does_not_have_says_so() -> None:
    x = begun(B, [1])
    for node in (A, C, D):
        x.contribution_arrived(node, 0)
    x.chunk_merged(0, 1, range(4), b"as sent")
    asked = [node for node, _ in sends(x.prove([b"as sealed"]), FrameKind.WANT)]
    while found := sends(out := x.sealed_arrived(0, b"as sent", asked[-1]), FrameKind.WANT):
        asked.append(found[0][0])
    assert sorted(asked) == [A, C, D] and out[-1] == ReportMissing((0,))


def test_who_gave_a_chunk_before_it_was_reopened_is_not_blamed_for_what_is_sealed_after() -> None:
    x = begun(A, [1])
    x.sealed_arrived(0, b"void", B)
    x.replan(plan_of(2, [0], since=(2,)))
    for node in (B, C, D):
        x.contribution_arrived(node, 0)
    x.chunk_merged(0, 2, range(4), b"as sent")
    assert not [e for e in x.prove([b"as sealed"]) if isinstance(e, ReportForged)]


def test_who_is_told_what_it_still_waits_for_asks_for_it_or_says_that_nobody_has_it() -> None:
    x = begun(A, [1])
    asked = [sends(x.pull(0), FrameKind.WANT)[0][0]]
    while found := sends(x.chunk_lacked(asked[-1], 0), FrameKind.WANT):
        asked.append(found[0][0])
    assert x.prove([b"as sealed"]) == [ReportMissing((0,))], "all have said that they do not have it"
    y = begun(A, [1])
    assert len(sends(y.prove([b"as sealed"]), FrameKind.WANT)) == 1


def test_who_has_nobody_to_ask_lacks_the_chunk_at_once() -> None:
    x = ReduceProtocol(A, 1, 1)
    plan = plan_of(1, [0])
    leaves = tuple(replace(m, leaf=m.node != A) for m in plan.members)
    x.replan(replace(plan, members=leaves))
    for node in (B, C, D):
        x.contribution_arrived(node, 0)
    x.chunk_merged(0, 1, range(4), b"as sent")
    assert x.prove([b"as sealed"]) == [FreeSealed(0), ReportMissing((0,))]
    assert x.replan(replace(plan_of(2, [0], since=(1,)), members=leaves)) == [ReportMissing((0,))]


def test_who_has_no_weight_contributes_nothing() -> None:
    x = ReduceProtocol(A, 1, 1)
    plan = plan_of(1, [0])
    members = (*plan.members[:2], replace(plan.members[2], weight=0.0), *plan.members[3:])
    x.replan(replace(plan, members=members))
    assert x.verdict(B, 1, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.TAKE
    assert x.verdict(C, 2, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD
    assert list(x.contributors_due()) == [B, D]


def test_who_has_no_weight_merges_what_it_owns_and_waits_for_nothing_else() -> None:
    x, plan = ReduceProtocol(C, 2, 1), plan_of(1, [2, 1])
    members = (*plan.members[:2], replace(plan.members[2], weight=0.0), *plan.members[3:])
    assert x.replan(replace(plan, members=members)) == []
    assert (x.chunks_to_seal, x.missing()) == (1, [])
    assert contribute(x, 0, A, B, D) == [MergeChunk(0, 1, (0, 1, 3))]
    to_all = [SendFrame(node, FrameKind.SEALED, 0, 1) for node in (A, B, D)]
    assert x.chunk_merged(0, 1, (0, 1, 3), b"digest") == [
        ReportSeal(0, 1, b"digest", (0, 1, 3)),
        FreeContributions(0),
        *to_all,
    ]
    assert (x.chunks_to_seal, x.dues()) == (0, [])
    assert ReduceProtocol(C, 2, 1).replan(replace(plan, members=members, kept=frozenset({1}))) == [], (
        "nor asks for it"
    )


def test_what_who_is_not_in_the_plan_says_after_a_break_is_answered_once_it_is() -> None:
    none, e = bitmap([], 1), NodeId("e")
    assert ReduceProtocol(A, 1, 1).resync(B, 1, none, none, none) == []
    x = begun(A, [0])
    contribute(x, 0, B, C, D)
    x.chunk_merged(0, 1, range(4), b"digest")
    assert x.resync(e, 2, none, none, none) == []
    x.replan(entered(plan_of(2, [0], since=(1,), kept=1), e))
    assert sends(x.resync(e, 2, none, none, none), FrameKind.SEALED) == [(e, 0)]


def test_a_chunk_that_is_late_is_asked_for_at_one_after_another_and_at_nobody_twice() -> None:
    x = begun(A, [1])
    asked = [sends(x.pull(0), FrameKind.WANT)[0][0]]
    while found := sends(x.chunk_lacked(asked[-1], 0), FrameKind.WANT):
        asked.append(found[0][0])
    assert sorted(asked) == [B, C, D]
    assert x.pull(0) == [] and x.chunk_lacked(asked[0], 0) == []


def test_who_is_asked_sends_what_it_has_or_says_that_it_lacks_it() -> None:
    x = begun(A, [1])
    assert x.chunk_wanted(C, 0) == [SendFrame(C, FrameKind.LACK, 0, 1)]
    x.sealed_arrived(0, b"digest")
    assert x.chunk_wanted(C, 0) == [SendFrame(C, FrameKind.SEALED, 0, 1)]


def test_after_a_death_only_its_unsealed_chunks_are_sent_again() -> None:
    n, chunks = 4, 36
    before = [c % n for c in range(chunks)]
    x = begun(A, before, window=chunks)
    dead = [c for c in range(chunks) if before[c] == 3]
    after, since = list(before), [1] * chunks
    for i, c in enumerate(dead):
        after[c], since[c] = i % 3, 2
    again = sends(x.replan(plan_of(2, after, gone="d", since=tuple(since))), FrameKind.CONTRIBUTION)
    assert again == [(node, c) for node, i in ((B, 1), (C, 2)) for c in dead if after[c] == i]
    # d's share is 1 / n of the chunks, and 1 / (n - 1) of it is this member's own now
    assert len(again) == chunks * (n - 2) / (n * (n - 1))
    assert len(again) <= chunks * (n - 1) / n * (n - 2) / (n - 1) ** 2


def test_what_had_arrived_of_the_dead_counts() -> None:
    x = begun(A, [0, 0])
    assert contribute(x, 0, B, D) == [] == contribute(x, 1, B, C)
    out = x.replan(plan_of(2, [0, 0], gone="d", since=(1, 1)))
    assert out == [MergeChunk(1, 1, (0, 1, 2))]
    assert contribute(x, 0, C) == [MergeChunk(0, 1, (0, 1, 2, 3))]


def test_a_merge_that_ends_after_its_chunk_was_given_to_another_is_void() -> None:
    x = begun(A, [0])
    contribute(x, 0, B, C, D)
    assert x.replan(plan_of(2, [1], since=(2,)))[0] == FreeContributions(0)
    assert x.chunk_merged(0, 1, (0, 1, 2, 3), b"digest") == []
    x.replan(plan_of(3, [0], since=(3,)))
    for node in (B, C, D):
        x.contribution_arrived(node, 0)
    assert x.chunk_merged(0, 1, (0, 1, 2, 3), b"digest") == [], "it is merging again"


def test_orphans_are_told_with_their_digests_and_fetched_from_their_new_owner() -> None:
    x, y = begun(A, [3, 3]), begun(B, [3, 3])
    x.sealed_arrived(0, b"digest")
    orphaned = plan_of(2, [NOBODY, 2], gone="d", since=(2, 2), kept=1)
    assert ReportOrphans(((0, b"digest"),)) in x.replan(orphaned)
    assert ReportOrphans(()) in y.replan(orphaned)
    assert y.dues() == [(C, "1 of its chunks")], "nobody is waited for with the orphan"
    adopted = plan_of(3, [0, 2], gone="d", since=(3, 2), kept=1)
    assert x.replan(adopted) == []
    assert sends(y.replan(adopted), FrameKind.WANT) == [(A, 0)]


def test_a_chunk_that_is_opened_again_is_forgotten() -> None:
    x = begun(A, [3])
    x.sealed_arrived(0, b"digest")
    assert FreeSealed(0) in x.replan(plan_of(2, [1], gone="d", since=(2,)))
    assert x.digests == [None]


def test_at_most_a_window_of_contributions_is_under_way_to_an_owner() -> None:
    x = ReduceProtocol(A, 4, 2)
    assert sends(x.replan(plan_of(1, [1, 1, 1, 2])), FrameKind.CONTRIBUTION) == [(B, 0), (B, 1), (C, 3)]
    assert sends(x.peer_merged(B, 0), FrameKind.CONTRIBUTION) == [(B, 2)]


def test_after_a_break_what_the_other_side_has_is_not_sent_again() -> None:
    x, owner = begun(A, [1, 1, 1]), begun(B, [1, 1, 1])
    contribute(owner, 0, A, C, D)
    owner.chunk_merged(0, 1, (0, 1, 2, 3), b"digest")
    contribute(owner, 1, A)
    assert sends(x.resync(B, 1, *owner.resync_state(A)), FrameKind.CONTRIBUTION) == [(B, 2)]
    assert sends(owner.resync(A, 1, *x.resync_state(B)), FrameKind.SEALED) == [(A, 0)]


def test_members_that_owe_contributions_are_those_whose_windows_are_not_full() -> None:
    x = begun(A, [0, 0, 0, 1], window=2)
    contribute(x, 0, B)
    contribute(x, 1, B, C)
    assert list(x.contributors_due()) == [C, D]
    assert x.dues() == [(C, "contributions"), (D, "contributions"), (B, "1 of its chunks")]


# Who comes later, or back


def entered(plan: Plan, *nodes: NodeId) -> Plan:
    """With these behind the others."""
    return replace(plan, members=(*plan.members, *(PlanMember(n, f"{n}:2", 1.0) for n in nodes)))


def test_who_came_back_is_not_who_it_was_and_brings_its_contribution_anew() -> None:
    x = begun(A, [0])
    contribute(x, 0, B, D)
    x.replan(entered(plan_of(2, [0], gone="d", since=(1,)), D))
    assert x.verdict(D, 3, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD
    assert contribute(x, 0, C) == []
    assert x.verdict(D, 4, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.TAKE
    assert x.contribution_arrived(D, 0) == [MergeChunk(0, 1, (0, 1, 2, 4))]


def test_who_was_left_out_begins_anew_with_what_was_not_given_to_another_meanwhile() -> None:
    x = begun(A, [1, 1, 2])
    x.sealed_arrived(1, b"digest")
    x.sealed_arrived(2, b"void")
    out = x.replan(entered(plan_of(3, [1, 1, 3], gone="a", since=(1, 1, 2)), A))
    assert sends(out, FrameKind.CONTRIBUTION) == [(B, 0), (D, 2)] and FreeSealed(2) in out
    assert x.digests == [None, b"digest", None]


@pytest.mark.parametrize(("attempt", "late"), [(2, [1]), (3, [0, 1])])
def test_who_comes_later_is_sent_what_it_cannot_know_to_be_sealed(attempt: int, late: list[int]) -> None:
    """It asks for what its first plan kept. Which chunks these are is not known if that plan was skipped."""
    x = begun(A, [0, 0])
    for c in range(2):
        contribute(x, c, B, C, D)
        x.chunk_merged(c, 1, range(4), b"digest")
    e = NodeId("e")
    out = x.replan(entered(plan_of(attempt, [0, 0], since=(1, 1), kept=1), e))
    assert sends(out, FrameKind.SEALED) == [(e, c) for c in late]


def test_that_all_is_held_is_said_in_each_attempt() -> None:
    x = begun(A, [1])
    assert (
        x.sealed_arrived(0, b"digest")[-1]
        == x.replan(plan_of(2, [1], since=(1,)))[-1]
        == ReportComplete(root([b"digest"]))
    )


def test_contributions_to_one_owner_go_in_the_order_in_which_it_got_the_chunks() -> None:
    x = begun(A, [1, 2, 2], window=1)
    x.replan(plan_of(3, [1, 1, 1], gone="c", since=(1, 3, 2)))
    assert sends(x.peer_merged(B, 0), FrameKind.CONTRIBUTION) == [(B, 2)]


def test_a_chunk_that_is_sealed_makes_room_for_the_next_contribution() -> None:
    assert sends(begun(A, [1, 1], window=1).sealed_arrived(0, b"digest"), FrameKind.CONTRIBUTION) == [(B, 1)]


def test_a_contribution_that_is_refused_is_not_waited_for_once_its_sender_is_gone() -> None:
    x = begun(A, [0])
    contribute(x, 0, B, C, D)
    x.replan(plan_of(2, [0], gone="d", since=(1,)))
    assert x.contribution_refused(0, 1, 3) == [MergeChunk(0, 1, (0, 1, 2))]


def test_what_an_owner_says_of_before_it_got_the_chunk_or_this_member_came_back_is_not_believed() -> None:
    none, all_ = bitmap([], 1), bitmap([0], 1)
    x, d = begun(A, [2]), ReduceProtocol(D, 1, 8)
    x.replan(plan_of(2, [1], gone="c", since=(2,)))
    d.replan(entered(plan_of(2, [1], gone="d", since=(1,)), D))
    for y in (x, d):
        assert sends(y.resync(B, 1, all_, none, none), FrameKind.CONTRIBUTION) == [(B, 0)]
        assert sends(y.resync(B, 1, none, all_, none), FrameKind.CONTRIBUTION) == [(B, 0)]
        assert sends(y.resync(B, 2, all_, none, none), FrameKind.CONTRIBUTION) == []
        assert sends(y.resync(B, 2, none, all_, none), FrameKind.CONTRIBUTION) == []


def test_after_a_break_who_was_asked_last_is_asked_again() -> None:
    x, none = begun(A, [1]), bitmap([], 1)
    asked = [sends(x.pull(0), FrameKind.WANT)[0][0]]
    asked += [node for node, _ in sends(x.chunk_lacked(asked[0], 0), FrameKind.WANT)]
    assert [sends(x.resync(node, 1, none, none, none), FrameKind.WANT) for node in asked] == [[], [(asked[1], 0)]]
    x.sealed_arrived(0, b"digest")
    assert sends(x.resync(asked[1], 1, none, none, none), FrameKind.WANT) == [] == x.pull(0)


def test_a_sealed_chunk_is_sent_again_to_who_has_only_what_was_sealed_before_it() -> None:
    x, none, all_ = begun(A, [1]), bitmap([], 1), bitmap([0], 1)
    x.replan(plan_of(2, [0], gone="d", since=(2,)))
    x.contribution_arrived(B, 0)
    x.contribution_arrived(C, 0)
    x.chunk_merged(0, 2, range(3), b"digest")
    assert sends(x.resync(B, 1, none, none, all_), FrameKind.SEALED) == [(B, 0)]
    assert x.resync(B, 2, none, none, all_) == []


# Two levels: a and b are a region, c and d another; a owns the chunks, c relays them.


def levels(attempt: int = 1, chunks: int = 1, gone: str = "", since: int = 1, flat: bool = False) -> Plan:
    plan = plan_of(attempt, [0] * chunks, gone, (since,) * chunks)
    layered = frozenset[int]() if flat else frozenset(range(chunks))
    return replace(plan, regions=(0, 0, 1, 1), relays=((0,) * chunks, (2,) * chunks), layered=layered)


def layered(me: NodeId, chunks: int = 1, window: int = 8) -> tuple[ReduceProtocol, list[Effect]]:
    x = ReduceProtocol(me, chunks, window)
    return x, x.replan(levels(chunks=chunks))


def test_members_of_another_region_send_to_its_relay_which_sums_and_passes_on() -> None:
    assert sends(layered(B)[1], FrameKind.CONTRIBUTION) == [(A, 0)]
    assert sends(layered(D)[1], FrameKind.CONTRIBUTION) == [(C, 0)]
    relay, out = layered(C)
    assert out == []
    assert contribute(relay, 0, D) == [SumRegion(0, 1, (2, 3))]
    assert relay.region_summed(0, 1, (2, 3)) == [FreeContributions(0), SendFrame(A, FrameKind.PARTIAL, 0, 1)]
    assert relay.verdict(D, 3, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD
    assert relay.peer_merged(D, 0) == [] and relay.peer_merged(A, 0) == [FreeContributions(0)]
    assert relay.sealed_arrived(0, b"digest")[0] == SendFrame(D, FrameKind.SEALED, 0, 1)


def test_the_owner_merges_its_region_and_the_others_sums_and_seals_who_is_in_them() -> None:
    x, _ = layered(A)
    assert contribute(x, 0, B) == []
    assert x.region_sum_arrived(C, 0, (2, 3)) == [MergeChunk(0, 1, (0, 1, 2, 3), ((2, (2, 3)),))]
    out = x.chunk_merged(0, 1, (0, 1, 2, 3), b"digest")
    assert out[0] == ReportSeal(0, 1, b"digest", (0, 1, 2, 3))
    assert sends(out, FrameKind.SEALED) == [(B, 0), (C, 0)]


def test_relay_and_owner_tell_those_that_wait_for_room() -> None:
    x, relay = layered(A, 2, 1)[0], layered(C, 2, 1)[0]
    contribute(x, 0, B)
    x.region_sum_arrived(C, 0, (2, 3))
    assert sends(x.chunk_merged(0, 1, (0, 1, 2, 3), b"digest"), FrameKind.MERGED) == [(B, 0), (C, 0)]
    contribute(relay, 0, D)
    assert sends(relay.region_summed(0, 1, (2, 3)), FrameKind.MERGED) == [(D, 0)]


def test_a_contribution_counts_on_one_way_only() -> None:
    x, relay = layered(A)[0], layered(C)[0]
    assert x.verdict(D, 3, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD, "d's comes in c's sum"
    assert x.verdict(C, 2, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD, "so does c's"
    assert x.verdict(D, 3, FrameKind.PARTIAL, 0, 1) is FrameVerdict.DISCARD, "d is no relay"
    assert relay.verdict(B, 1, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.DISCARD, "b is of another region"
    assert relay.verdict(A, 0, FrameKind.PARTIAL, 0, 1) is FrameVerdict.DISCARD, "c owns nothing"
    assert x.verdict(C, 2, FrameKind.PARTIAL, 0, 1) is FrameVerdict.TAKE
    x.region_sum_arrived(C, 0, (2, 3))
    assert x.verdict(C, 2, FrameKind.PARTIAL, 0, 1) is FrameVerdict.DISCARD, "it comes twice"


def test_a_sum_with_a_contribution_that_has_come_by_itself_is_refused() -> None:
    x, _ = layered(A)
    x.contribution_arrived(D, 0)  # though its verdict forbids it: nothing counts twice
    assert x.region_sum_arrived(C, 0, (2, 3)) is None


@pytest.mark.parametrize("claimed", [(), (1,), (0, 2, 3), (2, 3, 4), (2, 3, 9)])
def test_a_sum_of_others_than_its_region_is_refused(claimed: tuple[int, ...]) -> None:
    x, _ = layered(A)
    assert x.region_sum_arrived(C, 0, claimed) is None
    contribute(x, 0, B)
    assert x.region_sum_arrived(C, 0, (2, 3)) == [MergeChunk(0, 1, (0, 1, 2, 3), ((2, (2, 3)),))]


def test_a_sum_that_is_refused_counts_no_more() -> None:
    x, _ = layered(A)
    contribute(x, 0, B)
    x.region_sum_arrived(C, 0, (2, 3))
    assert x.contribution_refused(0, 1, 2) == []
    assert x.replan(levels(2, gone="cd")) == [MergeChunk(0, 1, (0, 1))]


def test_a_sum_waits_for_those_of_the_chunks_before_it() -> None:
    x, _ = layered(C, 2)
    contribute(x, 0, D)
    contribute(x, 1, D)
    assert sends(x.region_summed(1, 1, (2, 3)), FrameKind.PARTIAL) == []
    assert sends(x.region_summed(0, 1, (2, 3)), FrameKind.PARTIAL) == [(A, 0), (A, 1)]


def test_a_region_whose_members_are_gone_is_waited_for_by_nobody() -> None:
    x, relay = layered(A)[0], ReduceProtocol(C, 1, 8)
    contribute(x, 0, B)
    assert x.replan(levels(2, gone="cd")) == [MergeChunk(0, 1, (0, 1))]
    weightless = replace(levels(2, gone="d"), members=(*levels().members[:2], PlanMember(C, "c:1", 0.0)))
    members = (*weightless.members, PlanMember(D, "d:1", 1.0, gone=True))
    assert relay.replan(replace(weightless, members=members)) == []


def test_a_chunk_that_was_sealed_without_a_region_is_over_there() -> None:
    x, _ = layered(C)
    contribute(x, 0, D)
    assert x.verdict(A, 0, FrameKind.SEALED, 0, 1) is FrameVerdict.TAKE
    assert x.sealed_arrived(0, b"digest")[:2] == [FreeContributions(0), SendFrame(D, FrameKind.SEALED, 0, 1)]
    assert x.region_summed(0, 1, (2, 3)) == []


def test_without_its_relay_a_chunk_starts_anew_and_is_flat() -> None:
    x, d = layered(A)[0], layered(D)[0]
    contribute(x, 0, B)
    after = levels(2, gone="c", since=2, flat=True)
    assert x.replan(after) == [FreeContributions(0)]
    assert sends(d.replan(after), FrameKind.CONTRIBUTION) == [(A, 0)]
    assert x.verdict(D, 3, FrameKind.CONTRIBUTION, 0, 2) is FrameVerdict.TAKE


def test_who_was_a_relay_contributes_to_a_flat_chunk() -> None:
    relay = layered(C)[0]
    assert sends(relay.replan(levels(2, since=2, flat=True)), FrameKind.CONTRIBUTION) == [(A, 0)]


def test_a_relay_without_weight_has_the_sealed_chunk_to_pass_on() -> None:
    x, plan = ReduceProtocol(A, 1, 8), levels()
    x.replan(replace(plan, members=(*plan.members[:2], replace(plan.members[2], weight=0.0), plan.members[3])))
    contribute(x, 0, B)
    assert x.region_sum_arrived(C, 0, (2, 3)) is None, "it has nothing to bring itself"
    x.region_sum_arrived(C, 0, (3,))
    assert sends(x.chunk_merged(0, 1, (0, 1, 3), b"digest"), FrameKind.SEALED) == [(B, 0), (C, 0)]


def test_a_member_that_comes_later_has_no_region_and_deals_with_the_owner() -> None:
    entered = (*levels(2).members, PlanMember(NodeId("e"), "e:1", 1.0))
    plan = replace(levels(2), members=entered)
    x, e = layered(A)[0], ReduceProtocol(NodeId("e"), 1, 8)
    assert sends(e.replan(plan), FrameKind.CONTRIBUTION) == [(A, 0)]
    x.replan(plan)
    contribute(x, 0, B)
    assert x.region_sum_arrived(C, 0, (2, 3)) == []
    assert x.verdict(NodeId("e"), 4, FrameKind.CONTRIBUTION, 0, 1) is FrameVerdict.TAKE
    assert x.contribution_arrived(NodeId("e"), 0) == [MergeChunk(0, 1, (0, 1, 2, 3, 4), ((2, (2, 3)),))]
    assert sends(x.chunk_merged(0, 1, (0, 1, 2, 3, 4), b"d"), FrameKind.SEALED) == [
        (B, 0),
        (C, 0),
        (NodeId("e"), 0),
    ]


def test_after_a_break_neither_what_was_summed_nor_a_sum_that_is_here_is_sent_again() -> None:
    x, relay, d = layered(A)[0], layered(C)[0], layered(D)[0]
    contribute(relay, 0, D)
    assert sends(d.resync(C, 1, *relay.resync_state(D)), FrameKind.CONTRIBUTION) == []
    relay.region_summed(0, 1, (2, 3))
    assert sends(d.resync(C, 1, *relay.resync_state(D)), FrameKind.CONTRIBUTION) == []
    assert sends(relay.resync(A, 1, *x.resync_state(C)), FrameKind.PARTIAL) == [(A, 0)]
    x.region_sum_arrived(C, 0, (2, 3))
    assert sends(relay.resync(A, 1, *x.resync_state(C)), FrameKind.PARTIAL) == []
    relay.sealed_arrived(0, b"digest")
    assert sends(relay.resync(D, 1, *d.resync_state(C)), FrameKind.SEALED) == [(D, 0)]


def test_a_late_chunk_in_two_levels_is_not_asked_for_in_other_regions() -> None:
    d, c = layered(D)[0], layered(C)[0]
    assert sends(d.pull(0), FrameKind.WANT) == [(C, 0)] and d.chunk_lacked(C, 0) == []
    b = layered(B)[0]
    assert sends(b.pull(0), FrameKind.WANT) == [(A, 0)] and b.chunk_lacked(A, 0) == []
    flat = ReduceProtocol(D, 1, 1)
    flat.replan(levels(flat=True))
    assert len([c for _ in range(3) for c in flat.pull(0)]) == 3, "a flat one is asked for everywhere"
    assert d.dues() == [(C, "1 of its chunks")]
    assert c.dues() == [(D, "contributions")]
    assert layered(A)[0].dues() == [(B, "contributions"), (C, "region's sums")]


# One rule of the protocol broken at a time: a simulation that does not notice checks nothing. Rules that hardly
# any seed breaks are in tests/sim/test_mutations, with the tests above.

SOURCE = Path(protocol.__file__).read_text()
MUTATIONS = {
    "frames of members still unknown are discarded": (" or place >= len(self.plan.members)", ""),
    "a member that came back is in a sum twice": ("arrived -= routes.former", "arrived -= set()"),
    "a lost contribution is not sent again": ("elif not bit(here, c) or unheard:", "elif unheard:"),
    "a lost result is not sent again": (
        "if chunk.state is ChunkState.SERVED and (chunk.since > attempt",
        "if False and (chunk.since > attempt",
    ),
    "nobody is asked for a kept chunk that is lacking": (
        "[holder]\n                out.append(SendFrame(holder, FrameKind.WANT, c, since))",
        "[holder]",
    ),
    "windows have no bound": ("while queue and len(in_flight) < self.window and", "while queue and"),
    "contributions go out in any order": (
        "deque(sorted(window.queue, key=lambda c: (self._chunks[c].since, c)))",
        "window.queue",
    ),
    "a chunk is merged as soon as anything is there": ("if due <= chunk.arrived:", "if due & chunk.arrived:"),
    "a chunk that was opened again is not forgotten": ("if not kept and chunk.digest is not None:", "if False:"),
    "a seal does not make room": (
        "            self._withdraw(c, chunk.source)\n            out += self.peer_merged(chunk.source, c)",
        "            pass",
    ),
    "newcomers get nothing that was sealed before them": ("if before and before.get(node) != place", "if False"),
    "a member that was left out goes on as before": ("self._rejoin(plan, out)", "pass"),
    "a kept chunk is not asked for": ("out.append(SendFrame(holder, FrameKind.WANT, c, since))", "pass"),
    "what is complete is told once": ("self._complete_attempt != attempt", "self._complete_attempt < 0"),
    "a relay does not wait for its region": ("if self._routes.contributes_here(c, place)}", "if False}"),
    "a relay waits for other regions": ("if self._routes.contributes_here(c, place)}", "if True}"),
    "a relay without a region sums nothing": ("if chunk.relayed and not chunk.arrived:", "if False:"),
    "sums go out before those before them": (" and self._is_made(queue[0])", ""),
    "a relay keeps what is sealed": (
        "if node != self.me and self._routes.serves(c, place):\n                    out",
        "if False:\n                    out",
    ),
    "a region's sum comes twice": ("and place not in chunk.region_sums\n", "\n"),
    "who was a relay is one": (
        "routes.plan.relays_for(c, routes.place)",
        "routes.place != owner and routes.place in [row[c] for row in routes.plan.relays]",
    ),
}


def mutant(old: str, new: str) -> Any:
    assert SOURCE.count(old) == 1, f"protocol.py has {SOURCE.count(old)} times {old!r}: choose another fragment"
    module = types.ModuleType("atoll.comm.mutant")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(SOURCE.replace(old, new), "mutant.py", "exec"), module.__dict__)
    return module


def is_noticed(protocol: Any, seeds: int) -> bool:
    for seed in range(seeds):
        try:
            World(seed, protocol).run()
        except (AttributeError, NameError):
            raise  # of this test: the mutant would notice nothing
        except Exception:
            return True
    return False


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_rule_is_noticed(mutation: str) -> None:
    assert is_noticed(mutant(*MUTATIONS[mutation]), 100)
