"""Where this user's files go unless a command is told another place: the folders of the XDG base directory
specification."""

import os
from collections.abc import Mapping
from pathlib import Path

# Where all of it was before; what is still there goes on being used.
FORMER = Path("~/.atoll")


def default_state_dir(part: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of `part`, node or coordinator: ~/.atoll/PART if there is one, else atoll/PART below
    $XDG_STATE_HOME (~/.local/state)."""
    former = FORMER.expanduser() / part
    return former if former.is_dir() else _xdg_state_dir(part, environment)


def cache_dir(state_dir: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for what the node with this state directory can fetch or measure again: with the default one it
    is atoll/node below $XDG_CACHE_HOME (~/.cache), which backups leave out; else inside the state directory."""
    if state_dir == _xdg_state_dir("node", environment):
        return _base("XDG_CACHE_HOME", "~/.cache", environment) / "atoll" / "node"
    return state_dir / "cache"


def config_home(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of this user's settings, in which systemd finds their services."""
    return _base("XDG_CONFIG_HOME", "~/.config", environment)


def _xdg_state_dir(part: str, environment: Mapping[str, str]) -> Path:
    return _base("XDG_STATE_HOME", "~/.local/state", environment) / "atoll" / part


def _base(variable: str, otherwise: str, environment: Mapping[str, str]) -> Path:
    """The folder that the variable names; a relative one is to be ignored, the specification says."""
    named = Path(environment.get(variable, ""))
    return named if named.is_absolute() else Path(otherwise).expanduser()
