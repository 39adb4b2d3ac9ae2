"""The trainer's log: what its processes print, in the state directory, of bounded size.

The trainer writes through a file that the supervisor opened, for days; `bound` is called from time to time, and
when the trainer is started. Two files: `trainer.log`, and before it `trainer.log.1`.
"""

import os
import shutil
from pathlib import Path
from typing import BinaryIO

from atoll.comm.errors import ResourceError

LIMIT_BYTES = 8 << 20  # bytes of trainer.log, after which its content moves to trainer.log.1
TAIL_BYTES = 4000  # bytes in which the last line is looked for


class TrainerLog:
    """The log in one state directory. Every method raises `ResourceError` where the disk does not allow it."""

    def __init__(self, folder: Path, limit: int = LIMIT_BYTES) -> None:
        self._path, self._previous, self._limit = folder / "trainer.log", folder / "trainer.log.1", limit

    def open(self) -> BinaryIO:
        """A file to hand to a process: it writes at the log's end, wherever that is by then."""
        try:
            return open(self._path, "ab")
        except OSError as error:
            raise ResourceError(f"cannot write {self._path}: {error.strerror}") from None

    def bound(self) -> None:
        """Move the content of a log beyond its limit to `trainer.log.1`. By copy, as a living process writes to
        it; a line that it writes meanwhile may be lost."""
        try:
            if self._path.stat().st_size > self._limit:
                shutil.copyfile(self._path, self._previous)
                os.truncate(self._path, 0)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ResourceError(f"cannot bound {self._path}: {error.strerror}") from None

    def last_line(self) -> str:
        """The last line, where an exception says what it was, and where the rest is."""
        try:
            with open(self._path, "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                tail = log.read(TAIL_BYTES).decode(errors="replace")
        except OSError as error:
            raise ResourceError(f"cannot read {self._path}: {error.strerror}") from None
        lines = [line.strip() for line in tail.splitlines() if line.strip()]
        return f"{lines[-1] if lines else 'it said nothing'} (see {self._path})"
