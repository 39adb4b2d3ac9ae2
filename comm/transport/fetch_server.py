"""What a node gives to those who fetch from it: requests on one connection, answered one after the other.

What is asked for comes from the node's `StateSource`, few chunks at a time (`chunk_slots`); what is not there, a
leaf may have that offers it here; what an auditor asks for, from the reduce under way.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from atoll.comm.byte_view import Octets, view
from atoll.comm.codecs import zstd
from atoll.comm.ids import NodeId, Round
from atoll.comm.transport import frames
from atoll.comm.transport.chunk_slots import ChunkPlaces, ChunkSlot
from atoll.comm.transport.connection import CAPPED_PIECE_BYTES, Link, LinkBroken, RateLimiter
from atoll.comm.transport.frames import FrameKind, Header
from atoll.comm.transport.leaf_relay import OfferPool
from atoll.comm.transport.peer_links import PeerLinks
from atoll.comm.transport.stream_policy import LONG_PATH_RTT, fetch_congestion_control, is_lossy

log = logging.getLogger("atoll.plane")

IDLE_TIMEOUT = 60.0  # seconds between two requests on one connection
FAST_PATH_RATE = 60e6  # bytes a second: a path that carries more is done sooner with what is not packed
AUDIT_KINDS = (FrameKind.GET_INPUT, FrameKind.GET_RECEIPT)  # of what this node alone has
CHUNK_KINDS = (FrameKind.GET_STATE, FrameKind.GET_SEALED)  # that have a place in memory
MAX_RELAYED_BYTES = 1 << 28  # bytes of an answer that is passed on


class StateSource(Protocol):
    """A source of what this node can give to others. Called in the event loop, so it must be quick, or wait
    without blocking it; what it returns must not change while it is sent: the caller never copies it."""

    async def sealed(self, round: Round, chunk: int) -> Octets | None:
        """The sealed bytes of a committed round's chunk; None: they are not here."""

    async def state(self, round: Round, chunk: int) -> Octets | None:
        """The chunk's anchor, then its momentum, after `round`: fp32, little-endian; None: they are not here."""

    async def digests(self, round: Round) -> Sequence[bytes] | None:
        """The digest of each chunk of `state(round)`, 16 bytes each; None: that state is not here."""


class FetchServer:
    """The answers of one node to those who fetch from it."""

    def __init__(
        self, shelf: StateSource, peers: PeerLinks, offers: OfferPool, up: RateLimiter, congestion_control: str
    ) -> None:
        """`up`: the node's limit of sending; `congestion_control`: empty where each path has what suits it."""
        self._shelf, self._peers, self._offers = shelf, peers, offers
        self._up, self._congestion = up, congestion_control
        self._places = ChunkPlaces()
        self._answering = set[asyncio.Task[None]]()  # to those who fetch

    def hush(self) -> None:
        """Give nothing more to those who fetch here."""
        for answering in self._answering:
            answering.cancel()

    async def answer_until_hushed(self, node: NodeId, link: Link, request: Header) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            await self.answer_all(node, link, request)
        finally:
            self._answering.discard(task)

    async def answer_all(self, node: NodeId, link: Link, request: Header | None) -> None:
        """The first request may have come. One that this node is to wait for may come any time."""
        idle = IDLE_TIMEOUT if request is not None else None
        link.suit_path()  # what waits in the kernel gives way to no reduce
        with self._places.slot(node) as kept:
            while True:
                request = request or await frames.receive(link, idle)
                kept.asked()
                if request.length:
                    raise LinkBroken("a request with a payload")
                # A commit waits for audits; other fetches give way to the reduce.
                link.limit_sending(self._up if request.kind in AUDIT_KINDS else self._peers.spare)
                await self._answer(node, request, link, kept)
                kept.answered()
                request = None

    def _suit(self, link: Link) -> bool:
        """Use the congestion control that suits the path, or that was asked for; whether packing pays there."""
        path = link.path()
        if path is not None and (self._congestion or path.rtt > LONG_PATH_RTT):
            lossy = is_lossy(path.sent, path.resent)
            link.use_congestion_control(self._congestion or fetch_congestion_control(lossy, path.burst))
        slow = path is None or path.burst < FAST_PATH_RATE or 0 < self._up.rate < FAST_PATH_RATE
        return slow and self._peers.compressor.enabled  # where the run packs at all

    async def _answer(self, node: NodeId, request: Header, link: Link, slot: ChunkSlot) -> None:
        round, chunk = request.fence.round, request.chunk
        if slot.request != (request.kind, round, chunk):
            slot.packing_pays = self._suit(link)
            if request.kind in CHUNK_KINDS:
                await slot.begin((request.kind, round, chunk))
            slot.data = await self._find(node, request)
        if slot.data is None:
            slot.drop()  # it may be there when it is asked for again
            if request.kind in AUDIT_KINDS or not await self._pass_on(node, request, link):
                await frames.send(link, frames.unfenced(FrameKind.MISSING, round, chunk))
            return
        data, smaller = slot.data, False
        if request.kind is FrameKind.GET_STATE:
            if request.total > len(data) or (request.total - request.offset) % 4:
                raise LinkBroken(f"a request for bytes {request.offset} to {request.total} of {len(data)}")
            data = data[request.offset : request.total or None]
            packed = zstd.pack_floats(data) if slot.packing_pays else b""
            if smaller := 0 < len(packed) < len(data):
                data = view(packed)
        await frames.send(link, frames.unfenced(FrameKind.DATA, round, chunk, len(data), smaller), data)
        if request.kind is not FrameKind.GET_STATE or request.total in (0, len(slot.data)):
            slot.drop()  # that was all of it

    async def _find(self, node: NodeId, request: Header) -> memoryview | None:
        """What was asked for, as a whole."""
        round, chunk = request.fence.round, request.chunk
        found: Octets | None
        match request.kind:
            case FrameKind.GET_SEALED:
                found = await self._shelf.sealed(round, chunk)
            case FrameKind.GET_STATE:
                found = await self._shelf.state(round, chunk)
            case FrameKind.GET_DIGESTS:
                digests = await self._shelf.digests(round)
                found = None if digests is None else b"".join(digests)
            case FrameKind.GET_INPUT | FrameKind.GET_RECEIPT:
                found = await self._peers.evidence(node, request.kind, round, chunk)
            case _:
                raise LinkBroken(f"a frame of kind {request.kind.name} where a stream or a request begins")
        return None if found is None else view(found)

    async def _pass_on(self, node: NodeId, request: Header, link: Link) -> bool:
        """Answer with what a leaf has that offers it here; whether one does. Of the answer no more is kept than a
        piece: whether it is right is for who asked to find out."""
        asking = frames.part(request.kind, request.fence.round, request.chunk, request.offset, request.total)
        asked = {node}
        while (offered := self._offers.take(asked)) is not None:
            asked.add(offered.node)
            try:
                await frames.send(offered.link, asking)
                answer = await frames.receive(offered.link, IDLE_TIMEOUT)
            except LinkBroken as broken:
                log.debug("%s offers nothing any more: %s", offered.node, broken)
                offered.close()
                continue
            except BaseException:
                offered.close()
                raise
            if answer.kind is not FrameKind.DATA or answer.length > MAX_RELAYED_BYTES:
                if answer.kind is FrameKind.MISSING and not answer.length:
                    self._offers.give_back(offered)
                else:
                    offered.close()
                continue
            try:
                await self._pipe(answer, offered.link, link)
            except BaseException:
                offered.close()
                raise
            self._offers.give_back(offered)
            return True
        return False

    async def _pipe(self, answer: Header, source: Link, sink: Link) -> None:
        await frames.send(sink, answer)
        scratch, left = memoryview(bytearray(min(CAPPED_PIECE_BYTES, answer.length))), answer.length
        while left:
            piece = scratch[: min(left, CAPPED_PIECE_BYTES)]
            await source.read_into(piece)
            await sink.write(piece)
            left -= len(piece)
