"""Which Atoll this is, and what it runs on: the labels of `atoll_build_info`, and what `atoll --version` says."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent


def build_info() -> dict[str, str]:
    """Versions of Atoll and Python, and the system's name."""
    return {"version": installed_version(), "python": platform.python_version(), "system": platform.system()}


def installed_version() -> str:
    """The version that was installed, as pyproject.toml has it; "unknown" where Atoll was not installed."""
    try:
        return version("atoll")
    except PackageNotFoundError:
        return "unknown"


def git_version(clone: Path = CLONE) -> str:
    """The commit that a clone is at, as git describes it by the newest tag: v0.1.0-12-g1f0c2a9, with -dirty where
    files were changed. Empty where the code is in no clone, or git cannot tell."""
    import subprocess

    if not (clone / ".git").exists():
        return ""
    # Of a hook of git's, these name another repository.
    own = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-C", str(clone), "describe", "--tags", "--always", "--dirty"]
    try:
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def full_version() -> str:
    """The installed version, and the commit if it runs from a clone."""
    commit = git_version()
    return f"{installed_version()} ({commit})" if commit else installed_version()
