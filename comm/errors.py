"""Errors that people read: one sentence, whose fault it was, what to do; each kind has its exit code."""


class AtollError(Exception):
    """Base of every error a command shows as a sentence; `exit_code` is what the process returns."""

    exit_code = 1


class ConfigError(AtollError):
    """A config file, an override or a join URL is wrong: nothing was started."""

    exit_code = 2


class ResourceError(AtollError):
    """A lack on this machine: a free port, memory, disk, data."""

    exit_code = 3


class Unreachable(AtollError):
    """A deadline passed without the other side's answer; trying again may help."""

    exit_code = 4


class Refused(AtollError):
    """A no from the other side: a wrong token, another run, another model."""

    exit_code = 5


class PeerError(AtollError):
    """A peer broke the protocol or its connection; the peer's fault, the run goes on without it."""

    exit_code = 6


class BenchFailed(AtollError):
    """A benchmark without a result: what was to be measured did not happen."""
