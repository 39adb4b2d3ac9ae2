"""Logging for every process: lines for people, or JSON lines with ATOLL_LOG=json. Goes to stderr,
or to a file of bounded size.

A plain line is `2026-01-31T23:59:59+01:00 LEVEL: SENTENCE`, in local time with its offset; `info` is not named.
"""

import logging
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TextIO

import click
import msgspec

from atoll.comm.log_file import LogFile
from atoll.comm.status_line import StatusLine
from atoll.comm.terminal import visible

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
level_option = click.option(
    "--log-level",
    type=click.Choice(list(LEVELS)),
    default="info",
    show_default=True,
    help="The least that is logged. ATOLL_LOG=json makes the lines JSON.",
)


log_file_option = click.option(
    "--log-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to this file in place of the terminal; of 8 MB, four older ones beside it.",
)
status_line = StatusLine()  # of this process, below its log; `setup` says where
_file: Path | None = None  # that this process logs to


class _AboveStatus(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        with status_line.hidden():
            super().emit(record)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"at": record.created, "level": record.levelname.lower(), "what": record.getMessage()}
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="seconds")
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        line = f"{when} {level}{visible(record.getMessage())}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def file_beside(name: str) -> Path | None:
    """The log file for another process of this one's, next to its own: STEM-NAME.log of STEM.log; None: this one
    logs to no file. The other begins a new file by itself when its own is full."""
    return None if _file is None else _file.with_stem(f"{_file.stem}-{name}")


def setup(level: str = "info", file: Path | None = None) -> None:
    """Configure the root logger once, at the start of a process. `level` is one of `LEVELS`; libraries say nothing
    below `info`, whatever it is. With `file`, stdout and stderr are that file from now on: see `LogFile`."""
    global _file
    _file = file
    least, as_json = LEVELS[level], os.environ.get("ATOLL_LOG") == "json"
    handler = _AboveStatus(sys.stderr) if file is None else LogFile(file)
    handler.setFormatter(_Json() if as_json else _Plain())
    status_line.use(None if as_json or file is not None else sys.stderr)
    logging.basicConfig(level=max(least, logging.INFO), handlers=[handler], force=True)
    logging.getLogger("atoll").setLevel(least)
    for noisy in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(max(least, logging.WARNING))
