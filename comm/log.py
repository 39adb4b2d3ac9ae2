"""Logging for every process: lines for people, or JSON lines with ATOLL_LOG=json. Goes to stderr."""

import logging
import os
import sys
import time

import msgspec


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"at": record.created, "level": record.levelname.lower(), "what": record.getMessage()}
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields).decode()


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        line = f"{clock} {level}{record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def setup() -> None:
    """Configure the root logger once, at the start of a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if os.environ.get("ATOLL_LOG") == "json" else _Plain())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
