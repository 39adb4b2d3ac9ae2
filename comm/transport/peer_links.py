"""The links to the other members of a run: dialled, kept from round to round, dialled again when they break.

Several links lead to one peer, because one TCP stream cannot fill a long fat pipe; whatever waits for the peer
(`SendQueue`) goes out on the next of them that is free. Either side may have dialled: the one that joined first
does, the other one too when nothing has come of it for a moment; nobody dials a leaf. What the frames mean is for
the `FrameHandler` to say, the reduce that is under way.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import assert_never

from atoll.comm.buffers import BufferPool
from atoll.comm.byte_view import U8, Octets
from atoll.comm.ids import NodeId, Pin, Round
from atoll.comm.plan import PlanMember
from atoll.comm.transport import frames
from atoll.comm.transport.adaptive_zstd import AdaptiveZstd
from atoll.comm.transport.bandwidth import sample_peers, sample_round_trips
from atoll.comm.transport.connection import ByteCounter, Link, LinkBroken, LinkSpoiled, RateLimiter, close_dialled
from atoll.comm.transport.frame_handler import FrameHandler, RoundOrder, round_order
from atoll.comm.transport.frames import FrameKind, Header, QueuedFrame
from atoll.comm.transport.link_estimator import LinkEstimator
from atoll.comm.transport.link_policy import Dial, LeafMissing, Pause, Rest
from atoll.comm.transport.pacing import PeerPacer
from atoll.comm.transport.peer import Peer
from atoll.comm.transport.priority_lock import PriorityLock
from atoll.comm.transport.reassembly import MIN_PIECE_BYTES, Reassembly
from atoll.comm.transport.send_queue import OutgoingFrame
from atoll.comm.transport.stream_policy import LONG_PATH_CONGESTION_CONTROL, LONG_PATH_RTT, is_lossy, stream_count

log = logging.getLogger("atoll.plane")

SAMPLE_INTERVAL = 0.05  # seconds between two looks at what the links carried
SLOW_PEER_RATIO = 4  # this node's rate to its share of a peer's: beyond, the peer's link is the narrower one
SLOW_NODE_RATIO = 2  # a peer's rate to this node's: beyond, this node's chunks go one by one
MIN_TURN_SECONDS, TURN_RATIO = 0.1, 4.0  # turn of such a node's piece: at least, and times its sending
REFRESH_AFTER = 8.0  # seconds after which BBR would soon stop to measure the round trip anew
PIECE_SECONDS = 0.005  # seconds that a piece takes of this node's link
ROUND_BEGINS_WITHIN = 20.0  # seconds that a frame of a round to come is held
SPARE_SHARE = 0.05  # share of what this node's link carries up: for fetches while a reduce is under way
MIN_SPARE_RATE = 1e5  # bytes a second


class PeerLinks:
    """The links of one node to all its peers. `begin` and `end` a reduce, `expect` its members, `close` at
    last."""

    def __init__(
        self,
        dial: Callable[[NodeId, str, Pin], Awaitable[Link]],
        counter: ByteCounter,
        fixed_streams: int = 0,
        congestion_control: str = "",
        up: RateLimiter | None = None,
    ) -> None:
        """`dial(node, address, pin)` opens a connection for a link, or raises `LinkBroken`. `fixed_streams` to
        each peer; 0: as many as measurements say. `congestion_control`: empty: the system's. `up` bounds all that
        this node sends."""
        self._dial, self.fixed_streams, self._congestion = dial, fixed_streams, congestion_control
        self.compressor, self.buffers = AdaptiveZstd(), BufferPool()
        self.estimator = LinkEstimator(counter)
        self._sampling: asyncio.Task[None] | None = None
        self._peers: dict[NodeId, Peer] = {}
        self._handler: FrameHandler | None = None
        self._reduce_began = asyncio.Event()  # set, and replaced, whenever a reduce begins
        self._adopting: set[asyncio.Task[None]] = set()  # of links that this side dialled
        self.spare = RateLimiter(0, burst=0.05, within=up)  # for what is not the reduce's, and gives way to it
        self._send_order, self._reassembly = PriorityLock(), Reassembly()

    @property
    def rate_up(self) -> float:
        """Bytes a second that this node's link carried up in the last reduces, at best; 0: not known."""
        return self.estimator.rate_up

    @property
    def rate_down(self) -> float:
        """Bytes a second that this node's link carried down in the last reduces, at best; 0: not known."""
        return self.estimator.rate_down

    # The reduce under way

    def begin(self, handler: FrameHandler) -> None:
        """Begin the reduce of `handler`, to which frames belong from now on; what waited of the one before is not
        sent."""
        self._handler = handler
        self._peers = {n: peer for n, peer in self._peers.items() if peer.links or peer.dialling is not None}
        for peer in self._peers.values():
            peer.queue.clear()
            peer.policy.begin_reduce()
            self._choose_piece_size(peer)
            for link in peer.links if peer.long_path else ():
                self._refresh(link)
        self._reassembly.clear()
        self.estimator.begin(handler.round)
        self.compressor.forget()
        self.compressor.rate = self.rate_up
        self.spare.change(max(SPARE_SHARE * self.rate_up, MIN_SPARE_RATE))
        if self._sampling is not None:
            self._sampling.cancel()
        self._sampling = asyncio.create_task(self._sample())
        self._reduce_began.set()
        self._reduce_began = asyncio.Event()

    def end(self, handler: FrameHandler) -> None:
        """End the reduce of `handler`, unless another has begun; links stay for the next one, as many as there
        should be."""
        if self._handler is handler:
            self._handler = None
            self.spare.change(0)
            if self._sampling is not None:
                self._sampling.cancel()
            for peer in self._peers.values():
                peer.queue.clear()
                self._stop_dialling(peer)
                for link in list(peer.links)[peer.policy.link_target :] if peer.policy.primary else ():
                    link.close()

    async def evidence(self, node: NodeId, kind: FrameKind, round: Round, c: int) -> Octets | None:
        """What the reduce of `round`, if it is the one under way, has for `node`, which audits its chunk `c`."""
        handler = self._handler
        return await handler.evidence(node, kind, c) if handler is not None and handler.round == round else None

    async def ask(
        self, node: NodeId, kind: FrameKind, round: Round, c: int, size: int, exact: bool
    ) -> Octets | None:
        """What `node` has for an auditor of chunk `c`, over the links of the reduce of `round`, as
        `FrameHandler.ask`; None, too, where that is not under way or there is no link."""
        handler, peer = self._handler, self._peers.get(node)
        if handler is None or handler.round != round or peer is None or not peer.links:
            return None
        return await handler.ask(node, kind, c, size, exact)

    def expect(self, members: Iterable[tuple[PlanMember, bool]]) -> None:
        """Have links to these members, and to no others, as long as the reduce lasts: (member, whether this side
        dials it first)."""
        expected = {member.node: (member, primary) for member, primary in members}
        for node, peer in self._peers.items():
            if node not in expected:
                self._stop_dialling(peer)
                for link in list(peer.links):
                    link.close()
        for node, (member, primary) in expected.items():
            peer = self.peer(node)
            other = (peer.address, peer.pin) != (member.address, member.pin)
            if other or peer.dialling is None or peer.policy.primary != primary:
                self._stop_dialling(peer)
                peer.address, peer.pin = member.address, member.pin
                peer.policy.expect(primary, member.leaf, other)
                peer.dialling = asyncio.create_task(self._keep_linked(peer))
                peer.dialling.add_done_callback(_log_fault)
        for node, (member, _) in expected.items():
            peer = self.peer(node)
            peer.rate_down = member.down
            self._suit_path(peer)

    def pace(self, node: NodeId, whole: float, part: float) -> None:
        """Send `node` no more than its link carries, which was seen to take `whole` bytes a second (0: not known),
        of which a `part` in [0, 1] is this node's. Of a peer that is about as fast as this node it is seen too
        seldom what its link can: it is not paced."""
        peer = self.peer(node)
        slow = part * whole * SLOW_PEER_RATIO < self.rate_up
        peer.pacer = PeerPacer(whole, part) if slow and part * whole else None
        peer.limiter.rate = peer.pacer.rate if peer.pacer is not None else 0

    def peer(self, node: NodeId) -> Peer:
        """The record of `node`, with its queue; made now if there was none."""
        if node not in self._peers:
            self._peers[node] = Peer(node)
        return self._peers[node]

    def heard(self, node: NodeId) -> float | None:
        """The time at which bytes last came from `node`, in the loop's seconds; None: there is no link."""
        return max((link.heard for link in self.peer(node).links), default=None)

    def links(self) -> list[tuple[NodeId, Link]]:
        """All links, with the node that each leads to."""
        return [(peer.node, link) for peer in self._peers.values() for link in peer.links]

    def seen_rates(self, members: Sequence[NodeId], me: NodeId) -> dict[NodeId, tuple[float, float]]:
        """Bytes a second that came from each peer at best in this reduce, and that each took; of many `members`, a
        sample that differs with this node's place among them."""
        seen = self.estimator.seen
        return {n: seen[n] for n in sample_peers([n for n in members if n in seen], members.index(me))}

    def round_trips(self) -> dict[NodeId, float]:
        """The shortest round trip, in seconds, to each peer that there is a link to and the kernel has measured;
        of many peers, a sample that tells who is near (`sample_round_trips`)."""
        paths = ((node, link.path()) for node, link in self.links())
        found: dict[NodeId, float] = {}
        for node, path in paths:
            if path is not None and path.rtt:
                found[node] = min(path.rtt, found.get(node, path.rtt))
        return sample_round_trips(found)

    def drop(self, node: NodeId) -> None:
        """Close all links to `node`, whoever dialled them: it is no member any more."""
        if (peer := self._peers.get(node)) is not None:
            self._stop_dialling(peer)
            for link in list(peer.links):
                link.close()

    async def close(self) -> None:
        """Close all links, and wait for the tasks that used them."""
        tasks = [*self._adopting]
        if self._sampling is not None:
            tasks.append(self._sampling)
        for peer in self._peers.values():
            if peer.dialling is not None:
                tasks.append(peer.dialling)
            self._stop_dialling(peer)
            for link in list(peer.links):
                link.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self) -> None:
        """Learn what the node's own link carries, and send as fast."""
        clock = asyncio.get_running_loop().time
        while True:
            for node, link in self.links():
                if self.peer(node).long_path and clock() - link.fresh_at > REFRESH_AFTER:
                    self._refresh(link)
            self.estimator.sample(clock(), self._peers.values())
            self.compressor.rate = self.rate_up
            await asyncio.sleep(SAMPLE_INTERVAL)

    # Having links

    async def adopt(self, node: NodeId, link: Link) -> None:
        """Use a link to `node` until it breaks, as it does at the latest when it carries what is no frame; then it
        is closed."""
        peer, since = self.peer(node), asyncio.get_running_loop().time()
        link.suit_path()
        if not peer.links:
            self._choose_piece_size(peer, link)
        peer.links.add(link)
        self._suit_path(peer)
        peer.links_changed.set()
        if peer.policy.link_opened() and self._handler is not None:
            self._handler.joined(node)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._listen(peer, link))
                both.create_task(self._speak(peer, link))
        except* LinkBroken as broken:
            if self._handler is not None and broken.subgroup(LinkSpoiled) is not None:
                self._handler.spoiled(node, str(broken.exceptions[0]))
            lived = asyncio.get_running_loop().time() - since
            peer.policy.link_broke(lived)
            log.debug("a link to %s broke after %.1f s: %s", node, lived, broken.exceptions[0])
        finally:
            path = link.path()
            link.close()
            peer.links.discard(link)
            if path is not None:
                peer.segments += path.sent
                peer.resent += path.resent
            if peer.policy.link_closed(len(peer.links)) and self._handler is not None:
                self._handler.joined(node)
            peer.links_changed.set()

    async def _keep_linked(self, peer: Peer) -> None:
        """Have as many links as there should be, and say so when there are none."""
        while True:
            match step := peer.policy.next_step(len(peer.links)):
                case Rest():
                    peer.links_changed.clear()
                    await peer.links_changed.wait()
                case Pause(seconds):
                    await self._pause(peer, seconds)
                case LeafMissing(seconds):
                    self._lost(peer, f"it is a leaf and did not dial within {seconds:g} s")
                case Dial(count):
                    await self._dial_missing(peer, count)
                case _:
                    assert_never(step)

    async def _dial_missing(self, peer: Peer, count: int) -> None:
        for result in await self._dial_each(peer, count):
            if isinstance(result, Link):
                self._adopting.add(task := asyncio.create_task(self.adopt(peer.node, result)))
                task.add_done_callback(self._adopting.discard)
            elif isinstance(result, LinkBroken):
                peer.policy.dial_failed()
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

    def _choose_piece_size(self, peer: Peer, link: Link | None = None) -> None:
        """How large the pieces are: over a long path about what this node sends in `PIECE_SECONDS`."""
        link = link or next(iter(peer.links), None)
        path = link.path() if link is not None else None
        if path is not None:
            size = max(MIN_PIECE_BYTES, int(self.rate_up * PIECE_SECONDS))
            peer.queue.piece_size = size if path.rtt > LONG_PATH_RTT else 0

    def _refresh(self, link: Link) -> None:
        link.refresh(self._congestion or LONG_PATH_CONGESTION_CONTROL)

    def _suit_path(self, peer: Peer) -> None:
        """Have as many links, and such congestion control, as suit the path; or as were asked for."""
        paths = [path for link in peer.links if (path := link.path()) is not None]
        if not paths:
            return
        sent, resent = peer.segments + sum(p.sent for p in paths), peer.resent + sum(p.resent for p in paths)
        lossy, rtt = is_lossy(sent, resent), min(path.rtt for path in paths)
        rate = min((rate for rate in (self.rate_up, peer.rate_down) if rate), default=0.0)
        busy = sum(p.dialling is not None for p in self._peers.values())
        if self._congestion or rtt > LONG_PATH_RTT:
            for link in peer.links:
                link.use_congestion_control(self._congestion or LONG_PATH_CONGESTION_CONTROL)
                link.limit_unsent(peer.queue.piece_size)
        slowed = lossy and any(link.congestion_control != LONG_PATH_CONGESTION_CONTROL for link in peer.links)
        peer.policy.link_target = self.fixed_streams or stream_count(rtt, rate, busy, slowed)

    def _lost(self, peer: Peer, sentence: str) -> None:
        if not peer.links and self._handler is not None:
            self._handler.lost(peer.node, sentence)

    async def _pause(self, peer: Peer, seconds: float) -> None:
        """So long; where there is no link, until there is one at the longest."""
        if peer.links:
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not peer.links:
                    peer.links_changed.clear()
                    await peer.links_changed.wait()

    def _stop_dialling(self, peer: Peer) -> None:
        """Have no more links than there are."""
        if peer.dialling is not None:
            peer.dialling.cancel()
            peer.dialling = None

    # Using them

    async def _speak(self, peer: Peer, link: Link) -> None:
        while True:
            found, handler = await peer.queue.next(), self._handler
            queued = found.queued if isinstance(found, OutgoingFrame) else found
            try:
                outgoing = found if isinstance(found, OutgoingFrame) else await self._open(peer, found)
                while outgoing is not None and not outgoing.taken:
                    header, part = outgoing.piece(peer.queue.piece_size)
                    if peer.queue.piece_size:
                        in_order = self.rate_up * SLOW_NODE_RATIO < peer.rate_down
                        async with self._send_order.one(queued[1] * in_order, self._turn(len(part))):
                            await self.estimator.limiter.take(len(part))
                            if in_order:
                                await frames.send(link, header, part)
                                continue
                        await peer.limiter.take(len(part))
                    await frames.send(link, header, part)
            except BaseException:
                if self._handler is handler:  # else it would mean something of another round
                    peer.queue.put_back(queued)
                raise

    def _turn(self, size: int) -> float:
        """Seconds after which others send, too, of a node whose chunks go one by one: this peer may be stuck."""
        return MIN_TURN_SECONDS + (TURN_RATIO * size / self.rate_up if self.rate_up else 0.0)

    async def _open(self, peer: Peer, queued: QueuedFrame) -> OutgoingFrame | None:
        """What is to be sent of it, which other links may take pieces of from now on; None: nothing any more."""
        outgoing, handler = None, self._handler
        try:
            frame = await handler.frame(peer.node, queued) if handler is not None else None
            if frame is not None and self._handler is handler:
                outgoing = OutgoingFrame(queued, *frame)
        finally:
            peer.queue.share(queued, outgoing)
        return outgoing

    async def _listen(self, peer: Peer, link: Link) -> None:
        while True:
            header = await frames.receive(link, None)
            if header.kind is FrameKind.REFUSED:
                raise LinkBroken(f"it refused: {await frames.sentence(link, header)}")
            handler = await self._handler_of(header.fence.round)
            if handler is None:
                await frames.skip(link, header.length)
            elif header.whole:
                await self._read_piece(handler, peer, link, header)
            elif (place := await handler.buffer_for(peer.node, header)) is not None:
                await link.read_into(place.data)
                handler.arrived(peer.node, header, place)
            else:
                await frames.skip(link, header.length)
            await asyncio.sleep(0)  # other links may have something, too

    async def _read_piece(self, handler: FrameHandler, peer: Peer, link: Link, header: Header) -> None:
        async def place(whole: Header) -> U8 | None:
            buffer = await handler.buffer_for(peer.node, whole)
            return buffer if handler is self._handler else None

        if (found := await self._reassembly.read_piece(peer.node, link, header, place)) is not None:
            handler.arrived(peer.node, *found)

    async def _handler_of(self, round: Round) -> FrameHandler | None:
        """The reduce of this round, which may be about to begin here; None: it is over. `LinkBroken` if it does
        not begin in time: over another link the frame comes again."""
        try:
            async with asyncio.timeout(ROUND_BEGINS_WITHIN):
                while (order := round_order(self._round, round)) is RoundOrder.AHEAD:
                    await self._reduce_began.wait()
        except TimeoutError:
            raise LinkBroken(f"round {round}, of which it sent a frame, did not begin here in time") from None
        return self._handler if order is RoundOrder.CURRENT else None

    @property
    def _round(self) -> Round | None:
        return self._handler.round if self._handler is not None else None


def _log_fault(task: "asyncio.Task[None]") -> None:
    """Nobody waits for it: a fault is to be seen all the same."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a peer is not dialled any more, because of a fault of this node", exc_info=error)
