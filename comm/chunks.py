"""How the flat vector is cut into chunks, the unit that is owned, reduced, sealed, digested and fetched."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunks:
    """`numel` elements in chunks of `chunk` elements; the last one holds the rest."""

    numel: int
    chunk: int

    def __post_init__(self) -> None:
        if self.numel < 1 or self.chunk < 1:
            raise ValueError(f"{self.numel} elements in chunks of {self.chunk}: both must be at least 1")

    @property
    def count(self) -> int:
        return -(-self.numel // self.chunk)

    def span(self, c: int) -> slice:
        """Where chunk `c` lies in the flat vector, in elements."""
        if not 0 <= c < self.count:
            raise IndexError(f"chunk {c} of {self.count}")
        return slice(c * self.chunk, min((c + 1) * self.chunk, self.numel))

    def size(self, c: int) -> int:
        """Elements in chunk `c`."""
        span = self.span(c)
        return int(span.stop - span.start)
