"""What an attacker counts, in a file that says it all at any time."""

import json
import time
from collections import Counter
from pathlib import Path

WRITE_SECONDS = 0.5  # between two times that it is written


class Tally:
    """Counts by word. `note` what happened; `read` is for others."""

    def __init__(self, path: Path) -> None:
        self._path, self._counts, self._written_at = path, Counter[str](), 0.0

    def note(self, word: str, times: int = 1) -> None:
        """Count what happened."""
        self._counts[word] += times
        self._write()

    def largest(self, word: str, value: int) -> None:
        """Remember the largest value."""
        if value > self._counts[word]:
            self._counts[word] = value
            self._write()

    def _write(self) -> None:
        if (now := time.monotonic()) < self._written_at + WRITE_SECONDS:
            return
        self._written_at = now
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps(self._counts))
        beside.rename(self._path)


def read(path: Path) -> dict[str, int]:
    """What was counted; nothing, where nobody has counted yet."""
    try:
        found: dict[str, int] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found
