"""What the coordinator asks of wandb: where the run goes, by the config and wandb's own environment variables.

What the config says counts, then the environment, then what is usual here. Nothing of it imports wandb.
"""

import logging
import os
import secrets
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from atoll.comm.config.run import RunConfig, WandbMode, to_json
from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError
from atoll.comm.extras import demand, lacking

log = logging.getLogger("atoll.coordinator")
DEFAULT_PROJECT = "atoll"  # where neither config nor environment names one
MODE_OF_WORD = {  # what WANDB_MODE may be, with wandb's older words
    "online": WandbMode.ONLINE,
    "run": WandbMode.ONLINE,
    "shared": WandbMode.ONLINE,
    "offline": WandbMode.OFFLINE,
    "dryrun": WandbMode.OFFLINE,
    "disabled": WandbMode.DISABLED,
}
ID_CHARACTERS, ID_LENGTH = "abcdefghijklmnopqrstuvwxyz0123456789", 8
GIT_TIMEOUT = 5.0  # seconds
# What is usual here; each counts where its environment variable (WANDB_SILENT, ...) is not set.
SETTINGS: dict[str, Any] = {
    "console": "off",  # the log is not wandb's
    "x_disable_stats": True,  # of the coordinator's machine, which trains nothing
    "x_file_stream_transmit_interval": 1.0,  # seconds
    "x_file_stream_retry_max": 1_000_000,  # times: a server that is away for days is waited for
    "x_transaction_log_flush_interval": 1.0,  # seconds: so much of an offline run a killed process loses
    "disable_git": True,  # of the folder that the coordinator was started in; `code_version` is Atoll's
}


def wandb_mode(config: RunConfig) -> WandbMode:
    """The config's mode; for `auto` the one of WANDB_MODE, and without that `online` where a key is present and
    `disabled` where there is no wandb.

    Raises `ConfigError` for a WANDB_MODE that is none of wandb's.
    """
    if config.wandb.mode is not WandbMode.AUTO:
        return config.wandb.mode
    if missing := lacking("a chart of the run", "wandb"):
        log.info(f"nothing goes to wandb (wandb.mode=auto): {missing}")
        return WandbMode.DISABLED
    if said := os.environ.get("WANDB_MODE"):
        if (known := MODE_OF_WORD.get(said.lower())) is None:
            raise ConfigError(f"WANDB_MODE is {said[:40]!r}: set it to online, offline or disabled")
        return known
    netrc = Path.home() / ".netrc"
    logged_in = netrc.exists() and "wandb" in netrc.read_text(errors="replace")
    key = os.environ.get("WANDB_API_KEY") or logged_in
    return WandbMode.ONLINE if key else WandbMode.OFFLINE


def check_installed(config: RunConfig) -> None:
    """Raise `MissingPackage` where the config insists on what is not installed."""
    if config.wandb.mode in (WandbMode.ONLINE, WandbMode.OFFLINE):
        demand(f"wandb.mode={config.wandb.mode} (auto would do without)", "wandb")
    if config.figures.tensorboard:
        demand("figures.tensorboard", "tensorboardX")


def new_run_id() -> str:
    """An id of a wandb run that no other has."""
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


def init_arguments(config: RunConfig, state_dir: Path, run_id: str, mode: WandbMode) -> dict[str, Any]:
    """The arguments of `wandb.init`, settings aside. None: wandb takes its environment variable, or its
    default."""
    ours, env = config.wandb, os.environ
    facts = code_version() | {"config_digest": digest(to_json(config)).hex()}
    return {
        "id": run_id,
        "resume": None if env.get("WANDB_RESUME") else "allow",
        "mode": "online" if mode is WandbMode.ONLINE else "offline",
        "project": ours.project or env.get("WANDB_PROJECT") or DEFAULT_PROJECT,
        "entity": ours.entity or None,
        "name": env.get("WANDB_NAME") or config.name,
        "group": ours.group or None,
        "tags": ours.tags or None,
        "notes": ours.notes or None,
        "dir": None if env.get("WANDB_DIR") else str(state_dir),
        "config": {**msgspec.to_builtins(config), "atoll": facts},
    }


def init_settings(env: Mapping[str, str]) -> dict[str, Any]:
    """Settings of wandb's besides: those that the environment has nothing of."""
    usual = dict(SETTINGS)
    facts = code_version()
    usual |= {f"git_{key}": facts[key] for key in ("commit", "remote_url") if key in facts}
    return {name: value for name, value in usual.items() if not _variables(name) & env.keys()}


def _variables(setting: str) -> set[str]:
    """The environment variables that wandb takes a setting from."""
    return {f"WANDB_{setting.upper()}", f"WANDB_{setting.removeprefix('x').upper()}"}


@cache
def code_version() -> dict[str, str]:
    """Atoll's version, and where this is a clone its commit, its remote, and whether files differ from the
    commit."""
    root = Path(__file__).resolve().parents[2]
    try:
        found = {"version": version("atoll")}
    except PackageNotFoundError:
        found = {}
    if not (root / ".git").exists():
        return found
    if commit := _git(root, "rev-parse", "HEAD"):
        found["commit"] = commit
    if _git(root, "status", "--porcelain", "--untracked-files=no"):
        found["changed"] = "files differ from the commit"
    if remote := _git(root, "remote", "get-url", "origin"):
        found["remote_url"] = _without_password(remote)
    return found


def _git(root: Path, *arguments: str) -> str:
    """What git says, without the line's end; empty: nothing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if not parts.scheme or "@" not in parts.netloc:
        return url
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
