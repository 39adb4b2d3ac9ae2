"""The all-reduce of one round among the members of a plan.

    DeltaEncoder     each member, once a round: anchor - local, chunk by chunk, encoded (`encoding`)
    Reduction        each member, from the round's first plan to its commit:

        contributions   member --chunk--> its owner
        merge           owner: decode, weigh, sum in plan order, encode the mean once, digest it: sealed
        results         owner --sealed chunk--> every other member

Two hops and two quantisations however many members there are. Chunks that the plan reduces in two levels (`plan`)
take two hops and one quantisation more: a relay averages and encodes what it has of its region as an owner does,
and the owner averages its own region's contributions and the other regions' means. When a member is lost, the next
plan of the coordinator gives the chunks that it owned and had not sealed to others; everything else goes on.
Inputs are never written to, and nothing is applied before the commit.

The mean of chunk c is, in fp32, each operation rounded once and in this order, over what arrived,

    mean = 0;  mean += share[i] * x[i], i in plan order         x[i] = decode(contribution of members[i])
    share[i] = fp32(weight[i] / (sum of the weights that arrived) * scale[i])          all but its result in fp64

where the coordinator's scale of an outsized delta is below 1. `sealing` has the other ways to merge and to seal.

Of two levels, a region's mean is one term, at its relay's place in the order, weighed with all that is in it. It
is encoded with the run's codec, like everything: the slow links would have to carry what a finer one adds. For
int8 the error is then 1.1 to 1.2 times that of a flat reduce.

Which contributions these were is in the ledger. This file binds what decides (`exchange`) to what carries
(`peers`), and does the arithmetic, in threads.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol, assert_never

import numpy as np

from atoll.comm.allreduce.delta_encoder import EncodedVector, squared_norm
from atoll.comm.allreduce.effects import (
    Effect,
    FrameVerdict,
    FreeContributions,
    FreeSealed,
    MergeChunk,
    ReportComplete,
    ReportForged,
    ReportMissing,
    ReportOrphans,
    ReportSeal,
    SendFrame,
    SumRegion,
)
from atoll.comm.allreduce.protocol import ReduceProtocol
from atoll.comm.allreduce.sealing import SealFormat, Term, UnusableContribution, mean_of
from atoll.comm.bitmap import bitmap, places
from atoll.comm.buffers import thread_scratch
from atoll.comm.byte_view import U8, Octets
from atoll.comm.chunks import Chunks
from atoll.comm.codecs import zstd
from atoll.comm.codecs.codec import Codec, Malformed
from atoll.comm.digest import digest, root
from atoll.comm.ids import NodeId
from atoll.comm.plan import Fence, InvalidPlan, Plan, PlanMember
from atoll.comm.transport.connection import LinkBroken
from atoll.comm.transport.frames import FrameKind, Header
from atoll.comm.transport.peer_links import PeerLinks, Waiting
from atoll.comm.workers import workers

TICK = 0.3  # seconds between two looks at the clock
ASK = 1.5  # seconds of silence after which a peer is asked what it has
SILENT = 5.0  # seconds of silence after which a peer is lost
SLOW = 20.0  # seconds that the next chunk of a peer may take at least
SPREADS = 8  # median absolute deviations beyond the median after which a chunk is late
IMPATIENT = 3.0  # seconds; a machine that is busy with other things may be silent for so long
PULLS = 4  # sealed chunks of one late owner that others are asked for at once
# What a RESYNC is for, in place of its chunk. Of what is on its way, only what was lost with a link is sent again.
TELL, TELL_AND_ASK, PING, PONG = range(4)
ROUNDED = 1 + 1e-9  # what two sums of squares may differ by
OWN = np.empty(0, np.uint8)  # in the place of this member's own contribution
WINDOW = 0.5  # of an encoded vector: contributions that an owner holds at once at most


@dataclass(frozen=True)
class SealedVector:
    """The mean delta, encoded: the same bytes on every member."""

    chunks: tuple[U8, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SealReport:
    """What an owner reports to the ledger."""

    chunk: int
    since: int  # the attempt in which it got the chunk
    digest: bytes
    inputs: tuple[int, ...]  # places in the plan of those whose contributions are in it


class ReduceListener(Protocol):
    """To whom a reduction tells what the coordinator must know. Called in the event loop."""

    def sealed(self, plan: Plan, seal: SealReport, more: bool) -> None:
        """This member has sealed a chunk; `more`: others will follow."""

    def orphans(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None:
        """Sealed chunks without an owner that are here."""

    def lost(self, plan: Plan, node: NodeId, sentence: str) -> None:
        """A member cannot be reached, or does not do its part."""

    def held(self, plan: Plan, root: bytes, proven: bool) -> None:
        """Every sealed chunk is here; `proven`: and is the ledger's."""

    def forged(self, plan: Plan, node: NodeId, chunk: int) -> None:
        """The sealed chunk as this member gave it is not the ledger's."""

    def lacking(self, plan: Plan, chunks: tuple[int, ...]) -> None:
        """Nobody gave these sealed chunks as the ledger has them."""


class Reduction:
    """One member's part in the reduce of one round. `run` it, give it plans, read `result` when it is held."""

    def __init__(
        self,
        peers: PeerLinks,
        me: NodeId,
        encoded: EncodedVector | None,
        codec: Codec,
        chunks: Chunks,
        plan: Plan,
        outcome: ReduceListener,
        sealing: SealFormat | None = None,
        came: Callable[[int, U8], None] | None = None,
    ) -> None:
        """`encoded`: None for a member that only owns chunks. `plan`: the first one, valid or `InvalidPlan`.
        `sealing`: None for the plain mean, encoded with `codec`, as contributions are. `came` is told of each
        sealed chunk that is here; before the commit another one may still take its place."""
        self.round, self.me = plan.round, me
        self._peers, self._encoded, self._codec, self._chunks = peers, encoded, codec, chunks
        self._outcome, self._came = outcome, came or _nobody
        others = max(sum(m.weight > 0 for m in plan.members) - 1, 1)
        self._exchange = ReduceProtocol(me, chunks.count, int(WINDOW * chunks.count / others))
        self._sizes = [codec.size(chunks.size(c)) for c in range(chunks.count)]
        self._mean = mean_of(codec)  # of a region's contributions
        self._sealing = sealing = sealing or self._mean
        one, two = (sealing.size(chunks.size(0), terms) for terms in (1, 2))
        self._fixed = one == two  # a sealed chunk has the same size whatever is in it
        self._largest = max(self._sizes[0], one)  # bytes of a buffer
        self._sealed: list[U8 | None] = [None] * chunks.count
        self._inbox: dict[tuple[int, int], U8] = {}  # contributions, and regions' means, by chunk and place
        self._partials: dict[int, U8] = {}  # means of this region, with the places of those who are in them
        self._replanned = asyncio.Event()
        self._merges: set[asyncio.Task[None]] = set()
        self._readers = Counter[int]()  # by chunk: of these, who may read contributions to it in their threads
        self._sent = Counter[int]()  # by chunk: how often this member's own was sent, or begun to be
        self._progress: dict[NodeId, float] = {}  # when a peer's last chunk came, in the loop's seconds
        self._gaps = deque[float]((), 64)  # seconds from one chunk of a peer to its next
        self._pulled_at = self._planned_at = 0.0  # in the loop's seconds
        self._reported: dict[NodeId, float] = {}  # when a peer was said to be lost
        self._fault: BaseException | None = None  # of this node's own
        self._begun = self._over = False
        self._only_plan = True  # so far
        self.plan = plan
        self._check(plan)

    async def run(self) -> None:
        """Take part until cancelled: the others may need what is here until the commit."""
        try:
            self._begun = True
            self._peers.begin(self)
            self.replan(self.plan)
            while True:
                await asyncio.sleep(TICK)
                if self._fault is not None:
                    raise self._fault
                self._look(asyncio.get_running_loop().time())
        finally:
            self._over = True
            self._replanned.set()  # no plan comes any more
            self._peers.end(self)
            for task in self._merges:
                task.cancel()
            self._inbox.clear()  # a merge may still read from these in its thread: they are not used again

    def replan(self, plan: Plan) -> None:
        """Go on under this plan, the first or a newer one of the round; begin under it, if that is yet to come."""
        self._check(plan)
        self._only_plan = self._only_plan and plan is self.plan
        self.plan = plan
        if not self._begun:
            return
        place = plan.index(self.me)
        me = plan.members[place]
        now = asyncio.get_running_loop().time()
        others = [m for m in plan.members if not m.gone and m.node != self.me]
        self._planned_at = now
        self._progress = {m.node: self._progress.get(m.node, now) for m in others}
        order = {m.node: i for i, m in enumerate(plan.members)}

        def primary(member: PlanMember) -> bool:
            return not member.leaf and (me.leaf or place < order[member.node])

        self._peers.expect([m for m in others if not (m.leaf and me.leaf)], primary)
        parts = plan.receive_shares(place)
        for member in others:  # all that send to a peer share its link
            self._peers.pace(member.node, member.down, parts[order[member.node]])
        mine = plan.region(place)
        near = {m.node for m in others if plan.region(order[m.node]) == mine}
        self._peers.near = near if mine >= 0 else None
        self._reported.clear()
        self._do(self._exchange.replan(plan))
        self._replanned.set()
        self._replanned = asyncio.Event()

    def holds(self, root_: bytes) -> bool:
        """Whether every sealed chunk is here, and their digests are those of this root."""
        digests = [d for d in self._exchange.digests if d is not None]
        return len(digests) == self._chunks.count and root(digests) == root_

    def prove(self, ledger: Sequence[bytes]) -> None:
        """These are the digests of all sealed chunks, by the ledger: members were found to hold others."""
        if len(ledger) == self._chunks.count and not self._over:
            self._do(self._exchange.prove(ledger))

    @property
    def result(self) -> SealedVector:
        """The sealed chunks; all are here once `held` was called, and while no newer plan reopened one."""
        digests = tuple(d for d in self._exchange.digests if d is not None)
        chunks = tuple(s for s in self._sealed if s is not None)
        if len(digests) < self._chunks.count or len(chunks) < self._chunks.count:
            raise RuntimeError("not every sealed chunk is here")
        return SealedVector(chunks, digests)

    def _check(self, plan: Plan) -> None:
        plan.validate()
        if len(plan.owners) != self._chunks.count:
            raise InvalidPlan(
                f"{plan}: it has owners for {len(plan.owners)} chunks, there are {self._chunks.count}"
            )
        place = plan.index(self.me)
        if self._encoded is None and plan.members[place].weight:
            raise InvalidPlan(f"{plan}: it has a weight for {self.me}, which brings no delta")

    # What the links ask (atoll.comm.transport.peer_links.FrameHandler)

    async def place(self, node: NodeId, header: Header) -> U8 | None:
        kind, c, length = header.kind, header.chunk, header.length
        if kind in (FrameKind.MERGED, FrameKind.WANT, FrameKind.LACK, FrameKind.RESYNC):
            bits = -(-self._chunks.count // 8)
            resync = kind is FrameKind.RESYNC
            if length != (3 * bits if resync else 0) or not (resync or self._has(c)):
                raise LinkBroken(f"a frame {kind.name} of {length} bytes about chunk {c}")
            settled = resync or await self._settled(node, header) is FrameVerdict.TAKE
            return np.empty(length, np.uint8) if settled else None
        if kind not in (FrameKind.CONTRIBUTION, FrameKind.PARTIAL, FrameKind.SEALED) or not self._has(c):
            raise LinkBroken(f"a frame {kind.name} about chunk {c}, of {self._chunks.count}")
        follows = kind is FrameKind.PARTIAL or (kind is FrameKind.SEALED and not self._fixed)
        if follows and await self._settled(node, header) is not FrameVerdict.TAKE:
            return None  # how long it is to be follows from the plan
        if not self._fits(header):
            raise LinkBroken(f"it sent {length} bytes of chunk {c}, expected {self._size(kind, c) or 'others'}")
        if await self._settled(node, header) is not FrameVerdict.TAKE:
            return None
        return self._buffer(length)

    def arrived(self, node: NodeId, header: Header, payload: U8) -> None:
        if self._over:
            return
        x, c = self._exchange, header.chunk
        match header.kind:
            case FrameKind.CONTRIBUTION | FrameKind.PARTIAL | FrameKind.SEALED:
                self._arrived_chunk(node, header, payload)
            case FrameKind.MERGED:
                self._do(x.peer_merged(node, c))
            case FrameKind.WANT:
                self._do(x.chunk_wanted(node, c))
            case FrameKind.LACK:
                self._do(x.chunk_lacked(node, c))
            case FrameKind.RESYNC:
                bits = len(payload) // 3
                here, merged, sealed = (payload[i * bits : (i + 1) * bits].tobytes() for i in range(3))
                if c in (TELL, TELL_AND_ASK):
                    self._do(x.resync(node, header.fence.attempt, here, merged, sealed))
                if c in (TELL_AND_ASK, PING):
                    self._peers.peer(node).post((FrameKind.RESYNC, TELL if c == TELL_AND_ASK else PONG, 0))
            case _:
                raise LinkBroken(f"a frame {header.kind.name} on a link")

    async def frame(self, node: NodeId, waiting: Waiting) -> tuple[Header, memoryview] | None:
        kind, c, since = waiting
        place, fence = self.plan.index(self.me), self._fence(since)
        payload: U8 | None = None
        match kind:
            case FrameKind.CONTRIBUTION:
                self._sent[c] += 1
                payload = await self._encoded.chunk(c) if self._encoded is not None else None
            case FrameKind.PARTIAL:
                payload = self._partials.get(c)
            case FrameKind.SEALED:
                payload = self._sealed[c]
            case FrameKind.RESYNC:
                data = b"".join(self._exchange.resync_state(node))
                return Header(kind, self.plan.fence, c, len(data), place=place), memoryview(data)
            case _:
                return Header(kind, fence, c, place=place), memoryview(b"")
        if payload is None:
            return None
        far = self._peers.peer(node).far  # a short path is seldom slow, and what it carries hard to tell
        able = self._fixed or kind is not FrameKind.SEALED
        if far and able and (packed := await self._packed(kind, c, since, payload)) is not None:
            return Header(kind, fence, c, len(packed), packed=True, place=place), memoryview(packed)
        return Header(kind, fence, c, payload.size, place=place), payload.data

    def joined(self, node: NodeId) -> None:
        self._peers.peer(node).post((FrameKind.RESYNC, TELL_AND_ASK, 0))

    def lost(self, node: NodeId, sentence: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._reported.get(node, -SILENT) >= SILENT and node in self._progress:
            self._reported[node] = now
            self._outcome.lost(self.plan, node, sentence)

    # Chunks

    def _size(self, kind: FrameKind, c: int) -> int:
        """Bytes of such a payload; 0: it is told by its contents."""
        if kind is FrameKind.SEALED:
            return self._sealing.size(self._chunks.size(c), 1) if self._fixed else 0
        return self._sizes[c] + (-(-len(self.plan.regions) // 8) if kind is FrameKind.PARTIAL else 0)

    def _fits(self, header: Header) -> bool:
        """Whether a payload can have this length."""
        kind, c, length = header.kind, header.chunk, header.length
        if kind is FrameKind.SEALED and not header.packed:
            return self._sealing.fits(length, self._chunks.size(c), len(self.plan.members))
        size = self._size(kind, c)
        return length < size if header.packed else length == size

    async def _packed(self, kind: FrameKind, c: int, since: int, payload: U8) -> bytes | None:
        return await self._peers.squeeze.pack(kind, c, since, payload, self._codec.apart(self._chunks.size(c)))

    def _unpacked(self, c: int, frame: U8, size: int) -> U8:
        whole = self._buffer(size)
        try:
            zstd.unpack_shuffled(frame.data, whole, self._codec.apart(self._chunks.size(c)))
        except Malformed:
            self._give_back(whole)
            raise
        finally:
            self._give_back(frame)
        return whole

    def _has(self, c: int) -> bool:
        return 0 <= c < self._chunks.count

    def _fence(self, since: int) -> Fence:
        fence = self.plan.fence
        return Fence(fence.incarnation, fence.epoch, fence.round, since)

    async def _settled(self, node: NodeId, header: Header) -> FrameVerdict:
        """What becomes of a frame, once this member has its sender's plan. `LinkBroken` if that does not come in
        time: over another link the frame comes again."""
        ask = (node, header.place, header.kind, header.chunk, header.fence.attempt)
        if (verdict := self._exchange.verdict(*ask)) is not FrameVerdict.HOLD:
            return verdict
        try:
            async with asyncio.timeout(SLOW):
                while (verdict := self._exchange.verdict(*ask)) is FrameVerdict.HOLD and not self._over:
                    await self._replanned.wait()
        except TimeoutError:
            raise LinkBroken(
                f"the plan under which it sent a frame {header.kind.name} did not come here in time"
            ) from None
        return FrameVerdict.DISCARD if verdict is FrameVerdict.HOLD else verdict

    def _arrived_chunk(self, node: NodeId, header: Header, payload: U8) -> None:
        kind, c, since = header.kind, header.chunk, header.fence.attempt
        now = asyncio.get_running_loop().time()
        if node in self._progress:
            self._gaps.append(now - self._progress[node])
            self._progress[node] = now
        if self._exchange.verdict(node, header.place, kind, c, since) is not FrameVerdict.TAKE:
            self._give_back(payload)
            return
        try:
            whole = self._unpacked(c, payload, self._size(kind, c)) if header.packed else payload
            if kind is FrameKind.SEALED:
                self._sealing.check(whole, self._chunks.size(c))
        except Malformed as error:
            self.lost(node, sentence := f"chunk {c} as it sent it was refused: {error}")
            raise LinkBroken(
                sentence
            ) from None  # if it was right when it was sent, it comes again over another link
        if kind is FrameKind.SEALED:
            taken = self._exchange.sealed_arrived(c, sum_ := digest(whole), node)
            if self._exchange.digest(c) == sum_:
                self._is_sealed(c, whole, node == self._exchange.source(c))
            self._do(taken)
        elif kind is FrameKind.PARTIAL:
            mean, listed = whole[: self._sizes[c]], places(whole[self._sizes[c] :].tobytes())
            if (effects := self._exchange.region_sum_arrived(node, c, listed)) is None:
                self.lost(node, f"its region's mean of chunk {c} was refused: it claims places of others")
                return
            self._inbox[c, self.plan.index(node)] = mean
            self._do(effects)
        else:
            self._inbox[c, self.plan.index(node)] = whole
            self._do(self._exchange.contribution_arrived(node, c))

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendFrame(node, kind, c, since):
                    self._peers.peer(node).post((kind, c, since))
                case MergeChunk() | SumRegion():
                    self._readers[effect.chunk] += 1
                    task = asyncio.create_task(self._merge(effect, self._terms(effect)))
                    self._merges.add(task)
                    task.add_done_callback(self._wound_up)
                case ReportSeal(c, since, sum_, inputs):
                    self._outcome.sealed(
                        self.plan, SealReport(c, since, sum_, inputs), self._exchange.chunks_to_seal > 0
                    )
                case FreeContributions(c):
                    for key in [key for key in self._inbox if key[0] == c]:
                        payload = self._inbox.pop(key)
                        if not self._readers[c]:  # else a merge that has become void may still read from it
                            self._give_back(payload)
                    self._partials.pop(c, None)
                case FreeSealed(c):
                    self._sealed[c] = None
                case ReportOrphans(here):
                    self._outcome.orphans(self.plan, here)
                case ReportComplete(root_, proven):
                    self._outcome.held(self.plan, root_, proven)
                case ReportForged(c, node):
                    self._outcome.forged(self.plan, node, c)
                case ReportMissing(chunks):
                    self._outcome.lacking(self.plan, chunks)
                case _:
                    assert_never(effect)

    def _terms(self, order: MergeChunk | SumRegion) -> list[Term]:
        """What is to be summed, taken at once: a newer plan may free the contributions before the merge begins.
        This member's own is yet to be put in."""
        c, plan = order.chunk, self.plan
        total = sum(plan.members[i].weight for i in order.inputs)
        sums = dict(order.sums) if isinstance(order, MergeChunk) else {}
        inside = {i for listed in sums.values() for i in listed}
        direct = {i: (i,) for i in order.inputs if i not in inside}
        terms: list[Term] = []
        for i, listed in sorted((direct | sums).items()):
            mine = plan.members[i].node == self.me and (c, i) not in self._inbox
            assert self._encoded is not None or not mine
            payload = OWN if mine else self._inbox[c, i]
            share = sum(plan.members[k].weight for k in listed) / total
            terms.append((i, payload, share * (plan.members[i].scale if i in direct else 1.0)))
        return terms

    async def _merge(self, order: MergeChunk | SumRegion, terms: Sequence[Term]) -> None:
        c, plan = order.chunk, self.plan
        partial = isinstance(order, SumRegion)
        sealing = self._mean if partial else self._sealing
        size = sealing.size(self._chunks.size(c), len(terms))
        if self._encoded is not None:
            if (own := await self._encoded.chunk(c)) is None:
                return  # this member's delta is of no more use, nor is its part in the reduce
            terms = [(i, own if payload is OWN else payload, share) for i, payload, share in terms]
        place = np.empty(self._size(FrameKind.PARTIAL, c), np.uint8) if partial else self._buffer(size)
        loop = asyncio.get_running_loop()
        try:
            relays = set() if isinstance(order, SumRegion) else {relay for relay, _ in order.sums}
            told = {i: plan.members[i].norm for i, _, _ in terms if i not in relays}
            bounds = {i: norm for i, norm in told.items() if norm < math.inf}
            work = sealing, c, terms, plan.length, self._chunks.size(c), place[:size]
            sum_ = await loop.run_in_executor(workers(), merge, self._codec, bounds, *work)
        except UnusableContribution as refused:
            self._give_back(place)
            again = self._exchange.contribution_refused(c, order.since, refused.place)
            if again is not None:
                self._inbox.pop((c, refused.place), None)
                self._do(again)
                sentence = f"its contribution to chunk {c} was refused: {refused.sentence}"
                self.lost(plan.members[refused.place].node, sentence)
            return
        finally:
            self._readers[c] -= 1
        if partial:
            place[size:] = np.frombuffer(bitmap(order.inputs, len(plan.regions)), np.uint8)
            effects = self._exchange.region_summed(c, order.since, order.inputs)
            self._do(effects)
            if effects:
                self._partials[c] = place
            return
        effects = self._exchange.chunk_merged(c, order.since, order.inputs, sum_)
        if effects:
            self._is_sealed(c, place, True)
        else:
            self._give_back(place)  # the chunk has another owner now
        self._do(effects)

    def _is_sealed(self, c: int, payload: U8, of_owner: bool) -> None:
        """Its sealed bytes are here. This member's own are of no more use then, unless the chunk starts anew."""
        self._sealed[c] = payload
        self._came(c, payload)
        own = self._encoded.let_go(c) if self._encoded is not None else None
        # If it may have been sealed without them, they may still be on their way, or being read in a merge.
        if own is not None and of_owner and self._only_plan and self._sent[c] <= 1:
            self._give_back(own)

    def _wound_up(self, task: "asyncio.Task[None]") -> None:
        self._merges.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error

    def _buffer(self, size: int) -> U8:
        """Room for an encoded chunk."""
        if size > self._largest:
            return np.empty(size, np.uint8)
        return self._peers.buffers.take(size, self._largest)

    def _give_back(self, buffer: U8) -> None:
        self._peers.buffers.give(buffer)

    # The clock

    def _look(self, now: float) -> None:
        """See who is late."""
        owed = dict(self._exchange.dues())
        owing = set(self._exchange.contributors_due())
        late = late_after(self._gaps)
        for node in owed.keys() & self._progress.keys():
            heard, came = self._peers.heard(node), max(self._progress[node], self._planned_at)
            if heard is None:
                continue  # whoever dials it says so
            heard = max(heard, self._planned_at)  # before, nobody had anything to say
            if now - heard > SILENT:
                self.lost(node, f"it has been silent for {now - heard:.0f} s")
            elif now - heard > ASK:
                self._peers.peer(node).post((FrameKind.RESYNC, PING, 0))
            if node in owing and now - came > max(SLOW, 3 * late):
                self.lost(node, f"its {owed[node]} did not come for {now - came:.0f} s")
        if now - self._pulled_at > max(late, IMPATIENT):
            self._pulled_at = now
            self._pull(now - max(late, IMPATIENT))

    def _pull(self, before: float) -> None:
        """Ask others for sealed chunks of owners from which nothing came since."""
        asked = dict.fromkeys((n for n, came in self._progress.items() if came < before), 0)
        for c in self._exchange.missing() if asked else ():
            owner = self._exchange.source(c)
            if owner in asked and asked[owner] < PULLS:
                asked[owner] += 1
                self._do(self._exchange.pull(c, owner) or self._exchange.pull(c))


def late_after(gaps: Sequence[float]) -> float:
    """Seconds after which the next chunk of a peer is late, by those that others took."""
    if len(gaps) < 8:
        return SILENT
    middle = median(gaps)
    return middle + SPREADS * median(abs(gap - middle) for gap in gaps)


def _nobody(c: int, payload: U8) -> None:
    pass


def merge(
    codec: Codec,
    bounds: Mapping[int, float],
    sealing: SealFormat,
    c: int,
    terms: Sequence[Term],
    length: float,
    numel: int,
    out: U8,
) -> bytes:
    """Seal chunk `c` into `out`; returns its digest. `bounds`: norms that terms may have at most, by place."""
    for place, payload, _ in terms:
        if place in bounds:
            _refuse_beyond(codec, place, payload, bounds[place], numel)
    sealing.seal(c, terms, length, numel, out)
    return digest(out)


def _refuse_beyond(codec: Codec, place: int, payload: Octets, bound: float, numel: int) -> None:
    """Refuse a contribution of a larger norm than its sender told of all its chunks together."""
    decoded = thread_scratch(numel)
    try:
        codec.decode(payload, decoded)
    except Malformed as error:
        raise UnusableContribution(place, str(error)) from None
    if (norm := math.sqrt(squared_norm(decoded))) > bound * ROUNDED:
        raise UnusableContribution(
            place, f"its norm is {norm:.3g}, and that of all its chunks was told as {bound:.3g}"
        )
