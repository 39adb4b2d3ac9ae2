"""Figures as JSON lines: one object a round, in the order of the rounds, appended to one file.

A line that a killed process left unfinished is cut off when the next one begins. What is no number (a loss that
diverged) is null.
"""

import os
from pathlib import Path

import msgspec

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.coordinator.tracking.figures import Row

FILE = "figures.jsonl"  # in the state directory
TAIL_BYTES = 1 << 20  # the longest line is 64 nodes' figures: 40 kB


class _Line(msgspec.Struct):
    round: int


class JsonLines:
    """The file, opened to go on with. A `Sink`."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")
        self.last, end = self._whole_lines()
        self._file.truncate(end)

    def write(self, row: Row) -> None:
        self._file.write(msgspec.json.encode(_in_integers(row)) + b"\n")
        self.last = int(row["round"])

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _whole_lines(self) -> tuple[int, int]:
        """The round of the last line that is whole, and where that ends."""
        size = self._file.seek(0, os.SEEK_END)
        start = self._file.seek(max(size - TAIL_BYTES, 0))
        tail = self._file.read()
        end = tail.rfind(b"\n") + 1
        while end:
            begin = tail.rfind(b"\n", 0, end - 1) + 1
            try:
                return msgspec.json.decode(tail[begin:end], type=_Line).round, start + end
            except DECODE_ERRORS:
                end = begin  # the disk kept its place, and not its bytes
        return 0, start


def _in_integers(row: Row) -> Row:
    """The row as it reads best: whole numbers without a point."""
    return {name: int(value) if value == value // 1 else value for name, value in row.items()}
