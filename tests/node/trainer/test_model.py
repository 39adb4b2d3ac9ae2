"""The model: its size, its shapes, its initial values."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from atoll.comm.config.model import ModelConfig
from atoll.comm.errors import ConfigError
from atoll.node.trainer.model import blocks_of, build, build_custom, init_parameters

SMALL = ModelConfig(vocab_size=256, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, seq_len=16)
TEN_BILLION = ModelConfig(
    vocab_size=128_256, dim=4096, layers=41, heads=32, kv_heads=8, ffn_dim=14_336, tied_head=False
)


def initialised(config: ModelConfig, seed: int = 0) -> nn.Module:
    model = build(config)
    init_parameters(model, seed)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_config_counts_the_parameters_of_the_model(tied: bool, kv_heads: int) -> None:
    config = ModelConfig(dim=32, layers=3, heads=4, kv_heads=kv_heads, ffn_dim=48, tied_head=tied)
    assert sum(p.numel() for p in build(config).parameters()) == config.n_params


def test_the_default_model_has_eight_hundred_thousand_parameters() -> None:
    assert ModelConfig().n_params == 824_448


def test_a_model_of_ten_billion_parameters_is_built_without_memory_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = build(TEN_BILLION)
    assert sum(p.numel() for p in model.parameters()) == TEN_BILLION.n_params
    assert round(TEN_BILLION.n_params / 1e9, 1) == 10.0


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_logits_depend_on_earlier_tokens_only(kv_heads: int) -> None:
    config = ModelConfig(dim=32, layers=2, heads=4, kv_heads=kv_heads, ffn_dim=48)
    model = initialised(config)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 256)
    assert torch.equal(before[:, :10], after[:, :10])
    assert (before[:, 10:] != after[:, 10:]).any(dim=-1).all()


def test_attention_knows_the_order_of_tokens() -> None:
    model = initialised(SMALL)
    one, other = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(one[:, -1], other[:, -1], atol=1e-6)


def test_initial_values_follow_from_the_seed_and_the_name_alone() -> None:
    torch.manual_seed(1)
    first = dict(initialised(SMALL, seed=7).named_parameters())
    torch.manual_seed(2)
    second = dict(initialised(SMALL, seed=7).named_parameters())
    other = dict(initialised(SMALL, seed=8).named_parameters())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    assert not torch.equal(first["blocks.0.ffn.up.weight"], first["blocks.1.ffn.up.weight"])


def test_initial_values_have_the_spread_of_their_place() -> None:
    parameters = dict(initialised(SMALL).named_parameters())
    residual = 0.02 / math.sqrt(2 * SMALL.layers)
    for name, parameter in parameters.items():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            std = residual if name.endswith(("attention.output.weight", "ffn.down.weight")) else 0.02
            assert abs(parameter.std().item() / std - 1) < 0.1, name


def test_your_own_model_is_found_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n"
        "def build(config): return nn.Sequential(nn.Embedding(config.vocab_size, 8), nn.Linear(8, 256))\n"
        "def broken(config): raise RuntimeError('no heads')\n"
        "def nothing(config): return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = build_custom("my_models:build", SMALL)
    init_parameters(model, 0)
    assert model(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 256)
    assert blocks_of(model) == []
    assert torch.equal(model.get_parameter("1.bias"), torch.zeros(256))
    for path, reason in [
        ("my_models:broken", "RuntimeError: no heads"),
        ("my_models:nothing", "must return a torch.nn.Module"),
        ("my_models:absent", "has no attribute 'absent'"),
        ("no_such_package.models:build", "No module named 'no_such_package'"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            build_custom(path, SMALL)
    del sys.modules["my_models"]
