"""A run of transformers' model begins with a folder of its model, or with adapters where it trains these."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import lora, tiny_qwen
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from atoll.comm.config.hf import HfConfig, read_config
from atoll.comm.errors import ConfigError
from atoll.node.checkpoint.hf_adapters import peft_names
from atoll.node.checkpoint.initial_state import InitialStateLoader
from atoll.node.engines.hf_model import build, materialise
from atoll.node.participant.flat_vector import layout_of, trainable

SMALL = {"hidden_size": 64, "intermediate_size": 128}


def begun(folder: Path | str, hf: HfConfig) -> NDArray[np.float32]:
    """The anchor that a run of the model begins with."""
    layout = layout_of(build(hf)).shapes
    anchor, momentum = np.zeros((2, sum(int(np.prod(shape)) for _, shape in layout)), np.float32)
    InitialStateLoader(layout, None, anchor, momentum, hf=hf).load(str(folder), True)
    assert not momentum.any()
    return anchor


def flat(model: nn.Module) -> NDArray[np.float32]:
    """The trained parameters of a model, in the order of the flat vector."""
    values = trainable([model])
    flat: NDArray[np.float32] = torch.cat(
        [values[name].detach().flatten() for name, _ in layout_of(model).shapes]
    ).numpy()
    return flat


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_of_every_parameter_begins_with_a_folder_whole_or_in_shards(tied: bool, tmp_path: Path) -> None:
    model = tiny_qwen(tmp_path / "whole", tie_word_embeddings=tied, **SMALL)
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    hf = HfConfig(config=read_config(str(tmp_path / "whole")))
    assert begun(tmp_path / "whole", hf).tobytes() == flat(model).tobytes()
    assert begun(tmp_path / "shards", hf).tobytes() == flat(model).tobytes()
    file = tmp_path / "whole" / "model.safetensors"
    spare = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    head = load_file(file)["model.embed_tokens.weight"].clone()
    save_file(load_file(file) | spare | ({"lm_head.weight": head} if tied else {}), file)
    assert begun(tmp_path / "whole", hf).tobytes() == flat(model).tobytes()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny_qwen(tmp_path / "base", **SMALL)
    hf, config = HfConfig(config=read_config(str(tmp_path / "base"))), tmp_path / "base" / "config.json"
    edit(config, num_attention_heads=2, use_cache=False)
    with pytest.raises(
        ConfigError, match="says num_attention_heads=2, and the run's hf.config num_attention_heads=4"
    ):
        begun(tmp_path / "base", hf)
    edit(config, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    with pytest.raises(ConfigError, match=r"says rope_parameters.rope_theta=7.0, and the run's hf.config rop"):
        begun(tmp_path / "base", hf)
    edit(config, rope_parameters=None, architectures=["Another"], torch_dtype="bfloat16")
    begun(tmp_path / "base", hf)
    tiny_qwen(tmp_path / "wide", hidden_size=128, intermediate_size=128)
    (tmp_path / "wide" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight has the shape \(320, 128\), the model's is"):
        begun(tmp_path / "wide", hf)


@pytest.fixture
def adapted(tmp_path: Path) -> tuple[HfConfig, nn.Module, Path]:
    """A run's model with adapters, and them in a folder as peft itself writes it."""
    import peft

    base = tiny_qwen(tmp_path / "base", **SMALL)
    hf = lora(tmp_path / "base")
    model = build(hf)
    materialise(model, torch.device("cpu"))
    values = trainable([model])
    with torch.no_grad():
        for number, value in enumerate(values.values()):
            value.normal_(generator=torch.Generator().manual_seed(number))
    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=hf.lora.targets, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, settings)
    layout = layout_of(model).shapes
    state = {peft: values[ours].detach() for (ours, _), (peft, _) in zip(layout, peft_names(layout), strict=True)}
    peft.set_peft_model_state_dict(theirs, state)
    theirs.save_pretrained(tmp_path / "adapters")
    return hf, model, tmp_path / "adapters"


def test_a_run_of_adapters_begins_with_a_folder_of_pefts(adapted: tuple[HfConfig, nn.Module, Path]) -> None:
    hf, model, folder = adapted
    assert begun(folder, hf).tobytes() == flat(model).tobytes()
    assert begun(folder / "adapter_model.safetensors", hf).tobytes() == flat(model).tobytes()


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: edit(f / "adapter_config.json", lora_alpha=32), "says lora_alpha=32, and the run's hf.lora has 16"),
    (
        lambda f: edit(f / "adapter_config.json", use_rslora=True),
        "says use_rslora=true, which a run's adapters do",
    ),
    (
        lambda f: (f / "adapter_config.json").write_text("[]"),
        "adapter_config.json is damaged: it is no",
    ),
    (lambda f: (f / "adapter_config.json").unlink(), "without adapter_config.json beside them nothing says"),
    (
        lambda f: (f / "adapter_model.safetensors").unlink(),
        "nor model.safetensors.index.json, nor adapter_model",
    ),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_adapters_that_compute_something_else_are_refused(
    change: Callable[[Path], object], said: str, adapted: tuple[HfConfig, nn.Module, Path]
) -> None:
    hf, _, folder = adapted
    change(folder)
    with pytest.raises(ConfigError, match=f"the run cannot begin with init_from=.*{said}"):
        begun(folder, hf)


def test_adapters_are_no_whole_model_and_a_whole_model_no_adapters(
    adapted: tuple[HfConfig, nn.Module, Path], tmp_path: Path
) -> None:
    hf, _, folder = adapted
    whole = HfConfig(config=hf.config)
    with pytest.raises(ConfigError, match="it has LoRA adapters, and this run trains every parameter: merge them"):
        begun(folder, whole)
    with pytest.raises(ConfigError, match="it has no LoRA adapters, which are all that this run trains; the w"):
        begun(tmp_path / "base", hf)
    fewer = replace(hf, lora=replace(hf.lora, targets=["q_proj"]))
    with pytest.raises(
        ConfigError, match=r"it has model.layers.0.self_attn.v_proj.lora_A.*, which the model has not"
    ):
        begun(folder, fewer)
