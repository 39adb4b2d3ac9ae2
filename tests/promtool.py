"""Prometheus and its tools, as Debian has them."""

import shutil

from atoll.comm.errors import ConfigError


def installed(program: str) -> str:
    """The path of a program of Debian's package prometheus. Raises `ConfigError` with the line that brings it."""
    if (path := shutil.which(program)) is None:
        raise ConfigError(
            f"there is no {program} on this machine: apt-get install -y --no-install-recommends prometheus"
        )
    return path


def promtool() -> str:
    return installed("promtool")
