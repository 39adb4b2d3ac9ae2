"""Files that a run of a model of transformers' (`engine: hf`) may begin with: the names of their tensors, and what
the config beside them must agree on with the run's.

    model.safetensors, or shards, with config.json       for a run that trains every parameter
    adapter_model.safetensors with adapter_config.json   for a run that trains LoRA adapters, as peft writes them

`atoll.node.checkpoint.initial_state` asks; it compares names and shapes itself.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from atoll.comm.config.hf import HfConfig
from atoll.comm.config.hf_config import WITHOUT_EFFECT
from atoll.comm.errors import ConfigError
from atoll.node.checkpoint.hf_adapters import PREFIX, flat_names
from atoll.node.checkpoint.hf_layout import SPARE_HEAD, SPARE_SUFFIX
from atoll.node.checkpoint.snapshots import TensorShapes
from atoll.node.checkpoint.weights_file import Unusable

# Keys of adapter_config.json under which an adapter computes something else than plain LoRA does.
ADAPTER_VARIANTS = ("alpha_pattern", "rank_pattern", "modules_to_save", "use_dora", "use_rslora", "fan_in_fan_out")


def are_adapters(names: Collection[str]) -> bool:
    """Whether tensors have the names of a file of peft's."""
    return any(name.startswith(PREFIX) for name in names)


def run_names(found: Mapping[str, tuple[int, ...]], wanted: Collection[str], hf: HfConfig) -> dict[str, str]:
    """The run's name of each tensor of a file that says something. Raises `Unusable` where the file is of whole
    models and the run trains adapters, or the other way round."""
    if are_adapters(found):
        if not hf.lora.rank:
            raise Unusable("it has LoRA adapters, and this run trains every parameter: merge them into a model")
        try:
            flat: TensorShapes = flat_names(tuple(found.items()))
        except ConfigError as error:
            raise Unusable(str(error)) from None
        return dict(zip(found, (name for name, _ in flat), strict=True))
    if hf.lora.rank and not found.keys() & set(wanted):
        raise Unusable(
            "it has no LoRA adapters, which are all that this run trains; the weights beside them are hf.base's: "
            "give adapters, as peft or atoll export writes them, or let the run begin without init_from"
        )
    return {name: name for name in found if name in wanted or not _is_spare(name, wanted)}


def _is_spare(name: str, wanted: Collection[str]) -> bool:
    """Whether a tensor that the model has not says nothing: a tied head's second name, rotary frequencies."""
    return name.endswith(SPARE_SUFFIX) or name == SPARE_HEAD and name not in wanted


def check_model(text: bytes, path: str, hf: HfConfig) -> None:
    """Raise `Unusable` where a config.json says something else than the run's: the same tensors would compute
    something else. What only one of them says is not compared: versions of transformers write more or less."""
    theirs = _object(text, path)
    for key, there, here in _differences(theirs, hf.content):
        raise Unusable(
            f"{path} says {key}={json.dumps(there)[:80]}, and the run's hf.config {key}={json.dumps(here)[:80]}: "
            "give the coordinator the hf.config of the model that it is to begin with"
        )


def check_adapters(text: bytes, path: str, hf: HfConfig) -> None:
    """Raise `Unusable` where an adapter_config.json is of adapters that compute something else than the run's."""
    theirs = _object(text, path)
    for key, here in (("r", hf.lora.rank), ("lora_alpha", hf.lora.alpha)):
        if theirs.get(key) != here:
            raise Unusable(
                f"{path} says {key}={json.dumps(theirs.get(key))[:80]}, and the run's hf.lora has {here:g}: what "
                "an adapter adds is multiplied by alpha / rank"
            )
    for key in ADAPTER_VARIANTS:
        if theirs.get(key):
            raise Unusable(f"{path} says {key}={json.dumps(theirs[key])[:80]}, which a run's adapters do not have")


def _differences(theirs: dict[str, Any], ours: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys that both have, with other values: dotted, theirs, ours."""
    for key in sorted(theirs.keys() & ours.keys() - (WITHOUT_EFFECT - {"model_type"})):
        there, here = theirs[key], ours[key]
        if isinstance(there, dict) and isinstance(here, dict):
            yield from _differences(there, here, f"{above}{key}.")
        elif there is not None and here is not None and there != here:
            yield f"{above}{key}", there, here


def _object(text: bytes, path: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise Unusable(f"{path} is damaged: it is not an object")
    return found
