"""Reads lines that `comm/log.py` has written, plain ones or JSON: who has started a process asks why it ended."""

import re

import msgspec

from atoll.comm.log import ENDING

PLAIN_HEAD = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d ((debug|warning|error|critical): )?")


class _Line(msgspec.Struct):
    what: str
    trace: str = ""
    exit_code: int | None = None


def sentence_of(line: str) -> str:
    """What a line of a log says: its sentence, or the last line of its trace. A line that is of no log, as what
    libraries print, is what it is."""
    if found := _json_of(line):
        return (found.trace.splitlines() or [found.what])[-1]
    return line.removeprefix(head[0]) if (head := PLAIN_HEAD.match(line)) else line


def ending_in(lines: list[str]) -> str | None:
    """The sentence with which a command ended, in the lines that it wrote; None: it ended without one."""
    for at in reversed(range(len(lines))):
        if lines[at].startswith(ENDING):
            return "\n".join(lines[at:]).removeprefix(ENDING)  # a plain one may have several lines
        if (found := _json_of(lines[at])) and found.exit_code is not None:
            return found.what
    return None


def _json_of(line: str) -> _Line | None:
    if not line.startswith("{"):
        return None
    try:
        return msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError:
        return None
