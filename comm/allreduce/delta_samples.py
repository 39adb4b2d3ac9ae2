"""Samples of the deltas that earlier rounds sealed, to compare contributions with.

An owner of a chunk has, with a contribution x to it, the delta m that the chunk was last stepped by. It tells of
each contribution

    dot = <x, m> / |m|,        at most |x|

on a sample of the chunk's elements: its cosine there, times the norm of all of it. Summed over chunks these are
the contribution's cosine to the last round (`atoll.coordinator.state_machine.delta_scores`).

What is sampled: some elements of a part of a chunk, as the codec has them, of one chunk in `stride`; so that of a
model of any size about `ENOUGH` chunks have a sample, each of thousands of elements. Of n independent elements a
cosine is known within 1 / sqrt(n): of 2,500 within 0.02, while a turned delta's is off by 0.2 and more. Each node
draws its own sample, from its system's randomness, when a round is applied. Nobody else knows it: a delta cannot
be turned where nobody looks. The other side of it is that no auditor can recompute what an owner tells.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.comm.buffers import thread_scratch
from atoll.comm.byte_view import Octets, view
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import F32, Codec

MAX_ELEMENTS = 1 << 14  # of a sample: 64 KiB
ENOUGH = 32  # chunks of a fragment that have a sample
MAX_STRIDE = 16  # chunks to one that has a sample, at most
BLAS_ELEMENTS = 1 << 13  # elements of which a scalar product is not worth a thread to BLAS
SMALLEST, LARGEST = 1e-30, 1e30  # sums of squares that fp32 can tell


@dataclass(frozen=True)
class DeltaSample:
    """A part of the delta that an earlier round sealed of a chunk."""

    norm: float  # l2, of the delta of the whole chunk
    part: slice  # of the chunk, in which the sample is
    octets: slice  # where a codec has that part
    elements: slice  # of the part, that the sample has
    direction: F32  # (elements,) of norm 1

    def dots(self, codec: Codec, payloads: Sequence[Octets], norms: Sequence[float]) -> tuple[float, ...]:
        """The length along the sampled delta of each of these contributions to the chunk, which are well-formed
        and have these norms."""
        scratch = thread_scratch(self.part.stop - self.part.start)
        return tuple(n * self._cosine(codec, view(p), scratch) for p, n in zip(payloads, norms, strict=True))

    def _cosine(self, codec: Codec, payload: Octets, scratch: F32) -> float:
        codec.decode(view(payload)[self.octets], scratch)
        sampled = scratch[self.elements]
        along, square = scalar_product(sampled, self.direction), scalar_product(sampled, sampled)
        if not SMALLEST < square < LARGEST:
            wide = sampled.astype(np.float64)
            along, square = float(wide @ self.direction), float(wide @ wide)
        return max(-1.0, min(along / math.sqrt(square), 1.0)) if square else 0.0


class DeltaSamples:
    """The samples of what the latest rounds sealed, by chunk. One thread takes and discards them, others may get
    them meanwhile."""

    def __init__(self, codec: Codec, chunks: Chunks) -> None:
        """`codec`: of the contributions."""
        self._codec, self._chunks = codec, chunks
        self._samples: dict[int, DeltaSample] = {}
        self._random = np.random.default_rng()

    def get(self, c: int) -> DeltaSample | None:
        """The sample of chunk `c`; None: there is none."""
        return self._samples.get(c)

    def take(self, c: int, delta: F32) -> None:
        """Take a sample of `delta` (n,) fp32, which chunk `c` was stepped by, or drop the one that there is: not
        all chunks have one."""
        self.discard(c)
        stride = min(max(len(self._fragment(c)) // ENOUGH, 1), MAX_STRIDE)
        if self._random.integers(stride):
            return
        parts = self._codec.parts(delta.size)
        part, octets = parts[int(self._random.integers(len(parts)))]
        size = part.stop - part.start
        first = int(self._random.integers(max(size - MAX_ELEMENTS, 0) + 1))
        elements = slice(first, min(first + MAX_ELEMENTS, size))
        sampled = delta[part][elements]
        square, norm = scalar_product(sampled, sampled), math.sqrt(scalar_product(delta, delta))
        if SMALLEST < square < LARGEST and norm < math.inf:
            direction = sampled / np.float32(math.sqrt(square))
            self._samples[c] = DeltaSample(norm, part, octets, elements, direction)

    def discard(self, c: int) -> None:
        """Drop the sample of chunk `c`: it came from elsewhere."""
        self._samples.pop(c, None)

    def discard_all(self) -> None:
        """Drop all samples."""
        self._samples.clear()

    def _fragment(self, c: int) -> range:
        return self._chunks.fragment_range(self._chunks.place(c)[0])


def scalar_product(x: F32, y: F32) -> float:
    """The scalar product of `x` and `y` (n,), in fp32 within a few thousand elements and in fp64 over them;
    infinite or 0 where fp32 cannot tell it."""
    spans = (slice(i, i + BLAS_ELEMENTS) for i in range(0, x.size, BLAS_ELEMENTS))
    with np.errstate(over="ignore", invalid="ignore"):
        return sum(float(np.dot(x[span], y[span])) for span in spans)
