"""The signs by which a trainer that died is known to have run out of memory. Its last words say so where it was
told; where the kernel ended it, it was a SIGKILL, and the kernel counts those (`oom_kill` of /proc/vmstat, Linux
4.13). Pure, but for `oom_kills`.
"""

import re
import signal
from pathlib import Path

from atoll.comm.incidents import IncidentKind

VMSTAT = Path("/proc/vmstat")
SAID = re.compile(
    r"out of memory|OutOfMemoryError|\bMemoryError\b|can't allocate memory|cannot allocate memory|std::bad_alloc",
    re.IGNORECASE,
)
SIGNAL = re.compile(r"ended with signal (SIG[A-Z0-9]+)")  # the launcher's words of a rank


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory, of the machine's or of a control group's; 0
    where it does not tell."""
    try:
        found = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found is not None else 0


def cause_of_death(last_line: str, exit_code: int, kills: int) -> tuple[IncidentKind, int]:
    """What a trainer died of, and its exit code, or minus the number of the signal that ended it. `exit_code`: the
    launcher's, or the first rank's, -N for signal N; `kills`: the kernel's while the trainer lived."""
    number = _signal(last_line, exit_code)
    code = -number if number else exit_code
    if SAID.search(last_line) or (number == signal.SIGKILL and kills > 0):
        return IncidentKind.OUT_OF_MEMORY, code
    return IncidentKind.TRAINER_DIED, code


def _signal(last_line: str, exit_code: int) -> int:
    """The number of the signal; 0: there was none."""
    if (told := SIGNAL.search(last_line)) is not None and told[1] in signal.Signals.__members__:
        return signal.Signals[told[1]].value
    number = -exit_code if exit_code < 0 else exit_code - 128
    return number if number in {s.value for s in signal.Signals} else 0
