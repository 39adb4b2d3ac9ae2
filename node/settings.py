"""The volunteer's settings from where they are written: STATE_DIR/node.yaml, then the environment, then
`key=value` of the command line, each over those before."""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from atoll.comm.config.load import load_dataclass
from atoll.node.config import NodeConfig, check
from atoll.node.state_files import SETTINGS

PREFIX = "ATOLL_NODE_"  # of a setting's environment variable: ATOLL_NODE_DEVICE=cpu


def load_settings(
    state_dir: Path, overrides: tuple[str, ...], environment: Mapping[str, str] = os.environ
) -> NodeConfig:
    """The settings of the node with this state directory. Raises `ConfigError`."""
    local = state_dir / SETTINGS
    given = (*settings_of(environment), *overrides)
    config = load_dataclass(NodeConfig, local if local.exists() else None, given)
    check(config)
    return config


def settings_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The settings in an environment, as key=value; an empty variable is none."""
    told = ((item.name, environment.get(PREFIX + item.name.upper(), "")) for item in fields(NodeConfig))
    return tuple(f"{name}={value}" for name, value in told if value)
