"""The trainer's log: what its processes print, in the state directory, of bounded size.

The trainer writes through a file that was opened for it, for days; it is moved away when it is large, before a
trainer starts and from time to time. Two files: `trainer.log`, and before it `trainer.log.1`.
"""

import asyncio
import logging
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from atoll.comm.errors import ResourceError
from atoll.node.daemon.last_words import LastWords, last_words

log = logging.getLogger("atoll.node")
CHECK_SECONDS = 60.0  # between two looks at the size
LIMIT_BYTES = 8 << 20  # bytes of trainer.log, after which its content moves to trainer.log.1
TAIL_BYTES = 32 << 10  # in which the last words are looked for; torchrun's report has 300 a rank


class TrainerLog:
    """The log in one state directory. Methods raise `ResourceError` where the disk does not allow what they do."""

    def __init__(self, folder: Path, limit: int = LIMIT_BYTES) -> None:
        self._path, self._previous, self._limit = folder / "trainer.log", folder / "trainer.log.1", limit
        self._start = 0  # bytes; where the latest trainer's part begins

    @property
    def path(self) -> Path:
        return self._path

    def open(self) -> BinaryIO:
        """A file to hand to a process: it writes at the log's end, wherever that is by then."""
        try:
            file = open(self._path, "ab")
            self._start = file.tell()
            return file
        except OSError as error:
            raise ResourceError(f"cannot write {self._path}: {error.strerror}") from None

    async def keep_bounded(self) -> None:
        """`try_to_bound` it now and then, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.try_to_bound()

    async def try_to_bound(self) -> None:
        """`bound` it. A disk that does not let it is no reason to stop: the log may still be written."""
        try:
            await asyncio.to_thread(self.bound)
        except ResourceError as error:
            log.warning(str(error))

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

    def last_words(self) -> tuple[LastWords, Path]:
        """What the latest trainer ended of, and where the rest is; of `trainer.log.1` where the log was moved
        there just now."""
        words, path = last_words(self._tail(self._path)), self._path
        moved = self._start == 0 or self._path.stat().st_size < self._start
        if not words.line and moved and self._previous.exists():
            words, path = last_words(self._tail(self._previous)), self._previous
        return words, path

    def _tail(self, path: Path) -> str:
        try:
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                begin = self._start if self._start <= size else 0
                file.seek(max(begin, size - TAIL_BYTES))
                return file.read(TAIL_BYTES).decode(errors="replace")
        except OSError as error:
            raise ResourceError(f"cannot read {path}: {error.strerror}") from None
