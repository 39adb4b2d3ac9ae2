"""The coordinator's and the nodes' real machines in one process: seeded order of events, crashes, joins.

After every event the invariants hold; when the faults end, rounds commit again. ATOLL_SIM_SEEDS=N runs N seeds
from ATOLL_SIM_FIRST on.
"""

import hashlib
import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from atoll.comm.config import MembersConfig, ReduceConfig, RoundsConfig, RunConfig
from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator import events as ev
from atoll.coordinator import machine as coordinator
from atoll.coordinator import membership
from atoll.coordinator.view import view
from atoll.node import machine as node

CONFIG = RunConfig(
    rounds=RoundsConfig(inner_steps=10, quorum=0.5, grace=0.5),
    members=MembersConfig(start=2, minimum=2, lease=8.0, reconnect=1.0),
    reduce=ReduceConfig(block=1, chunk=10),
)
FIRST, SEEDS = int(os.environ.get("ATOLL_SIM_FIRST", "0")), int(os.environ.get("ATOLL_SIM_SEEDS", "20"))


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def durable(state: coordinator.State) -> coordinator.State:
    """Without what heartbeats move: they are not in the journal."""
    members = state.members
    for n in members.here:
        members = membership.update(members, n, heard_at=0.0, moved_at=0.0, phase="", step=(0, 0))
    gone = {n: replace(m, heard_at=0.0, moved_at=0.0, phase="", step=(0, 0)) for n, m in members.gone.items()}
    return replace(state, members=replace(members, gone=gone))


class SimNode:
    """One node: the real machine, and what it asked for and has not got yet."""

    def __init__(self, world: "World", me: NodeId) -> None:
        self.world, self.me, self.state = world, me, node.Node()
        self.jobs: list[Callable[[], None]] = []  # done in any order
        self.reports: list[ev.Event] = []  # in order
        self.seen = -1
        self.attempt: pb.Plan | None = None

    def feed(self, event: node.Event) -> None:
        self.state, effects = node.step(self.state, event)
        for effect in effects:
            self.act(effect)

    def act(self, effect: node.Effect) -> None:
        world, me = self.world, self.me
        match effect:
            case node.Initialise():
                self.jobs.append(lambda: self.feed(node.StateMoved(0, world.state_digest(0))))
            case node.Train(order):
                self.jobs.append(lambda: self.trained(order))
            case node.FinishTraining():
                pass  # the job ends anyway, sooner or later
            case node.Evaluate(round_):
                self.jobs.append(lambda: self.feed(node.TrainerEvaluated(round_, 1.0)))
            case node.StartReduce(plan):
                self.attempt = plan
                world.started.setdefault((plan.round, plan.attempt), set()).add(me)
                self.jobs.append(self.reduce)
            case node.StopReduce():
                self.attempt = None
            case node.Apply(round_):
                self.jobs.append(lambda: self.feed(node.StateMoved(round_, world.state_digest(round_))))
            case node.Recover(view_, _):
                self.jobs.append(lambda: self.recover(view_))
            case node.ReportLayout():
                self.reports.append(ev.LayoutKnown(me, 40, digest("layout")))
            case node.ReportState(round_, digest_):
                self.reports.append(ev.StateAt(me, round_, digest_))
            case node.ReportReady(ready):
                r = ready
                event = ev.BecameReady(me, r.round, r.steps, r.tokens, r.samples, r.loss, 1.0, r.first_sample)
                self.reports.append(event)
            case node.ReportEvaluated(round_, loss):
                self.reports.append(ev.Evaluated(me, round_, loss))

    def trained(self, order: pb.Train) -> None:
        if self.state.task is not None:
            self.feed(node.TrainerReady(order.round, 10, self.world.rng.randint(1, 100), 10, 1.0))

    def reduce(self) -> None:
        """One step of the attempt at hand: a lost peer, own chunks to seal, or everything held."""
        plan, world = self.attempt, self.world
        if plan is None:
            return
        members = [NodeId(m.node_id) for m in plan.members]
        if dead := [n for n in members if n not in world.nodes]:
            self.reports.append(ev.PeerLost(self.me, dead[0], plan.round, plan.attempt, "reset"))
            self.attempt = None
            return
        self.jobs.append(self.reduce)
        key = (plan.round, plan.attempt)
        if world.started[key] < set(members):
            return
        sealed = world.sealed.setdefault(key, {})
        mine = [c for c, owner in enumerate(plan.owners) if members[owner] == self.me and c not in sealed]
        if mine:
            for c in mine:
                sealed[c] = digest("sealed", key, members, c)
            seals = tuple((c, sealed[c]) for c in mine)
            self.reports.append(ev.Sealed(self.me, plan.round, plan.attempt, seals))
        elif len(sealed) == len(plan.owners):
            all_ = b"".join(sealed[c] for c in range(len(plan.owners)))
            self.attempt = None
            self.feed(node.ReduceHeld(key, all_))
            root = hashlib.blake2b(all_, digest_size=16).digest()
            self.reports.append(ev.Held(self.me, plan.round, plan.attempt, root, 1, 1))

    def recover(self, view_: pb.View) -> None:
        donors = [n for n in self.world.nodes.values() if n.state.round == view_.committed and n is not self]
        if donors:
            self.feed(node.StateMoved(view_.committed, donors[0].state.digest))
        else:
            self.feed(node.MoveFailed(self.state.round))


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.founders = self.rng.randint(2, 5)
        members = replace(CONFIG.members, start=self.rng.choice([2, self.founders]))
        self.config = replace(CONFIG, members=members)
        self.state = coordinator.State(self.config)
        self.nodes: dict[NodeId, SimNode] = {}
        self.started: dict[tuple[int, int], set[NodeId]] = {}
        self.sealed: dict[tuple[int, int], dict[int, bytes]] = {}
        self.log: list[bytes] = []  # root of each committed round's sealed chunks
        self.version = 0
        self.used: set[int] = set()
        self.published: list[int] = []
        self.journal: list[tuple[float, ev.Event]] = []
        self.feed(ev.Started(1))

    def state_digest(self, round_: int) -> bytes:
        return digest("state", round_, self.log[:round_])

    def feed(self, event: ev.Event) -> None:
        before = self.state
        if not isinstance(event, ev.Heard):
            self.journal.append((self.now, event))
        self.state, effects = coordinator.step(self.state, event, self.now)
        self.version += 1
        if self.state.committed != before.committed:
            self.committed(before)
        for effect in effects:
            if isinstance(effect, ev.Publish):
                self.published.append(effect.record.round)
                assert effect.record.digests_equal
        self.check()

    def committed(self, before: coordinator.State) -> None:
        plan, record = before.round.plan, self.state.pending
        assert plan is not None and record is not None
        assert self.state.committed == before.committed + 1
        self.log.append(b"".join(self.state.sealed))
        for n in plan.members:
            assert record.contributors[n] == before.round.ready[n].tokens
            first, _ = before.leases.held[n]
            if n in self.nodes and (ready := self.nodes[n].state.ready) is not None:
                assert ready.first_sample == first, "the delta is not of the lease that is consumed"
            used = set(range(first, first + before.round.ready[n].samples))
            assert not used & self.used, "a sample was consumed twice"
            self.used |= used

    def check(self) -> None:
        for n in self.nodes.values():
            if n.state.round >= 0 and not n.state.moving and n.state.round <= len(self.log):
                assert n.state.digest == self.state_digest(n.state.round)
        held = sorted(self.state.leases.held.values())
        assert all(a[0] + a[1] <= b[0] for a, b in zip(held, held[1:], strict=False)), "leases overlap"
        assert self.published == sorted(set(self.published)), "a round was published twice"

    def restart(self) -> None:
        """The coordinator dies and comes back with nothing but its journal."""
        replayed = coordinator.State(self.config)
        for at, event in self.journal:
            replayed, _ = coordinator.step(replayed, event, at)
        assert durable(replayed) == durable(self.state)
        self.state = replayed
        self.feed(ev.Started(self.state.incarnation + 1))
        for me in self.nodes:
            if me in self.state.members.here:
                self.feed(ev.Connected(me))

    def leave(self) -> None:
        me = self.rng.choice(list(self.nodes))
        del self.nodes[me]
        self.feed(ev.Leaving(me, "bye"))

    def join(self) -> None:
        me = NodeId(f"n{self.state.members.next_id}")
        self.feed(ev.Joined(me, me, f"{me}:1", me))
        self.feed(ev.Connected(me))
        self.nodes[me] = SimNode(self, me)
        self.nodes[me].jobs.append(lambda: self.nodes[me].feed(node.TrainerUp()))

    def crash(self) -> None:
        me = self.rng.choice(list(self.nodes))
        del self.nodes[me]
        self.feed(ev.Disconnected(me))

    def crash_trainer(self) -> None:
        victim = self.rng.choice(list(self.nodes.values()))
        if victim.state.trainer_up:
            victim.feed(node.TrainerDown())
            victim.jobs.append(lambda: victim.feed(node.TrainerUp()))

    def tick(self) -> None:
        self.now += self.rng.uniform(0.05, 0.5)
        for me, n in self.nodes.items():
            self.feed(ev.Heard(me, n.state.phase, n.state.round, int(self.now * 10)))
        for me, reason in membership.overdue(
            self.state.members, self.config.members, self.state.awaited, self.now
        ):
            self.feed(ev.Expired(me, reason))
        self.feed(ev.Tick())

    def turn(self) -> None:
        """One thing that can happen, happens."""
        n = self.rng.choice(list(self.nodes.values()))
        kind = self.rng.random()
        if kind < 0.1:
            self.tick()
        elif kind < 0.4 and n.seen != self.version and n.me in self.state.members.here:
            n.seen = self.version
            latest = view(self.state, n.me)
            latest.version = self.version
            n.feed(node.ViewArrived(latest))
        elif kind < 0.7 and n.reports:
            self.feed(n.reports[0])
            if self.rng.random() < 0.9:  # else the answer is lost and the report comes again
                n.reports.pop(0)
        elif n.jobs:
            n.jobs.pop(self.rng.randrange(len(n.jobs)))()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_whatever_dies_the_survivors_agree_and_go_on(seed: int) -> None:
    world = World(seed)
    for _ in range(world.founders):
        world.join()
    for _ in range(4000):
        world.turn()
        fault = world.rng.random()
        if fault < 0.002 and len(world.nodes) > 2:
            world.crash()
        elif fault < 0.004 and len(world.nodes) < 8:
            world.join()
        elif fault < 0.007:
            world.crash_trainer()
        elif fault < 0.008:
            world.restart()
        elif fault < 0.009 and len(world.nodes) > 2:
            world.leave()
    while len(world.nodes) < world.config.members.start:
        world.join()
    calm = len(world.log)
    for _ in range(6000):
        world.turn()
    assert len(world.log) >= calm + 3, f"stuck after round {calm}: {world.state.round}"
    outside = [m for m in world.state.members.here.values() if m.state not in ("active", "synced")]
    assert not outside, f"never entered the run: {outside}"
