"""A member's contribution to a round: its delta, encoded once, chunk by chunk, while the first chunks are on their
way already. It is the same for every attempt of the round.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from atoll.comm.buffers import BufferPool, thread_scratch
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import F32, Codec, NonFinite
from atoll.comm.digest import digest
from atoll.comm.signatures import SIGNATURE_BYTES
from atoll.comm.workers import threads, workers

CHUNKS_AT_ONCE = 8  # chunks that a thread encodes before others may have them
Compute = Callable[[Callable[[], None]], Awaitable[None]]  # calls a function in another thread


class EncodedVector:
    """An encoded vector, of which the first `ready` chunks were made; nobody writes to those. One that is of no
    more use may be released: if it is wanted after all, it is made again."""

    def __init__(
        self, chunks: Sequence[U8 | None], ready: int = 0, reencode: Callable[[int], Awaitable[U8]] | None = None
    ) -> None:
        """`reencode` makes a chunk anew, the same bytes; None: all stay here."""
        self._chunks, self.ready, self._reencode, self._ended = list(chunks), ready, reencode, False
        self._digests: list[bytes | None] = [None] * len(self._chunks)
        self._more = asyncio.Event()  # set, and replaced, whenever there are more

    async def chunk(self, c: int) -> U8 | None:
        """Chunk `c`, as soon as it is there; None: it will never be."""
        while self.ready <= c:
            if self._ended:
                return None
            await self._more.wait()
        if self._chunks[c] is None and self._reencode is not None and not self._ended:
            self._chunks[c] = await self._reencode(c)
        return self._chunks[c]

    def release(self, c: int) -> U8 | None:
        """Give up chunk `c`, which is of no more use for now; returns its memory, from which others may still
        read. None: it stays."""
        if self._reencode is None or self.ready <= c:
            return None
        payload, self._chunks[c] = self._chunks[c], None
        return payload

    @property
    def chunks(self) -> tuple[U8 | None, ...]:
        """Each chunk, None where it is not made yet or was released."""
        return tuple(self._chunks)

    @property
    def whole(self) -> tuple[U8, ...]:
        """All chunks; `RuntimeError` unless all were made, and none was released."""
        found = tuple(payload for payload in self._chunks if payload is not None)
        if len(found) < len(self._chunks):
            raise RuntimeError("not every encoded chunk is here")
        return found

    def put(self, first: int, payloads: Sequence[U8]) -> None:
        """Add the next chunks, of which chunk `first` is the first."""
        self._chunks[first : first + len(payloads)] = payloads
        self.ready = first + len(payloads)
        self._more.set()
        self._more = asyncio.Event()

    def digest_of(self, c: int) -> bytes | None:
        """The digest of chunk `c`, which is ready; None: nobody has computed it."""
        return self._digests[c]

    def put_digest(self, c: int, digest: bytes) -> None:
        """Remember the digest of chunk `c` until it is made anew."""
        self._digests[c] = digest

    def end(self) -> None:
        """End the vector: no more chunks come, and who waits for one gets None."""
        self._ended = True
        self._more.set()


def encoded_norm(codec: Codec, chunks: Chunks, payloads: Sequence[U8]) -> float:
    """The l2 norm of what an encoded vector decodes to; not to be called in one of the `workers`."""

    def square(c: int) -> float:
        return codec.square(payloads[c], chunks.size(c))

    return math.sqrt(math.fsum(workers().map(square, range(chunks.count))))


class DeltaEncoder:
    """Encodes `anchor - local`, both (numel,) fp32, which do not change meanwhile.

    `buffers`: memory to use. `offer` changes a part of that difference in place before it is encoded; several
    threads call it. `permanent`: no chunk is released. `digested`: the encoded vector has the digest of each
    chunk, which costs least while the chunk is in the processor's cache.
    """

    def __init__(
        self,
        anchor: F32,
        local: F32,
        codec: Codec,
        chunks: Chunks,
        buffers: BufferPool | None = None,
        offer: Callable[[slice, F32], None] | None = None,
        permanent: bool = False,
        digested: bool = False,
    ) -> None:
        if anchor.shape != (chunks.numel,) or local.shape != (chunks.numel,):
            raise ValueError(f"vectors of shapes {anchor.shape} and {local.shape} for {chunks.numel} elements")
        self._anchor, self._local = (
            np.asarray(anchor),
            np.asarray(local),
        )  # of a map each slice costs ten times that
        self._codec, self._chunks = codec, chunks
        self._offer, self._digested = offer, digested
        self._buffers = BufferPool() if buffers is None else buffers
        self._largest = codec.size(chunks.largest) + SIGNATURE_BYTES
        self.encoded = EncodedVector([None] * chunks.count, reencode=None if permanent else self._reencode)
        self._threads = threads()

    async def run(self, compute: Compute) -> None:
        """Encode it all. `NonFinite` says which element is NaN or infinite."""
        self._compute = compute
        while (first := self.encoded.ready) < self._chunks.count:
            several = range(first, min(first + CHUNKS_AT_ONCE * self._threads, self._chunks.count))
            self.encoded.put(first, await self._encoded(several))

    async def _reencode(self, c: int) -> U8:
        return (await self._encoded(range(c, c + 1)))[0]

    async def _encoded(self, several: range) -> list[U8]:
        """These chunks, by all workers."""
        sizes = [self._codec.size(self._chunks.size(c)) for c in several]
        # With room for what is sent behind them:
        parts = [self._buffers.take(size + SIGNATURE_BYTES, self._largest)[:size] for size in sizes]
        await self._compute(lambda: self._encode_each(several, parts))
        for part in parts:
            part.flags.writeable = False
        return parts

    def _encode_each(self, several: range, parts: Sequence[U8]) -> None:
        shares = [slice(i, None, self._threads) for i in range(min(self._threads, len(several)))]
        if len(shares) == 1:
            self._encode(several, parts)
        else:
            list(workers().map(self._encode, [several[s] for s in shares], [parts[s] for s in shares]))

    def _encode(self, several: range, parts: Sequence[U8]) -> None:
        for c, payload in zip(several, parts, strict=True):
            first = self._chunks.span(c).start
            with np.errstate(over="ignore", invalid="ignore"):  # the codec refuses what comes of it
                for elements, octets in self._codec.parts(self._chunks.size(c)):
                    part = slice(first + elements.start, first + elements.stop)
                    delta = thread_scratch(part.stop - part.start)
                    np.subtract(self._anchor[part], self._local[part], out=delta)
                    if self._offer is not None:
                        self._offer(part, delta)
                    try:
                        self._codec.encode(delta, payload[octets])
                    except NonFinite as error:
                        raise NonFinite("the delta holds NaN or infinity", part.start + error.element) from None
            if self._digested:
                self.encoded.put_digest(c, digest(payload))
