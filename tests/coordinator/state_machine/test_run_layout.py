"""The layout that the coordinator computes is the one that nodes' trainers have, for every model it describes."""

import dataclasses
from pathlib import Path

import pytest
import torch

from atoll import configs
from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.engine import Engine
from atoll.comm.config.hf_config import FAMILIES, to_model
from atoll.comm.config.load import load_run
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.outer import FragmentsConfig, PatternName
from atoll.comm.config.run import RunConfig
from atoll.comm.config.security import SecurityConfig
from atoll.coordinator.state_machine.run_layout import LayoutRule, RunLayout, config_layout, layout_digest
from atoll.node.outer.layout import flat_order, fragments_and_chunks
from atoll.node.trainer.model import build

SMALL = ModelConfig(vocab_size=256, dim=32, layers=3, heads=4, kv_heads=2, ffn_dim=48)
LAYOUT = RunLayout(SMALL.n_params, b"", ())
VARIANTS = [
    {},
    {"tied_head": False},
    {"head_dim": 6},
    {"qk_norm": True},
    {"qkv_bias": True},
    {"attention_output_bias": True, "ffn_bias": True},
    {"qk_norm": True, "qkv_bias": True, "ffn_bias": True, "attention_output_bias": True, "tied_head": False},
    {"layers": 12},  # whose names are not in the order of their numbers
]
FRAGMENTS = [
    FragmentsConfig(),
    FragmentsConfig(count=3),
    FragmentsConfig(count=2, pattern=PatternName.STRIDED),
    FragmentsConfig(count=3, stagger=False),
    FragmentsConfig(count=64),
]
DATA = ("data.kind=dataset", "data.url=https://data.example/set", f"data.digest={bytes(16).hex()}")
# Small models of each family, as their config.json has them.
FAMILY: dict[str, object] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FAMILY |= {"num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
FAMILY |= {"hidden_act": "silu"}
SHIPPED = sorted(Path(configs.__file__).parent.glob("*.yaml"))


def reported(config: RunConfig) -> RunLayout:
    """What a node reports whose trainer has built the model."""
    with torch.device("meta"):
        model = build(config.model)
    order = flat_order(config, [(name, tuple(p.shape)) for name, p in model.named_parameters()])
    chunks = fragments_and_chunks(config, order)[1]
    return RunLayout(chunks.numel, layout_digest(order), chunks.fragments)


@pytest.mark.parametrize("fragments", FRAGMENTS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_layout_of_the_config_is_that_of_the_torch_model(
    variant: dict[str, object], fragments: FragmentsConfig
) -> None:
    config = RunConfig(model=dataclasses.replace(SMALL, **variant), fragments=fragments)  # type: ignore[arg-type]
    assert config_layout(config) == reported(config)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_the_layouts_of_the_shipped_configs_are_those_of_their_torch_models(path: Path) -> None:
    config = load_run(path, DATA)
    assert config_layout(config) == reported(config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_layout_of_each_familys_model_is_that_of_its_torch_model(family: str, tied: bool) -> None:
    named = {"model_type": family, "architectures": [FAMILIES[family].architecture], "tie_word_embeddings": tied}
    config = RunConfig(model=to_model(FAMILY | named))
    assert config_layout(config) == reported(config)


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(model=SMALL, data=DataConfig(kind=DataKind.SCRIPT)),
        RunConfig(model=SMALL, security=SecurityConfig(own_models=True)),
        RunConfig(model=ModelConfig(plugin="bigram")),
        RunConfig(engine=Engine.HF),
        RunConfig(engine=Engine.TORCHTITAN),
    ],
)
def test_a_model_that_only_nodes_know_has_no_layout_in_the_config_but_a_bound(config: RunConfig) -> None:
    assert config_layout(config) is None
    assert LayoutRule(config).refusal(LAYOUT) == ""
    assert "takes 137,438,953,472 at most" in LayoutRule(config).refusal(LAYOUT._replace(numel=1 << 42))


def test_a_layout_that_is_not_the_configs_is_refused_with_both() -> None:
    rule, right = LayoutRule(RunConfig(model=SMALL)), reported(RunConfig(model=SMALL))
    assert rule.refusal(right) == ""
    for wrong in (
        right._replace(numel=1 << 42),
        right._replace(digest=bytes(16)),
        right._replace(fragments=(1, 2)),
    ):
        sentence = rule.refusal(wrong)
        assert f"the run's config says {right.numel:,}" in sentence and "security.own_models" in sentence
    assert "4,398,046,511,104 parameters" in rule.refusal(right._replace(numel=1 << 42))


def test_the_layout_of_a_very_deep_model_is_not_computed() -> None:
    config = RunConfig(model=dataclasses.replace(SMALL, layers=1 << 30))
    assert config_layout(config) is None
    assert "at most" in LayoutRule(config).refusal(LAYOUT._replace(numel=config.model.n_params + 1))
