"""The zstandard stage of a node's links: used for as long as it saves more time than it takes.

Encoded int8 values of a bell-shaped vector have 5 to 15 % less than eight bits of entropy. What that saves depends
on the node's own link, what it costs on its processor; both are measured in passing. Of several costs the least
counts: the first chunk of a thread takes ten times what others do, for memory that is new to it.
"""

import asyncio
import time
from collections import OrderedDict, deque

from atoll.comm.byte_view import U8
from atoll.comm.codecs import zstd
from atoll.comm.codecs.codec import ByteShuffle
from atoll.comm.transport.frames import FrameKind
from atoll.comm.workers import workers

TRY_AGAIN = 64  # chunks, after one that did not pay
TRIES = 8  # chunks whose cost is known
KEPT = 3  # packed chunks, for those that go to several peers: these take them at about the same time
NOTHING_APART = ByteShuffle()
SMALLEST = 4096  # bytes that are worth a try


class AdaptiveZstd:
    def __init__(self) -> None:
        self.on = True  # the run wants it
        self.rate = 0.0  # bytes a second that the node's link carries up; 0: not known
        self._saved = 0.04  # share of the bytes
        self._costs = deque([1e-9], TRIES)  # seconds a byte
        self._skipped = 0
        self._kept: OrderedDict[tuple[int, int], tuple[U8, bytes]] = OrderedDict()  # and what they are of

    @property
    def pays(self) -> bool:
        return self.rate > 0 and self._saved / self.rate > min(self._costs)

    async def pack(
        self, kind: FrameKind, chunk: int, since: int, payload: U8, apart: ByteShuffle = NOTHING_APART
    ) -> bytes | None:
        """The payload as a zstandard frame (see `zstd.pack_shuffled`); None: it goes as it is."""
        if (
            not self.on
            or payload.size < SMALLEST
            or not self.rate
            or (not self.pays and self._skipped < TRY_AGAIN)
        ):
            self._skipped += 1
            return None
        self._skipped = 0
        shared = kind is FrameKind.SEALED  # with the other peers it goes to
        if shared and (kept := self._kept.get((chunk, since))) is not None and kept[0] is payload:
            return kept[1]
        packed, seconds = await asyncio.get_running_loop().run_in_executor(workers(), _timed, payload, apart)
        self._saved += (1 - len(packed) / payload.size - self._saved) / 8
        self._costs.append(seconds / payload.size)
        if len(packed) >= payload.size:
            return None
        if shared:
            self._kept[chunk, since] = payload, packed
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return packed

    def forget(self) -> None:
        """Another round begins."""
        self._kept.clear()


def _timed(payload: U8, apart: ByteShuffle) -> tuple[bytes, float]:
    start = time.thread_time()
    packed = zstd.pack_shuffled(payload, apart)
    return packed, time.thread_time() - start
