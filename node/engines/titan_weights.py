"""Weights of torchtitan's models from Hugging Face's layout and into it, by torchtitan's own adapters.

    python -m atoll.node.engines.titan_weights from-hf FOLDER MODEL.safetensors --module llama3 --config llama3_8b
    python -m atoll.node.engines.titan_weights to-hf MODEL.safetensors FOLDER --module llama3 --config llama3_8b

MODEL.safetensors has the parameters' own names, as a run's `init_from` reads them and `atoll export` writes them.
The whole model is in host memory meanwhile, once or twice. `config.json` and the tokenizer of the model are
Hugging Face's own; they are not made here.
"""

import argparse
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.comm.errors import AtollError, ConfigError
from atoll.comm.extras import demand

WEIGHTS = "model.safetensors"


def main(arguments: list[str]) -> None:
    """Convert as the command line says. Raises `AtollError`."""
    parser = argparse.ArgumentParser(prog="atoll.node.engines.titan_weights")
    parser.add_argument("direction", choices=["from-hf", "to-hf"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--module", default="llama3", help="a folder of torchtitan.models, or a module of yours")
    parser.add_argument("--config", required=True, help="a function of its config_registry")
    chosen = parser.parse_args(arguments)
    demand("a conversion of torchtitan's weights", "torchtitan", "triton")
    model, adapter = model_and_adapter(chosen.module, chosen.config)
    if chosen.target.exists() and (chosen.direction == "from-hf" or (chosen.target / WEIGHTS).exists()):
        raise ConfigError(f"{chosen.target} exists: name another")
    if chosen.direction == "from-hf":
        tensors = from_hf(model, adapter, read_tensors(chosen.source))
        write_tensors(chosen.target, tensors)
    else:
        tensors = to_hf(model, adapter, read_tensors(chosen.source))
        chosen.target.mkdir(parents=True, exist_ok=True)
        write_tensors(chosen.target / WEIGHTS, tensors)
    print(f"{len(tensors)} tensors, {sum(t.numel() for t in tensors.values()):,} parameters: {chosen.target}")


def model_and_adapter(module: str, config: str) -> tuple[nn.Module, Any]:
    """torchtitan's model, with memory for its parameters, and its adapter to Hugging Face's names. Raises
    `ConfigError` where torchtitan has no such model, or no adapter for it."""
    for name in (f"torchtitan.models.{module}.config_registry", module):
        with suppress(ModuleNotFoundError):
            registry = import_module(name)
            break
    else:
        raise ConfigError(f"--module {module}: torchtitan has no such model")
    if not callable(make := getattr(registry, config, None)):
        raise ConfigError(f"--config {config}: {registry.__name__} has no such configuration")
    spec = make().model_spec
    if spec.state_dict_adapter is None:
        raise ConfigError(f"torchtitan has no adapter to Hugging Face's names for {spec.name}")
    model: nn.Module = spec.model.build()
    return model, spec.state_dict_adapter(spec.model, None)


def from_hf(model: nn.Module, adapter: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's parameters under their own names, fp32, from Hugging Face's tensors. Raises `ConfigError` where
    these are of another model."""
    try:
        model.load_state_dict({name: t.float() for name, t in adapter.from_hf(tensors).items()})
    except (AssertionError, KeyError, RuntimeError) as error:
        raise ConfigError(f"these weights are not of this model: {' '.join(str(error).split())}") from None
    return {name: p.detach() for name, p in model.named_parameters()}


def to_hf(model: nn.Module, adapter: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's tensors from the model's parameters under their own names. Raises `ConfigError` where these
    are of another model."""
    parameters = dict(model.named_parameters())
    ours, theirs = ({name: tuple(t.shape) for name, t in found.items()} for found in (parameters, tensors))
    if ours != theirs:
        odd = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        raise ConfigError(f"these weights are not of this model: {odd} is {theirs.get(odd)}, not {ours.get(odd)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return {name: t.detach().contiguous() for name, t in adapter.to_hf(model.state_dict()).items()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of those in a folder. Raises `ConfigError` if there are none, or if
    one cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ConfigError(f"{path}: there is no safetensors file")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= load_file(file)
        except SafetensorError as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
    return found


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
