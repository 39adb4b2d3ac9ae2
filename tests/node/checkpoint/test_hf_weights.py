"""A run begins with Hugging Face's files, whole or in shards, if they are of the run's model, or not at all."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_files import hub_of
from numpy.typing import NDArray
from safetensors.torch import save_file
from states import TINY, layout_for
from torch import Tensor

from atoll.comm.config.hf_config import to_hf
from atoll.comm.config.model import ModelConfig, RopeType
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.checkpoint import weights_file
from atoll.node.checkpoint.hf_layout import to_hf_names
from atoll.node.checkpoint.initial_state import InitialStateLoader

F32 = NDArray[np.float32]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
LLAMA_3 = replace(TINY, rope_type=RopeType.LLAMA3, rope_factor=32.0, rope_original_length=32, kv_heads=2)


def loaded(url: Path | str, model: ModelConfig) -> F32:
    """The anchor that a run of this model begins with."""
    anchor, momentum = np.zeros(model.n_params, np.float32), np.zeros(model.n_params, np.float32)
    shares = list[float]()
    InitialStateLoader(layout_for(model), model, anchor, momentum, shares.append).load(str(url), True)
    assert shares == sorted(shares) and shares[-1] == 1.0
    return anchor


def tensors_of(model: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors of a model, by Hugging Face's names, in the flat vector's order."""
    generator = torch.Generator().manual_seed(0)
    names = to_hf_names(layout_for(model), model)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in names}


def flat(tensors: dict[str, Tensor]) -> bytes:
    return torch.cat([tensor.float().flatten() for tensor in tensors.values()]).numpy().tobytes()


def save_shards(folder: Path, model: ModelConfig, tensors: dict[str, Tensor]) -> Path:
    """A folder with two shards, an index and a config.json, as transformers saves a large model."""
    folder.mkdir()
    names = sorted(tensors, key=len)
    parts = {SHARDS[i]: {name: tensors[name] for name in names[i::2]} for i in range(2)}
    for name, part in parts.items():
        save_file(part, folder / name)
    weight_map = {name: shard for shard, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(to_hf(model)))
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shards_are_read_by_their_index_and_widened(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_file, "READ_SIZE", 1000)  # no tensor comes at once
    tensors = tensors_of(LLAMA_3, dtype)
    folder = save_shards(tmp_path / "model", LLAMA_3, tensors)
    assert loaded(folder, LLAMA_3).tobytes() == flat(tensors)
    assert loaded(f"file://{folder}", LLAMA_3).tobytes() == flat(tensors)


def test_what_transformers_shards_is_read(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    them = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf(LLAMA_3))).to(torch.bfloat16)
    them.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and not (tmp_path / "model.safetensors").exists()
    tensors = dict(them.named_parameters())
    expected = {name: tensors[name].detach() for name, _ in to_hf_names(layout_for(LLAMA_3), LLAMA_3)}
    assert loaded(tmp_path, LLAMA_3).tobytes() == flat(expected)


def test_tensors_that_say_nothing_new_are_passed_over(tmp_path: Path) -> None:
    tensors = tensors_of(LLAMA_3)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(64, 32)}
    folder = save_shards(tmp_path / "model", LLAMA_3, tensors | more)
    assert loaded(folder, LLAMA_3).tobytes() == flat(tensors)


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda t: {n: v for n, v in t.items() if n != Q}, f"it lacks {Q} of the model's 20 tensors"),
        (
            lambda t: t | {"model.layers.2.mlp.up_proj.weight": torch.ones(3)},
            "it has model.layers.2.mlp",
        ),
        (lambda t: t | {Q: torch.ones(5, 32)}, rf"{Q} has the shape \(5, 32\), the model's is \(32, 32\)"),
        (lambda t: t | {Q: torch.full((32, 32), torch.nan)}, f"{Q} holds NaN"),
        (lambda t: t | {"model.norm.bias": torch.ones(32)}, "it has model.norm.bias, which the model has not"),
    ],
)
def test_a_tensor_too_many_or_missing_or_of_another_shape_is_named(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], why: str, tmp_path: Path
) -> None:
    folder = save_shards(tmp_path / "model", LLAMA_3, change(tensors_of(LLAMA_3)))
    with pytest.raises(ConfigError, match=f"the run cannot begin with init_from={folder}: {why}"):
        loaded(folder, LLAMA_3)


@pytest.mark.parametrize(
    "index, why",
    [
        ("{", "is no index: it does not say which tensor is in which file"),
        ('{"weight_map": []}', "is no index"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "is no index: it names '../secret.safetensors'"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "is no index: it names '/etc/passwd'"),
        ('{"weight_map": {"a": 5}}', "is no index: it names 5"),
        (json.dumps({"weight_map": {"a": SHARDS[0]}}), "it lacks "),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(index: str, why: str, tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "model", LLAMA_3, tensors_of(LLAMA_3))
    (folder / INDEX).write_text(index)
    with pytest.raises(ConfigError, match=why):
        loaded(folder, LLAMA_3)


def test_a_shard_that_is_not_there_or_has_what_another_has_is_named(tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "model", LLAMA_3, tensors_of(LLAMA_3))
    first = (folder / SHARDS[0]).read_bytes()
    (folder / SHARDS[0]).write_bytes((folder / SHARDS[1]).read_bytes())
    with pytest.raises(ConfigError, match=f"{SHARDS[1]} has .*, which another file has as well"):
        loaded(folder, LLAMA_3)
    (folder / SHARDS[0]).write_bytes(first[:-1])
    with pytest.raises(ConfigError, match=f"{SHARDS[0]} has .* bytes of tensors, its header says"):
        loaded(folder, LLAMA_3)
    (folder / SHARDS[0]).unlink()
    with pytest.raises(ResourceError, match="FileNotFoundError"):
        loaded(folder, LLAMA_3)


@pytest.mark.parametrize(
    "run, said",
    [
        (
            replace(LLAMA_3, rope_type=RopeType.DEFAULT, rope_factor=1.0),
            "rope_type=llama3, and the run's model.",
        ),
        (replace(LLAMA_3, rope_factor=8.0), "rope_factor=32.0, and the run's model.rope_factor is 8.0"),
        (replace(LLAMA_3, norm_eps=1e-6), "norm_eps=1e-05, and the run's model.norm_eps is 1e-06"),
        (replace(LLAMA_3, vocab_size=65), "vocab_size=64, and the run's model.vocab_size is 65"),
        (replace(LLAMA_3, tied_head=False), "tied_head=True, and the run's model.tied_head is False"),
    ],
)
@pytest.mark.parametrize("whole", [True, False], ids=["one file", "shards"])
def test_weights_whose_config_json_is_of_another_model_are_refused(
    whole: bool, run: ModelConfig, said: str, tmp_path: Path
) -> None:
    tensors = tensors_of(LLAMA_3)
    folder = save_shards(tmp_path / "model", LLAMA_3, tensors)
    url = folder
    if whole:
        save_file(tensors, folder / "the-model.safetensors")
        url = folder / "the-model.safetensors"
        assert loaded(url, LLAMA_3).tobytes() == flat(tensors)
    with pytest.raises(
        ConfigError, match=f"{folder}/config.json says {said}.*: give the coordinator model={folder},"
    ):
        loaded(url, run)


def test_sequences_may_be_longer_or_shorter_than_the_config_json_says(tmp_path: Path) -> None:
    tensors = tensors_of(LLAMA_3)
    folder = save_shards(tmp_path / "model", LLAMA_3, tensors)
    assert loaded(folder, replace(LLAMA_3, seq_len=9, max_positions=99)).tobytes() == flat(tensors)


@pytest.mark.parametrize(
    "config, why",
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "is of GPT2LMHeadModel"),
        (to_hf(TINY) | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"engine": "builtin", "build": "", "model": asdict(replace(TINY, norm_eps=0.1))}, "norm_eps=0.1, and"),
        ({"engine": "builtin", "build": "", "model": {"dim": "wide"}}, "config.json is damaged"),
        ([], "config.json"),
    ],
)
def test_a_config_json_that_is_not_understood_is_no_description(config: Any, why: str, tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "model", TINY, tensors_of(TINY))
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=why):
        loaded(folder, TINY)


def test_weights_under_hugging_faces_names_need_a_config_json(tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "model", LLAMA_3, tensors_of(LLAMA_3))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="without a config.json beside it nothing says what model they are of"):
        loaded(folder, LLAMA_3)
    ours = {name: t for (name, _), t in zip(layout_for(LLAMA_3), tensors_of(LLAMA_3).values(), strict=True)}
    save_file(ours, tmp_path / "ours.safetensors")
    assert loaded(tmp_path / "ours.safetensors", LLAMA_3).tobytes() == flat(ours)


FROM_HUB = """
import sys
import numpy as np
from atoll import configs
from atoll.comm.config.load import load_run
from atoll.comm.errors import AtollError
from atoll.node.checkpoint.hf_layout import shapes
from atoll.node.checkpoint.initial_state import InitialStateLoader

run = load_run(configs.DEMO, ("model=hf://org/name", "init_from=hf://org/name", "data.kind=script"))
anchor, momentum = np.zeros((2, run.model.n_params), np.float32)
loader = InitialStateLoader(tuple(sorted(shapes(run.model).items())), run.model, anchor, momentum, files=False)
print(loader.load(run.init_from, True).what)
anchor.tofile(sys.argv[1])
for gone in ("hf://org/gone", "hf://org/name/gone.safetensors"):
    try:
        loader.load(gone, True)
    except AtollError as error:
        print(type(error).__name__, error)
print("torch" in sys.modules)
"""


def test_a_run_begins_with_what_the_hub_has(tmp_path: Path) -> None:
    tensors = tensors_of(LLAMA_3, torch.bfloat16)
    folder = save_shards(tmp_path / "model", LLAMA_3, tensors)
    with hub_of(folder) as endpoint:
        settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-P", "-c", FROM_HUB, str(tmp_path / "anchor")]
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    what, gone, no_file, torch_there = done.stdout.splitlines()
    assert what == f"the weights in org/name/{INDEX}" and torch_there == "False"
    assert gone.startswith("ResourceError init_from=hf://org/gone cannot be read") and "not found" in gone
    assert no_file.startswith("ResourceError init_from=hf://org/name/gone.safetensors cannot be read")
    names = dict(zip(tensors, (name for name, _ in layout_for(LLAMA_3)), strict=True))
    in_order = sorted(tensors.items(), key=lambda item: names[item[0]])
    assert (tmp_path / "anchor").read_bytes() == flat(dict(in_order))
