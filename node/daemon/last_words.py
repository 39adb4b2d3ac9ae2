"""What a trainer's log says that the trainer ended of. Pure; the supervisor quotes it to people.

Of an exception the last line says what it was. torchrun writes a report behind it, of rules, tables and its own
traceback, in which only the exit code of the first rank that failed is news.
"""

import re
from dataclasses import dataclass

from atoll.comm.log_lines import sentence_of

# Lines of torch's own logger (W1123 12:17:05.143000 18575 torch/...), and torchrun's remark on threads.
LOGGED_BY_TORCH = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d|Setting OMP_NUM_THREADS environment variable for each")
EXCEPTION = re.compile(r"(\[rank\d+\]: ?)?([A-Za-z_]\w*\.)*[A-Za-z_]\w*(Error|Exception|Interrupt)\b")
TORCHRUN_REPORT = re.compile(r"(\w+\.)+ChildFailedError:")
TORCHRUN_EXIT_CODE = re.compile(r"\s*exitcode\s*:\s*(-?\d+)")
TRACEBACK = "Traceback (most recent call last):"
PEER_GONE = re.compile(r"connection (was )?(closed|reset) by (remote )?peer|remote process exited", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LastWords:
    """The line of a log that says what its trainer ended of; empty: there is none."""

    line: str
    exit_code: int | None = None  # of the first rank that failed, -N for signal N; None: the log does not say
    peer_gone: bool = False  # the ranks lost a connection among each other


def last_words(log: str) -> LastWords:
    """What a log's end says. The last line that has letters and is not torch's; of ranks under torchrun the last
    exception's, where it was not a signal that ended them."""
    lines, code = [sentence_of(line) for line in log.splitlines()], None
    gone = PEER_GONE.search(log) is not None
    report = next((i for i in reversed(range(len(lines))) if TORCHRUN_REPORT.match(lines[i])), None)
    if report is not None:
        codes = [int(m[1]) for line in lines[report:] if (m := TORCHRUN_EXIT_CODE.match(line))]
        code = codes[-1] if codes else None  # the root cause stands last
        while report and lines[report - 1] != TRACEBACK:
            report -= 1
        lines = lines[: max(report - 1, 0)]
    said = [line for line in lines if any(map(str.isalpha, line)) and not LOGGED_BY_TORCH.match(line.strip())]
    exceptions = [line for line in said if EXCEPTION.match(line)] if code is not None and code > 0 else []
    return LastWords((exceptions or said or [""])[-1].strip(), code, gone)
