"""A log file of bounded size for a process without a terminal: NAME, and before it NAME.1 to NAME.4.

What libraries and a dying interpreter print goes there, too: the file is the process's stdout and stderr, and is
put in their place again when it is changed.
"""

import logging
import os
import sys
from pathlib import Path

from atoll.comm.errors import ResourceError

LIMIT_BYTES = 8 << 20
FORMER_FILES = 4


class LogFile(logging.StreamHandler):  # type: ignore[type-arg]
    """Logs to stderr, which it has made the file `path`. Raises `ResourceError` if that cannot be written."""

    def __init__(self, path: Path, limit: int = LIMIT_BYTES) -> None:
        self._path, self._limit = path, limit
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise ResourceError(f"cannot write the log {path}: {error.strerror}") from None
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; then, if the file is beyond its limit, begin another one."""
        super().emit(record)
        try:
            if os.fstat(sys.stderr.fileno()).st_size > self._limit:
                self._begin_another()
        except OSError:  # on a disk that is full, say: the file at hand goes on
            pass

    def _begin_another(self) -> None:
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{n + 1}") for n in range(FORMER_FILES))]
        for newer, older in reversed(list(zip(names, names[1:], strict=False))):
            if newer.exists():
                newer.replace(older)
        self._open()

    def _open(self) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file, stream.fileno())
        finally:
            os.close(file)
