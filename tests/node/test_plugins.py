"""Runs of the sample package's plugins, which a wheel installs: they train where it is, and say so where it is
not."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plugin_packages import install_sample, write_package
from trainers import launched, order, small

from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.outer import OuterConfig
from atoll.comm.config.run import InnerConfig, OptimizerName, RoundsConfig, RunConfig
from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.node.config import Device, NodeConfig
from atoll.node.daemon.entrance import settings_for
from atoll.node.daemon.state_dir import JoinOptions
from atoll.node.data.source import open_source
from atoll.node.engine_check import check_engine
from atoll.node.outer.method import outer_schedule
from atoll.node.simulate.conditions import Conditions
from atoll.node.simulate.simulation import local_updates
from atoll.node.trainer.model import build_for
from atoll.node.trainer_channel import Evaluate, Evaluated, Initialise, Initialised, Ready
from atoll.outer_opt.sgd import Sgd

NODE = NodeConfig(device=Device.CPU, threads=1)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    install_sample(target, tmp_path_factory.mktemp("work"))
    return target


@pytest.fixture
def sample(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sample package is installed, for this process and those that it starts."""
    monkeypatch.syspath_prepend(wheel)
    monkeypatch.setenv("PYTHONPATH", str(wheel))
    yield
    for module in [name for name in sys.modules if name.partition(".")[0] == "atoll_sample"]:
        del sys.modules[module]


def run_of(**changes: Any) -> RunConfig:
    """A run of all the sample's plugins."""
    settings: dict[str, Any] = {
        "model": ModelConfig(plugin="bigram", vocab_size=32, dim=16, seq_len=16),
        "data": DataConfig(kind=DataKind.PLUGIN, plugin="counting", val_batches=1),
        "outer": OuterConfig(plugin="heavy-ball", lr=0.7, momentum=0.5),
        "inner": InnerConfig(optimizer=OptimizerName.ADAMW, lr=0.05, batch_size=4, warmup_tokens=64),
        "rounds": RoundsConfig(inner_steps=10),
        "plugin_packages": ["atoll-sample==0.1.0"],
    }
    return small(**(settings | changes))


@pytest.mark.long
def test_a_trainer_of_two_ranks_trains_a_plugins_model_on_a_plugins_data(sample: None, tmp_path: Path) -> None:
    async def story() -> None:
        async with launched(tmp_path / "node", run_of(), 2) as node:
            hello = await node.attach()
            assert hello.numel == 2 * 32 * 16 + 32
            await node.ask(Initialise(7), Initialised)
            before = (await node.ask(Evaluate(1), Evaluated)).loss
            assert before == pytest.approx(np.log(32), abs=0.1)
            assert (await node.ask(order(1, 60), Ready)).loss < before / 3
            assert "atoll_sample" not in sys.modules  # of this process

    asyncio.run(story())


@pytest.mark.long
def test_a_trainer_without_the_package_ends_with_the_sentence(tmp_path: Path) -> None:
    async def failure(folder: str, run: RunConfig) -> str:
        async with launched(tmp_path / folder, run) as node:
            return await node.failure()

    async def both() -> None:
        model, data = await asyncio.gather(
            failure("model", run_of(data=DataConfig())), failure("data", run_of(model=small().model))
        )
        assert "the entry point bigram in the group atoll.models: install what" in model
        assert "the entry point counting in the group atoll.data: install what" in data

    asyncio.run(both())


def test_simulated_nodes_train_with_all_three(sample: None, tmp_path: Path) -> None:
    run = run_of()
    source = open_source(run, NODE, tmp_path)
    outcome = local_updates("run", run, NODE, Conditions(2, 40), source, lambda record: None)
    losses = [record.val_loss for record in outcome.records if record.val_loss is not None]
    assert losses[-1] < losses[0] / 2


def joining(run: RunConfig, folder: Path, command: tuple[str, ...] = ()) -> None:
    settings_for(run, NODE, JoinOptions(folder, "", "", "ada", 0.0, command=command))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": DataConfig(), "outer": OuterConfig()}, "model.plugin is bigram, and no package"),
        ({"model": small().model, "outer": OuterConfig()}, "data.plugin is counting, and no package"),
        ({"model": small().model, "data": DataConfig()}, "outer.plugin is heavy-ball, and no package"),
    ],
)
def test_a_node_without_the_package_refuses_when_it_joins(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ResourceError, match=rf"{sentence} .*\(atoll-sample==0.1.0\)"):
        joining(run_of(**changes), tmp_path)


def test_a_node_with_the_package_joins_and_imports_neither_model_nor_data(sample: None, tmp_path: Path) -> None:
    joining(run_of(), tmp_path)
    imported = {name for name in sys.modules if name.startswith("atoll_sample")}
    assert imported == {"atoll_sample", "atoll_sample.outer"}


def test_a_script_needs_the_runs_outer_rule_alone(tmp_path: Path) -> None:
    run = run_of(outer=OuterConfig())
    joining(run, tmp_path, ("python", "train.py"))
    with pytest.raises(ResourceError, match="outer.plugin is heavy-ball"):
        joining(run_of(), tmp_path, ("python", "train.py"))


def test_a_model_of_ones_own_is_not_trained_in_a_run_that_names_a_plugin(sample: None) -> None:
    with pytest.raises(ConfigError, match="model=mine:build: this run says its model itself, model.plugin=bigram"):
        check_engine(run_of(), NodeConfig(model="mine:build"))


def test_the_outer_rule_is_the_plugins_after_a_data_parallel_start(sample: None) -> None:
    schedule = outer_schedule(run_of(rounds=RoundsConfig(inner_steps=10, data_parallel=1)))
    assert schedule.at(1) == Sgd(1.0)
    anchor, momentum, scratch = np.ones(4, np.float32), np.zeros(4, np.float32), np.empty(4, np.float32)
    for k in (2, 3):
        schedule.at(k).step(anchor, momentum, np.full(4, 0.5, np.float32), scratch)
    np.testing.assert_allclose(momentum, 0.75)  # 0.5, then 0.5 * 0.5 + 0.5
    np.testing.assert_allclose(anchor, 1 - 0.7 * (0.5 + 0.75), rtol=1e-6)


RULE = """
class Rule:
    def at(self, k, length=1.0): return self
    def step(self, anchor, momentum, delta, scratch):
        {step}
def make(outer): return {made}
"""


@pytest.mark.parametrize(
    ("step", "made", "sentence"),
    [
        ("anchor -= delta", "Rule()", ""),
        ("anchor -= delta / abs(delta).max()", "Rule()", "same bits for a vector whole and in parts"),
        ("anchor[0] += id(scratch) % 1009 + len(delta)", "Rule()", "same bits for a vector whole and in parts"),
        ("anchor *= 1e38", "Rule()", "not finite"),
        ("anchor -= delta.astype('float64').reshape(2, -1)", "Rule()", "failed in its step: ValueError"),
        ("pass", "None", r"returned a NoneType without at\(\)"),
    ],
)
def test_a_rule_that_nodes_could_not_agree_on_is_refused(
    step: str, made: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path, "tide", "atoll.outer", "tide = tide:make", RULE.format(step=step, made=made))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tide", raising=False)
    run = RunConfig(outer=OuterConfig(plugin="tide"))
    if not sentence:
        outer_schedule(run)
        return
    with pytest.raises(ConfigError, match=rf"outer.plugin=tide .*{sentence}"):
        outer_schedule(run)


SOURCE = """
import numpy as np
from atoll.node.data.samples import Sample
class Source:
    def train(self, index): return {sample}
    validation = train
    def expect(self, indices): pass
def wrong(run, node): return {made}
"""
ROW = "np.arange(16)"


@pytest.mark.parametrize(
    ("sample", "made", "sentence"),
    [
        (f"Sample({ROW}, {ROW}, {ROW})", "Source()", ""),
        (f"Sample({ROW}, {ROW} * 0 - 100, {ROW})", "Source()", ""),
        (f"Sample({ROW}, np.arange(15), {ROW})", "Source()", r"labels of shape \(15,\) and type int64"),
        (f"Sample({ROW}.astype('int32'), {ROW}, {ROW})", "Source()", r"input_ids of shape \(16,\) and type int32"),
        (f"Sample({ROW}, {ROW}, list({ROW}))", "Source()", "position_ids of shape None and type list"),
        (f"Sample({ROW} + 17, {ROW}, {ROW})", "Source()", r"input_ids from 17 to 32: they must be in 0 \.\.\. 31"),
        (f"Sample({ROW}, {ROW} - 1, {ROW})", "Source()", "labels from -1 to 14"),
        ("{}", "Source()", "gives a dict as training sample 3"),
        ("None", "object()", r"returned a object without train\(\)"),
    ],
)
def test_samples_that_the_model_cannot_be_trained_on_are_refused(
    sample: str, made: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = SOURCE.replace("{sample}", sample).replace("{made}", made)
    write_package(tmp_path, "texts", "atoll.data", "texts = texts_of_mine:wrong", code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "texts_of_mine", raising=False)
    run = run_of(data=DataConfig(kind=DataKind.PLUGIN, plugin="texts"), plugin_packages=[])
    if not sentence:
        assert open_source(run, NODE, tmp_path).train(3).input_ids.tolist() == list(range(16))
        return
    with pytest.raises(AtollError, match=rf"data.plugin=texts .*{sentence}"):
        open_source(run, NODE, tmp_path).train(3)


def test_what_is_no_module_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path, "reefs", "atoll.models", "reef = reefs_of_mine:build", "def build(config): return 3")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="model.plugin=reef .* returned a int: it must return a torch.nn.Module"):
        build_for(RunConfig(model=ModelConfig(plugin="reef")))
    del sys.modules["reefs_of_mine"]
