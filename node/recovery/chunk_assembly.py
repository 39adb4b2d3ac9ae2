"""The parts of one chunk of the state, which several donors give together. Pure.

The first stream asks for them from the front on, the others from the back, each for parts that nobody was asked
for: as long as all answer none comes twice. Once each was asked for, a stream that came because parts were late
asks for these, too.
"""

from collections import deque


class ChunkAssembly:
    def __init__(self, size: int, part: int, here: bytearray | None = None, alone: bool = False) -> None:
        """`size`: bytes of the chunk; `here`: its first ones, of an earlier life; `alone`: nobody is to help."""
        self.data = bytearray(size)
        self.front = len(here) if here is not None else 0  # so many bytes are here without a gap
        self.data[: self.front] = here or b""
        self.earlier, self.alone = self.front, alone
        self.givers = 0  # streams that were asked for any of it
        self._size, self._part = size, part
        self._lacking = dict.fromkeys(range(self.front, size, part))
        self._open = deque(self._lacking)  # nobody was asked for
        self._asked: dict[int, list[int]] = {}  # by stream, what did not come

    @property
    def complete(self) -> bool:
        return not self._lacking

    @property
    def open(self) -> int:
        """Parts that somebody who helps may ask for."""
        return 0 if self.alone else len(self._open)

    def join(self) -> int:
        """A stream that will ask for parts; returns its number."""
        self.givers += 1
        self._asked[self.givers] = []
        return self.givers

    def leave(self, stream: int) -> None:
        """The stream asks for no more, and what it was asked for does not come any more."""
        others = {at for k, asked in self._asked.items() if k != stream for at in asked}
        again = [at for at in self._asked.pop(stream) if at in self._lacking and at not in others]
        self._open.extendleft(reversed(again))

    def next(self, stream: int, late: bool) -> tuple[int, int] | None:
        """What the stream asks for: from here to there; None: nothing. `late`: also what others were asked for."""
        mine = self._asked[stream]
        if self._open:
            at = self._open.popleft() if min(self._asked) == stream else self._open.pop()
        else:
            at = next((at for at in self._lacking if late and at not in mine), -1)
        if at < 0:
            return None
        mine.append(at)
        return at, min(at + self._part, self._size)

    def came(self, stream: int, at: int, part: bytes) -> None:
        """Bytes that the stream asked for are here."""
        self.data[at : at + len(part)] = part
        self._lacking.pop(at, None)
        self._asked[stream].remove(at)
        self.front = next(iter(self._lacking), self._size)
