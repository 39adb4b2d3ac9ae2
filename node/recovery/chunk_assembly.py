"""The parts of one chunk of the state, which several donors give together. Pure.

The first stream asks for them from the front on, the others from the back, each for parts that nobody was asked
for: as long as all answer none comes twice. Once each was asked for, a stream that came because parts were late
asks for these, too.
"""

from collections import deque


class ChunkAssembly:
    """One chunk's bytes, and which of its parts each stream was asked for. A part is named by its first byte."""

    def __init__(self, size: int, part: int, resumed: bytearray | None = None, single_donor: bool = False) -> None:
        """`size`: bytes of the chunk; `part`: of each part; `resumed`: its first bytes, from an earlier life;
        `single_donor`: no other donor's stream is to help."""
        self.data = bytearray(size)
        self.front = len(resumed) if resumed is not None else 0  # so many bytes are here without a gap
        self.data[: self.front] = resumed or b""
        self.resumed, self.single_donor = self.front, single_donor  # bytes of an earlier life
        self.streams = 0  # that were asked for any of it
        self._size, self._part = size, part
        self._missing = dict.fromkeys(range(self.front, size, part))
        self._unrequested = deque(self._missing)
        self._requested: dict[int, list[int]] = {}  # by stream: parts that did not come

    @property
    def complete(self) -> bool:
        """Whether all bytes are here."""
        return not self._missing

    @property
    def unrequested(self) -> int:
        """Parts that a stream of another donor may ask for, and nobody was asked for."""
        return 0 if self.single_donor else len(self._unrequested)

    def join(self) -> int:
        """Add a stream that will ask for parts; returns its number."""
        self.streams += 1
        self._requested[self.streams] = []
        return self.streams

    def leave(self, stream: int) -> None:
        """Remove a stream: the parts that it was asked for and that nobody else was asked for can be asked of
        others."""
        others = {at for k, requested in self._requested.items() if k != stream for at in requested}
        orphaned = [at for at in self._requested.pop(stream) if at in self._missing and at not in others]
        self._unrequested.extendleft(reversed(orphaned))

    def next(self, stream: int, late: bool) -> tuple[int, int] | None:
        """The part that the stream asks for next, its first byte and the one behind its last; None: none. `late`:
        also parts that others were asked for."""
        requested = self._requested[stream]
        if self._unrequested:
            first = min(self._requested) == stream
            at = self._unrequested.popleft() if first else self._unrequested.pop()
        else:
            at = next((at for at in self._missing if late and at not in requested), -1)
        if at < 0:
            return None
        requested.append(at)
        return at, min(at + self._part, self._size)

    def add(self, stream: int, at: int, part: bytes) -> None:
        """Store the part at byte `at`, which came over the stream that asked for it."""
        self.data[at : at + len(part)] = part
        self._missing.pop(at, None)
        self._requested[stream].remove(at)
        self.front = next(iter(self._missing), self._size)
