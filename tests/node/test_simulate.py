"""Simulated runs of a tiny model: where theory says what must come out, they are exact."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from atoll import configs
from atoll.comm.codecs.codec import NonFinite
from atoll.comm.config.data import DataConfig
from atoll.comm.config.load import load_run
from atoll.comm.config.methods import check_real, simulated_only
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.outer import FragmentsConfig, LeftOutName, OuterConfig, OverlapConfig, TakeName
from atoll.comm.config.run import CodecName, InnerConfig, OptimizerName, ReduceConfig, RoundsConfig, RunConfig
from atoll.comm.config.shipped import method_file
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.config import NodeConfig
from atoll.node.data.samples import Source
from atoll.node.data.source import open_source
from atoll.node.participant.lr_schedule import learning_rate
from atoll.node.simulate import simulation
from atoll.node.simulate.cli import _progress, percent, simulate
from atoll.node.simulate.conditions import Conditions
from atoll.node.simulate.defence import Seals
from atoll.node.simulate.exchange import MemberDelta, ReplicatedState
from atoll.node.simulate.fleet import SimulatedFleet
from atoll.node.simulate.learner import SimulatedTrainer, with_batch
from atoll.node.simulate.method import build_method
from atoll.node.simulate.simulation import RunOutcome, data_parallel, fleet_of, local_updates
from atoll.node.simulate.state import SimulatedNode
from atoll.outer_opt.merge import mean
from atoll.outer_opt.overlap import rebase
from atoll.outer_opt.round import RoundMember, exchange
from atoll.outer_opt.sgd import Sgd
from atoll.outer_opt.weights import shares

METHODS = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in ("overlapped", "muloco") else pytest.mark.long)
    for path in sorted(configs.METHODS.glob("*.yaml"))
]
MODEL = ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, ffn_dim=48, seq_len=32, tied_head=False)
FP32 = ReduceConfig(codec=CodecName.FP32)
NODE = NodeConfig()


def tiny(**changes: Any) -> RunConfig:
    inner = InnerConfig(optimizer=OptimizerName.ADAMW, batch_size=4, warmup_tokens=512)
    rounds = RoundsConfig(inner_steps=5)
    outer = OuterConfig(clip=False)  # what theory says is of plain means
    usual = {"model": MODEL, "inner": inner, "outer": outer, "reduce": FP32, "rounds": rounds}
    return RunConfig(**{"seed": 5, **usual, **changes})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(tiny(), NODE, tmp_path_factory.mktemp("cache"))


def played(run: RunConfig, source: Source, nodes: int = 4, steps: int = 20, **conditions: Any) -> RunOutcome:
    return local_updates("run", run, NODE, Conditions(nodes, steps, **conditions), source, lambda record: None)


def fleet(run: RunConfig, source: Source, nodes: int = 4, steps: int = 20, **conditions: Any) -> SimulatedFleet:
    """After its run."""
    found = fleet_of(run, NODE, Conditions(nodes, steps, **conditions), source, lambda record: None)
    found.simulate()
    return found


def losses(outcome: RunOutcome) -> list[float]:
    return [record.val_loss for record in outcome.records if record.val_loss is not None]


def plain(run: RunConfig, source: Source, steps: int) -> SimulatedTrainer:
    trainer = SimulatedTrainer(run, NODE, source)
    trainer.initialise(run.seed)
    for k in range(steps):
        train(trainer, run, k)
    return trainer


def train(trainer: SimulatedTrainer, run: RunConfig, k: int) -> None:
    first = k * run.inner.batch_size
    trainer.step(first, learning_rate(run.inner, first * run.model.seq_len))


def test_a_share_is_rounded_and_nearly_all_is_not_all() -> None:
    shares = (0.0, 0.004, 0.896, 0.994, 0.995, 0.9996, 1.0)
    assert [percent(share) for share in shares] == ["0 %", "0 %", "90 %", "99 %", ">99 %", ">99 %", "100 %"]


def test_progress_is_told_as_it_is_at_every_tenth_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny()
    total = 4 * 20 * run.inner.batch_size * run.model.seq_len
    with _progress(Conditions(4, 20), quiet=False) as follow:
        show = follow("diloco", run)
        for number, share in enumerate((1 / 6, 0.19, 1 / 3, 0.9996), 1):
            show(SimpleNamespace(round=number, tokens=int(share * total), val_loss=None))
    said = [line for line in capsys.readouterr().err.splitlines() if "round" in line]
    assert said == [
        f"diloco: round {number}, {share}" for number, share in ((1, "17 %"), (3, "33 %"), (4, ">99 %"))
    ]


@pytest.mark.parametrize("every", [1, 4])
def test_one_node_with_sgd_of_1_is_plain_training_bit_for_bit(every: int, source: Source) -> None:
    # In fp64 the difference of two fp32 numbers is exact; in fp32 it is rounded where one is far from the other.
    run, trainer = tiny(), SimulatedTrainer(tiny(), NODE, source)
    trainer.initialise(run.seed)
    anchor = trainer.flat.astype(np.float64)
    momentum, residual, offered, *room = (np.zeros_like(anchor) for _ in range(6))
    member = RoundMember(trainer.flat, residual, offered, *shares([3.0]))
    for k in range(12):
        train(trainer, run, k)
        if (k + 1) % every == 0:
            exchange(
                anchor, momentum, [member], mean, Sgd(1.0), rebase, None, np.copy, (room[0], room[1], room[2])
            )
    assert trainer.flat.tobytes() == plain(run, source, 12).flat.tobytes()


@pytest.mark.parametrize("feedback", [0.0, 0.9])
def test_a_simulated_run_is_its_rounds_put_together_bit_for_bit(feedback: float, source: Source) -> None:
    run = tiny(
        reduce=ReduceConfig(codec=CodecName.INT8),
        outer=OuterConfig(momentum_warmup=2, feedback=feedback, clip=False),
        rounds=RoundsConfig(inner_steps=3),
    )
    trainees = [plain(run, source, 0) for _ in range(3)]
    method, anchor = build_method(run, trainees[0].tensors()), trainees[0].flat.copy()
    wire = ReplicatedState(run, method, method.fragments[0], anchor).over_the_wire
    members = [RoundMember(t.flat, np.zeros_like(anchor), np.empty_like(anchor), 1 / 3) for t in trainees]
    momentum, room = np.zeros_like(anchor), (np.empty_like(anchor), np.empty_like(anchor), np.empty_like(anchor))
    for k in range(9):
        for i, trainer in enumerate(trainees):
            trainer.step((3 * k + i) * 4, learning_rate(run.inner, 3 * k * 4 * 32))
        if k % 3 == 2:
            rule = method.schedule.at(k // 3 + 1)
            exchange(anchor, momentum, members, mean, rule, method.left_out, method.feedback, wire, room)
    assert fleet(run, source, nodes=3, steps=9).anchor().tobytes() == anchor.tobytes()


def test_one_simulated_node_with_sgd_of_1_is_plain_training(source: Source) -> None:
    run = tiny(outer=OuterConfig(lr=1.0, momentum=0.0))
    found = fleet(run, source, nodes=1)
    assert found.states[0].round == 4
    # In fp32 each round's difference is rounded, and AdamW makes more of that; how much, is the processor's.
    np.testing.assert_allclose(found.anchor(), plain(run, source, 20).flat, rtol=0, atol=1e-5)


@pytest.mark.long
def test_averaging_after_every_sgd_step_is_data_parallelism(source: Source) -> None:
    run = tiny(
        inner=InnerConfig(optimizer=OptimizerName.SGD, lr=0.1, warmup_tokens=512, clip=1e6, batch_size=4),
        outer=OuterConfig(lr=1.0, momentum=0.0, clip=False),
        rounds=RoundsConfig(inner_steps=1),
    )
    here, there = fleet(run, source), plain(with_batch(run, 4 * 4), source, 20)
    assert here.states[0].round == 20
    np.testing.assert_allclose(here.anchor(), there.flat, rtol=0, atol=1e-6)
    outcome, evaluator = (
        data_parallel("dp", run, NODE, Conditions(4, 20), source, lambda record: None),
        plain(run, source, 0),
    )
    evaluator.flat[:] = there.flat
    assert outcome.val_loss == evaluator.validation_loss()
    assert losses(outcome)[0] - losses(outcome)[-1] > 0.1


@pytest.mark.long
def test_fragments_that_are_all_due_at_once_are_the_whole_model_bit_for_bit(source: Source) -> None:
    whole = tiny(overlap=OverlapConfig(0))
    parts = tiny(fragments=FragmentsConfig(4, stagger=False), overlap=OverlapConfig(0, TakeName.MIX, 0.0))
    one, other = fleet(whole, source), fleet(parts, source)
    assert [len(found.states) for found in (one, other)] == [1, 4]
    assert one.anchor().tobytes() == other.anchor().tobytes()
    assert one.committed == other.committed
    assert {state.round for state in other.states} == {state.round for state in one.states} == {4}


class Measured(SimulatedTrainer):
    """Sums up how far its inner steps took it."""

    def __init__(self, run: RunConfig, source: Source) -> None:
        super().__init__(run, NODE, source)
        self.trained = np.zeros(self.flat.size)

    def step(self, first: int, rate: float) -> float:
        before = self.flat.copy()
        loss = super().step(first, rate)
        self.trained += self.flat.astype(np.float64) - before
        return loss


class Recorded(ReplicatedState):
    """Sums up what of each node's the rounds used."""

    nodes: Sequence[SimulatedNode] = ()
    sent: dict[int, Any] = {}

    def commit(self, contributions: Sequence[MemberDelta], seals: Seals | None = None) -> None:
        for contribution in contributions:
            (node,) = (n.number for n in self.nodes if n.shares[0].decoded is contribution.decoded)
            self.sent[node] = self.sent.get(node, 0.0) + contribution.decoded.astype(np.float64)
        super().commit(contributions, seals)


@pytest.mark.long
@pytest.mark.parametrize("overlap", [OverlapConfig(), OverlapConfig(2)])
def test_what_was_sent_and_what_is_left_is_what_was_trained(overlap: OverlapConfig, source: Source) -> None:
    """Over 50 rounds in which 30 % of the contributions are in vain, and with a wire that loses a lot."""
    run = tiny(
        reduce=ReduceConfig(codec=CodecName.INT4),
        outer=OuterConfig(feedback=1.0, left_out=LeftOutName.REBASE),
        rounds=RoundsConfig(inner_steps=2),
        overlap=overlap,
        data=DataConfig(eval_every=100),
    )
    conditions, start = Conditions(2, 100, drop=0.3, latency=0.5), plain(run, source, 0)
    method = build_method(run, start.tensors())
    found = SimulatedFleet(run, conditions, method, lambda: Measured(run, source), plain(run, source, 0), start)
    recorded = Recorded(run, method, method.fragments[0], start.flat)
    recorded.nodes, recorded.sent, found.states = found.nodes, {}, [recorded]
    found.simulate()
    used = sum(record.members for record in found.records)
    assert recorded.round >= 45 and 0.5 < used / (2 * recorded.round) < 0.85
    for node in found.nodes:
        assert isinstance(node.trainer, Measured) and node.shares[0].owed == 0
        residual, trained = node.shares[0].residual, node.trainer.trained
        assert residual is not None and np.linalg.norm(residual) > 1e-3 * np.linalg.norm(trained)
        error = np.linalg.norm(recorded.sent[node.number] + residual + trained)
        assert error < 1e-5 * np.linalg.norm(trained)


@pytest.mark.long
@pytest.mark.parametrize("overlap", [OverlapConfig(), OverlapConfig(3, TakeName.MIX, 0.5)])
def test_a_data_parallel_start_has_rounds_of_one_step_that_are_averaged(
    overlap: OverlapConfig, source: Source
) -> None:
    averaged = tiny(
        inner=InnerConfig(optimizer=OptimizerName.SGD, lr=0.1, warmup_tokens=512, clip=1e6, batch_size=4),
        rounds=RoundsConfig(inner_steps=5, data_parallel=10),
        overlap=overlap,
    )
    there = data_parallel("dp", averaged, NODE, Conditions(4, 20), source, lambda record: None)
    here = played(averaged, source)
    assert [record.round for record in here.records[:12]] == list(range(12))
    assert here.records[10].tokens == 10 * 4 * 4 * 32
    assert here.records[10].val_loss == pytest.approx(losses(there)[2], abs=1e-6)
    assert here.tokens == there.tokens
    steps = [b.tokens - a.tokens for a, b in zip(here.records, here.records[1:], strict=False)]
    assert set(steps[:10]) == {4 * 4 * 32} and min(steps[10:]) >= 5 * 4 * 4 * 32


def test_fragments_take_turns_after_a_data_parallel_start(source: Source) -> None:
    rounds = RoundsConfig(inner_steps=8, data_parallel=3)
    found = played(tiny(rounds=rounds, fragments=FragmentsConfig(4)), source, steps=19).records
    ends = [(record.time, record.fragment) for record in found if 3.0 < record.time < 19.0]
    assert ends == [(3.0 + 2.0 * k, (k - 1) % 4) for k in range(1, 8)]


@pytest.mark.long
def test_a_step_that_an_exchange_ends_in_is_from_the_parameters_that_it_began_with(source: Source) -> None:
    run = tiny(overlap=OverlapConfig(1))
    at_once, within, with_it = (played(run, source, latency=seconds) for seconds in (0.0, 0.5, 1.0))
    assert at_once.val_loss == within.val_loss == with_it.val_loss


@pytest.mark.long
def test_the_same_seed_gives_the_same_run_and_another_seed_another(source: Source) -> None:
    conditions: dict[str, Any] = {"drop": 0.3, "churn": 2, "speeds": (1.0, 1.0, 0.8, 0.5)}
    run = tiny(reduce=ReduceConfig(codec=CodecName.INT8))
    one, same = (played(run, source, **conditions) for _ in range(2))
    assert one.records == same.records
    assert played(replace(run, seed=6), source, **conditions).records != one.records


@pytest.mark.long
@pytest.mark.parametrize("path", METHODS)
def test_every_method_trains_through_faults(path: Path, source: Source, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {dim: 32, layers: 2, heads: 2, kv_heads: 1, ffn_dim: 48, seq_len: 32, tied_head: false}\n"
        "inner: {batch_size: 4, warmup_tokens: 512}\nseed: 5\n"
    )
    delay = min(2, load_run(tmp_path / "run.yaml", (), path).overlap.delay)
    run = load_run(tmp_path / "run.yaml", ("rounds.inner_steps=8", f"overlap.delay={delay}"), path)
    outcome = played(run, source, steps=40, drop=0.2, churn=2, speeds=(1.0, 1.0, 0.8, 0.5), latency=0.5)
    assert outcome.val_loss < losses(outcome)[0] - 0.5
    assert outcome.tokens >= 40 * 4 * 4 * 32 - 4 * 4 * 32
    assert outcome.inner_steps_lost > 0


@pytest.mark.long
@pytest.mark.parametrize("churn", [1, 3])
@pytest.mark.parametrize("delay", [0, 4])
def test_nodes_die_and_join_while_deltas_travel(churn: int, delay: int, source: Source) -> None:
    run = tiny(
        overlap=OverlapConfig(delay), reduce=ReduceConfig(codec=CodecName.INT4), outer=OuterConfig(feedback=1.0)
    )
    outcome = played(run, source, steps=30, churn=churn, latency=4.0, speeds=(1.0, 0.9, 0.7, 0.4))
    assert outcome.tokens >= (30 * 4 - 2) * 4 * 32
    assert outcome.utilisation <= 1.0 and outcome.goodput < 1.0


@pytest.mark.long
def test_who_joins_without_moments_begins_with_small_steps_as_a_node_does(source: Source) -> None:
    run = tiny(rounds=RoundsConfig(inner_steps=12))
    nodes = fleet(run, source, steps=48, churn=1).nodes
    assert {node.trainer.rewarming.steps for node in nodes if node.joined} == {3}
    assert {node.trainer.rewarming.steps for node in nodes if not node.joined} == {0}
    first, second = plain(run, source, 0), plain(run, source, 0)
    first.begin_without_moments(12)
    for share in (0.25, 0.5, 0.75, 1.0, 1.0):
        first.step(0, 3e-3)
        second.step(0, share * 3e-3)
    assert first.flat.tobytes() == second.flat.tobytes()


@pytest.mark.long
def test_late_work_can_count_less_and_rounds_can_keep_their_decay_a_token(source: Source) -> None:
    run = tiny(rounds=RoundsConfig(inner_steps=4))
    conditions: dict[str, Any] = {"drop": 0.5, "speeds": (1.0, 1.0, 0.8, 0.5)}
    usual = OuterConfig(lr=0.9, momentum=0.5, momentum_warmup=3)
    settings = [usual, replace(usual, damping=True), replace(usual, per_token=True)]
    found = [played(replace(run, outer=outer), source, **conditions) for outer in settings]
    assert len({outcome.val_loss for outcome in found}) == 3
    assert max(outcome.val_loss for outcome in found) < losses(found[0])[0] - 0.5
    assert {outcome.tokens for outcome in found} == {20 * 4 * 4 * 32}


def test_training_that_diverges_is_said(source: Source) -> None:
    wild = InnerConfig(optimizer=OptimizerName.SGD, lr=float("inf"), warmup_tokens=0, batch_size=4)
    run = tiny(inner=wild)
    with pytest.raises(NonFinite, match="training diverged on node 0 in round 1"):
        played(run, source)


@pytest.mark.long
def test_waiting_costs_what_the_formula_says_and_overlap_nothing(source: Source) -> None:
    # An exchange that takes half of a round: 10 steps of training, 10 seconds of exchange.
    blocking = tiny(rounds=RoundsConfig(inner_steps=10))
    waited = played(blocking, source, steps=40, latency=10.0)
    assert waited.utilisation == pytest.approx(10 / 20, rel=0.03)
    overlapped = played(replace(blocking, overlap=OverlapConfig(10)), source, steps=40, latency=8.0)
    assert overlapped.utilisation == pytest.approx(40 / 48, rel=0.01)  # waits for the exchange that ends the run
    assert overlapped.tokens == waited.tokens


@pytest.mark.long
def test_a_quorum_with_grace_keeps_fast_nodes_training(source: Source) -> None:
    speeds = (1.0, 1.0, 0.8, 0.5)
    everybody = tiny(rounds=RoundsConfig(inner_steps=10, quorum=1.0, ceiling=1.0, grace=100.0))
    waited = played(everybody, source, steps=40, speeds=speeds)
    assert waited.goodput == pytest.approx(4 * 0.5 / sum(speeds), rel=0.03)
    quorum = tiny(rounds=RoundsConfig(inner_steps=10, quorum=0.25, grace=0.5), overlap=OverlapConfig(2))
    assert played(quorum, source, steps=40, speeds=speeds).goodput > 0.97


@pytest.mark.long
def test_the_command_compares_methods_and_leaves_files(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "name: tiny\nmodel: {dim: 32, layers: 2, heads: 2, kv_heads: 1, ffn_dim: 48, seq_len: 32}\n"
        "inner: {optimizer: adamw, batch_size: 4, warmup_tokens: 512}\n"
    )
    out = tmp_path / "out"
    arguments = [str(tmp_path / "run.yaml"), "--nodes", "2", "--out", str(out), "--steps", "10", "--json"]
    methods = ["--method", "diloco", "--method", "sparse", "rounds.inner_steps=5", "seed=3"]
    done = CliRunner().invoke(simulate, [*arguments, *methods], catch_exceptions=False)
    rows = {row["label"]: row for row in json.loads(done.stdout)["runs"]}
    assert set(rows) == {"data-parallel-adamw", "diloco", "sparse"}
    assert {row["tokens"] for row in rows.values()} == {10 * 2 * 4 * 32}
    assert rows["diloco"]["reduction"] == pytest.approx(5)  # fp32, once in five steps
    assert rows["sparse"]["reduction"] > 5 * 130
    assert rows["diloco"]["against_baseline"] is not None
    assert (out / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert len((out / "diloco.jsonl").read_text().splitlines()) == 3
    assert (out / "curves.csv").read_text().startswith("method,fragment,round")
    assert json.loads((out / "summary.json").read_text())["settings"]["runs"]["sparse"]["seed"] == 3


def short(tmp_path: Path, *arguments: str) -> list[str]:
    """The command, for a run of one step of two nodes."""
    (tmp_path / "run.yaml").write_text(
        "model: {dim: 32, layers: 2, heads: 2, kv_heads: 1, ffn_dim: 48, seq_len: 32}\ninner: {batch_size: 2}\n"
    )
    options = ["--nodes", "2", "--steps", "1", "--no-baseline", "--out", str(tmp_path / "out"), "--json"]
    return [str(tmp_path / "run.yaml"), *options, *arguments]


def test_a_folder_that_cannot_be_used_is_named_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "local_updates", None)
    (tmp_path / "out").touch()
    under = ("--out", str(tmp_path / "out" / "sim"))
    with pytest.raises(ResourceError, match="out/sim cannot be used .*Not a directory.*: give another --out"):
        CliRunner().invoke(simulate, short(tmp_path, *under), catch_exceptions=False)


def test_results_that_cannot_be_written_are_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "out" / "curves.csv").mkdir(parents=True)
    with pytest.raises(ResourceError, match="out cannot be used .*curves.csv.*: give another --out"):
        CliRunner().invoke(simulate, short(tmp_path), catch_exceptions=False)


def test_an_interrupted_comparison_leaves_the_runs_that_were_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(label: str, *others: Any) -> RunOutcome:
        if label == "sparse":
            raise KeyboardInterrupt
        return local_updates(label, *others)

    monkeypatch.setattr(simulation, "local_updates", interrupted)
    CliRunner().invoke(simulate, short(tmp_path, "--method", "diloco", "--method", "sparse"))
    assert {path.stem for path in (tmp_path / "out").glob("*.jsonl")} == {"diloco"}
    assert "\ndiloco," in (tmp_path / "out" / "curves.csv").read_text()


def test_a_run_of_torchtitans_models_is_not_simulated(tmp_path: Path) -> None:
    titan = "engine=torchtitan", "titan.config=llama3_8b", "inner.optimizer=adamw"
    with pytest.raises(ConfigError, match="trains the built-in model: set engine=builtin"):
        CliRunner().invoke(simulate, short(tmp_path, *titan), catch_exceptions=False)


def test_a_fleet_too_large_for_memory_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="simulating 2 nodes with a model of .* GB are available"):
        CliRunner().invoke(simulate, short(tmp_path, "model.dim=1000000"), catch_exceptions=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--nodes", "0"), "--nodes is 0"),
        (("--nodes", "2", "--speeds", "1,2,3"), "3 numbers for --nodes 2"),
        (("--nodes", "2", "--speeds", "fast"), "write numbers"),
        (("--nodes", "2", "--drop", "1"), "--drop is 1"),
        (("--nodes", "2", "--method", "magic"), "name one of decoupled, diloco"),
        (("--nodes", "2", "rounds.total=0", "--steps", "0"), "give --steps"),
        (("--nodes", "2", "overlap.delay=99"), "above rounds.inner_steps"),
        (("--nodes", "2", "reduce.codec=sparse"), "outer.feedback is 0"),
        (("--nodes", "2", "outer.feedback=2"), "outer.feedback is 2"),
        (("--nodes", "2", "data.kind=bytes"), "data.kind=bytes: give its folder, --data FOLDER"),
        (("--nodes", "2", "data.kind=script"), "trains on text, and data.kind=script has none"),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        CliRunner().invoke(
            simulate,
            [str(configs.FOLDER / "demo.yaml"), "--out", str(tmp_path), *arguments],
            catch_exceptions=False,
        )


def test_a_coordinator_refuses_what_nodes_would_ignore() -> None:
    demo = configs.FOLDER / "demo.yaml"
    for method in configs.METHODS.glob("*.yaml"):
        check_real(load_run(demo, (), method))
    check_real(load_run(demo, ("outer.damping=true", "rounds.data_parallel=5", "overlap.delay=1")))
    check_real(load_run(demo, ("outer.damping=true", "fragments.count=2")))
    begun = load_run(demo, ("rounds.data_parallel=5", "fragments.count=2"))
    assert simulated_only(begun) == ["rounds.data_parallel=5 with fragments.count=2"]
    with pytest.raises(ConfigError, match="only `atoll simulate` carries this out so far"):
        check_real(begun)
    with pytest.raises(ConfigError, match="set fragments.count=6 or less"):
        check_real(load_run(demo, ("rounds.inner_steps=6",), method_file("decoupled", demo)))
