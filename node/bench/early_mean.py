"""The mean of a round as fp32, decoded chunk by chunk while others are still on their way.

    begin --> came, came, ... --> complete

What comes in the first moments waits: where a reduce is over that soon, processors have enough to do.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import F32, Codec

LINE = 64  # bytes of a cache's line
AT_LEISURE = 0.5  # seconds of a reduce after which chunks are decoded as they come


class EarlyMean:
    def __init__(self, numel: int) -> None:
        self.decoded = _of_lines(numel)  # (numel,)
        self.decoded.fill(0.0)  # so that the kernel gives the memory now, not in the measured time
        self._came: dict[int, U8] = {}  # sealed chunks that are not decoded yet
        self._is: dict[int, U8] = {}  # which sealed chunks the decoded ones are of
        self._more, self._over = asyncio.Event(), asyncio.Event()
        self._decoding: asyncio.Task[None] | None = None

    def begin(self, codec: Codec, chunks: Chunks) -> None:
        """Another round, of whose chunks none is here."""
        self._codec, self._chunks = codec, chunks
        self._came.clear()
        self._is.clear()
        self._over.clear()

    def came(self, c: int, payload: U8) -> None:
        """A sealed chunk is here; it may take the place of another."""
        if self._over.is_set():
            return
        self._came[c] = payload
        self._more.set()
        if self._decoding is None:
            self._decoding = asyncio.create_task(self._decode())

    async def complete(self, sealed: Sequence[U8]) -> None:
        """These are the round's sealed chunks: decode what is not decoded, or of another one."""
        self._over.set()
        self._more.set()
        if self._decoding is not None:
            await self._decoding
            self._decoding = None
        rest = {c: payload for c, payload in enumerate(sealed) if self._is.get(c) is not payload}
        await asyncio.to_thread(self._decode_each, rest)

    async def _decode(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(AT_LEISURE):
                await self._over.wait()
        while not self._over.is_set():
            self._more.clear()
            chunks, self._came = self._came, {}
            await asyncio.to_thread(self._decode_each, chunks)
            await self._more.wait()

    def _decode_each(self, chunks: dict[int, U8]) -> None:
        for c, payload in chunks.items():
            self._codec.decode(payload, self.decoded[self._chunks.span(c)], far=True)
            self._is[c] = payload


def _of_lines(numel: int) -> F32:
    """Memory for (numel,) fp32 that begins with a line of the caches."""
    whole = np.empty(numel + LINE // 4, np.float32)
    first = -whole.ctypes.data % LINE // 4
    return whole[first : first + numel]
