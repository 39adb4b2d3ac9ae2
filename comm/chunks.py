"""Chunks of the flat vector, the unit that is owned, reduced, sealed, digested and fetched.

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
        if min(self._fragment_sizes) < 1 or sum(self._fragment_sizes) != self.numel:
            raise ValueError(f"fragments of {self._fragment_sizes} elements are not {self.numel} elements")

    @property
    def _fragment_sizes(self) -> tuple[int, ...]:
        return self.fragments or (self.numel,)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The first element of each fragment, and behind the last."""
        return tuple(accumulate(self._fragment_sizes, initial=0))

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """The first chunk of each fragment, and behind the last."""
        return tuple(accumulate((-(-size // self.chunk) for size in self._fragment_sizes), initial=0))

    @property
    def fragment_count(self) -> int:
        """The number of fragments, at least 1."""
        return len(self._fragment_sizes)

    @property
    def count(self) -> int:
        """The number of chunks of all fragments."""
        return self._firsts[-1]

    @property
    def largest(self) -> int:
        """The number of elements in the largest chunk."""
        return min(self.chunk, max(self._fragment_sizes))

    def span(self, c: int) -> slice:
        """The elements of chunk `c` in the flat vector. Raises `IndexError` beyond the last chunk."""
        p, i = self.place(c)
        start = self._starts[p] + i * self.chunk
        return slice(start, min(start + self.chunk, self._starts[p + 1]))

    def size(self, c: int) -> int:
        """The number of elements in chunk `c`."""
        span = self.span(c)
        return int(span.stop - span.start)

    def place(self, c: int) -> tuple[int, int]:
        """The fragment that chunk `c` belongs to, and its number among that fragment's. Raises `IndexError`."""
        if not 0 <= c < self.count:
            raise IndexError(f"chunk {c} of {self.count}")
        p = bisect_right(self._firsts, c) - 1
        return p, c - self._firsts[p]

    def fragment_range(self, fragment: int) -> range:
        """The chunks of a fragment, by their numbers among all."""
        return range(self._firsts[fragment], self._firsts[fragment + 1])

    def fragment_slice(self, fragment: int) -> slice:
        """The elements of a fragment in the flat vector."""
        return slice(self._starts[fragment], self._starts[fragment + 1])

    def fragment_chunks(self, fragment: int) -> "Chunks":
        """The chunks of a fragment as a flat vector by itself: they begin at chunk 0 and element 0."""
        return Chunks(self._fragment_sizes[fragment], self.chunk)
