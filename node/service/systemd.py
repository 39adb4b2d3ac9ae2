"""A node as a service of the user's systemd. Pure text; `atoll.node.service.installer` writes it."""

from dataclasses import dataclass
from pathlib import Path

from atoll.comm.exit_codes import ExitCode, final_codes

FIRST_WITH_STEPS = 254  # version that knows pauses which grow
FIRST_PAUSE, LONGEST_PAUSE, STEPS = 5, 600, 8  # seconds between two starts: 5, 9, 17 ... 600
FIXED_PAUSE = 60  # seconds, where they cannot grow
STOP_SECONDS = 90  # a script of the volunteer's own may take 60 to end


@dataclass(frozen=True, slots=True)
class Service:
    """What a service manager is told of a node."""

    name: str  # without .service
    words: tuple[str, ...]  # of its command line; the first is a path
    environment: dict[str, str]
    folder: Path  # that the command line's relative paths are of
    log: Path  # for a manager without a journal


def unit_text(service: Service, version: int) -> str:
    """The unit file, for a systemd of this version: one that grows its pauses if that can be."""
    grows = version >= FIRST_WITH_STEPS
    pause = FIRST_PAUSE if grows else FIXED_PAUSE
    steps = [f"RestartSteps={STEPS}", f"RestartMaxDelaySec={LONGEST_PAUSE}"] if grows else []
    final = " ".join(f"{code:d}" for code in final_codes() if code is not ExitCode.DONE)
    lines = [
        "[Unit]",
        "Description=Atoll: this machine's part in training a model",
        # The pauses bound it: a coordinator may be away for days, and a network come after the login.
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=notify",  # it says when it has joined
        "TimeoutStartSec=infinity",  # it is its --patience that ends
        f"ExecStart={' '.join(map(quoted, service.words))}",
        f"WorkingDirectory=-{_literal(str(service.folder))}",
        *(f"Environment={quoted(f'{name}={value}', '')}" for name, value in sorted(service.environment.items())),
        "Restart=on-failure",
        f"RestartSec={pause}",
        *steps,
        f"RestartPreventExitStatus={final}",  # docs/exit-codes.md
        "KillMode=mixed",  # the daemon ends its trainer itself
        f"TimeoutStopSec={STOP_SECONDS}",
        "Nice=10",
        "",
        "[Install]",
        "WantedBy=default.target",
        "",
    ]
    return "\n".join(lines)


def quoted(word: str, dollar: str = "$") -> str:
    """A word as systemd reads it back: in quotes, its escapes, specifiers and variables (which the ones of
    `dollar` begin) meant literally."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    for sign in ("%", *dollar):
        escaped = escaped.replace(sign, 2 * sign)
    return f'"{escaped}"'


def _literal(path: str) -> str:
    """A path of a line that knows specifiers and no quotes."""
    return path.replace("%", "%%")
