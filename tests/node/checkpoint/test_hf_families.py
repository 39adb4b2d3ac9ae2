"""A model of each Hugging Face family that the decoder computes, in and out: the logits are transformers'."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import RUN, Node, layout_for
from torch import Tensor, nn

from atoll.comm.config.hf_config import FAMILIES, read_model, to_hf
from atoll.comm.config.model import ModelConfig
from atoll.node.checkpoint.initial_state import InitialStateLoader
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.export.model_files import TensorNaming
from atoll.node.export.single_file import export
from atoll.node.trainer.model import build

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# model_type, and what its config.json says beyond `TINY`. Sequences are of 96 tokens: three times the length that
# Llama 3's was first trained on, and several windows.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {}),
    "llama 3": ("llama", {"rope_theta": 500_000.0}),
    "llama 3.1": ("llama", {"rope_theta": 500_000.0, "rope_scaling": LLAMA_3}),
    "llama 3.2": ("llama", {"rope_theta": 500_000.0, "rope_scaling": LLAMA_3 | {"factor": 32.0}, "head_dim": 24}),
    "llama, linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral, window": ("mistral", {"sliding_window": 20}),
    "qwen 2": ("qwen2", {"rope_theta": 1e6, "sliding_window": 64, "use_sliding_window": False}),
    "qwen 2, window": ("qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 0}),
    "qwen 3": ("qwen3", {"rope_theta": 1e6, "head_dim": 32}),
    "qwen 3 with biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


def theirs(name: str, tied: bool) -> Any:
    """transformers' model, from its config, with weights that make attention and biases matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    type_, more = MODELS[name]
    config = AutoConfig.for_model(type_, **TINY, **json.loads(json.dumps(more)), tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def tokens(samples: int = 2, length: int = 96) -> Tensor:
    return torch.randint(TINY["vocab_size"], (samples, length), generator=torch.Generator().manual_seed(1))


def begun_from(folder: Path, model: ModelConfig) -> "np.ndarray[Any, Any]":
    """The anchor of a run of this model that begins with the folder."""
    layout = layout_for(model)
    anchor, momentum = np.zeros((2, model.n_params), np.float32)
    InitialStateLoader(layout, model, anchor, momentum).load(str(folder), True)
    return anchor


def decoder(model: ModelConfig, anchor: "np.ndarray[Any, Any]") -> nn.Module:
    """The decoder with the parameters of a flat vector."""
    ours, at = build(model), 0
    parameters = dict(ours.named_parameters())
    for name, shape in layout_for(model):
        size = int(np.prod(shape))
        parameters[name].data = torch.from_numpy(anchor[at : at + size].copy()).view(shape)
        at += size
    assert at == len(anchor) == model.n_params
    return ours.eval()


def exported(model: ModelConfig, anchor: "np.ndarray[Any, Any]", folder: Path) -> Path:
    """The folder of what `atoll export --layout llama` writes of a node whose anchor this is."""
    node = Node(folder / "node", RunManifest(replace(RUN, model=model)))
    node.outer.vectors.anchor[:] = anchor
    node.outer.initialise()

    async def keep() -> None:
        node.disk.finalized(0, 0)
        await node.disk.wait_idle()

    asyncio.run(keep())
    export(node.state_dir, folder / "out" / "model.safetensors", TensorNaming.LLAMA)
    return folder / "out"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_in_and_out(name: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    them, sequences = theirs(name, tied), tokens()
    them.save_pretrained(tmp_path / "in")
    model = read_model((tmp_path / "in" / "config.json").read_text(), "config.json")
    assert sum(p.numel() for p in them.parameters()) == model.n_params and model.tied_head is tied
    anchor = begun_from(tmp_path / "in", model)
    out = exported(model, anchor, tmp_path)
    again, notes = AutoModelForCausalLM.from_pretrained(out, local_files_only=True, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"]
    assert again.config.model_type == ("llama" if name == "mistral" else MODELS[name][0])
    with torch.no_grad():
        wanted, found = them(sequences).logits, decoder(model, anchor)(sequences)
        back = again(sequences).logits
    assert wanted.std() > 0.5, "or a difference would not be seen"
    assert (found - wanted).abs().max() < 1e-4
    assert (back - wanted).abs().max() < 1e-4
    assert read_model((out / "config.json").read_text(), "config.json") == model
    assert begun_from(out, model).tobytes() == anchor.tobytes()


@pytest.mark.parametrize("name", ["llama 3.1", "mistral, window", "qwen 2", "qwen 3"])
def test_a_packed_document_has_the_logits_that_transformers_gives_it_alone(name: str, tmp_path: Path) -> None:
    them, sequences = theirs(name, True), tokens()
    them.save_pretrained(tmp_path)
    model = read_model((tmp_path / "config.json").read_text(), "config.json")
    positions = torch.cat([torch.arange(n) for n in (40, 1, 55)]).repeat(2, 1)
    with torch.no_grad():
        found = decoder(model, begun_from(tmp_path, model))(sequences, positions=positions)
        alone = torch.split(sequences, [40, 1, 55], dim=1)
        wanted = torch.cat([them(document).logits for document in alone], dim=1)
    assert (found - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("type_", FAMILIES)
def test_the_defaults_of_a_family_are_those_of_transformers(type_: str) -> None:
    from transformers import AutoConfig

    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    silent = {
        "model_type": type_,
        **{key: TINY[key] for key in sizes},
        "num_attention_heads": 32,
        "hidden_size": 64,
    }
    told = AutoConfig.for_model(**silent).to_dict()
    ours = read_model(json.dumps(silent), "config.json")
    assert ours == read_model(json.dumps(told), "config.json")
    written = to_hf(ours)
    for key in told.keys() & written.keys() - {"dtype", "bos_token_id", "eos_token_id", "architectures"}:
        assert written[key] == told[key] or key in ("max_window_layers", "model_type"), key
