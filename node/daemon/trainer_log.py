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
    """The log in one state directory. Methods raise `ResourceError` where the disk does not allow what they do."""

    def __init__(self, folder: Path, limit: int = LIMIT_BYTES) -> None:
        self._path, self._previous, self._limit = folder / "trainer.log", folder / "trainer.log.1", limit

    @property
    def path(self) -> Path:
        return self._path

    def open(self) -> BinaryIO:
        """A file to hand to a process: it writes at the log's end, wherever that is by then."""
        try:
            return open(self._path, "ab")
        except OSError as error:
            raise ResourceError(f"cannot write {self._path}: {error.strerror}") from None

    def bound(self) -> None:
        """Move the content of a log beyond its limit to `trainer.log.1`. By copy, as a living process writes to
        it; a line that it writes meanwhile may be lost, and all of it where the disk has no room for the copy."""
        try:
            if self._path.stat().st_size <= self._limit:
                return
            try:
                shutil.copyfile(self._path, self._previous)
            except OSError:
                self._previous.unlink(missing_ok=True)
            os.truncate(self._path, 0)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ResourceError(f"cannot bound {self._path}: {error.strerror}") from None

    def last_line(self) -> str:
        """The last line, where an exception says what it was, and where the rest is; of `trainer.log.1` where the
        log was moved there just now."""
        for path in (self._path, *([self._previous] if self._previous.exists() else [])):
            try:
                with open(path, "rb") as log:
                    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                    tail = log.read(TAIL_BYTES).decode(errors="replace")
            except OSError as error:
                raise ResourceError(f"cannot read {path}: {error.strerror}") from None
            if lines := [line.strip() for line in tail.splitlines() if line.strip()]:
                return f"{lines[-1]} (see {path})"
        return f"it said nothing (see {self._path})"
