"""Payloads that come in pieces, over several links to a peer at once, put together again."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from atoll.comm.byte_view import U8
from atoll.comm.ids import NodeId
from atoll.comm.transport import frames
from atoll.comm.transport.connection import Link, LinkBroken
from atoll.comm.transport.frames import FrameKind, Header
from atoll.comm.transport.send_queue import DIVISIBLE_KINDS

MIN_PIECE_BYTES = 1 << 16  # bytes of a piece at least; the last of a payload may be smaller
MAX_FORMS = 2  # forms in which one payload may come at once: packed, and as it is

PayloadKey = tuple[NodeId, FrameKind, int, int, int, bool, int]  # whose, and which, payload


class IncomingPayload:
    """A payload of which pieces are here, or being read."""

    def __init__(self, buffer: U8) -> None:
        self.buffer = buffer
        self.begun: dict[int, int] = {}  # offset: length, bytes, of each piece that is here, or being read
        self.missing = buffer.size  # bytes

    def fits(self, offset: int, length: int) -> bool:
        """Whether this is one of the pieces that are here, or beside them."""
        if offset in self.begun:
            return self.begun[offset] == length
        return not any(o < offset + length and offset < o + n for o, n in self.begun.items())


class Reassembly:
    """The incoming payloads of one reduce, of all peers."""

    def __init__(self) -> None:
        self._incoming: dict[PayloadKey, IncomingPayload] = {}

    def __len__(self) -> int:
        return len(self._incoming)

    def clear(self) -> None:
        """Drop all payloads that are not whole, as another round begins; a link that still reads a piece reads it
        in vain."""
        self._incoming.clear()

    async def read_piece(
        self, node: NodeId, link: Link, header: Header, place: Callable[[Header], Awaitable[U8 | None]]
    ) -> tuple[Header, U8] | None:
        """Read the piece that follows its `header` on the link.

        `place` says where the payload belongs, by the header of the whole; None: it is of no use. Returns that
        header and the payload once all of it is here, None before. `LinkBroken` if no peer would cut it like this.
        """
        smallest = min(MIN_PIECE_BYTES, max(header.total - header.offset, 1))
        if header.kind not in DIVISIBLE_KINDS or header.length < smallest:
            raise LinkBroken(f"a piece of {header.length} bytes of a frame {header.kind.name} of {header.total}")
        whole = replace(header, length=header.total, offset=0, whole=0)
        attempt = header.fence.attempt
        key = (node, header.kind, header.chunk, attempt, header.place, header.packed, header.total)
        incoming = self._incoming.get(key)
        if incoming is None and sum(k[:4] == key[:4] for k in self._incoming) >= MAX_FORMS:
            raise LinkBroken(f"it sends chunk {header.chunk} in more than {MAX_FORMS} lengths at once")
        if incoming is None and (buffer := await place(whole)) is not None:
            incoming = self._incoming.setdefault(key, IncomingPayload(buffer))
        if incoming is not None and not incoming.fits(header.offset, header.length):
            # Sent again, after a break, and cut otherwise: what is here of it counts no more. Not into the same
            # memory: an old link may still write there when it has long been given to another chunk.
            incoming = self._incoming[key] = IncomingPayload(np.empty_like(incoming.buffer))
        if incoming is None or header.offset in incoming.begun:
            await frames.skip(link, header.length)
            return None
        incoming.begun[header.offset] = header.length
        try:
            await link.read_into(incoming.buffer[header.offset : header.offset + header.length].data)
        except BaseException:
            del incoming.begun[header.offset]
            raise
        incoming.missing -= header.length
        if incoming.missing or self._incoming.get(key) is not incoming:
            return None
        del self._incoming[key]
        return whole, incoming.buffer
