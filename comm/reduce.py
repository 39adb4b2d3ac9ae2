"""One attempt of one round's all-reduce among the members of a plan.

    encode_delta     each member, once a round: anchor - local, chunk by chunk, encoded
    reduce           each member, once an attempt:

        contributions   member --chunk--> its owner
        merge           owner: decode, weigh, sum in plan order, encode the mean once, digest it: sealed
        results         owner --sealed chunk--> every other member

Two hops and two quantisations however many members there are. Everybody ends with the same sealed bytes,
or the attempt fails for him and the coordinator starts another among the survivors, with the same encoded
inputs, which nothing here writes to.

The mean of chunk c is, in fp32, each operation rounded once and in this order,

    mean = share[0] * x[0];  mean += share[1] * x[1];  ...      x[i] = decode(contribution of members[i])
    share[i] = fp32(weight[i] / (weight[0] + weight[1] + ...))  the sum and the quotient in fp64

Each member dials each other member once, and sends on that connection only. The accepting side writes a
last word on it: done; gave the attempt up; or what was wrong with the stream. So a member that gives up
because of a third one is not taken for dead: the others wait for evidence of their own, or for the
coordinator's next attempt to cancel them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Never

import numpy as np

from atoll.comm.chunks import Chunks
from atoll.comm.codec import F32, U8, Codec, Malformed, NonFinite
from atoll.comm.digest import digest
from atoll.comm.errors import Unreachable
from atoll.comm.ids import NodeId
from atoll.comm.plan import BadPlan, Plan, PlanMember
from atoll.comm.plane import PATIENCE, Arrivals, DataPlane, PeerLost
from atoll.comm.wire import Broken, Header, Kind, Link

ARRIVAL = PATIENCE + 10  # seconds after which a member that opened no stream is lost
GRACE = 1.0  # seconds between a member's broken stream and its last word that it is well


@dataclass(frozen=True)
class Slots:
    """Where each encoded chunk lies in one buffer of `total` bytes."""

    chunks: Chunks
    codec: Codec

    @property
    def total(self) -> int:
        return self.start(self.chunks.count - 1) + self.size(self.chunks.count - 1)

    def size(self, c: int) -> int:
        return self.codec.size(self.chunks.size(c))

    def start(self, c: int) -> int:
        return c * self.codec.size(self.chunks.chunk)

    def slot(self, c: int) -> slice:
        return slice(self.start(c), self.start(c) + self.size(c))


@dataclass(frozen=True)
class EncodedVector:
    """A member's delta, encoded; read-only, the same for every attempt of the round."""

    buffer: U8  # (slots.total,)
    slots: Slots
    norm: float  # l2 norm of the delta before it was encoded

    def chunk(self, c: int) -> U8:
        return self.buffer[self.slots.slot(c)]


@dataclass(frozen=True)
class SealedVector:
    """The mean delta, encoded: the same bytes on every member; read-only."""

    buffer: U8  # (slots.total,)
    slots: Slots
    digests: list[bytes]  # (chunks,)

    def chunk(self, c: int) -> U8:
        return self.buffer[self.slots.slot(c)]


@dataclass(frozen=True)
class Seal:
    """What an owner reports to the ledger."""

    chunk: int
    digest: bytes


OnSeal = Callable[[Seal], Awaitable[None]]


def encode_delta(anchor: F32, local: F32, codec: Codec, chunks: Chunks) -> EncodedVector:
    """Encode `anchor - local`, both (numel,) fp32. Heavy: call it in a worker thread.

    `NonFinite` names the first chunk that holds NaN or infinity.
    """
    if anchor.shape != (chunks.numel,) or local.shape != (chunks.numel,):
        raise ValueError(f"vectors of shapes {anchor.shape} and {local.shape} for {chunks.numel} elements")
    slots = Slots(chunks, codec)
    buffer = np.empty(slots.total, np.uint8)
    scratch = np.empty(min(chunks.chunk, chunks.numel), np.float32)
    squares = 0.0
    for c in range(chunks.count):
        span = chunks.span(c)
        delta = scratch[: chunks.size(c)]
        with np.errstate(over="ignore", invalid="ignore"):  # the codec refuses what comes of it
            np.subtract(anchor[span], local[span], out=delta)
        try:
            codec.encode(delta, buffer[slots.slot(c)])
        except NonFinite:
            raise NonFinite(f"the delta holds NaN or infinity in chunk {c}: training diverged") from None
        squares += float(np.square(delta, dtype=np.float64).sum())
    buffer.flags.writeable = False
    return EncodedVector(buffer, slots, squares**0.5)


async def reduce(
    plane: DataPlane,
    plan: Plan,
    me: NodeId,
    encoded: EncodedVector,
    codec: Codec,
    chunks: Chunks,
    on_seal: OnSeal,
    deadline: float = 600.0,
) -> SealedVector:
    """Carry out `plan` with the other members; `on_seal` is awaited for each chunk that this member seals.

    `PeerLost` names a member that failed, or that the attempt was still waiting for after `deadline`
    seconds. Cancel it when a newer attempt comes: all its connections close and no task is left.
    """
    plan.validate()
    if len(plan.owners) != chunks.count:
        raise BadPlan(f"{plan}: it has owners for {len(plan.owners)} chunks, the vector has {chunks.count}")
    if encoded.slots.chunks != chunks or encoded.buffer.size != Slots(chunks, codec).total:
        raise ValueError("the vector was encoded with another codec or for other chunks")
    attempt = _Attempt(plane, plan, plan.index(me), encoded, codec, chunks, on_seal)
    try:
        async with asyncio.timeout(deadline):
            return await attempt.run()
    except TimeoutError:
        raise attempt.late(deadline) from None


@dataclass
class _Peer:
    """Another member, as the attempt sees it."""

    index: int  # in plan.members
    member: PlanMember
    contributions: set[int]  # chunks of mine that it has not sent yet
    results: set[int]  # chunks of its own that it has not sent yet
    unsent: int  # frames that it has not taken yet
    sealed: asyncio.Queue[int] = field(default_factory=asyncio.Queue)  # chunks of mine to send to it
    spoken: asyncio.Event = field(default_factory=asyncio.Event)  # its last word was read, or will not come
    verdict: Kind | None = None
    refusal: str = ""

    @property
    def node(self) -> NodeId:
        return self.member.node


class _Attempt:
    def __init__(
        self,
        plane: DataPlane,
        plan: Plan,
        index: int,
        encoded: EncodedVector,
        codec: Codec,
        chunks: Chunks,
        on_seal: OnSeal,
    ) -> None:
        self.plane, self.plan, self.index = plane, plan, index
        self.encoded, self.codec, self.chunks, self.on_seal = encoded, codec, chunks, on_seal
        self.slots = Slots(chunks, codec)
        self.mine = plan.owned(index)
        total = sum(member.weight for member in plan.members)
        self.shares = [np.float32(member.weight / total) for member in plan.members]
        self.peers = [
            _Peer(i, member, set(self.mine), set(theirs := plan.owned(i)), len(theirs) + len(self.mine))
            for i, member in enumerate(plan.members)
            if i != index
        ]
        # Memory is committed by the kernel as it is written: about one encoded vector in all.
        self.inbox = np.empty((len(plan.members), sum(map(self.slots.size, self.mine))), np.uint8)
        starts = np.cumsum([0, *map(self.slots.size, self.mine)])
        self.inbox_slot = {c: slice(starts[i], starts[i + 1]) for i, c in enumerate(self.mine)}
        self.sealed = np.empty(self.slots.total, np.uint8)
        self.digests: list[bytes] = [b""] * chunks.count
        self.awaited = {c: len(self.peers) for c in self.mine}  # contributions
        self.complete: asyncio.Queue[int] = asyncio.Queue()  # chunks of mine with all contributions
        self.seals: asyncio.Queue[Seal] = asyncio.Queue()
        self.unreported = len(self.mine)

    async def run(self) -> SealedVector:
        if not self.peers:
            for c in self.mine:
                self.complete.put_nowait(c)
        try:
            with self.plane.attempt(self.plan) as arrivals:
                await self._work(arrivals)
        except BaseExceptionGroup as group:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from group
            raise _cause(group) from None
        else:
            self.sealed.flags.writeable = False
            return SealedVector(self.sealed, self.slots, self.digests)
        finally:
            # Tracebacks of cancelled tasks keep this object until the next garbage collection, not its memory.
            self.inbox, self.sealed = np.empty((0, 0), np.uint8), np.empty(0, np.uint8)

    async def _work(self, arrivals: Arrivals) -> None:
        links: list[Link] = []
        try:
            async with asyncio.TaskGroup() as group:
                work = [group.create_task(self._merge_all()), group.create_task(self._report())]
                listeners: list[asyncio.Task[None]] = []
                for peer in self.peers:
                    work.append(group.create_task(self._receive(peer, arrivals)))
                    work.append(group.create_task(self._send(peer, group, links, listeners)))
                await asyncio.wait(work)
                for listener in listeners:
                    listener.cancel()
            for link in links:
                link.close()
        finally:
            for link in links:
                link.abort()

    async def _send(
        self, peer: _Peer, group: asyncio.TaskGroup, links: list[Link], listeners: list[asyncio.Task[None]]
    ) -> None:
        """Dial `peer`, send it my contributions to its chunks, then my chunks as they are sealed."""
        try:
            link = await self.plane.dial(peer.node, peer.member.address)
        except Broken as error:
            peer.spoken.set()
            await self._lost(peer, str(error))
        links.append(link)
        listeners.append(group.create_task(self._listen(peer, link)))
        try:
            await link.send(Header(Kind.OPEN, self.plan.fence))
            for c in self.plan.owned(peer.index):
                await self._send_chunk(peer, link, Kind.CONTRIBUTION, c, self.encoded.chunk(c))
            for _ in self.mine:
                c = await peer.sealed.get()
                await self._send_chunk(peer, link, Kind.RESULT, c, self.sealed[self.slots.slot(c)])
        except Broken as error:
            await self._lost(peer, str(error))

    async def _send_chunk(self, peer: _Peer, link: Link, kind: Kind, c: int, payload: U8) -> None:
        await link.send(Header(kind, self.plan.fence, c, payload.size), payload.data)
        peer.unsent -= 1

    async def _listen(self, peer: _Peer, link: Link) -> None:
        """Hear the last word of `peer` on the stream that was dialled to it."""
        try:
            header = await link.receive(None)
            peer.verdict = header.kind
            if header.kind is Kind.REFUSED:
                peer.refusal = f"it refused this member's stream: {await link.sentence(header)}"
        except Broken as error:
            peer.refusal = str(error)
        finally:
            peer.spoken.set()
        match peer.verdict:
            case Kind.DONE | Kind.ABORT:
                return
            case _:
                await self._lost(peer, peer.refusal or "it sent a frame on a stream that was only to be read")

    async def _receive(self, peer: _Peer, arrivals: Arrivals) -> None:
        """Take the stream of `peer`: its contributions to my chunks, and its chunks."""
        try:
            async with asyncio.timeout(ARRIVAL):
                link = await arrivals.link(peer.node)
        except TimeoutError:
            await self._lost(peer, f"it opened no stream within {ARRIVAL:g} s")
        try:
            while peer.contributions or peer.results:
                await self._receive_chunk(peer, link)
        except Broken as error:
            await self._lost(peer, str(error))

    async def _receive_chunk(self, peer: _Peer, link: Link) -> None:
        header = await link.receive(None)
        c = header.chunk
        match header.kind:
            case Kind.CONTRIBUTION if c in peer.contributions:
                place = self.inbox[peer.index, self.inbox_slot[c]]
            case Kind.RESULT if c in peer.results:
                place = self.sealed[self.slots.slot(c)]
            case _:
                raise PeerLost(
                    peer.node, f"it sent {header.kind.name} of chunk {c}, which was not expected from it"
                )
        if header.fence != self.plan.fence:
            raise PeerLost(peer.node, f"it sent chunk {c} of {header.fence} in the stream of {self.plan.fence}")
        if header.length != place.size:
            raise PeerLost(peer.node, f"it sent {header.length} bytes of chunk {c}, expected {place.size}")
        await link.read_into(place.data)
        if header.kind is Kind.CONTRIBUTION:
            peer.contributions.remove(c)
            self.awaited[c] -= 1
            if not self.awaited[c]:
                self.complete.put_nowait(c)
        else:
            try:
                self.digests[c] = await asyncio.to_thread(self._examine, c)
            except Malformed as error:
                raise PeerLost(peer.node, f"chunk {c} as it sealed it was refused: {error}") from None
            peer.results.remove(c)

    def _examine(self, c: int) -> bytes:
        """Check a chunk that another member sealed, and digest it."""
        place = self.sealed[self.slots.slot(c)]
        self.codec.check(place, self.chunks.size(c))
        return digest(place)

    async def _merge_all(self) -> None:
        """Seal my chunks as their contributions become complete."""
        largest = max(map(self.chunks.size, self.mine), default=0)
        mean, x = np.empty(largest, np.float32), np.empty(largest, np.float32)
        for _ in self.mine:
            c = await self.complete.get()
            n = self.chunks.size(c)
            self.digests[c] = await asyncio.to_thread(self._merge, c, mean[:n], x[:n])
            for peer in self.peers:
                peer.sealed.put_nowait(c)
            self.seals.put_nowait(Seal(c, self.digests[c]))

    def _merge(self, c: int, mean: F32, x: F32) -> bytes:
        """Seal chunk `c`; `mean` and `x` are scratch of its size."""
        for i, (member, share) in enumerate(zip(self.plan.members, self.shares, strict=True)):
            payload = self.encoded.chunk(c) if i == self.index else self.inbox[i, self.inbox_slot[c]]
            term = x if i else mean
            try:
                self.codec.decode(payload, term)
            except Malformed as error:
                raise PeerLost(member.node, f"its contribution to chunk {c} was refused: {error}") from None
            term *= share
            if i:
                mean += term
        place = self.sealed[self.slots.slot(c)]
        self.codec.encode(mean, place)
        return digest(place)

    async def _report(self) -> None:
        for _ in self.mine:
            await self.on_seal(await self.seals.get())
            self.unreported -= 1

    async def _lost(self, peer: _Peer, sentence: str) -> Never:
        """Blame `peer`, unless it says, or has said, that it only gave up this attempt."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await peer.spoken.wait()
        if peer.verdict is Kind.ABORT:
            await asyncio.Event().wait()  # evidence of another task, the coordinator or the deadline ends it
        raise PeerLost(peer.node, peer.refusal if peer.verdict is Kind.REFUSED else sentence)

    def late(self, deadline: float) -> Exception:
        """Whom the attempt was waiting for when its deadline passed."""
        within = f"within {deadline:g} s"
        for peer in self.peers:  # they wait for nobody
            if peer.contributions:
                return PeerLost(peer.node, f"{len(peer.contributions)} of its contributions did not come {within}")
        for peer in self.peers:
            if peer.results:
                return PeerLost(peer.node, f"{len(peer.results)} of its chunks did not come sealed {within}")
        for peer in self.peers:
            if peer.unsent:
                return PeerLost(peer.node, f"it left {peer.unsent} chunks untaken {within}")
        return Unreachable(f"{self.unreported} seals were not taken by the coordinator {within}")


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure to report: what no peer can cause before what a peer did, the first of each."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_cause(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in leaves if not isinstance(error, PeerLost)), leaves[0])
