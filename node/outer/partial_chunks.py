"""Bytes of chunks that are being fetched, in the place of the chunks that are not here.

A chunk of the state that a peer sends comes in parts. The parts that follow one another from the front lie in the
shared vectors already, where nothing else is, with a note of whose they are: so a daemon that is killed while it
recovers leaves them to the next one, which asks for the rest.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from atoll.comm.chunks import Chunks
from atoll.node.outer.shared_vectors import SharedVectors


class PartialChunks:
    """The first bytes (anchor, then momentum, fp32) of chunks that are not whole."""

    def __init__(self, vectors: SharedVectors, chunks: Chunks, is_missing: Callable[[int], bool]) -> None:
        """`is_missing(c)`: the vectors have nothing else as chunk `c`. Where they have, nothing is stored."""
        self._vectors, self._chunks, self._is_missing = vectors, chunks, is_missing
        # (chunks, 2): the chunk's digest, as far as it fits, and its bytes that are here
        self._extents: NDArray[np.int64] = vectors.counters("partial", 2 * chunks.count).reshape(-1, 2)

    def size(self, c: int, digest: bytes) -> int:
        """Bytes that are here, from the front, of the chunk `c` that has this digest."""
        prefix, size = self._extents[c]
        return int(size) if self._is_missing(c) and prefix == _prefix(digest) else 0

    def append(self, c: int, digest: bytes, at: int, part: bytes) -> None:
        """Store bytes of the chunk with this digest, which begin at byte `at`; no effect unless they are the next
        ones."""
        if not self._is_missing(c) or self.size(c, digest) != at:
            return
        span, half = self._chunks.span(c), 4 * self._chunks.size(c)  # bytes of the anchor
        anchor, momentum = (v[span].view(np.uint8) for v in (self._vectors.anchor, self._vectors.momentum))
        first = part[: max(half - at, 0)]
        anchor[at : at + len(first)] = np.frombuffer(first, np.uint8)
        rest = max(at - half, 0)
        momentum[rest : rest + len(part) - len(first)] = np.frombuffer(part, np.uint8, offset=len(first))
        self._extents[c] = _prefix(digest), at + len(part)

    def read(self, c: int, digest: bytes) -> bytearray:
        """The bytes that are here of the chunk with this digest; empty: none."""
        span, size = self._chunks.span(c), self.size(c, digest)
        if not size:
            return bytearray()
        return bytearray(self._vectors.anchor[span].tobytes() + self._vectors.momentum[span].tobytes())[:size]

    def discard(self, c: int) -> None:
        """Forget the first bytes of chunk `c`: it is here as a whole, or they were wrong."""
        self._extents[c] = 0

    def discard_all(self) -> None:
        """Forget the first bytes of all chunks."""
        self._extents[:] = 0


def _prefix(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little", signed=True)
