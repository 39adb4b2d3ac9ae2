"""Names and settings of LoRA adapters as peft writes them, for a run whose engine is hf.

    adapter_model.safetensors    the adapters' matrices under peft's names (`peft_names`)
    adapter_config.json          what `PeftModel.from_pretrained` reads beside it (`adapter_config`)

The flat vector of such a run has the adapters alone, under the names that peft gives them within a model: there
each adapter has a name of its own, `default`, which is in no file.
"""

import re
from typing import Any

from atoll.comm.config.hf import HfConfig
from atoll.comm.config.model_source import HUB, hub_repository
from atoll.comm.errors import ConfigError
from atoll.node.checkpoint.snapshots import TensorShapes

STEM, CONFIG = "adapter_model", "adapter_config.json"
PREFIX = "base_model.model."
# model.layers.0.self_attn.q_proj.lora_A.default.weight, or of an embedding without .weight
NAME = re.compile(r"(?P<module>.+)\.(?P<matrix>lora_(?:embedding_)?[AB])\.default(?P<weight>\.weight)?")


def peft_names(layout: TensorShapes) -> TensorShapes:
    """Rename a flat vector's adapters to the names in peft's files; their order and shapes stay. Raises
    `ConfigError` if they are no adapters."""
    return tuple((_peft_name(name), shape) for name, shape in layout)


def flat_names(layout: TensorShapes) -> TensorShapes:
    """Rename the tensors of a file of peft's to the names that they have in a flat vector. Raises `ConfigError` if
    they are no adapters of LoRA."""
    return tuple((_flat_name(name), shape) for name, shape in layout)


def adapter_config(hf: HfConfig, layout: TensorShapes) -> dict[str, Any]:
    """The content of adapter_config.json for a run's adapters, whose names and shapes in the flat vector are
    `layout`. The base model that it names is the run's `hf.base`, as the hub calls it; none where that is a
    folder: its path is nobody else's affair."""
    base, revision = hub_repository(hf.base) if hf.base.startswith(HUB) else (None, None)
    modules = {_matched(name)["module"] for name, _ in layout}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": hf.lora.rank,
        "lora_alpha": hf.lora.alpha,
        "lora_dropout": hf.lora.dropout,
        "target_modules": sorted(hf.lora.targets or {name.rpartition(".")[2] for name in modules}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _peft_name(name: str) -> str:
    found = _matched(name)
    return f"{PREFIX}{found['module']}.{found['matrix']}{found['weight'] or ''}"


def _matched(name: str) -> re.Match[str]:
    found = NAME.fullmatch(name)
    if found is None:
        raise ConfigError(f"{name} is no LoRA adapter: this run trains every parameter")
    return found


def _flat_name(name: str) -> str:
    found = re.fullmatch(rf"{re.escape(PREFIX)}(.+\.lora_(?:embedding_)?[AB])(\.weight)?", name)
    if found is None:
        raise ConfigError(f"{name} is no LoRA adapter as peft writes it")
    return f"{found[1]}.default{found[2] or ''}"
