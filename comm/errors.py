"""Errors that people read: one sentence, whose fault it was, what to do; each kind has its exit code."""

from atoll.comm.exit_codes import ExitCode


class AtollError(Exception):
    """Base of every error a command shows as a sentence; `exit_code` is what the process returns."""

    exit_code: ExitCode = ExitCode.FAILED


def atoll_error(error: BaseException) -> AtollError | None:
    """The error that people read, of one that it may be, or a group of them: the first. None: there is none."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(atoll_error, error.exceptions)), None)
    return error if isinstance(error, AtollError) else None


class ConfigError(AtollError):
    """A config file, an override or a join URL is wrong: nothing was started."""

    exit_code = ExitCode.CONFIG


class ResourceError(AtollError):
    """A lack on this machine: a free port, memory, disk, data."""

    exit_code = ExitCode.RESOURCE


class Unreachable(AtollError):
    """A deadline passed without the other side's answer; trying again may help."""

    exit_code = ExitCode.UNREACHABLE


class Refused(AtollError):
    """A no from the other side: a wrong token, another run, another model."""

    exit_code = ExitCode.REFUSED


class RefusedForNow(Refused):
    """A no from the other side that passes by itself: the same may be tried again later."""

    exit_code = ExitCode.NOT_NOW


class PeerError(AtollError):
    """A peer broke the protocol or its connection; the peer's fault, the run goes on without it."""

    exit_code = ExitCode.PEER


class BenchFailed(AtollError):
    """A benchmark without a result: what was to be measured did not happen."""


KINDS = (ConfigError, ResourceError, Unreachable, Refused, RefusedForNow, PeerError)


def error_told(code: object, sentence: str) -> AtollError:
    """The error with which another process of this software answered, by its exit code: one and the same, whoever
    finds it. `Refused` for what is no code of an error's kind."""
    return next((kind for kind in KINDS if kind.exit_code == code), Refused)(sentence)
