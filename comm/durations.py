"""Durations as people write them on a command line: `90s`, `30m`, `48h`, `7d`."""

import re

from atoll.comm.errors import ConfigError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds


def duration(option: str, text: str) -> float:
    """Seconds of the value of an option. Raises `ConfigError`, which names the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise ConfigError(f"{option} is {text!r}: write a number and s, m, h or d, for example 48h")
    return float(match[1]) * UNITS[match[2]]
