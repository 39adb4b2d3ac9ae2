"""What is exported of a run of transformers: adapters that peft loads, or a folder that transformers loads."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hf_models import lora, run_of, tiny_qwen
from safetensors.torch import load_file
from states import Node
from tokenized import END_OF_TEXT, tokenizer_json
from torch import Tensor, nn

from atoll.comm.config.hf import HfConfig, read_config
from atoll.comm.errors import ConfigError
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.engines.hf_model import build, frozen, initialise, initialise_adapters, materialise
from atoll.node.engines.hf_weights import BaseWeights
from atoll.node.export.command import export
from atoll.node.participant.flat_vector import layout_of, trainable

SIZES = {"hidden_size": 64, "intermediate_size": 128}
TOKENS = torch.arange(20)[None]


def saved(folder: Path, hf: HfConfig) -> nn.Module:
    """A node's state directory with a state of the run's model; the model with that state."""
    model = build(hf)
    materialise(model, torch.device("cpu"))
    if hf.lora.rank:
        BaseWeights.open(Path(hf.base)).read(frozen(model))
        initialise_adapters(model, 1)
    else:
        initialise(model, 1)
    values = trainable([model])
    with torch.no_grad():
        for parameter in values.values():
            parameter.add_(0.02)
    run = replace(run_of(hf), name="tiny")
    layout = layout_of(model).shapes
    node = Node(folder, RunManifest(run), layout)
    node.outer.vectors.anchor[:] = torch.cat([values[name].detach().flatten() for name, _ in layout])
    node.outer.initialise()

    async def keep() -> None:
        node.disk.finalized(0, 0)
        await node.disk.wait_idle()

    asyncio.run(keep())
    return model.eval()


def write(node: Path, out: Path, *arguments: str) -> str:
    return CliRunner().invoke(export, [str(node), "--out", str(out), *arguments], catch_exceptions=False).output


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


def test_adapters_are_a_folder_that_peft_loads_and_a_file_that_a_run_begins_with(tmp_path: Path) -> None:
    from peft import PeftModel

    base = tiny_qwen(tmp_path / "base", **SIZES)
    model = saved(tmp_path / "node", lora(tmp_path / "base"))
    write(tmp_path / "node", tmp_path / "out", "--dtype", "fp32")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {p.name for p in (tmp_path / "out").iterdir()}
    assert (
        "transformers' Qwen2ForCausalLM, LoRA adapters of rank 8" in (tmp_path / "out" / "README.md").read_text()
    )
    expected = logits(model)
    assert (logits(base) - expected).abs().max() > 1e-3
    loaded = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert (logits(loaded) - expected).abs().max() < 1e-5

    written = (tmp_path / "out" / "adapter_config.json").read_text()
    assert json.loads(written)["base_model_name_or_path"] is None and str(tmp_path) not in written
    assert "PeftModel.from_pretrained(base, " in (tmp_path / "out" / "README.md").read_text()
    (theirs := tmp_path / "tokenizer").mkdir()
    (theirs / "tokenizer.json").write_bytes(tokenizer_json(280))
    (theirs / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    said = write(tmp_path / "node", tmp_path / "named", "--base", "reef/base", "--tokenizer", str(theirs))
    assert json.loads((tmp_path / "named" / "generation_config.json").read_text()) == {"eos_token_id": 0}
    assert json.loads((tmp_path / "named" / "adapter_config.json").read_text())["revision"] is None
    assert 'base_model: "reef/base"' in (card := (tmp_path / "named" / "README.md").read_text())
    assert "AutoPeftModelForCausalLM" in card and "give --base" not in said

    said = write(tmp_path / "node", tmp_path / "file" / "adapters.safetensors", "--dtype", "fp32")
    assert str(tmp_path / "base") not in said
    assert load_file(tmp_path / "file" / "adapters.safetensors").keys() == dict(layout_of(model).shapes).keys()
    with pytest.raises(
        ConfigError, match="transformers' Qwen2ForCausalLM, the llama layout is of the built-in model"
    ):
        write(tmp_path / "node", tmp_path / "file" / "model.safetensors", "--layout", "llama", "--overwrite")


@pytest.mark.parametrize("named", [None, "Qwen2ForCausalLM", 5])
def test_a_config_without_a_list_of_architectures_is_exported(tmp_path: Path, named: object) -> None:
    tiny_qwen(tmp_path / "base", **SIZES)
    content = json.loads(read_config(str(tmp_path / "base"))) | {"architectures": named}
    saved(tmp_path / "node", HfConfig(config=json.dumps(content)))
    write(tmp_path / "node", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_whole_model_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny_qwen(tmp_path / "base", **SIZES)
    model = saved(tmp_path / "node", HfConfig(config=read_config(str(tmp_path / "base"))))
    write(tmp_path / "node", tmp_path / "out", "--dtype", "fp32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen2"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (logits(loaded) - logits(model)).abs().max() < 1e-5
