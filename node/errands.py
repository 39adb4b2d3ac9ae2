"""Which chunk a donor's stream fetches next. Pure.

A free stream takes a chunk that nobody fetches; donors so get work as fast as they answer. When there is none
left, it takes one that another donor is late with, if that is expected to save time; the first answer wins. A
chunk is expected to take as long as its donor's last one; one that is late by some seconds, as many more.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from atoll.comm.ids import NodeId


@dataclass(eq=False, frozen=True, slots=True)
class Errand:
    """A stream fetches a chunk."""

    donor: NodeId
    chunk: int
    since: float  # seconds


class Errands:
    def __init__(self, chunks: Iterable[int]) -> None:
        self._waiting = deque(chunks)
        self._under_way: dict[int, list[Errand]] = {}  # by chunk
        self._typical: dict[NodeId, float] = {}  # seconds

    @property
    def left(self) -> int:
        """Chunks that are not here."""
        return len(self._waiting) + len(self._under_way)

    def take(self, donor: NodeId, now: float) -> Errand | None:
        """What a free stream to this donor fetches; None: nothing now."""
        if self._waiting:
            chunk = self._waiting.popleft()
        elif (late := self._latest(donor, now)) is not None:
            chunk = late
        else:
            return None
        errand = Errand(donor, chunk, now)
        self._under_way.setdefault(chunk, []).append(errand)
        return errand

    def done(self, errand: Errand, now: float) -> list[Errand] | None:
        """The chunk is here; returns the other errands for it, which are of no more use. None: this one was not
        the first."""
        if errand not in self._under_way.get(errand.chunk, ()):
            return None
        self._typical[errand.donor] = now - errand.since
        return [other for other in self._under_way.pop(errand.chunk) if other is not errand]

    def drop(self, errand: Errand) -> None:
        """It came to nothing: the chunk is the next one, unless somebody else fetches it."""
        others = self._under_way.get(errand.chunk, [])
        if errand in others:
            others.remove(errand)
            if not others:
                del self._under_way[errand.chunk]
                self._waiting.appendleft(errand.chunk)

    def again(self, chunk: int) -> None:
        """What was here turned out to be of no use."""
        self._waiting.append(chunk)

    def _latest(self, donor: NodeId, now: float) -> int | None:
        """The chunk that is longest to come, if this donor would have it sooner."""
        mine = self._typical.get(donor)
        if mine is None:
            return None
        worst, found = mine, None
        for chunk, errands in self._under_way.items():
            rest = min(abs(self._typical.get(e.donor, 0.0) - (now - e.since)) for e in errands)
            if rest > worst and all(e.donor != donor for e in errands):
                worst, found = rest, chunk
        return found
