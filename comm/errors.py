"""Errors that people read: one sentence, whose fault it was, what to do; each kind has its exit code."""


class AtollError(Exception):
    """Base of every error a command shows as a sentence; `exit_code` is what the process returns."""

    exit_code = 1


class ConfigError(AtollError):
    """A config file, an override or a join URL is wrong: nothing was started."""

    exit_code = 2


class ResourceError(AtollError):
    """This machine lacks something: a free port, memory, disk, data."""

    exit_code = 3


class Unreachable(AtollError):
    """The other side did not answer within its deadline; trying again may help."""

    exit_code = 4


class Refused(AtollError):
    """The other side answered and said no: a wrong token, another run, another model."""

    exit_code = 5


class PeerError(AtollError):
    """A peer broke the protocol or its connection; the peer's fault, the run goes on without it."""

    exit_code = 6
