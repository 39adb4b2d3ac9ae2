"""How the flat vector is cut into chunks, the unit that is owned, reduced, sealed, digested and fetched.

Fragments, parts of the model that are exchanged each by itself, follow one another in the flat vector. Each is cut
by itself, so that its chunks are a range of all chunks, and those of a flat vector of its own.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Chunks:
    """`numel` elements in chunks of `chunk` elements; the last one of each fragment holds its rest."""

    numel: int
    chunk: int
    fragments: tuple[int, ...] = ()  # elements of each; empty: there is one, of all

    def __post_init__(self) -> None:
        if self.numel < 1 or self.chunk < 1:
            raise ValueError(f"{self.numel} elements in chunks of {self.chunk}: both must be at least 1")
        if min(self._parts) < 1 or sum(self._parts) != self.numel:
            raise ValueError(f"fragments of {self._parts} elements are not {self.numel} elements")

    @property
    def _parts(self) -> tuple[int, ...]:
        return self.fragments or (self.numel,)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The first element of each fragment, and behind the last."""
        return tuple(accumulate(self._parts, initial=0))

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """The first chunk of each fragment, and behind the last."""
        return tuple(accumulate((-(-part // self.chunk) for part in self._parts), initial=0))

    @property
    def parts(self) -> int:
        """How many fragments there are."""
        return len(self._parts)

    @property
    def count(self) -> int:
        return self._firsts[-1]

    @property
    def largest(self) -> int:
        """Elements in the largest chunk."""
        return min(self.chunk, max(self._parts))

    def span(self, c: int) -> slice:
        """Where chunk `c` lies in the flat vector, in elements."""
        p, i = self.place(c)
        start = self._starts[p] + i * self.chunk
        return slice(start, min(start + self.chunk, self._starts[p + 1]))

    def size(self, c: int) -> int:
        """Elements in chunk `c`."""
        span = self.span(c)
        return int(span.stop - span.start)

    def place(self, c: int) -> tuple[int, int]:
        """The fragment that chunk `c` is of, and its number among that fragment's."""
        if not 0 <= c < self.count:
            raise IndexError(f"chunk {c} of {self.count}")
        p = bisect_right(self._firsts, c) - 1
        return p, c - self._firsts[p]

    def of(self, fragment: int) -> range:
        """The chunks of a fragment."""
        return range(self._firsts[fragment], self._firsts[fragment + 1])

    def within(self, fragment: int) -> slice:
        """Where a fragment lies in the flat vector, in elements."""
        return slice(self._starts[fragment], self._starts[fragment + 1])

    def alone(self, fragment: int) -> "Chunks":
        """A fragment's chunks, as those of a flat vector of its own."""
        return Chunks(self._parts[fragment], self.chunk)
