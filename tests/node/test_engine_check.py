"""What a run's engine asks of a node, before a trainer is started."""

import pytest

from atoll.comm.config.engine import Engine, TitanConfig
from atoll.comm.config.hf import HfConfig, LoraConfig
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.extras import MissingPackage
from atoll.node import preflight
from atoll.node.config import Checkpointing, NodeConfig
from atoll.node.engine_check import check_engine

RUN = RunConfig(engine=Engine.TORCHTITAN, titan=TitanConfig(config="llama3_8b"))


def test_the_built_in_trainer_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.comm.extras.installed", lambda package: False)
    check_engine(RunConfig(), NodeConfig(bf16=True, compile=True, model="mine:build"))


def test_a_node_without_torchtitan_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.comm.extras.installed", lambda package: False)
    with pytest.raises(MissingPackage, match=r'needs torchtitan and triton, .*pip install ".\[titan\]"'):
        check_engine(RUN, NodeConfig())


def test_a_node_without_transformers_or_peft_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, adapters = (
        RunConfig(engine=Engine.HF),
        RunConfig(engine=Engine.HF, hf=HfConfig(lora=LoraConfig(rank=8))),
    )
    monkeypatch.setattr("atoll.comm.extras.installed", lambda package: package not in ("transformers", "peft"))
    with pytest.raises(MissingPackage, match=r'hf needs transformers, .*pip install ".\[hf\]"'):
        check_engine(whole, NodeConfig())
    monkeypatch.setattr("atoll.comm.extras.installed", lambda package: package != "peft")
    check_engine(whole, NodeConfig(bf16=True, compile=True))
    with pytest.raises(MissingPackage, match=r'hf needs peft, .*pip install ".\[hf\]"'):
        check_engine(adapters, NodeConfig())


def test_settings_that_transformers_has_not_are_refused() -> None:
    run = RunConfig(engine=Engine.HF)
    with pytest.raises(ConfigError, match="model=mine:build: this run's engine is hf, whose models it trains"):
        check_engine(run, NodeConfig(model="mine:build"))
    with pytest.raises(ConfigError, match="checkpointing=selective is for the built-in trainer"):
        check_engine(run, NodeConfig(checkpointing=Checkpointing.SELECTIVE))


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        (NodeConfig(model="mine:build"), "this run's engine is torchtitan, whose models it trains"),
        (NodeConfig(bf16=True), r"give titan=\[--training.mixed_precision_param=bfloat16\]"),
        (NodeConfig(compile=True), r"give titan=\[--compile.enable\]"),
    ],
)
def test_settings_of_the_built_in_trainer_are_refused(
    node: NodeConfig, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.comm.extras.installed", lambda package: True)
    with pytest.raises(ConfigError, match=sentence):
        check_engine(RUN, node)


def test_the_state_of_a_model_that_only_its_trainer_knows_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available", lambda: 32 << 30)
    preflight.check_memory(RUN, NodeConfig(), (), 1_000_000_000)
    with pytest.raises(ResourceError, match="the run's model of 3,000,000,000 parameters needs about"):
        preflight.check_memory(RUN, NodeConfig(), (), 3_000_000_000)
