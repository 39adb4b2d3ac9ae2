"""Whatever members say, in whatever order, the run stays sound; and it goes on as soon as members behave.

The coordinator's machine alone: events are drawn by a seed, many of them late, twice, about somebody else or lies.
ATOLL_FUZZ_SEEDS=N runs N seeds from ATOLL_FUZZ_FIRST on.
"""

import os
import random

import pytest
import scenario

from atoll.comm.bitmap import bitmap
from atoll.comm.config.data import DataConfig
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import InnerConfig, MembersConfig, ReduceConfig, RoundsConfig, RunConfig
from atoll.comm.digest import digest
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import NOBODY, Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.replace import replace
from atoll.coordinator.service.journaled_machine import decode, encode
from atoll.coordinator.service.view import view
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine import members
from atoll.coordinator.state_machine.makers import may_hold
from atoll.coordinator.state_machine.members import REDUCER, Member, MemberState
from atoll.coordinator.state_machine.state import Phase, State
from atoll.coordinator.state_machine.step import step

FIRST, SEEDS = int(os.environ.get("ATOLL_FUZZ_FIRST", "0")), int(os.environ.get("ATOLL_FUZZ_SEEDS", "30"))
NO_FENCE = Fence(Incarnation(1), Epoch(0), Round(1), 1)
LAYOUT = digest(b"layout")


def config(rng: random.Random) -> RunConfig:
    minimum = rng.choice([1, 2, 3])
    return RunConfig(
        model=ModelConfig(seq_len=1),
        inner=InnerConfig(batch_size=1),
        rounds=RoundsConfig(
            inner_steps=10, quorum=rng.choice([0.3, 0.5, 1.0]), grace=0.5, collect=20.0, reduce_timeout=30.0
        ),
        members=MembersConfig(
            start=minimum + rng.choice([0, 1]), minimum=minimum, lease=10.0, reconnect=2.0, stall=30.0
        ),
        reduce=ReduceConfig(block=1, chunk=10),
        data=DataConfig(eval_every=rng.choice([1, 2])),
    )


def durable(state: State) -> State:
    """Without what heartbeats move: they are not in the journal."""

    def quiet(members: dict[NodeId, Member]) -> dict[NodeId, Member]:
        return {
            n: replace(m, heard_at=0.0, moved_at=0.0, stuck=0.0, phase="", step=(0, 0), step_before=(0, 0))
            for n, m in members.items()
        }

    here, gone = quiet(state.members.here), quiet(state.members.departed)
    return replace(state, members=replace(state.members, here=here, departed=gone))


class Fuzz:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.config, self.now = config(self.rng), 0.0
        self.state = State(self.config)
        self.journal: list[tuple[float, ev.Event]] = []
        self.fences: list[Fence] = []
        self.consumed: set[int] = set()
        self.kinds = self.rng.choice([("",), ("", "", "leaf"), ("", REDUCER), ("", "leaf", "leaf", REDUCER)])
        self.kind: dict[NodeId, str] = {}
        self.feed(ev.Started(1))

    def feed(self, event: ev.Event) -> None:
        before = self.state
        self.state, effects = step(before, event, self.now)
        if not isinstance(event, ev.Heartbeat) and (effects or self.state != before):
            self.journal.append((self.now, event))
        self.check(before)

    def check(self, before: State) -> None:
        state, r = self.state, self.state.round
        assert state.committed - before.committed in (0, 1)
        assert set(r.ledger.contributions) | r.reached <= set(r.participants) <= set(state.members.here)
        assert all(state.members.here[n].state is MemberState.ACTIVE for n in r.participants)
        assert r.evaluator is None or state.members.here[r.evaluator].evaluates
        assert (r.plan is not None) == (r.phase is Phase.REDUCING)
        if r.plan is not None:
            assert set(r.ledger.members) <= set(r.ledger.contributions)
            owners = {o: state.members.here[o] for o in r.ledger.owners if o in state.members.here}
            assert not any(m.leaf for m in owners.values()), "nobody could send it what it owns"
            if r.plan.fence not in self.fences[-1:]:
                assert all(fence < r.plan.fence for fence in self.fences)
                self.fences.append(r.plan.fence)
        leased = [(*state.leases.free, *(range_ for lease in state.leases.by_node.values() for range_ in lease))]
        samples = [s for ranges in leased for first, count in ranges for s in range(first, first + count)]
        assert len(samples) == len(set(samples)) and not self.consumed & set(samples)
        used = set(range(state.leases.next)) - set(samples) - self.consumed
        left = {
            n for n in before.members.here if n not in state.members.here
        }  # their part may be in sealed chunks
        assert not used or state.committed > before.committed or left, "only a commit consumes"
        self.consumed |= used

    def tick(self, seconds: float, heard: float = 1.0) -> None:
        self.now += seconds
        for node, m in self.state.members.here.items():
            if m.connected and self.rng.random() < heard:
                round_ = self.rng.choice((0, self.state.round.number))
                self.feed(ev.Heartbeat(node, m.life, "inner", round_, self.rng.randint(0, 3)))
        for verdict in members.judge(
            self.state.members, self.config.members, self.state.awaited_members, self.now
        ):
            self.feed(verdict)
        self.feed(ev.Tick())

    def restart(self) -> None:
        replayed = State(self.config)
        for at, event in self.journal:
            replayed, _ = step(replayed, event, at)
        assert durable(replayed) == durable(self.state)
        assert decode(encode(self.state), self.config) == self.state
        self.state = replayed
        self.feed(ev.Started(self.state.incarnation + 1))

    def join(self, node: NodeId, life: int, kind: str | None = None) -> None:
        """Of another kind than it had before nobody comes back."""
        kind = self.kind.setdefault(node, self.rng.choice(self.kinds) if kind is None else kind)
        told = f"{node}:1", f"session of {node}", kind == "leaf", REDUCER if kind == REDUCER else ""
        self.feed(ev.Joined(node, life, str(node), *told))
        if self.rng.random() < 0.9:
            self.feed(ev.Connected(node, life))
            if kind != REDUCER:
                self.feed(ev.LayoutReported(node, life, 40, LAYOUT))

    def anything(self) -> None:
        """One event, most of them such as they might come."""
        rng, members, r = self.rng, self.state.members, self.state.round
        if not members.here or (rng.random() < 0.03 and len(members.here) < 6):
            return self.join(NodeId(f"n{members.next_id}"), 1)
        if rng.random() < 0.01:
            known = members.here | members.departed
            node = rng.choice(list(known))
            return self.join(node, known[node].life + 1)
        if rng.random() < 0.15:
            return self.tick(rng.choice([0.25, 0.25, 0.25, 1.0]), heard=0.95)
        if rng.random() < 0.003:
            return self.restart()
        planned = [n for n in r.ledger.members if n in members.here] if r.plan is not None else []
        node = rng.choice(planned if planned and rng.random() < 0.7 else list(members.here))
        life = members.here[node].life - (rng.random() < 0.01)
        fence = rng.choice(self.fences) if self.fences and rng.random() < 0.1 else NO_FENCE
        fence = r.plan.fence if r.plan is not None and rng.random() < 0.9 else fence
        lease = self.state.leases.by_node.get(node, ())
        front = data.front(lease) if lease and rng.random() < 0.95 else rng.randint(0, 99)
        samples = rng.randint(1, 20) if rng.random() < 0.99 else rng.randint(-2, 200)
        round_ = r.number if rng.random() < 0.9 else rng.randint(0, 5)
        committed = self.state.committed if rng.random() < 0.9 else rng.randint(0, 9)
        flipped = b"" if rng.random() < 0.98 else b"flipped"
        root = r.ledger.root if r.ledger.complete and rng.random() < 0.99 else b""
        inputs = bitmap((i for i, e in enumerate(r.ledger.entries) if not e.gone and rng.random() < 0.98), 16)
        seals = tuple((c, digest(b"%d" % c), inputs) for c in range(-1, 6) if rng.random() < 0.9)
        since = rng.choice(r.ledger.since) if r.ledger.since and rng.random() < 0.95 else fence.attempt
        here = tuple((c, digest(b"%d" % c)) for c in r.ledger.orphans if rng.random() < 0.7)
        usual: list[ev.Event] = [
            ev.StateReported(node, life, committed, digest(b"state %d" % committed + flipped)),
            ev.StepsReached(node, life, round_),
            ev.ContributionReady(
                node, life, round_, ev.Contribution(samples, rng.randint(0, 20), 1.0, 1.0, front)
            ),
            ev.LossEvaluated(node, life, committed, 1.0),
        ]
        reducing: list[ev.Event] = [
            ev.ChunksSealed(
                node,
                life,
                fence._replace(attempt=since),
                seals,
                scenario.norms_of(r.ledger, seals, rng.choice([0.0, 0.0, 0.5, 9.0])),
            ),
            ev.ReduceComplete(node, life, fence, root, 1, 1, rng.choice([0.0, 1e6]), 1e6),
            *([ev.OrphansFound(node, life, fence, here)] if r.ledger.orphans else []),
        ]
        faults: list[ev.Event] = [
            ev.Connected(node, life),
            ev.Disconnected(node, life),
            ev.Leaving(node, life, "bye"),
            ev.LayoutReported(node, life, 40, LAYOUT if self.state.layout is None else digest(b"other")),
            ev.LayoutReported(node, life, 40, LAYOUT, evaluates=rng.random() < 0.5),
            ev.PeerUnreachable(node, life, rng.choice(list(members.here)), fence, "reset"),
        ]
        draw = rng.random()
        self.feed(rng.choice(faults if draw < 0.02 else reducing if planned and draw < 0.6 else usual))

    def behave(self) -> None:
        """Everybody does what its view says; who was lost comes back, with the state if it held it, and, where
        nobody can tell what the state is, who left with it, too."""
        members, makers = self.state.members, self.state.makers
        for node, m in list(members.departed.items())[-6:]:
            if m.state is MemberState.EVICTED and len(self.state.members.here) < 6:
                self.join(node, m.life + 1)
        for node in sorted(makers & members.departed.keys()) if not self.state.digest else ():
            if node not in self.state.members.here:
                self.join(node, members.departed[node].life + 1)
        while sum(m.role != REDUCER and not m.leaf for m in self.state.members.here.values()) < 4:
            self.join(NodeId(f"n{self.state.members.next_id}"), 1, "")
        for node in list(self.state.members.here):
            if node in self.state.members.here:
                for answer in answers(view(self.state, node), self.state, node):
                    self.feed(answer)
        self.tick(0.25)


def answers(v: pb.View, state: State, node: NodeId) -> list[ev.Event]:
    """What a node that does its work says to its view."""
    r, m = state.round, state.members.here[node]
    life, lease = m.life, state.leases.by_node.get(node, ())
    said: list[ev.Event] = [] if m.connected else [ev.Connected(node, life)]
    if m.role == REDUCER:
        return said + sealed(v, state, node)
    said += [ev.LayoutReported(node, life, 40, LAYOUT)] if m.state is MemberState.JOINING else []
    if v.initialise:
        said.append(ev.StateReported(node, life, 0, v.state_digest or digest(b"state 0")))
    elif m.state_round != v.committed and (may_hold(state, node, v.committed) if v.committed else v.has_state):
        said.append(ev.StateReported(node, life, v.committed, v.state_digest or digest(b"state %d" % v.committed)))
    if v.evaluate:
        said.append(ev.LossEvaluated(node, life, v.committed, 1.0))
    if v.train.lease and m.state_round == v.committed and not v.ready:
        said += [] if v.reached else [ev.StepsReached(node, life, v.train.round)]
        said += (
            [ev.ContributionReady(node, life, r.number, ev.Contribution(1, 1, 1.0, 1.0, data.front(lease)))]
            if v.closing
            else []
        )
    if v.HasField("plan") and r.plan is not None:
        said += sealed(v, state, node)
        if NOBODY in v.plan.owners:
            here = tuple((c, digest(b"%d" % c)) for c in r.ledger.orphans if c % 2)
            said.append(ev.OrphansFound(node, life, r.plan.fence, here))
        elif r.ledger.complete:
            said.append(ev.ReduceComplete(node, life, r.plan.fence, r.ledger.root, 1, 1))
    return said


def sealed(v: pb.View, state: State, node: NodeId) -> list[ev.Event]:
    """All that it owns, as if it owned everything: who does not is not heard."""
    if not v.HasField("plan") or state.round.plan is None:
        return []
    life, fence = state.members.here[node].life, state.round.plan.fence
    alive = bitmap((i for i, m in enumerate(v.plan.members) if not m.gone and m.weight), len(v.plan.members))
    seals = tuple((c, digest(b"%d" % c), alive) for c in range(4))
    norms = scenario.norms_of(state.round.ledger, seals)
    return [
        ev.ChunksSealed(node, life, fence._replace(attempt=since), seals, norms) for since in set(v.plan.since)
    ]


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_the_run_stays_sound_whatever_members_say_and_goes_on_when_they_behave(seed: int) -> None:
    fuzz = Fuzz(seed)
    for _ in range(fuzz.rng.choice([30, 100, 300, 1000])):
        fuzz.anything()
    before = fuzz.state.committed
    for _ in range(4 * 120):
        fuzz.behave()
        if fuzz.state.committed >= before + 3:
            return
    pytest.fail(f"no three rounds in two minutes: {fuzz.state.round}")
