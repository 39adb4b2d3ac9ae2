"""Which chunk a donor's stream fetches next. Pure.

A free stream takes a chunk that nobody fetches; donors so get work as fast as they answer. When there is none
left, it helps another donor's stream with the chunk of which the most parts were asked of nobody. When there is no
such chunk either, it takes one of which nothing came for longer than its own donor takes for all of one: what is
late then comes twice, and the first answer wins.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atoll.comm.ids import NodeId


@dataclass(eq=False, frozen=True, slots=True)
class ChunkRequest:
    """A stream fetches a chunk."""

    donor: NodeId
    chunk: int
    since: float  # seconds
    late: bool = False  # others were asked for all of it before


LATE = 2.0  # seconds at least without anything of a chunk: a busy machine may be silent for so long


class ChunkScheduler:
    def __init__(self, chunks: Iterable[int]) -> None:
        self._waiting = deque(chunks)
        self._under_way: dict[int, list[ChunkRequest]] = {}  # by chunk
        self._typical: dict[NodeId, float] = {}  # seconds that its last chunk took
        self._moved: dict[int, float] = {}  # by chunk: seconds; when something of it came

    @property
    def left(self) -> int:
        """Chunks that are not here."""
        return len(self._waiting) + len(self._under_way)

    def take(self, donor: NodeId, now: float, open_: Callable[[int], int]) -> ChunkRequest | None:
        """What a free stream to this donor fetches; None: nothing now. `open_`: parts of a chunk under way that
        nobody was asked for."""
        late = False
        if self._waiting:
            chunk = self._waiting.popleft()
        elif (found := self._most(donor, open_)) is not None:
            chunk = found
        elif (found := self._latest(donor, now)) is not None:
            chunk, late = found, True
        else:
            return None
        errand = ChunkRequest(donor, chunk, now, late)
        self._moved[chunk] = now
        self._under_way.setdefault(chunk, []).append(errand)
        return errand

    def done(self, errand: ChunkRequest, now: float) -> list[ChunkRequest] | None:
        """The chunk is here; returns the other errands for it, which are of no more use. None: this one was not
        the first."""
        if errand not in self._under_way.get(errand.chunk, ()):
            return None
        if len(self._under_way[errand.chunk]) == 1:
            self._typical[errand.donor] = now - errand.since
        return [other for other in self._under_way.pop(errand.chunk) if other is not errand]

    def moved(self, chunk: int, now: float) -> None:
        """Something of the chunk came."""
        self._moved[chunk] = now

    def drop(self, errand: ChunkRequest) -> None:
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

    def _most(self, donor: NodeId, open_: Callable[[int], int]) -> int | None:
        """The chunk that others fetch with the most parts to ask for."""
        of_others = [c for c, errands in self._under_way.items() if all(e.donor != donor for e in errands)]
        found = max(of_others, key=open_, default=None) if donor in self._typical else None
        return found if found is not None and open_(found) else None

    def _latest(self, donor: NodeId, now: float) -> int | None:
        """The chunk of which longest nothing came, if this donor would have it sooner."""
        mine = self._typical.get(donor)
        if mine is None:
            return None
        worst, found = max(mine, LATE), None
        for chunk, errands in self._under_way.items():
            silent = now - self._moved[chunk]
            if silent > worst and all(e.donor != donor for e in errands):
                worst, found = silent, chunk
        return found
