"""Durations as people write them on a command line, `90s`, `30m`, `48h`, `7d`, and as they are told to people."""

import re

from atoll.comm.errors import ConfigError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds
# Of a time that is yet to come: the seconds to which it is told, while it is less than so many.
GRAINS, LONGEST_GRAIN = ((1, 600.0), (60, 3600.0), (600, 6 * 3600.0)), 3600


def duration(option: str, text: str) -> float:
    """Seconds of the value of an option. Raises `ConfigError`, which names the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise ConfigError(f"{option} is {text!r}: write a number and s, m, h or d, for example 48h")
    return float(match[1]) * UNITS[match[2]]


def remaining(seconds: float) -> str:
    """A time that is yet to come, for people, as exactly as it may be known (`grain`)."""
    of = grain(seconds)
    rounded = seconds if of == 1 else of * int(seconds / of + 0.5)
    return f"{rounded // 60} min" if of == 60 and rounded < 3600 else in_words(rounded)


def grain(seconds: float) -> int:
    """The seconds to which a time that is this far away is told."""
    return next((of for of, until in GRAINS if seconds < until), LONGEST_GRAIN)


def in_words(seconds: float) -> str:
    """A time for people, in its two largest units."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02.0f} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02.0f} min"
    return f"{seconds // 86400:,} d {seconds % 86400 // 3600} h"
