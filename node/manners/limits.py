"""The limits that a node's owner may change while it runs: settings of `NodeConfig`, above what its file and its
command line say, kept in the state directory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from atoll.comm.config.load import load_dataclass
from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.files import atomic_write, write_all
from atoll.node.config import NodeConfig, check
from atoll.node.manners.hours import parse_hours
from atoll.node.manners.may_train import Pause, Wishes

NAME = "limits.json"
KEYS = (
    *("hours", "idle_only", "battery", "metered"),
    *("gpu_temperature", "gpu_duty", "threads", "memory", "upload", "download", "daily", "monthly"),
)
TRAINER_KEYS = ("gpu_temperature", "gpu_duty", "threads", "memory")  # of a node that has a trainer alone
GIGABYTE = 1e9


@dataclass
class Orders:
    """What the owner has told the running node, kept for its next life."""

    limits: dict[str, str] = field(default_factory=dict)  # in the place of the config's
    pause: Pause | None = None


def load_orders(state_dir: Path) -> Orders:
    """What was told to an earlier life. Raises `ConfigError` for what cannot be read."""
    path = state_dir / NAME
    try:
        orders = msgspec.json.decode(path.read_bytes(), type=Orders)
    except FileNotFoundError:
        return Orders()
    except (OSError, *DECODE_ERRORS) as error:
        raise ConfigError(f"cannot read {path} ({error}): remove it, and set the limits again") from None
    return orders


def save_orders(state_dir: Path, orders: Orders) -> None:
    """Keep what was told. Raises `ResourceError`."""
    try:
        with atomic_write(state_dir / NAME, None) as out:
            write_all(out, [memoryview(msgspec.json.encode(orders))], 0)
    except OSError as error:
        raise ResourceError(f"cannot write {state_dir / NAME}: {error.strerror or error}") from None


def changed(orders: Orders, settings: Sequence[str], keys: Sequence[str] = KEYS) -> Orders:
    """The orders with these KEY=VALUE, of `keys`; an empty value takes back what was told of a key. Raises
    `ConfigError`."""
    limits = dict(orders.limits)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key in KEYS and key not in keys:
            raise ConfigError(f"{key} is a limit on a trainer, and this node has none: leave it out")
        if not equals or key not in keys:
            raise ConfigError(f"there is no limit {setting!r}: write KEY=VALUE, where KEY is {', '.join(keys)}")
        limits.pop(key, None)
        if value:
            limits[key] = value
    return replace(orders, limits=limits)


def limited(config: NodeConfig, orders: Orders) -> NodeConfig:
    """The settings with the owner's limits in force. Raises `ConfigError` for a value that cannot be."""
    if not orders.limits:
        return config
    told = load_dataclass(NodeConfig, None, tuple(f"{key}={value}" for key, value in orders.limits.items()))
    merged = replace(config, **{key: getattr(told, key) for key in orders.limits})
    check(merged)
    wishes(merged)
    return merged


def wishes(config: NodeConfig) -> Wishes:
    """What the settings wish of the machine. Raises `ConfigError` for hours that cannot be."""
    return Wishes(
        parse_hours(config.hours),
        int(config.daily * GIGABYTE),
        int(config.monthly * GIGABYTE),
        config.battery,
        config.metered,
        config.idle_only,
        config.gpu_temperature,
    )


def check_without_trainer(config: NodeConfig) -> None:
    """Raise `ConfigError` for the first limit that only a trainer could obey."""
    for key in TRAINER_KEYS:
        if getattr(config, key) != getattr(NodeConfig(), key):
            raise ConfigError(
                f"{key}={getattr(config, key):g} is a limit on a trainer, and a reducer has none: leave it out"
            )


def shown(config: NodeConfig) -> dict[str, Any]:
    """The limits by their keys."""
    return {key: getattr(config, key) for key in KEYS}
