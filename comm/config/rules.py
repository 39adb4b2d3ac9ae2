"""Rules of a configuration: what must hold of its values, and the sentence that the operator reads where it does
not.

Each dataclass of the run's configuration (`atoll.comm.config.run`) yields its own from `rules()`. They are asked
one at a time and in order, and the first that does not hold ends it: a rule may count on those before it, a
division on the rule that its divisor is above 0.
"""

import re
from collections.abc import Iterator
from typing import Any

Rule = tuple[bool, str]  # whether it holds, and what to say where it does not
# Of URLs of servers that a node asks because a run's config says so. Others that fsspec knows would take the
# owner's own keys to machines of the run's choice (sftp, smb), or lead to this machine's files.
SERVER_SCHEMES = ("http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf")
MAX_LAYERS = 1024  # of a model: each takes memory before there is a parameter in it
LARGEST_INT = 1 << 42  # no machine holds as many elements, steps or tokens


def positive(section: str, **values: float) -> Iterator[Rule]:
    """Rules that each of a section's values, by its key, is above 0."""
    for key, value in values.items():
        yield value > 0, f"{section}.{key} is {value}: it must be greater than 0"


def representable(section: str, config: Any) -> Iterator[Rule]:
    """Rules for all numbers of a section: floats are finite and not negative, integers at most `LARGEST_INT`."""
    for key, value in vars(config).items():
        if isinstance(value, float):
            yield (
                0 <= value < float("inf"),
                f"{section}.{key} is {value}: it must be finite and not negative",
            )
        elif isinstance(value, int):
            yield value <= LARGEST_INT, f"{section}.{key} is {value}: no machine can hold that"


def store_url(key: str, url: str) -> Iterator[Rule]:
    """Rules for the URL of a store of checkpoints: one that fsspec knows, without a password in it."""
    scheme, separator, _ = url.partition("://")
    yield "::" not in url, f"{key} is {url!r}: it must be one URL, without '::'"
    yield (
        not re.search("//[^/]*:[^/]*@", url),
        f"{key} has a password in it, and every node gets the run's config: give it to the machines that "
        "need it in their environment",
    )
    yield (
        not separator or scheme in _schemes(),
        f"{key} is {url!r}: no store is known whose URLs begin with {scheme}://, as those of s3:// do",
    )


def ambiguous(url: str) -> str:
    """The character of a data set's URL that may hide whom it asks, or what of it: '#', '@' or a backslash; empty:
    there is none. A path has what it likes, and hf:// has a revision behind its '@'."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("file", "local"):
        return ""
    return next((c for c in ("#\\" if scheme == "hf" else "#@\\") if c in rest), "")


def _schemes() -> list[str]:
    from fsspec import available_protocols  # 0.1 s, which most runs never need

    schemes: list[str] = available_protocols()
    return schemes
