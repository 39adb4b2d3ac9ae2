"""The mean of a round as fp32, decoded chunk by chunk while others are still on their way.

    begin --> put, put, ... --> complete

What arrives in the first moments waits: where a reduce is over that soon, processors have enough to do.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import F32, Codec

CACHE_LINE = 64  # bytes
EARLY_AFTER = 0.5  # seconds of a reduce after which chunks are decoded as they arrive


class EarlyMean:
    """The mean of the round under way, `decoded` (numel,) fp32; whole when `complete` returns. For one event
    loop."""

    def __init__(self, numel: int) -> None:
        self.decoded = _aligned(numel)  # (numel,)
        self.decoded.fill(0.0)  # so that the kernel gives the memory now, not in the measured time
        self._waiting: dict[int, U8] = {}  # sealed chunks that are not decoded yet
        self._decoded_from: dict[int, U8] = {}  # which sealed chunks the decoded ones are of
        self._more, self._over = asyncio.Event(), asyncio.Event()
        self._decoding: asyncio.Task[None] | None = None

    def begin(self, codec: Codec, chunks: Chunks) -> None:
        """Begin a round, none of whose chunks is there yet."""
        self._codec, self._chunks = codec, chunks
        self._waiting.clear()
        self._decoded_from.clear()
        self._over.clear()

    def put(self, c: int, payload: U8) -> None:
        """Take a sealed chunk, which may replace another that was taken for `c`."""
        if self._over.is_set():
            return
        self._waiting[c] = payload
        self._more.set()
        if self._decoding is None:
            self._decoding = asyncio.create_task(self._decode())

    async def complete(self, sealed: Sequence[U8]) -> None:
        """Decode all of the round's sealed chunks that are not decoded, or were decoded from another payload."""
        self._over.set()
        self._more.set()
        if self._decoding is not None:
            await self._decoding
            self._decoding = None
        rest = {c: payload for c, payload in enumerate(sealed) if self._decoded_from.get(c) is not payload}
        await asyncio.to_thread(self._decode_each, rest)

    async def _decode(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(EARLY_AFTER):
                await self._over.wait()
        while not self._over.is_set():
            self._more.clear()
            chunks, self._waiting = self._waiting, {}
            await asyncio.to_thread(self._decode_each, chunks)
            await self._more.wait()

    def _decode_each(self, chunks: dict[int, U8]) -> None:
        for c, payload in chunks.items():
            self._codec.decode(payload, self.decoded[self._chunks.span(c)], far=True)
            self._decoded_from[c] = payload


def _aligned(numel: int) -> F32:
    """Memory for (numel,) fp32 that begins with a line of the caches."""
    whole = np.empty(numel + CACHE_LINE // 4, np.float32)
    first = -whole.ctypes.data % CACHE_LINE // 4
    return whole[first : first + numel]
