"""The payloads of one reduce: how many bytes each has, where they lie, and what they are on the way.

    CONTRIBUTION    what the codec makes of a chunk
    PARTIAL         the same of a region's mean; behind it a bit for each member of the plan's regions
                    (either with its sender's signature behind it, where the plan has a salt)
    SEALED          what the seal format makes of a chunk's contributions

Each may travel as a smaller zstandard frame, and is unpacked when it is here.
"""

import numpy as np

from atoll.comm.allreduce.sealing import SealFormat
from atoll.comm.buffers import BufferPool
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs import zstd
from atoll.comm.codecs.codec import Codec, Malformed
from atoll.comm.plan import Plan
from atoll.comm.signatures import SIGNATURE_BYTES
from atoll.comm.transport.adaptive_zstd import AdaptiveZstd
from atoll.comm.transport.frames import FrameKind, Header


class Payloads:
    """The formats and the memory of one reduce's payloads."""

    def __init__(
        self, codec: Codec, chunks: Chunks, sealing: SealFormat, buffers: BufferPool, compressor: AdaptiveZstd
    ) -> None:
        self.codec, self.chunks, self.sealing = codec, chunks, sealing
        self._buffers, self._compressor = buffers, compressor
        self._sizes = [codec.size(chunks.size(c)) for c in range(chunks.count)]
        one, two = (sealing.size(chunks.size(0), terms) for terms in (1, 2))
        self.fixed_seal_size = one == two  # a sealed chunk has the same size whatever is in it
        self._largest = max(self._sizes[0], one) + SIGNATURE_BYTES  # bytes of a buffer

    def encoded_size(self, c: int) -> int:
        """Bytes of a contribution to chunk `c`."""
        return self._sizes[c]

    def size(self, kind: FrameKind, c: int, plan: Plan) -> int:
        """Bytes of such a payload; 0: it is told by its contents."""
        if kind is FrameKind.SEALED:
            return self.sealing.size(self.chunks.size(c), 1) if self.fixed_seal_size else 0
        size = self._sizes[c] + (-(-len(plan.regions) // 8) if kind is FrameKind.PARTIAL else 0)
        return size + self.signature_size(kind, plan)

    def signature_size(self, kind: FrameKind, plan: Plan) -> int:
        """Bytes of the signature behind such a payload, which is never packed."""
        signed = plan.salt and kind in (FrameKind.CONTRIBUTION, FrameKind.PARTIAL)
        return SIGNATURE_BYTES if signed else 0

    def fits(self, header: Header, plan: Plan) -> bool:
        """Whether a payload can have the length that its header says."""
        kind, c, length = header.kind, header.chunk, header.length
        if kind is FrameKind.SEALED and not header.packed:
            return self.sealing.fits(length, self.chunks.size(c), len(plan.members))
        size = self.size(kind, c, plan)
        return length < size if header.packed else length == size

    async def pack(self, kind: FrameKind, c: int, since: int, payload: U8) -> bytes | None:
        """A smaller zstandard frame of the payload; None: it goes as it is."""
        return await self._compressor.pack(kind, c, since, payload, self.codec.apart(self.chunks.size(c)))

    def unpack(self, c: int, frame: U8, size: int) -> U8:
        """The payload of `size` bytes in a zstandard frame, whose memory goes back. Raises `Malformed`."""
        whole = self.buffer(size)
        try:
            zstd.unpack_shuffled(frame.data, whole, self.codec.apart(self.chunks.size(c)))
        except Malformed:
            self.give_back(whole)
            raise
        finally:
            self.give_back(frame)
        return whole

    def buffer(self, size: int) -> U8:
        """Memory for a payload of `size` bytes."""
        return np.empty(size, np.uint8) if size > self._largest else self._buffers.take(size, self._largest)

    def give_back(self, buffer: U8) -> None:
        """Let the memory of a payload be used again; nobody may read from it any more."""
        self._buffers.give(buffer)
