"""The model that an export is of: what its file calls the parameters, and the config that says how to build it.

The run's built-in one, which transformers builds from `config.json` (`hf_layout` has its names); one of
transformers', whose names and config are its own already, or LoRA adapters in one, in peft's files
(`hf_adapters`); the volunteer's own and torchtitan's, under the parameters' own names, with a `config.json` that
only Atoll reads.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from atoll.comm.config.engine import Engine
from atoll.comm.config.hf_config import to_hf
from atoll.comm.errors import ConfigError
from atoll.node.checkpoint import hf_adapters, hf_layout
from atoll.node.checkpoint.saved_run import SavedRun
from atoll.node.checkpoint.snapshots import TensorShapes

CONFIG = "config.json"


class TensorNaming(StrEnum):
    """The names that an exported file gives the parameters."""

    NAMES = "names"  # the parameters' own
    LLAMA = "llama"  # Hugging Face's, as transformers has them for the run's own model


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The names and the config of an exported model."""

    tensors: TensorShapes  # named as in the file, in the order of the flat vector
    config: dict[str, Any]
    transformers: bool  # it loads the model by `config`; if not, the config is for people
    stem: str = "model"  # of the weights' files
    config_name: str = CONFIG

    @property
    def adapters(self) -> bool:
        """Whether the weights are adapters of a base model, which peft loads."""
        return self.config_name != CONFIG

    @property
    def architectures(self) -> Sequence[str]:
        """The classes of transformers that load the model; empty: none does."""
        found = self.config.get("architectures") if self.transformers else None
        return tuple(map(str, found)) if isinstance(found, list) else ()


def default_naming(saved: SavedRun) -> TensorNaming:
    """The naming that transformers loads where the run's model has one, else the parameters' own."""
    builtin = not saved.manifest.model and saved.manifest.run.decoder
    return TensorNaming.LLAMA if builtin else TensorNaming.NAMES


def model_files(saved: SavedRun, naming: TensorNaming) -> ModelFiles:
    """Names and config of the saved run's model. Raises `ConfigError` for a naming that it does not have."""
    run = saved.manifest.run
    if naming is TensorNaming.LLAMA:
        _check_builtin(saved)
        return ModelFiles(hf_layout.to_hf_names(saved.layout, run.model), to_hf(run.model), True)
    if run.engine is Engine.HF:
        if not run.hf.lora.rank:
            return ModelFiles(saved.layout, run.hf.content, True)
        names, config = hf_adapters.peft_names(saved.layout), hf_adapters.adapter_config(run.hf, saved.layout)
        return ModelFiles(names, config, True, hf_adapters.STEM, hf_adapters.CONFIG)
    model = asdict(run.titan if run.engine is Engine.TORCHTITAN else run.model)
    return ModelFiles(
        saved.layout, {"engine": run.engine, "build": saved.manifest.model, "model": model}, transformers=False
    )


def with_base(model: ModelFiles, base: str) -> ModelFiles:
    """The model, with adapters that say that they are for `base`, ORG/NAME; empty: what they say stays."""
    if not base or not model.adapters:
        return model
    return replace(model, config=model.config | {"base_model_name_or_path": base, "revision": None})


def _check_builtin(saved: SavedRun) -> None:
    if saved.manifest.model:
        raise ConfigError(
            f"this node trains a model of its own (model={saved.manifest.model}), the llama layout is of the "
            "run's built-in one: export it with --layout names"
        )
    if plugin := (run := saved.manifest.run).model.plugin:
        raise ConfigError(
            f"run {run.name} trains the model of a plugin (model.plugin={plugin}), the llama layout is of the "
            "built-in one: export it with --layout names"
        )
    if run.engine is Engine.HF:
        raise ConfigError(
            f"run {run.name} trains transformers' {run.hf.architecture}, the llama layout is of the built-in "
            "model: export it with --layout names, which are transformers' own"
        )
    if run.engine is Engine.TORCHTITAN:
        raise ConfigError(
            f"run {run.name} trains torchtitan's {run.titan.config}, the llama layout is of the built-in model: "
            "export it with --layout names, and have torchtitan turn that into Hugging Face's layout, "
            "python -m atoll.node.engines.titan_weights to-hf MODEL.safetensors FOLDER "
            f"--module {run.titan.module} --config {run.titan.config}"
        )
