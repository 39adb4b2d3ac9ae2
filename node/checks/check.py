"""One thing that was looked at, before a node joins a run or while it does, in words for people."""

from dataclasses import dataclass

from atoll.comm.errors import AtollError, ResourceError


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    found: str  # in words
    remedy: str = ""  # what to do where it is not ok; or what to know
    exit_code: int = ResourceError.exit_code  # of `atoll doctor`, where this is the first that is not ok

    def __str__(self) -> str:
        return f"{self.name}: {self.found}" + (f" ({self.remedy})" if self.remedy else "")


def failed(name: str, error: AtollError) -> Check:
    """What an error says, which ends with what to do, behind a colon."""
    found, _, remedy = str(error).rpartition(": ")
    return Check(name, False, found or remedy, remedy if found else "", error.exit_code)
