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

CHUNKS_BETWEEN_TRIES = 64  # chunks, after one that did not pay
KNOWN_COSTS = 8  # chunks whose cost is known
MAX_SHARED_FRAMES = 3  # packed chunks, for those that go to several peers: these take them at about the same time
NO_SHUFFLE = ByteShuffle()
MIN_PACKED_BYTES = 4096  # bytes that are worth a try


class AdaptiveZstd:
    """Packs the payloads of one node's links where that pays. `rate` is to be kept up to date."""

    def __init__(self) -> None:
        self.enabled = True  # the run wants it
        self.rate = 0.0  # bytes a second that the node's link carries up; 0: not known
        self._saved = 0.04  # share of the bytes
        self._costs = deque([1e-9], KNOWN_COSTS)  # seconds a byte
        self._skipped = 0
        self._shared: OrderedDict[tuple[int, int], tuple[U8, bytes]] = OrderedDict()  # and what they are of

    @property
    def pays(self) -> bool:
        """Whether a byte that is saved takes longer to send than to save, by what is known."""
        return self.rate > 0 and self._saved / self.rate > min(self._costs)

    async def pack(
        self, kind: FrameKind, chunk: int, since: int, payload: U8, apart: ByteShuffle = NO_SHUFFLE
    ) -> bytes | None:
        """The payload as a zstandard frame (see `zstd.pack_shuffled`); None: it goes as it is."""
        if (
            not self.enabled
            or payload.size < MIN_PACKED_BYTES
            or not self.rate
            or (not self.pays and self._skipped < CHUNKS_BETWEEN_TRIES)
        ):
            self._skipped += 1
            return None
        self._skipped = 0
        shared = kind is FrameKind.SEALED  # with the other peers it goes to
        if shared and (before := self._shared.get((chunk, since))) is not None and before[0] is payload:
            return before[1]
        packed, seconds = await asyncio.get_running_loop().run_in_executor(workers(), _timed, payload, apart)
        self._saved += (1 - len(packed) / payload.size - self._saved) / 8
        self._costs.append(seconds / payload.size)
        if len(packed) >= payload.size:
            return None
        if shared:
            self._shared[chunk, since] = payload, packed
            while len(self._shared) > MAX_SHARED_FRAMES:
                self._shared.popitem(last=False)
        return packed

    def forget(self) -> None:
        """Drop the packed frames that go to several peers: another round begins, and none of them is sent
        again."""
        self._shared.clear()


def _timed(payload: U8, apart: ByteShuffle) -> tuple[bytes, float]:
    start = time.thread_time()
    packed = zstd.pack_shuffled(payload, apart)
    return packed, time.thread_time() - start
