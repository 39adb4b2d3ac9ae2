"""The last line of a terminal, which says how far something is and is written again and again, below the log.

Lines of the log go above it: `hidden` takes it away while one is written. Without a terminal there is no such
line, and `show` says so.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TextIO

from atoll.comm.terminal import visible

CLEAR = "\r\x1b[K"
BAR_WIDTH = 30  # characters


class StatusLine:
    """The status line of one stream, from `use` on."""

    def __init__(self) -> None:
        self._stream: TextIO | None = None
        self._text = ""
        self._turn = RLock()  # lines of a log come from several threads

    def use(self, stream: TextIO | None) -> None:
        """Write to this stream from now on, if it is a terminal that can take a line back; None: nowhere."""
        able = stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._stream, self._text = stream if able else None, ""

    def show(self, text: str) -> bool:
        """Write this in the place of what is there, cut to the terminal's width; empty: take it away. Returns
        False where there is no terminal."""
        if self._stream is None:
            return False
        with self._turn:
            self._clear()
            self._text = visible(text)[: shutil.get_terminal_size().columns - 1]
            self._write(self._text)
        return True

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Have it away while something else is written."""
        with self._turn:
            self._clear()
            try:
                yield
            finally:
                self._write(self._text)

    def _clear(self) -> None:
        if self._text:
            self._write(CLEAR)

    def _write(self, text: str) -> None:
        if self._stream is not None and text:
            self._stream.write(text)
            self._stream.flush()


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar that is full to this share, 0 to 1, with its percentage."""
    share = min(max(share, 0.0), 1.0)
    full = int(share * width)
    return f"[{'#' * full}{'.' * (width - full)}] {int(100 * share):3} %"
