"""A model of torchtitan's in Hugging Face's layout, and back, by torchtitan's own adapter."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.comm.errors import ConfigError
from atoll.node.engines.titan_weights import main, model_and_adapter

MODEL = ("--module", "titan_on_cpu", "--config", "llama3_debugmodel")


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Random ones, under torchtitan's names."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    model, _ = model_and_adapter(MODEL[1], MODEL[3])
    return {name: torch.randn(p.shape) for name, p in model.named_parameters()}


def test_weights_go_to_hugging_face_and_back_unchanged(parameters: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(parameters, tmp_path / "titan.safetensors")
    main(["to-hf", str(tmp_path / "titan.safetensors"), str(tmp_path / "hf"), *MODEL])
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    assert theirs["model.layers.1.self_attn.k_proj.weight"].shape == (256, 256)
    assert torch.equal(theirs["model.embed_tokens.weight"], parameters["tok_embeddings.weight"])
    main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "again.safetensors"), *MODEL])
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == parameters.keys()
    assert all(torch.equal(again[name], parameters[name]) for name in parameters)


def test_weights_of_another_model_are_refused(parameters: dict[str, Tensor], tmp_path: Path) -> None:
    parameters["norm.weight"] = torch.zeros(3)
    save_file(parameters, tmp_path / "titan.safetensors")
    with pytest.raises(ConfigError, match=r"not of this model: norm.weight is \(3,\), not \(256,\)"):
        main(["to-hf", str(tmp_path / "titan.safetensors"), str(tmp_path / "hf"), *MODEL])
