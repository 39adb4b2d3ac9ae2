"""A node as a launch agent of macOS. Pure bytes; `atoll.node.service.installer` writes them.

launchd starts again what does not end with 0, at most once in `THROTTLE_SECONDS`, whatever the other code says. So
the command itself ends with 0 where trying again is of no use: `ATOLL_SERVICE=launchd` tells it to.
"""

import plistlib

from atoll.comm.exit_codes import SERVICE
from atoll.node.service.systemd import STOP_SECONDS, Service

THROTTLE_SECONDS = 60


def plist(service: Service) -> bytes:
    """The property list; the log goes to a file of bounded size, as launchd has no journal."""
    return plistlib.dumps(
        {
            "Label": service.name,
            "ProgramArguments": list(with_log_file(service)),
            "EnvironmentVariables": service.environment | {SERVICE: "launchd"},
            "WorkingDirectory": str(service.folder),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": THROTTLE_SECONDS,
            "ExitTimeOut": STOP_SECONDS,
            "Nice": 10,
            "ProcessType": "Standard",  # of Background, Apple silicon's slow cores alone would compute
        }
    )


def with_log_file(service: Service) -> tuple[str, ...]:
    """The command line with a log file, before what is the trainer's."""
    words = service.words
    if any(word.startswith("--log-file=") for word in words[: _end(words)]):
        return words
    return (*words[: _end(words)], f"--log-file={service.log}", *words[_end(words) :])


def _end(words: tuple[str, ...]) -> int:
    return words.index("--") if "--" in words else len(words)
