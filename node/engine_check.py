"""Checks whether this node can train with the run's engine, before its trainer is started."""

from atoll.comm.config.engine import Engine
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError
from atoll.comm.extras import demand
from atoll.node.config import NodeConfig

# Settings of the built-in trainer, and what torchtitan has in their places.
TITAN_HAS = {"bf16": "--training.mixed_precision_param=bfloat16", "compile": "--compile.enable"}


def check_engine(run: RunConfig, config: NodeConfig) -> None:
    """Check the node's settings, as the volunteer gave them, for the run's engine. Raises `MissingPackage` where
    the engine is not installed, `ConfigError` for settings of another."""
    if run.engine is Engine.BUILTIN:
        return
    demand("a node of a run whose engine is torchtitan", "torchtitan", "triton")
    if config.model:
        raise ConfigError(f"model={config.model}: this run's engine is torchtitan, whose models it trains")
    for key, setting in TITAN_HAS.items():
        if getattr(config, key):
            raise ConfigError(
                f"{key}=true is for the built-in trainer, and this run's engine is torchtitan: "
                f"give titan=[{setting}]"
            )
