"""Checks whether this node can train with the run's engine, before its trainer is started."""

from atoll.comm.config.engine import Engine
from atoll.comm.config.plugin import PluginGroup
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError
from atoll.comm.extras import demand
from atoll.node.config import Checkpointing, NodeConfig

# Settings of the built-in trainer, and what torchtitan has in their places.
TITAN_HAS = {"bf16": "--training.mixed_precision_param=bfloat16", "compile": "--compile.enable"}


def check_engine(run: RunConfig, config: NodeConfig) -> None:
    """Check the node's settings, as the volunteer gave them, for the run's engine. Raises `MissingPackage` where
    the engine is not installed, `ResourceError` where the package of `model.plugin` is not, `ConfigError` for
    settings that the run leaves no place for."""
    if run.engine is Engine.BUILTIN:
        _check_plugin(run, config)
        return
    if config.model:
        raise ConfigError(f"model={config.model}: this run's engine is {run.engine}, whose models it trains")
    if run.engine is Engine.HF:
        _check_hf(run, config)
    else:
        _check_torchtitan(config)


def _check_plugin(run: RunConfig, config: NodeConfig) -> None:
    if (plugin := run.plugin(PluginGroup.MODELS)) is None:
        return
    if config.model:
        raise ConfigError(
            f"model={config.model}: this run says its model itself, {plugin.key}={plugin.name}; leave out model="
        )
    plugin.find()


def _check_hf(run: RunConfig, config: NodeConfig) -> None:
    adapters = ("peft", "safetensors") if run.hf.lora.rank else ()
    demand("a node of a run whose engine is hf", "transformers", "accelerate", *adapters)
    if config.checkpointing is Checkpointing.SELECTIVE:
        raise ConfigError(
            "checkpointing=selective is for the built-in trainer, and this run's engine is hf: give "
            "checkpointing=full, or none"
        )


def _check_torchtitan(config: NodeConfig) -> None:
    demand("a node of a run whose engine is torchtitan", "torchtitan", "triton")
    for key, setting in TITAN_HAS.items():
        if getattr(config, key):
            raise ConfigError(
                f"{key}=true is for the built-in trainer, and this run's engine is torchtitan: "
                f"give titan=[{setting}]"
            )
