"""The links to the other members of a run: dialled, kept from round to round, dialled again when they break.

Several links lead to one peer, because one TCP stream cannot fill a long fat pipe; whatever waits for the peer
goes out on the next of them that is free. Either side may have dialled: the one that joined first does, the other
one too when nothing has come of it for a moment; nobody dials a leaf. What the frames mean is for the
`FrameHandler` to say, the reduce that is under way.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import numpy as np

from atoll.comm.buffers import BufferPool
from atoll.comm.byte_view import U8
from atoll.comm.ids import NO_PIN, NodeId, Pin, Round
from atoll.comm.plan import PlanMember
from atoll.comm.transport import frames
from atoll.comm.transport.adaptive_zstd import AdaptiveZstd
from atoll.comm.transport.bandwidth import LinkEstimate, PeakRate
from atoll.comm.transport.connection import PIECE, ByteCounter, Link, LinkBroken, RateLimiter, close_dialled
from atoll.comm.transport.frames import FrameKind, Header
from atoll.comm.transport.pacing import LinkPacer, PeerPacer
from atoll.comm.transport.priority_lock import PriorityLock
from atoll.comm.transport.stream_policy import LONG_PATH, LONG_PATH_RTT, is_lossy, streams

log = logging.getLogger("atoll.plane")

SAMPLE = 0.05  # seconds between two looks at what the links carried
TURN = 1.5  # seconds after which the side that was not to dial does
SLOWER = 4  # times; a node's link is then what bounds the transfer to it
IN_ORDER = 2  # times; a node's chunks then go one by one, whomever they go to
SHORTEST_TURN, LONG_TURN = 0.1, 4.0  # seconds of such a chunk's piece; times what it takes
FRESH = 8.0  # seconds after which BBR would soon stop to measure the round trip anew
PIECE_TIME = 0.005  # seconds of this node's link
SMALLEST_PIECE = 1 << 16  # bytes; the last one of a payload may be smaller
IN_PIECES = (FrameKind.CONTRIBUTION, FrameKind.PARTIAL, FrameKind.SEALED)  # what may be cut
AGAIN = (0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between tries to dial
PATIENCE = 20.0  # seconds that a frame of a round, or attempt, to come is held
MOST = 1 << 28  # bytes of a frame
FORMS = 2  # of one payload that come in pieces at once: packed, and as it is
SPARE = 0.05  # of what this node's link carries up: for fetches while a reduce is under way
LEAST_SPARE = 1e5  # bytes a second
SHORT = 2.0  # seconds; a link that broke sooner counts as a failed try

Waiting = tuple[FrameKind, int, int]  # kind, chunk, attempt
Key = tuple[NodeId, FrameKind, int, int, int, bool, int]  # whose, and which, payload comes in pieces


class FrameHandler(Protocol):
    """A reduce, as the links know it."""

    round: Round

    async def place(self, node: NodeId, header: Header) -> U8 | None:
        """Where the payload belongs; None: it is of no use. Waits while that cannot be told yet. `LinkBroken` if
        the frame is not what such a peer may send."""

    def arrived(self, node: NodeId, header: Header, payload: U8) -> None:
        """A whole frame is here."""

    async def frame(self, node: NodeId, waiting: Waiting) -> tuple[Header, memoryview] | None:
        """What is to be sent; None: it is no longer."""

    def joined(self, node: NodeId) -> None:
        """A link broke and there is another: what was on it may be lost."""

    def lost(self, node: NodeId, sentence: str) -> None:
        """There is none, and dialling failed; it is tried again."""


class OutgoingFrame:
    """A frame on its way over several links."""

    def __init__(self, waiting: Waiting, header: Header, payload: memoryview) -> None:
        self.waiting, self.header, self.payload = waiting, header, payload
        self.offset = 0  # of what no link has taken yet
        self.taken = False

    def piece(self, size: int) -> tuple[Header, memoryview]:
        """The next part, of `size` bytes; 0: all of it."""
        if not size or self.header.kind not in IN_PIECES:
            self.taken = True
            return self.header, self.payload
        part = self.payload[self.offset : self.offset + size]
        header = replace(self.header, length=len(part), offset=self.offset, whole=len(self.payload))
        self.offset += len(part)
        self.taken = self.offset >= len(self.payload)
        return header if len(part) < len(self.payload) else self.header, part


class IncomingPayload:
    """A payload that comes in pieces."""

    def __init__(self, place: U8) -> None:
        self.place = place
        self.begun: dict[int, int] = {}  # offsets and lengths of pieces that are here, or being read
        self.missing = place.size  # bytes

    def fits(self, offset: int, length: int) -> bool:
        """Whether this is one of the pieces that are here, or beside them."""
        if offset in self.begun:
            return self.begun[offset] == length
        return not any(o < offset + length and offset < o + n for o, n in self.begun.items())


class Peer:
    """Another node: its links, and what waits to be sent."""

    def __init__(self, node: NodeId) -> None:
        self.node, self.address, self.pin, self.leaf = node, "", NO_PIN, False
        self.links: set[Link] = set()
        self.wanted = 1  # links that there should be
        self.dials = False  # this side opens them
        self.down = 0.0  # bytes a second that its link carries; 0: not known
        self.segments = self.resent = 0  # sent over them, and sent again
        self.broke = False  # a link broke, and what was on it may be lost
        self.tries = 0  # to dial, in vain
        self.pace = RateLimiter(0, burst=0.05)
        self.part: PeerPacer | None = None  # of its link, which sets the pace; None: no pace
        self.changed = asyncio.Event()  # links came or went
        self.tending: asyncio.Task[None] | None = None
        self.piece = 0  # bytes that one link carries at once, of what several can; 0: whole payloads
        self._sent_in_parts = deque[OutgoingFrame]()
        self._urgent: dict[Waiting, None] = {}
        self._first: dict[Waiting, None] = {}  # contributions: others wait for their merge
        self._then: dict[Waiting, None] = {}
        self._idle: deque[asyncio.Future[None]] = deque()
        self._opening = False  # a link is about to share what it took

    def post(self, waiting: Waiting) -> None:
        """Send this when its turn comes; once, however often it was posted before that."""
        self._queue(waiting)[waiting] = None
        self._wake()

    def give_back(self, waiting: Waiting) -> None:
        """It could not be sent: it is the next one."""
        queue = self._queue(waiting)
        later = [other for other in queue if other != waiting]
        queue.clear()
        queue.update(dict.fromkeys([waiting, *later]))
        self._wake()

    @property
    def far(self) -> bool:
        """The path to it is a long one."""
        return self.piece > 0

    def clear(self) -> None:
        for queue in (self._urgent, self._first, self._then):
            queue.clear()
        self._sent_in_parts.clear()

    def share(self, waiting: Waiting, sending: OutgoingFrame | None) -> None:
        """Let other links take parts of it, or what comes next."""
        if (
            sending is not None
            and self.piece
            and len(sending.payload) > self.piece
            and sending.header.kind in IN_PIECES
        ):
            self._sent_in_parts.append(sending)
        if self._queue(waiting) is not self._urgent:
            self._opening = False
        self._wake()

    async def next(self) -> Waiting | OutgoingFrame:
        """What a link that is free sends next: something new, or a part of what others are sending."""
        while True:
            while self._sent_in_parts and self._sent_in_parts[0].taken:
                self._sent_in_parts.popleft()
            if self._sent_in_parts and not self._urgent:
                self._wake()
                return self._sent_in_parts[0]
            # One payload after the other, over all links: who waits for the first one has it soonest.
            for queue in (self._urgent, self._first, self._then):
                if queue and (queue is self._urgent or not self._opening):
                    waiting = next(iter(queue))
                    del queue[waiting]
                    if queue is not self._urgent:
                        self._opening = self.piece > 0
                    return waiting
            idle = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            try:
                await idle
            except asyncio.CancelledError:
                self._wake()  # it may have been this one's turn
                raise

    def _queue(self, waiting: Waiting) -> dict[Waiting, None]:
        kind = waiting[0]
        return (
            self._first
            if kind is FrameKind.CONTRIBUTION
            else self._then
            if kind is FrameKind.SEALED
            else self._urgent
        )

    def _wake(self) -> None:
        """Have one link look."""
        while self._idle:
            if not (idle := self._idle.popleft()).done():
                idle.set_result(None)
                return


class PeerLinks:
    """All of them. `dial(node, address, pin)` opens a connection for a link."""

    def __init__(
        self,
        dial: Callable[[NodeId, str, Pin], Awaitable[Link]],
        meter: ByteCounter,
        streams: int = 0,
        congestion_control: str = "",
        up: RateLimiter | None = None,
    ) -> None:
        """`streams` to each peer; 0: as many as measurements say. `congestion_control`: empty: the system's. `up`
        bounds all that this node sends."""
        self._dial, self._meter, self.fixed = dial, meter, streams
        self._congestion = congestion_control
        self.squeeze, self.buffers = AdaptiveZstd(), BufferPool()
        self._known = (
            LinkEstimate(),
            LinkEstimate(),
        )  # what this node's link carried up, and down, in the last reduces, at best
        self.near: set[NodeId] | None = None  # peers of this node's region; None: there are no regions
        self.inside = self.outside = 0.0  # likewise, of what went to one of those, and to all others
        self._sampling: asyncio.Task[None] | None = None
        self._peers: dict[NodeId, Peer] = {}
        self._talk: FrameHandler | None = None
        self._begun = asyncio.Event()  # set, and replaced, whenever a reduce begins
        self._dialled: set[asyncio.Task[None]] = set()
        self.spare = RateLimiter(0, burst=0.05, within=up)  # for what is not the reduce's, and gives way to it
        self._pace, self._pacing, self._one_by_one = RateLimiter(0, burst=0.02), LinkPacer(), PriorityLock()
        self._scratch = memoryview(bytearray(PIECE))
        self._coming: dict[Key, IncomingPayload] = {}

    @property
    def up(self) -> float:
        """Bytes a second that this node's link carried in the last reduces, at best; 0: not known."""
        return self._known[0].rate

    @property
    def down(self) -> float:
        return self._known[1].rate

    # The reduce under way

    def begin(self, talk: FrameHandler) -> None:
        """From now on frames belong to this reduce."""
        self._talk = talk
        self._peers = {node: peer for node, peer in self._peers.items() if peer.links or peer.tending is not None}
        for peer in self._peers.values():
            peer.clear()
            peer.broke = False
            self._measure_path(peer)
            for link in peer.links if peer.far else ():
                self._refresh(peer, link)
        self._coming.clear()
        for known in self._known:
            known.begin()
        self.squeeze.forget()
        self.squeeze.rate = self.up
        self.spare.change(max(SPARE * self.up, LEAST_SPARE))
        self._pace.change(self._pacing.rate)
        if self._sampling is not None:
            self._sampling.cancel()
        self._sampling = asyncio.create_task(self._sample())
        self._begun.set()
        self._begun = asyncio.Event()

    def end(self, talk: FrameHandler) -> None:
        """It is over; its links stay for the next one."""
        if self._talk is talk:
            self._talk = None
            self.spare.change(0)
            if self._sampling is not None:
                self._sampling.cancel()
            for peer in self._peers.values():
                peer.clear()
                self._leave(peer)
                for link in list(peer.links)[peer.wanted :] if peer.dials else ():
                    link.close()

    def expect(self, members: Iterable[PlanMember], primary: Callable[[PlanMember], bool]) -> None:
        """Have links to these members as long as the reduce lasts; `primary`: this side dials."""
        expected = {m.node: m for m in members}
        for node, peer in self._peers.items():
            if node not in expected:
                self._leave(peer)
                for link in list(peer.links):
                    link.close()
        for node, member in expected.items():
            peer = self.peer(node)
            other = (peer.address, peer.pin) != (member.address, member.pin)
            if other or peer.tending is None:
                self._leave(peer)
                if other:
                    peer.tries = 0  # it is another process: what came of the one before says nothing
                peer.address, peer.pin, peer.leaf = member.address, member.pin, member.leaf
                peer.dials = primary(member)
                peer.tending = asyncio.create_task(self._tend(peer, peer.dials))
                peer.tending.add_done_callback(_look_at)
        for node, member in expected.items():
            peer = self.peer(node)
            peer.down = member.down
            self._suit(peer)

    def pace(self, node: NodeId, whole: float, part: float) -> None:
        """Send it no more than its link has place for, of which this node has a part, and which was seen to carry
        `whole` bytes a second; 0: not known. Of one that is about as fast as this node it is seen too seldom what
        its link can."""
        peer = self.peer(node)
        slow = part * whole * SLOWER < self.up
        peer.part = PeerPacer(whole, part) if slow and part * whole else None
        peer.pace.rate = peer.part.rate if peer.part is not None else 0

    def peer(self, node: NodeId) -> Peer:
        if node not in self._peers:
            self._peers[node] = Peer(node)
        return self._peers[node]

    def heard(self, node: NodeId) -> float | None:
        """When bytes last came from it, in the loop's seconds; None: there is no link."""
        return max((link.heard for link in self.peer(node).links), default=None)

    def links(self) -> list[tuple[NodeId, Link]]:
        return [(peer.node, link) for peer in self._peers.values() for link in peer.links]

    def round_trips(self) -> dict[NodeId, float]:
        """Seconds to the peers that there are links to."""
        paths = ((node, link.path()) for node, link in self.links())
        found: dict[NodeId, float] = {}
        for node, path in paths:
            if path is not None and path.rtt:
                found[node] = min(path.rtt, found.get(node, path.rtt))
        return found

    async def close(self) -> None:
        tasks = [*self._dialled]
        if self._sampling is not None:
            tasks.append(self._sampling)
        for peer in self._peers.values():
            if peer.tending is not None:
                tasks.append(peer.tending)
            self._leave(peer)
            for link in list(peer.links):
                link.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self) -> None:
        """Learn what the node's own link carries, and send as fast."""
        outside = PeakRate()
        inside = 0.0  # within a region a reduce waits for other regions: what a link carries shows in bursts only
        clock = asyncio.get_running_loop().time
        seen: dict[Link, tuple[int, int]] = {}
        total = got = far = looks = 0
        while True:
            delays: dict[NodeId, tuple[float, float]] = {}  # of those that took bytes: without a queue, and now
            for node, link in self.links():
                if self.peer(node).far and clock() - link.fresh_at > FRESH:
                    self._refresh(self.peer(node), link)
                if (path := link.path()) is not None:
                    was_acked, was_received = seen.get(link, (path.acked, path.received))
                    seen[link] = path.acked, path.received
                    more = path.acked - was_acked
                    total += more
                    got += path.received - was_received
                    if more and path.rtt > LONG_PATH_RTT:
                        rtt, now = delays.get(node, (path.rtt, path.smoothed))
                        delays[node] = min(rtt, path.rtt), min(now, path.smoothed)
                    if self.near is not None and node not in self.near:
                        far += more
                    elif self.near is not None and more:
                        inside = max(inside, path.burst)
            for peer in self._peers.values():
                if peer.part is not None and peer.node in delays:
                    rtt, now = delays[peer.node]
                    peer.pace.adjust(peer.part.look(rtt, now - rtt))
                elif peer.part is not None:
                    peer.pace.adjust(peer.part.rest())
            if delays:
                rtt, queue = max(d[0] for d in delays.values()), min(now - rtt for rtt, now in delays.values())
                self._pace.adjust(self._pacing.look(clock(), self._meter.up, total, rtt, queue, self.up))
            if looks % 2 == 0:
                self._known[0].add(clock(), total, self._meter.up)
                self._known[1].add(clock(), got)
                if self.near is not None:
                    outside.add(clock(), far)
                    self.inside, self.outside = inside or self.inside, outside.best or self.outside
                self.squeeze.rate = self.up
            looks += 1
            await asyncio.sleep(SAMPLE)

    # Having links

    async def adopt(self, node: NodeId, link: Link) -> None:
        """Use a link until it breaks, which it does at the latest when it carries a frame that is none."""
        peer, since = self.peer(node), asyncio.get_running_loop().time()
        link.suit_path()
        if not peer.links:
            self._measure_path(peer, link)
        peer.links.add(link)
        self._suit(peer)
        peer.changed.set()
        if self._talk is not None and peer.broke:
            self._talk.joined(node)
        peer.broke = False
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._listen(peer, link))
                both.create_task(self._speak(peer, link))
        except* LinkBroken as broken:
            lived = asyncio.get_running_loop().time() - since
            peer.tries = 0 if lived > SHORT else peer.tries + 1
            log.debug("a link to %s broke after %.1f s: %s", node, lived, broken.exceptions[0])
        finally:
            path = link.path()
            link.close()
            peer.links.discard(link)
            if path is not None:
                peer.segments += path.sent
                peer.resent += path.resent
            peer.broke = not peer.links
            if peer.links and self._talk is not None:  # what was on this one may be lost: ask over another
                self._talk.joined(node)
            peer.changed.set()

    async def _tend(self, peer: Peer, primary: bool) -> None:
        """Have as many links as there should be, and say so when there are none."""
        while True:
            if len(peer.links) >= (peer.wanted if primary else 1):
                peer.changed.clear()
                await peer.changed.wait()
                continue
            if not primary and not peer.leaf and await self._came(peer, TURN):
                continue
            if peer.tries and await self._pause(peer, AGAIN[min(peer.tries, len(AGAIN)) - 1]):
                continue
            if peer.leaf:
                if not await self._came(peer, PATIENCE):
                    self._lost(peer, f"it is a leaf and did not dial within {PATIENCE:g} s")
                continue
            missing = (peer.wanted if primary else 1) - len(peer.links)
            for result in await self._dial_each(peer, missing):
                if isinstance(result, Link):
                    self._dialled.add(task := asyncio.create_task(self.adopt(peer.node, result)))
                    task.add_done_callback(self._dialled.discard)
                elif isinstance(result, LinkBroken):
                    peer.tries += 1
                    self._lost(peer, str(result))
                else:
                    raise result
            await asyncio.sleep(0)  # they are among the peer's links now

    async def _dial_each(self, peer: Peer, count: int) -> Sequence[Link | BaseException]:
        dials = [asyncio.ensure_future(self._dial(peer.node, peer.address, peer.pin)) for _ in range(count)]
        try:
            return await asyncio.gather(*dials, return_exceptions=True)
        except asyncio.CancelledError:
            for dialled in dials:
                dialled.add_done_callback(close_dialled)
            raise

    def _measure_path(self, peer: Peer, link: Link | None = None) -> None:
        """How large the pieces are: over a long path about what this node sends in `PIECE_TIME`."""
        link = link or next(iter(peer.links), None)
        path = link.path() if link is not None else None
        if path is not None:
            size = max(SMALLEST_PIECE, int(self.up * PIECE_TIME))
            peer.piece = size if path.rtt > LONG_PATH_RTT else 0

    def _refresh(self, peer: Peer, link: Link) -> None:
        link.refresh(self._congestion or LONG_PATH)

    def _suit(self, peer: Peer) -> None:
        """Have as many links, and such congestion control, as suit the path; or as were asked for."""
        paths = [path for link in peer.links if (path := link.path()) is not None]
        if not paths:
            return
        sent, resent = peer.segments + sum(p.sent for p in paths), peer.resent + sum(p.resent for p in paths)
        lossy, rtt = is_lossy(sent, resent), min(path.rtt for path in paths)
        rate = min((rate for rate in (self.up, peer.down) if rate), default=0.0)
        busy = sum(p.tending is not None for p in self._peers.values())
        if self._congestion or rtt > LONG_PATH_RTT:
            for link in peer.links:
                link.use(self._congestion or LONG_PATH)
                link.let_wait(peer.piece)
        slowed = lossy and any(link.congestion_control != LONG_PATH for link in peer.links)
        peer.wanted = self.fixed or streams(rtt, rate, busy, slowed)

    def _lost(self, peer: Peer, sentence: str) -> None:
        if not peer.links and self._talk is not None:
            self._talk.lost(peer.node, sentence)

    async def _pause(self, peer: Peer, seconds: float) -> bool:
        """Before another try; whether it is not needed any more."""
        if peer.links:
            await asyncio.sleep(seconds)
            return False
        return await self._came(peer, seconds)

    async def _came(self, peer: Peer, within: float) -> bool:
        """Whether there is a link in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not peer.links:
                    peer.changed.clear()
                    await peer.changed.wait()
        return bool(peer.links)

    def _leave(self, peer: Peer) -> None:
        """Have no more links than there are."""
        if peer.tending is not None:
            peer.tending.cancel()
            peer.tending = None

    # Using them

    async def _speak(self, peer: Peer, link: Link) -> None:
        while True:
            found, talk = await peer.next(), self._talk
            waiting = found.waiting if isinstance(found, OutgoingFrame) else found
            try:
                sending = found if isinstance(found, OutgoingFrame) else await self._sending(peer, found)
                while sending is not None and not sending.taken:
                    header, part = sending.piece(peer.piece)
                    if peer.piece:
                        in_order = self.up * IN_ORDER < peer.down
                        async with self._one_by_one.one(waiting[1] * in_order, self._turn(len(part))):
                            await self._pace.take(len(part))
                            if in_order:
                                await frames.send(link, header, part)
                                continue
                        await peer.pace.take(len(part))
                    await frames.send(link, header, part)
            except BaseException:
                if self._talk is talk:  # else it would mean something of another round
                    peer.give_back(waiting)
                raise

    def _turn(self, size: int) -> float:
        """Seconds after which others send, too, of a node whose chunks go one by one: this peer may be stuck."""
        return SHORTEST_TURN + (LONG_TURN * size / self.up if self.up else 0.0)

    async def _sending(self, peer: Peer, waiting: Waiting) -> OutgoingFrame | None:
        sending, talk = None, self._talk
        try:
            frame = await talk.frame(peer.node, waiting) if talk is not None else None
            if frame is not None and self._talk is talk:
                sending = OutgoingFrame(waiting, *frame)
        finally:
            peer.share(waiting, sending)
        return sending

    async def _listen(self, peer: Peer, link: Link) -> None:
        while True:
            header = await frames.receive(link, None)
            if header.kind is FrameKind.REFUSED:
                raise LinkBroken(f"it refused: {await frames.sentence(link, header)}")
            talk = await self._talk_of(header.fence.round)
            if talk is None:
                await self._skip(link, header.length)
            elif header.whole:
                await self._take_piece(talk, peer, link, header)
            elif (place := await talk.place(peer.node, header)) is not None:
                await link.read_into(place.data)
                talk.arrived(peer.node, header, place)
            else:
                await self._skip(link, header.length)
            await asyncio.sleep(0)  # other links may have something, too

    async def _take_piece(self, talk: FrameHandler, peer: Peer, link: Link, header: Header) -> None:
        smallest = min(SMALLEST_PIECE, max(header.total - header.offset, 1))
        if header.kind not in IN_PIECES or header.length < smallest:
            raise LinkBroken(f"a piece of {header.length} bytes of a frame {header.kind.name} of {header.total}")
        whole = replace(header, length=header.total, offset=0, whole=0)
        attempt = header.fence.attempt
        key = (peer.node, header.kind, header.chunk, attempt, header.place, header.packed, header.total)
        coming = self._coming.get(key)
        if coming is None and sum(k[:4] == key[:4] for k in self._coming) >= FORMS:
            raise LinkBroken(f"it sends chunk {header.chunk} in more than {FORMS} lengths at once")
        if coming is None and (place := await talk.place(peer.node, whole)) is not None and talk is self._talk:
            coming = self._coming.setdefault(key, IncomingPayload(place))
        if coming is not None and not coming.fits(header.offset, header.length):
            # Sent again, after a break, and cut otherwise: what is here of it counts no more. Not into the same
            # memory: an old link may still write there when it has long been given to another chunk.
            coming = self._coming[key] = IncomingPayload(np.empty_like(coming.place))
        if coming is None or header.offset in coming.begun:
            await self._skip(link, header.length)
            return
        coming.begun[header.offset] = header.length
        try:
            await link.read_into(coming.place[header.offset : header.offset + header.length].data)
        except BaseException:
            del coming.begun[header.offset]
            raise
        coming.missing -= header.length
        if not coming.missing and self._coming.get(key) is coming:
            del self._coming[key]
            talk.arrived(peer.node, whole, coming.place)

    async def _talk_of(self, round: Round) -> FrameHandler | None:
        """The reduce of this round, which may be about to begin here; None: it is over. `LinkBroken` if it does
        not begin in time: over another link the frame comes again."""
        if self._talk is not None and self._talk.round == round:
            return self._talk
        try:
            async with asyncio.timeout(PATIENCE):
                while self._talk is None or self._talk.round < round:
                    await self._begun.wait()
        except TimeoutError:
            raise LinkBroken(f"round {round}, of which it sent a frame, did not begin here in time") from None
        return self._talk if self._talk.round == round else None

    async def _skip(self, link: Link, length: int) -> None:
        if length > MOST:
            raise LinkBroken(f"it sent a frame of {length} bytes")
        while length:
            piece = self._scratch[: min(length, PIECE)]
            await link.read_into(piece)
            length -= len(piece)


def _look_at(task: "asyncio.Task[None]") -> None:
    """Nobody waits for it: a fault is to be seen all the same."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a peer is not dialled any more, because of a fault of this node", exc_info=error)
