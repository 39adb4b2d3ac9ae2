"""A member's contribution to a round: its delta, encoded once, chunk by chunk, while the first chunks are on their
way already. It is the same for every attempt of the round.
"""

import asyncio
import math
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache

import numpy as np

from atoll.comm.chunks import Chunks
from atoll.comm.codec import F32, Codec, NonFinite
from atoll.comm.octets import U8

AT_ONCE = 8  # chunks that a thread encodes before others may have them


class EncodedVector:
    """An encoded vector, of which the first `ready` chunks are there; nobody writes to those."""

    def __init__(self, chunks: Sequence[U8], ready: int = 0) -> None:
        self.chunks, self.ready, self._ended = chunks, ready, False
        self._more = asyncio.Event()  # set, and replaced, whenever there are more

    async def chunk(self, c: int) -> U8 | None:
        """Chunk `c`, as soon as it is there; None: it will never be."""
        while self.ready <= c:
            if self._ended:
                return None
            await self._more.wait()
        return self.chunks[c]

    def end(self) -> None:
        """No more chunks come."""
        self._ended = True
        self._more.set()

    def advance(self, ready: int) -> None:
        self.ready = ready
        self._more.set()
        self._more = asyncio.Event()


@cache
def workers() -> Executor:
    """Threads for encoding and merging: half of the processor's cores, the trainer has the others."""
    return ThreadPoolExecutor(threads(), "codec")


def threads() -> int:
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def encoded_size(codec: Codec, chunks: Chunks) -> int:
    """Bytes of an encoded vector."""
    return sum(codec.size(chunks.size(c)) for c in range(chunks.count))


def encoded_norm(codec: Codec, chunks: Chunks, payloads: Sequence[U8]) -> float:
    """The l2 norm of what an encoded vector decodes to; not to be called in one of the `workers`."""
    here = threading.local()

    def square(c: int) -> float:
        if not hasattr(here, "decoded"):
            here.decoded = np.empty(chunks.largest, np.float32)
        part: F32 = here.decoded[: chunks.size(c)]
        codec.decode(payloads[c], part)
        return squared_norm(part)

    return math.sqrt(sum(workers().map(square, range(chunks.count))))


def squared_norm(x: F32) -> float:
    wide = x.astype(np.float64)
    return float(np.dot(wide, wide))


class DeltaEncoder:
    """Encodes `anchor - local`, both (numel,) fp32, which do not change meanwhile.

    `into`: memory to use, of `encoded_size`. `offer` changes a part of that difference in place before it is
    encoded; several threads call it.
    """

    def __init__(
        self,
        anchor: F32,
        local: F32,
        codec: Codec,
        chunks: Chunks,
        into: U8 | None = None,
        offer: Callable[[slice, F32], None] | None = None,
    ) -> None:
        if anchor.shape != (chunks.numel,) or local.shape != (chunks.numel,):
            raise ValueError(f"vectors of shapes {anchor.shape} and {local.shape} for {chunks.numel} elements")
        self._anchor, self._local = (
            np.asarray(anchor),
            np.asarray(local),
        )  # of a map each slice costs ten times that
        self._codec, self._chunks = codec, chunks
        self._offer = offer
        buffer = np.empty(encoded_size(codec, chunks), np.uint8) if into is None else into
        ends = np.cumsum([codec.size(chunks.size(c)) for c in range(chunks.count)])
        self._parts = [buffer[end - codec.size(chunks.size(c)) : end] for c, end in enumerate(ends)]
        shown = [part.view() for part in self._parts]
        for part in shown:
            part.flags.writeable = False
        self.encoded = EncodedVector(shown)
        largest = max(e.stop - e.start for e, _ in codec.parts(chunks.largest))
        self._scratch = [np.empty(largest, np.float32) for _ in range(threads())]
        self._at_once = AT_ONCE * len(self._scratch)

    async def run(self, compute: Callable[[Callable[[], int]], Awaitable[int]]) -> None:
        """Encode it all; `compute` calls a function in another thread."""
        while self.encoded.ready < self._chunks.count:
            self.encoded.advance(await compute(self.step))

    def step(self) -> int:
        """Encode the next few chunks with all workers; returns how many chunks are encoded now. `NonFinite` says
        which element is NaN or infinite."""
        first = self.encoded.ready
        stop = min(first + self._at_once, self._chunks.count)
        shares = [range(first + i, stop, len(self._scratch)) for i in range(len(self._scratch))]
        if len(shares) == 1:
            self._encode(shares[0], self._scratch[0])
        else:
            list(workers().map(self._encode, shares, self._scratch))
        return stop

    def _encode(self, chunks: range, scratch: F32) -> None:
        for c in chunks:
            first = self._chunks.span(c).start
            with np.errstate(over="ignore", invalid="ignore"):  # the codec refuses what comes of it
                for elements, octets in self._codec.parts(self._chunks.size(c)):
                    part = slice(first + elements.start, first + elements.stop)
                    delta = scratch[: part.stop - part.start]
                    np.subtract(self._anchor[part], self._local[part], out=delta)
                    if self._offer is not None:
                        self._offer(part, delta)
                    try:
                        self._codec.encode(delta, self._parts[c][octets])
                    except NonFinite as error:
                        raise NonFinite("the delta holds NaN or infinity", part.start + error.element) from None
