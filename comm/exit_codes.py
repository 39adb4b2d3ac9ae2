"""What a command's exit code says: the one table, from which errors, `atoll --help`, docs/exit-codes.md and the
service that restarts a node take it."""

from enum import IntEnum
from typing import Self

# Environment variable: "launchd" in a service of it, which starts again whatever does not end with 0.
SERVICE = "ATOLL_SERVICE"


class ExitCode(IntEnum):
    """A command's exit code; `again` says whether a service starts a node again that ended with it."""

    summary: str  # a few words
    meaning: str
    remedy: str
    again: bool

    def __new__(cls, code: int, summary: str, meaning: str, remedy: str, again: bool) -> Self:
        member = int.__new__(cls, code)
        member._value_ = code
        member.summary, member.meaning, member.remedy, member.again = summary, meaning, remedy, again
        return member

    DONE = (
        *(0, "done", "What was asked happened: of a node, the run is finished, or it was told to leave."),
        *("Nothing.", False),
    )
    FAILED = (
        *(1, "failed", "It was begun and did not succeed, or something happened that nobody foresaw."),
        *("Read the sentence; a traceback is a fault of Atoll: report it.", True),
    )
    CONFIG = (
        *(
            2,
            "wrong config or usage",
            "An option, a setting, a config or a join URL is wrong, whether the command finds it or the "
            "node that it asks; nothing was started or changed.",
        ),
        *("Correct what the sentence names.", False),
    )
    RESOURCE = (
        *(3, "this machine lacks something", "A port, memory, disk, data, a package or a device is missing here."),
        *("Provide what the sentence names; `atoll doctor` looks at all of it.", True),
    )
    UNREACHABLE = (
        *(4, "unreachable", "The other side did not answer in time."),
        *("Try again later; if it stays so, ask the operator whether the coordinator is up.", True),
    )
    REFUSED = (
        *(5, "refused by the other side", "A no: a token that is used up, another run, another certificate."),
        *("Do what the sentence says; a new join URL is the operator's to give.", False),
    )
    PEER = (
        *(6, "a peer's fault", "A peer broke the protocol or its connection. A node goes on without that peer."),
        *("Try again.", True),
    )
    NOT_NOW = (
        *(7, "refused for now", "A no that passes: what the sentence names will have changed."),
        *("Try again later; a service does.", True),
    )
    INTERRUPTED = (
        *(130, "interrupted", "It was ended at the keyboard, or a question was not answered with yes."),
        *("Nothing.", False),
    )


def final_codes() -> list[ExitCode]:
    """Those after which trying again would come to the same."""
    return [code for code in ExitCode if not code.again]
