"""The links to the other members of a run: dialled, kept from round to round, dialled again when they break.

Several links lead to one peer, because one TCP stream cannot fill a long fat pipe; whatever waits for the peer
goes out on the next of them that is free. Either side may have dialled: the one that joined first does, the other
one too when nothing has come of it for a moment; nobody dials a leaf. What the frames mean is for the `Talk` to
say, the reduce that is under way.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Protocol

from atoll.comm import wire
from atoll.comm.ids import NodeId, Round
from atoll.comm.link import PIECE, Broken, Link, Meter
from atoll.comm.octets import U8
from atoll.comm.plan import PlanMember
from atoll.comm.rates import Peak
from atoll.comm.squeeze import Squeeze
from atoll.comm.streams import Streams, observed, start
from atoll.comm.wire import Header, Kind

log = logging.getLogger("atoll.plane")

SAMPLE = 0.1  # seconds between two looks at what the links carried
TURN = 1.5  # seconds after which the side that was not to dial does
AGAIN = (0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between tries to dial
PATIENCE = 20.0  # seconds that a frame of a round, or attempt, to come is held
MOST = 1 << 28  # bytes of a frame
SHORT = 2.0  # seconds; a link that broke sooner counts as a failed try

Waiting = tuple[Kind, int, int]  # kind, chunk, attempt


class Talk(Protocol):
    """A reduce, as the links know it."""

    round: Round

    async def place(self, node: NodeId, header: Header) -> U8 | None:
        """Where the payload belongs; None: it is of no use. Waits while that cannot be told yet. `Broken` if
        the frame is not what such a peer may send."""

    def arrived(self, node: NodeId, header: Header, payload: U8) -> None:
        """A whole frame is here."""

    async def frame(self, node: NodeId, waiting: Waiting) -> tuple[Header, memoryview] | None:
        """What is to be sent; None: it is no longer."""

    def joined(self, node: NodeId) -> None:
        """A link broke and there is another: what was on it may be lost."""

    def lost(self, node: NodeId, sentence: str) -> None:
        """There is none, and dialling failed; it is tried again."""


class Peer:
    """Another node: its links, and what waits to be sent."""

    def __init__(self, node: NodeId) -> None:
        self.node, self.address, self.leaf = node, "", False
        self.links: set[Link] = set()
        self.streams: Streams | None = None  # None: the path is not known yet
        self.moved = 0  # bytes over links that are gone
        self.broke = False  # a link broke, and what was on it may be lost
        self.tries = 0  # to dial, in vain
        self.changed = asyncio.Event()  # links came or went
        self.tending: asyncio.Task[None] | None = None
        self._urgent: dict[Waiting, None] = {}
        self._first: dict[Waiting, None] = {}  # contributions: others wait for their merge
        self._then: dict[Waiting, None] = {}
        self._idle: deque[asyncio.Future[None]] = deque()

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
    def wanted(self) -> int:
        """Links that there should be."""
        return 1 if self.streams is None else self.streams.count

    def clear(self) -> None:
        for queue in (self._urgent, self._first, self._then):
            queue.clear()

    async def next(self) -> Waiting:
        while True:
            for queue in (self._urgent, self._first, self._then):
                if queue:
                    waiting = next(iter(queue))
                    del queue[waiting]
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
        return self._first if kind is Kind.CONTRIBUTION else self._then if kind is Kind.SEALED else self._urgent

    def _wake(self) -> None:
        """Have one link look."""
        while self._idle:
            if not (idle := self._idle.popleft()).done():
                idle.set_result(None)
                return


class Peers:
    """All of them. `dial(node, address)` opens a connection for a link."""

    def __init__(self, dial: Callable[[NodeId, str], Awaitable[Link]], meter: Meter, streams: int = 0) -> None:
        """`streams` to each peer; 0: as many as measurements say."""
        self._dial, self._meter, self._fixed = dial, meter, streams
        self.squeeze = Squeeze()
        self.up = self.down = 0.0  # bytes a second that this node's link carried in the last reduces, at best
        self._sampling: asyncio.Task[None] | None = None
        self._peers: dict[NodeId, Peer] = {}
        self._talk: Talk | None = None
        self._begun = asyncio.Event()  # set, and replaced, whenever a reduce begins
        self._dialled: set[asyncio.Task[None]] = set()
        self._scratch = memoryview(bytearray(PIECE))

    # The reduce under way

    def begin(self, talk: Talk) -> None:
        """From now on frames belong to this reduce."""
        self._talk = talk
        for peer in self._peers.values():
            peer.clear()
            peer.broke = False
            peer.moved = -sum(link.moved for link in peer.links)
        self.squeeze.forget()
        self.squeeze.rate = self.up
        self._sampling = asyncio.create_task(self._sample())
        self._begun.set()
        self._begun = asyncio.Event()

    def end(self, talk: Talk) -> None:
        """It is over; its links stay for the next one."""
        if self._talk is talk:
            self._talk = None
            if self._sampling is not None:
                self._sampling.cancel()
            for peer in self._peers.values():
                peer.clear()
                self._leave(peer)

    def done(self, seconds: float) -> None:
        """The reduce has come to its end after so long: learn from it."""
        for peer in self._peers.values():
            moved = peer.moved + sum(link.moved for link in peer.links)
            if peer.streams is not None and moved > 0 and not self._fixed:
                peer.streams = observed(peer.streams, moved / seconds)

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
            if peer.address != member.address or peer.tending is None:
                self._leave(peer)
                peer.address, peer.leaf = member.address, member.leaf
                peer.tending = asyncio.create_task(self._tend(peer, primary(member)))

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
        """Learn what the node's own link carries."""
        up, down = Peak(), Peak()
        clock = asyncio.get_running_loop().time
        acked: dict[Link, int] = {}
        total = 0
        while True:
            for _, link in self.links():
                if (path := link.path()) is not None:
                    total += path.acked - acked.get(link, path.acked)
                    acked[link] = path.acked
            up.add(clock(), total)
            down.add(clock(), self._meter.down)
            self.up, self.down = up.rate or self.up, down.rate or self.down
            self.squeeze.rate = self.up
            await asyncio.sleep(SAMPLE)

    # Having links

    async def adopt(self, node: NodeId, link: Link) -> None:
        """Use a link until it breaks, which it does at the latest when it carries a frame that is none."""
        peer, since = self.peer(node), asyncio.get_running_loop().time()
        link.choose_congestion_control()
        if peer.streams is None and (path := link.path()) is not None:
            peer.streams = Streams(self._fixed, settled=True) if self._fixed else start(path.rtt)
        peer.links.add(link)
        peer.changed.set()
        if self._talk is not None and peer.broke:
            self._talk.joined(node)
        peer.broke = False
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._listen(peer, link))
                both.create_task(self._speak(peer, link))
        except* Broken as broken:
            lived = asyncio.get_running_loop().time() - since
            peer.tries = 0 if lived > SHORT else peer.tries + 1
            log.debug("a link to %s broke after %.1f s: %s", node, lived, broken.exceptions[0])
        finally:
            link.close()
            peer.links.discard(link)
            peer.moved += link.moved
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
            dials = (self._dial(peer.node, peer.address) for _ in range(missing))
            for result in await asyncio.gather(*dials, return_exceptions=True):
                if isinstance(result, Link):
                    self._dialled.add(task := asyncio.create_task(self.adopt(peer.node, result)))
                    task.add_done_callback(self._dialled.discard)
                elif isinstance(result, Broken):
                    peer.tries += 1
                    self._lost(peer, str(result))
                else:
                    raise result
            await asyncio.sleep(0)  # they are among the peer's links now

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
            waiting = await peer.next()
            try:
                frame = await self._talk.frame(peer.node, waiting) if self._talk is not None else None
                if frame is not None:
                    await wire.send(link, *frame)
            except BaseException:
                peer.give_back(waiting)
                raise

    async def _listen(self, peer: Peer, link: Link) -> None:
        while True:
            header = await wire.receive(link, None)
            if header.kind is Kind.REFUSED:
                raise Broken(f"it refused: {await wire.sentence(link, header)}")
            talk = await self._talk_of(header.fence.round)
            place = await talk.place(peer.node, header) if talk is not None else None
            if talk is not None and place is not None:
                await link.read_into(place.data)
                talk.arrived(peer.node, header, place)
            else:
                await self._skip(link, header.length)
            await asyncio.sleep(0)  # other links may have something, too

    async def _talk_of(self, round: Round) -> Talk | None:
        """The reduce of this round, which may be about to begin here."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while self._talk is None or self._talk.round < round:
                    await self._begun.wait()
        return self._talk if self._talk is not None and self._talk.round == round else None

    async def _skip(self, link: Link, length: int) -> None:
        if length > MOST:
            raise Broken(f"it sent a frame of {length} bytes")
        while length:
            piece = self._scratch[: min(length, PIECE)]
            await link.read_into(piece)
            length -= len(piece)
