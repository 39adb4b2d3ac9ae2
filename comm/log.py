"""Logging for every process: lines for people, or JSON lines with ATOLL_LOG=json. Goes to stderr,
or to a file of bounded size.

A plain line is `2026-01-31T23:59:59+01:00 LEVEL: SENTENCE`, in local time with its offset; `info` is not named. A
JSON line is an object with these keys, null where the process does not know:

    at        seconds since 1970
    time      the same as in a plain line, to the millisecond
    level     debug, info, warning, error or critical
    process   coordinator, door, wandb, node, trainer rank 0, gateway, worker...
    run       its name
    node      id in the run: of the node that writes, or that the line is about
    round     that is under way, or that the line is about
    what      the sentence
    trace     of an exception; only where there is one
    exit_code with which the command ends, in its last line; only there

A process calls `setup` once, says by `about` what its lines are about, and hands `beside` to those that it starts,
whose lines are as its own. Handlers of OpenTelemetry, which its own tool puts on the root logger, stay, and find
process, run, node and round as attributes of each record, under the names `atoll.process`, `atoll.run`...
`comm/log_lines.py` reads what is written here.
"""

import json
import logging
import os
import sys
import threading
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import click
import msgspec
from msgspec.structs import replace

from atoll.comm.log_file import LogFile
from atoll.comm.status_line import StatusLine
from atoll.comm.terminal import visible

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
SUBJECT = ("process", "run", "node", "round")  # of a line
ATTRIBUTES = "atoll."  # before these names, where they are attributes of a record
KEPT_HANDLERS = "opentelemetry."  # where handlers of others come from that stay
ENDING = "atoll: "  # before the sentence with which a command ends, where lines are plain
level_option = click.option(
    "--log-level",
    type=click.Choice(list(LEVELS)),
    default="info",
    show_default=True,
    help="The least that is logged. ATOLL_LOG=json makes the lines JSON.",
)
log_file_option = click.option(
    "--log-file",
    type=click.Path(dir_okay=False),
    default="",
    help="Write to this file in place of the terminal; of 8 MB, four older ones beside it.",
)


class LogSetup(msgspec.Struct, frozen=True):
    """How a process logs, and what its lines are about."""

    process: str
    level: str = "info"  # one of LEVELS
    file: str = ""  # path; empty: stderr
    run: str = ""
    node: str = ""
    round: int | None = None


status_line = StatusLine()  # of this process, below its log; `setup` says where
_own = LogSetup("")  # this process's


def setup(how: LogSetup) -> None:
    """Configure the root logger once, at the start of a process; libraries say nothing below `info`, whatever the
    level is. With a file, stdout and stderr are that file from now on: see `LogFile`. What ends the process, or a
    thread of it, is logged. Raises `ResourceError` where the file cannot be written."""
    global _own
    least, as_json = LEVELS[how.level], _lines_are_json()
    handler = LogFile(Path(how.file)) if how.file else _AboveStatus(sys.stderr)
    _own = how
    handler.setFormatter(_Json() if as_json else _Plain())
    status_line.use(None if as_json or how.file else sys.stderr)
    root = logging.getLogger()
    kept = [other for other in root.handlers if type(other).__module__.startswith(KEPT_HANDLERS)]
    for other in [*root.handlers]:
        root.removeHandler(other)
        if other not in kept:
            other.close()
    for each in (handler, *kept):
        each.addFilter(_put_subject)
        root.addHandler(each)
    root.setLevel(max(least, logging.INFO))
    logging.getLogger("atoll").setLevel(least)
    for noisy in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(max(least, logging.WARNING))
    sys.excepthook = _log_crash
    threading.excepthook = lambda crash: _log_crash(crash.exc_type, crash.exc_value, crash.exc_traceback)


def about(*, run: str | None = None, node: str | None = None, round: int | None = None) -> None:
    """Say what this process's lines are about from now on; what is None stays as it was."""
    global _own
    said = {"run": run, "node": node, "round": round}
    _own = replace(_own, **{key: value for key, value in said.items() if value is not None})


def beside(process: str) -> LogSetup:
    """How another process of this one's logs: about the same run and node, at the same level, to stderr or to a
    file next to this one's, STEM-PROCESS.log of STEM.log, which begins a new file by itself when its own is full.
    Which round is under way it has to hear itself."""
    file = Path(_own.file)
    name = str(file.with_stem(f"{file.stem}-{process}")) if _own.file else ""
    return replace(_own, process=process, file=name, round=None)


def say_ending(sentence: str, code: int) -> None:
    """Say on stderr, which a log file is, too, with what sentence a command ends, and in JSON with what code."""
    if _own.process and _lines_are_json():
        logging.getLogger("atoll").error(sentence, extra={"fields": {"exit_code": code}})
    else:
        click.echo(visible(f"{ENDING}{sentence}", keep="\n"), err=True)


def complain(name: str, sentence: str) -> None:
    """Log an error of `name`'s; on stderr where this process is a script of others, which logs as it likes."""
    if _own.process:
        logging.getLogger("atoll").error(f"{name}: {sentence}")
    else:
        click.echo(visible(f"{name}: {sentence}", keep="\n"), err=True)


def flush() -> None:
    """Have handlers pass on what they hold: in a process that was forked nothing else does at its end."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _lines_are_json() -> bool:
    return os.environ.get("ATOLL_LOG") == "json"


class _AboveStatus(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        with status_line.hidden():
            super().emit(record)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = {key.removeprefix(ATTRIBUTES): v for key, v in vars(record).items() if key.startswith(ATTRIBUTES)}
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {"at": record.created, "time": time, "level": record.levelname.lower()}
        fields |= dict.fromkeys(SUBJECT) | told | {"what": record.getMessage()}
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)  # which has words for surrogates: names of files may have them


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="seconds")
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        line = f"{when} {level}{visible(record.getMessage())}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _put_subject(record: logging.LogRecord) -> bool:
    """Make what the process's lines are about attributes of the record, and over that the `fields` of its `extra`.
    Nothing changes where it is called again, by another handler."""
    told = {key: value for key, value in record.__dict__.pop("fields", {}).items() if value is not None}
    for key, value in ({key: getattr(_own, key) for key in SUBJECT} | told).items():
        if value not in (None, ""):
            record.__dict__.setdefault(f"{ATTRIBUTES}{key}", value)
    return True


def _log_crash(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """What an interpreter would print of the exception that ends it, or a thread."""
    error = error or Exception(kind.__name__)  # a thread may have none to show
    if issubclass(kind, Exception):
        logging.getLogger("atoll").critical("a fault of the program", exc_info=(kind, error, trace))
    elif not issubclass(kind, SystemExit):
        sys.__excepthook__(kind, error, trace)
