"""Chooses the chunk that a donor's stream fetches next. Pure.

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
    """A stream to a donor fetches a chunk."""

    donor: NodeId
    chunk: int
    since: float  # seconds
    late: bool = False  # others were asked for all of it before


LATE_AFTER = 2.0  # seconds at least without anything of a chunk: a busy machine may be silent for so long


class ChunkScheduler:
    """Chunks that are not here: waiting, or with the requests under way for each. Times are seconds of one
    clock."""

    def __init__(self, chunks: Iterable[int]) -> None:
        """`chunks` are fetched in this order."""
        self._waiting = deque(chunks)
        self._under_way: dict[int, list[ChunkRequest]] = {}  # by chunk
        self._durations: dict[NodeId, float] = {}  # seconds that a donor's last chunk took
        self._last_progress: dict[int, float] = {}  # by chunk: when something of it came

    @property
    def remaining(self) -> int:
        """Chunks that are not here."""
        return len(self._waiting) + len(self._under_way)

    def assign(self, donor: NodeId, now: float, unrequested: Callable[[int], int]) -> ChunkRequest | None:
        """The chunk that a free stream to this donor fetches; None: none now. `unrequested(c)`: parts of a chunk
        under way that nobody was asked for."""
        late = False
        if self._waiting:
            chunk = self._waiting.popleft()
        elif (found := self._most_open(donor, unrequested)) is not None:
            chunk = found
        elif (found := self._stalled(donor, now)) is not None:
            chunk, late = found, True
        else:
            return None
        request = ChunkRequest(donor, chunk, now, late)
        self._last_progress[chunk] = now
        self._under_way.setdefault(chunk, []).append(request)
        return request

    def complete(self, request: ChunkRequest, now: float) -> list[ChunkRequest] | None:
        """Remove the request's chunk, which is here; returns the other requests for it, which are of no more use.
        None: this one was not the first."""
        if request not in self._under_way.get(request.chunk, ()):
            return None
        if len(self._under_way[request.chunk]) == 1:
            self._durations[request.donor] = now - request.since
        return [other for other in self._under_way.pop(request.chunk) if other is not request]

    def record_progress(self, chunk: int, now: float) -> None:
        """Note that something of the chunk came at `now` (seconds)."""
        self._last_progress[chunk] = now

    def abandon(self, request: ChunkRequest) -> None:
        """Give up a request that came to nothing: its chunk is the next one, unless somebody else fetches it. No
        effect on a request that is complete."""
        others = self._under_way.get(request.chunk, [])
        if request in others:
            others.remove(request)
            if not others:
                del self._under_way[request.chunk]
                self._waiting.appendleft(request.chunk)

    def requeue(self, chunk: int) -> None:
        """Have the chunk fetched again: what was fetched of it turned out to be of no use."""
        self._waiting.append(chunk)

    def _most_open(self, donor: NodeId, unrequested: Callable[[int], int]) -> int | None:
        """The chunk that others fetch with the most parts to ask for."""
        of_others = [c for c, requests in self._under_way.items() if all(e.donor != donor for e in requests)]
        found = max(of_others, key=unrequested, default=None) if donor in self._durations else None
        return found if found is not None and unrequested(found) else None

    def _stalled(self, donor: NodeId, now: float) -> int | None:
        """The chunk of which longest nothing came, if this donor would have it sooner."""
        worst, found = max(self._durations.get(donor, 0.0), LATE_AFTER), None
        for chunk, requests in self._under_way.items():
            silent = now - self._last_progress[chunk]
            if silent > worst and all(e.donor != donor for e in requests):
                worst, found = silent, chunk
        return found
