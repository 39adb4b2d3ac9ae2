"""One simulated run: a coordinator, hosts and a network, and what becomes of them under the faults of a seed.

World(seed).run()      raises `invariants.Violation` with the first invariant that does not hold
"""

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from sim import invariants
from sim.disk import Disk
from sim.engine import Engine, Network
from sim.faults import SPEEDS, Faults
from sim.node import Host, Node
from sim.reducer import Reducer
from sim.service import Service, copy
from sim.truth import CHUNK, Mean, Truth, digest

from atoll.comm.chunks import Chunks
from atoll.comm.config.data import DataConfig
from atoll.comm.config.outer import OuterConfig, OverlapConfig, WeightName
from atoll.comm.config.run import (
    CheckpointConfig,
    InnerConfig,
    MembersConfig,
    ReduceConfig,
    RoundsConfig,
    RunConfig,
)
from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.replace import replace
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.journaled_machine import Batch, JournaledMachine
from atoll.coordinator.state_machine.conduct import refusal
from atoll.coordinator.state_machine.events import Decision, Note, Publish
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.state import State

MEMORY = "/dev/shm"
ROUNDS = 20  # that every seed commits at least
STORM = 12  # rounds that commit under faults
CALM = 80.0  # seconds in which a run without faults must have recovered
SLOWEST = 8.0  # seconds that a round may take then


class World:
    """Everything there is, and the only place that knows all of it."""

    step_time, encode_time, apply_time = 0.1, 0.01, 0.02  # seconds

    def __init__(self, seed: int, config: RunConfig | None = None, speeds: Sequence[float] = ()) -> None:
        """What is not given is drawn."""
        self.seed, self.rng = seed, random.Random(seed)
        self.tracing = bool(os.environ.get("ATOLL_SIM_TRACE"))
        self.luck = random.Random(f"disks {seed}")  # apart, so that worlds without disks are what they were
        self.disks = self.luck.random() < 0.4
        self.engine = Engine()
        self.network = Network(self.engine, self.rng)
        self.network.latency["coordinator"] = 0.01
        self.truth = Truth()
        self.faults = Faults(self)
        self.on_commit: list[Callable[[], None]] = []  # called once
        self.hosts: dict[str, Host] = {}
        self.nodes: dict[str, Node] = {}  # the latest process on each host
        speeds = speeds or [self.rng.choice(SPEEDS) for _ in range(self.rng.randint(4, 9))]
        self.config = config or a_config(self.rng, self.luck, len(speeds), a_method(seed), a_start(seed))
        if config is None and seed % 4 == 2:
            delay = random.Random(f"overlap {seed}").choice([1, 3, 5, 8])
            outer = replace(self.config.outer, feedback=0.9 if seed % 8 == 2 else 0.0)
            self.config = replace(self.config, overlap=OverlapConfig(delay=delay), outer=outer)
        self.numel = CHUNK * self.rng.randint(2, 8) - 3
        self.fragments = some_fragments(seed, self.numel) if config is None and seed % 3 == 1 else ()
        if self.fragments:
            self.config = replace(self.config, rounds=replace(self.config.rounds, data_parallel=0))
        self.turns = FragmentSchedule(len(self.fragments) or 1)
        self.folder = Path(tempfile.mkdtemp(prefix="atoll-sim-", dir=MEMORY if Path(MEMORY).is_dir() else None))
        self.seal_time = self.rng.choice([0.02, 0.02, 0.2, 0.6])  # seconds that an average takes at most
        self.same_bits = self.rng.random() < 0.5
        self.config = replace(self.config, security=replace(self.config.security, own_models=not self.same_bits))
        self.regions = 2 + seed % 2 if seed % 5 == 3 else 1  # hosts are in them by turns; far from each other
        self.doors = random.Random(f"leaves {seed}")
        self.leafy = config is None and seed % 4 == 1  # some hosts cannot be dialled
        self.blind = random.Random(f"evaluation {seed}")  # which hosts cannot measure a validation loss
        self.blindness = self.blind.choice([0.0, 0.0, 0.5, 1.0]) if config is None else 0.0
        reducers = self.doors.choice([1, 2]) if config is None and seed % 4 in (1, 3) and seed % 3 else 0
        self.lives = 0  # of the coordinator
        self.last = 0.0  # seconds on its clock; of the latest event
        self.durable = self.durable_before = State(self.config)
        self.service = self._coordinator(self.folder / "0")
        for speed in speeds:
            self.add_host(speed)
        for _ in range(reducers):
            self.add_host(1.0, "reducer")

    # Its parts

    def _coordinator(self, folder: Path) -> Service:
        service = Service(self, folder, snapshot_every=self.rng.choice([10, 40, 150]))
        invariants.replay_gives_what_was_durable(self, service.state)
        self.durable = self.durable_before = service.state
        service.start()
        return service

    def add_host(self, speed: float, role: str = "") -> Host:
        name = f"m{len(self.hosts) + 1}"
        offset = self.rng.choice([0.0, 0.0, 3600.0, -3600.0])
        leaf = self.leafy and not role and len(self.hosts) > 1 and self.doors.random() < 0.6
        evaluates = self.blind.random() >= self.blindness
        host = self.hosts[name] = Host(name, speed, offset, leaf=leaf, evaluates=evaluates, role=role)
        if not role and self.disks and self.luck.random() < 0.9:
            host.disk = Disk()
        self.network.latency[name] = self.rng.uniform(0.002, 0.05)
        self.start(host)
        return host

    def start(self, host: Host) -> None:
        """Start the daemon on a host, with nothing but its session."""
        if not host.gone:
            node = self.nodes[host.name] = (Reducer if host.role else Node)(self, host)
            node.later(self.rng.uniform(0, 0.5), node.control.join)

    def kill(self, node: Node, silent: bool = False) -> None:
        """Its process is gone; its peers' connections break, at some time, or never when its host is gone too."""
        if not node.alive:
            return
        node.alive = False
        self.say(f"{node.place} {node.me} is killed")
        if silent:
            return
        self.network.send(node, self.service, self.service.closed, node.control.stream, *node.session)
        for peer in node.plane.peers.values():
            for link in list(peer.links):
                link.snap()

    def at(self, host: str) -> Node | None:
        return self.nodes.get(host)

    @property
    def living(self) -> list[Node]:
        """Nodes that train."""
        return [n for n in self.nodes.values() if n.alive and not n.host.role]

    @property
    def reducers(self) -> list[Node]:
        return [n for n in self.nodes.values() if n.alive and n.host.role]

    def coordinator_dies(self, how: str, harm: Callable[[Path], None] | None = None, away: float = -1.0) -> None:
        service = self.service
        if not service.alive:
            return
        self.say(f"the coordinator dies {how}")
        self.lives += 1
        folder = self.folder / str(self.lives)
        copy(service.folder, folder)
        if harm is not None:
            harm(folder)
        service.die()
        shutil.rmtree(service.folder)
        for stream in service.streams.values():
            if not stream.deaf:
                self.network.send(service, stream.client.node, stream.client.broke, stream.number)
        if away < 0:
            some = self.rng.choice([0.1, 5.0, 5.0, 30.0])
            away = self.rng.uniform(0, some) if self.rng.random() < 0.97 else 120.0
        self.faults.undo_after(away, lambda: self._coordinator_returns(folder))

    def _coordinator_returns(self, folder: Path) -> None:
        self.say("the coordinator starts")
        self.service = self._coordinator(folder)

    # What happens is told here, and held against the invariants

    def say(self, sentence: str) -> None:
        if self.tracing:
            print(f"{self.engine.now:9.3f} {sentence}")

    def written(self, before: State, batch: Batch) -> None:
        """The batch is on the disk."""
        if self.tracing:
            for _, event in batch.entries:
                self.say(f"coordinator <- {event}")
        self.durable_before, self.durable = self.durable, batch.state
        if before.committed != batch.state.committed:
            watching, self.on_commit = self.on_commit, []
            for happens in watching:
                self.engine.after(0.0, happens)
        invariants.check_written(self, before, batch)

    def heard(self, state: State) -> None:
        """Heartbeats changed the coordinator's state, which nothing that is durable shows."""
        self.durable = self.durable_before = state

    def adopted(self, service: Service, batch: Batch) -> None:
        for effect in batch.effects:
            if isinstance(effect, Decision):
                invariants.only_who_lied_of_a_norm_is_charged_with_it(self, effect)
                invariants.only_whose_delta_was_turned_is_an_outlier(self, effect)
                invariants.who_saves_bytes_is_not_waited_for(self, effect)
            if self.tracing and isinstance(effect, Note):
                self.say(f"coordinator: {effect.sentence}")
            elif self.tracing and isinstance(effect, Publish):
                self.say(f"coordinator: published {effect.record}")
        if self.rng.random() < 0.003:
            journal = Journal(service.folder, lock=False)
            invariants.replay_gives_what_was_durable(self, JournaledMachine(self.config, journal).state)
            journal.close()

    def moved(self, node: Node) -> None:
        invariants.active_nodes_have_the_logs_state(self, node)

    def chunks(self, round_: int) -> Chunks:
        """Of the round's fragment."""
        return Chunks((self.fragments or (self.numel,))[self.turns.fragment(round_)], CHUNK)

    def planned(self, plan: pb.Plan) -> None:
        invariants.a_plan_is_of_its_rounds_fragment(self, plan)
        fence = Fence(Incarnation(plan.incarnation), Epoch(plan.epoch), Round(plan.round), plan.attempt)
        invariants.one_plan_an_attempt(self, fence)

    def averaged(self, mean: Mean) -> bytes:
        """An owner computed the mean of a chunk; its payload."""
        payload = self.payload(mean)
        self.truth.means[payload] = mean
        return payload

    def payload(self, mean: Mean) -> bytes:
        """The sealed bytes of a chunk with this mean."""
        return digest(mean.chunk, mean.contributions, mean.weights, mean.length)

    def sealed(self, round_: int, since: int, chunk: int, payload: bytes) -> None:
        """An owner sealed a chunk."""
        invariants.one_result_an_attempt(self, round_, since, chunk, payload)

    def forged(self, payload: bytes) -> bytes:
        """A lying owner's other bytes for the same chunk."""
        forged = digest("forged", payload)
        self.truth.means[forged] = self.truth.means[payload]
        return forged

    def measured(
        self, node: Node, peers: list[NodeId], divided: bool
    ) -> tuple[tuple[tuple[NodeId, float], ...], float, float]:
        """Round trips to peers, and rates of what it sends within its region and to others, if it knows them."""
        if self.regions == 1:
            return (), 0.0, 0.0
        host = {n.me: int(n.place[1:]) % self.regions for n in self.nodes.values()}
        trips = ((p, 0.004 if host[p] == host[node.me] else 0.1) for p in peers if p in host)
        return tuple(trips), *((1e6, 10.0) if divided else (0.0, 0.0))

    def initial_state(self, node: Node) -> bytes:
        """Made from the run's seed; on some machines with other bits."""
        return digest("initial", "" if self.same_bits else (node.place, self.engine.now))

    def over(self, node: Node) -> None:
        """The run is finished: the node leaves."""
        node.control.leave("the run is finished")
        self.kill(node)

    def admitted(self, node: Node) -> None:
        self.truth.hosts[node.me] = node.place
        self.say(f"{node.place} is {node.me}.{node.control.life}")

    def resumed(self, node: Node, order: pb.Train, lease: list[int], carried: int) -> None:
        invariants.a_round_has_its_inner_steps(self, order)
        invariants.carried_work_is_the_front_of_the_lease(self, node, lease, carried)

    def restored(self, node: Node, state: bytes) -> None:
        """From its disk."""
        node.say(f"has {state.hex()[:6]} on its disk")
        if state not in self.truth.states:
            self.truth.flipped.add(node.me)

    def dropped(self, node: Node, samples: list[int], why: str) -> None:
        invariants.only_committed_work_is_dropped(self, node, samples, why)

    def settled(self, node: Node, round_: int) -> None:
        invariants.states_go_forward(self, node, round_)

    def applies(self, node: Node, round_: int, sealed: bytes) -> None:
        invariants.sealed_bytes_are_the_logs(self, node, round_, sealed)

    def left_out(self, node: Node, round_: int) -> bool:
        """Whether the node was a member in the round, and is in no chunk: all were sealed, or sealed anew."""
        entered = any(e.node == node.me for e in self.truth.entries[round_])
        return entered and self.truth.consumed.isdisjoint(node.local)

    # The story of a seed

    def run(self) -> None:
        """Faults until enough rounds are committed, then none; then everybody must be back, and rounds commit."""
        try:
            faults = self.faults
            faults.begin()
            self.until(lambda: self.durable.committed >= STORM, 300.0)
            faults.end()
            self.say(f"the faults end after round {self.durable.committed}")
            rounds = max(3, ROUNDS - self.durable.committed)
            if self.config.rounds.total:
                invariants.the_run_ends(self, CALM + SLOWEST * rounds)
            else:
                invariants.the_run_goes_on(self, rounds, CALM + SLOWEST * rounds)
            invariants.the_journal_has_every_record(self)
            invariants.the_journal_has_every_decision(self)
            for node in self.living:
                invariants.every_step_counts_once(self, node)
        finally:
            self.close()

    def until(self, over: Callable[[], bool], limit: float) -> bool:
        """Let things happen until `over`; False if it did not come within `limit` seconds."""
        limit += self.engine.now
        step, engine = self.engine.step, self.engine
        durable: State | None = None
        while engine.now < limit:
            step()
            if self.service.alive:
                invariants.only_durable_states_are_shown(self, self.service)
            if self.durable is not durable:
                durable = self.durable
                if over():
                    return True
        return over()

    def unwell(self) -> list[Node]:
        """Living nodes that should be active members and are not."""
        active = self.durable.members.of(MemberState.ACTIVE)
        away = [n for n in self.living if (n.me not in active or n.control.joining) and not n.host.sick]
        return [n for n in away if not refusal(self.durable, n.me)]

    def ailing(self, goal: int) -> str:
        """What is wrong, for the report of a stuck run."""
        state = self.durable
        out = [f"{n.place} ({n.me}, {state.members.here.get(n.me)})" for n in self.unwell()]
        return (
            f"{state.committed} of {goal} rounds are committed, round {state.round.number} is {state.round.phase} "
            f"({state.round.reason}); not active: {', '.join(out) or 'nobody'}"
        )

    def close(self) -> None:
        if self.service.alive:
            self.service.die()
        shutil.rmtree(self.folder, ignore_errors=True)


def a_config(rng: random.Random, luck: random.Random, hosts: int, outer: OuterConfig, together: int) -> RunConfig:
    minimum = rng.choice([1, 2, 2, 3, hosts])
    return RunConfig(
        inner=InnerConfig(batch_size=2),
        outer=outer,
        data=DataConfig(eval_every=rng.choice([1, 2])),
        rounds=RoundsConfig(
            inner_steps=8,
            floor=rng.choice([1, 2]),
            quorum=rng.choice([0.3, 0.5, 0.5, 0.7, 1.0]),
            total=rng.choice([0, 0, 0, 0, ROUNDS]),
            grace=rng.choice([0.0, 0.25, 1.0]),
            collect=4.0,
            reduce_timeout=5.0,
            data_parallel=together,
        ),
        members=MembersConfig(
            start=max(minimum, rng.randint(1, hosts)), minimum=minimum, lease=6.0, reconnect=1.0, stall=5.0
        ),
        reduce=ReduceConfig(block=1, chunk=CHUNK),
        checkpoint=CheckpointConfig(copies=luck.choice([0, 0, 3]), every=luck.choice([1, 2, 4]), patience=30.0),
    )


def some_fragments(seed: int, numel: int) -> tuple[int, ...]:
    """Their elements."""
    ways = random.Random(f"fragments {seed}")
    ends = [0, *sorted(ways.sample(range(1, numel), ways.choice([1, 2, 3]))), numel]
    return tuple(b - a for a, b in pairwise(ends))


def a_method(seed: int) -> OuterConfig:
    ways = random.Random(f"method {seed}")  # apart, so that worlds are what they were
    weights = ways.choice([WeightName.TOKENS, WeightName.TOKENS, WeightName.EQUAL, WeightName.QUALITY])
    return OuterConfig(weights=weights, clip=ways.random() < 0.4, per_token=ways.random() < 0.4)


def a_start(seed: int) -> int:
    """Rounds of one step."""
    return random.Random(f"start {seed}").choice([0, 0, 0, 4])


def again(seed: int) -> str:
    """The command that runs just this seed and prints what happens."""
    return f"ATOLL_SIM_FIRST={seed} ATOLL_SIM_SEEDS=1 ATOLL_SIM_TRACE=1 pytest -s tests/sim/test_simulation.py"


def violations(seeds: Iterable[int]) -> list[str]:
    """What the seeds' runs violate, each with the command that runs it again."""
    found = []
    for seed in seeds:
        try:
            World(seed).run()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}\n    {again(seed)}")
    return found
