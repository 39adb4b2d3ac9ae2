"""The all-reduce of one round among the members of a plan.

    DeltaEncoder     each member, once a round: anchor - local, chunk by chunk, encoded (`delta_encoder`)
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

Which contributions these were is in the ledger. This file binds what decides (`protocol`) to what carries
(`peer_links`), computes (`merge_executor`) and watches the clock (`late_peers`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np

from atoll.comm.allreduce import control_frames
from atoll.comm.allreduce.control_frames import CONTROL_KINDS
from atoll.comm.allreduce.delta_encoder import EncodedVector
from atoll.comm.allreduce.delta_samples import DeltaSample
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
from atoll.comm.allreduce.evidence_requests import ANSWERS, REQUESTS, EvidenceRequests
from atoll.comm.allreduce.input_signer import InputSigner
from atoll.comm.allreduce.late_peers import AskState, LatePeers, Lost, Ping, PullFrom
from atoll.comm.allreduce.listener import ReduceListener, SealReport
from atoll.comm.allreduce.merge_executor import MergeExecutor, PendingMerge
from atoll.comm.allreduce.payloads import Payloads
from atoll.comm.allreduce.protocol import ReduceProtocol
from atoll.comm.allreduce.reduce_evidence import ReduceEvidence
from atoll.comm.allreduce.routes import links
from atoll.comm.allreduce.seal_lengths import SealLengths
from atoll.comm.allreduce.sealing import SealFormat, UnusableContribution, mean_of
from atoll.comm.bitmap import places
from atoll.comm.byte_view import U8, Octets, view
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import Codec, Malformed
from atoll.comm.digest import digest, root
from atoll.comm.ids import NodeId
from atoll.comm.plan import NOBODY, Fence, InvalidPlan, Plan
from atoll.comm.transport.connection import LinkBroken
from atoll.comm.transport.frames import FrameKind, Header, QueuedFrame
from atoll.comm.transport.peer_links import PeerLinks

TICK = 0.3  # seconds between two looks at the clock
PLAN_WITHIN = 20.0  # seconds that a frame of an attempt to come is held
WINDOW_SHARE = 0.5  # share of an encoded vector that an owner holds in contributions at once, at most


@dataclass(frozen=True)
class SealedVector:
    """The mean delta, encoded: the same bytes on every member."""

    chunks: tuple[U8, ...]
    digests: tuple[bytes, ...]


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
        listener: ReduceListener,
        sealing: SealFormat | None = None,
        on_sealed: Callable[[int, U8], None] | None = None,
        signer: InputSigner | None = None,
        samples: Callable[[int], DeltaSample | None] | None = None,
    ) -> None:
        """`encoded`: None for a member that only owns chunks. `plan`: the first one, valid or `InvalidPlan`.
        `sealing`: None for the plain mean, encoded with `codec`, as contributions are. `on_sealed` is called with
        each sealed chunk that is here; before the commit another one may still take its place. `signer`: for what
        this member sends, where the plan has a salt; None: nobody can hold it to that. `samples`: of chunks'
        deltas of an earlier round, with which contributions are compared where the plan looks at norms."""
        self.round, self.me = plan.round, me
        self._peers, self._encoded, self._codec, self._chunks = peers, encoded, codec, chunks
        self._listener, self._on_sealed = listener, on_sealed or _nobody
        others = max(sum(m.weight > 0 for m in plan.members) - 1, 1)
        self._exchange = ReduceProtocol(me, chunks.count, int(WINDOW_SHARE * chunks.count / others))
        self._payloads = Payloads(codec, chunks, sealing or mean_of(codec), peers.buffers, peers.compressor)
        self._executor = MergeExecutor(me, encoded, self._payloads, signer, samples)
        self._evidence = ReduceEvidence(me, encoded, signer)
        self._requests = EvidenceRequests(lambda node, queued: peers.peer(node).queue.post(queued))
        self._late = LatePeers()
        self._lengths = SealLengths()
        self._sealed: list[U8 | None] = [None] * chunks.count
        self._region_means: dict[int, U8] = {}  # by chunk; with the places of those who are in them
        self._replanned = asyncio.Event()
        self._merges: set[asyncio.Task[None]] = set()
        self._terms: dict[int, SealReport] = {}  # by chunk: what is told of the terms of this member's latest mean
        self._sent = Counter[int]()  # by chunk: how often this member's own was sent, or begun to be
        self._refused = set[NodeId]()  # whose contribution was of no use in a merge, under the latest plan
        self._shown = set[int]()  # chunks whose own contributions auditors asked for
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
            self._requests.end()
            for task in self._merges:
                task.cancel()
            self._executor.inbox.clear()

    def replan(self, plan: Plan) -> None:
        """Go on under this plan, the first or a newer one of the round; begin under it, if that is yet to come.
        `InvalidPlan` if it is not for this member, or none that can be carried out."""
        self._check(plan)
        self._only_plan = self._only_plan and plan is self.plan
        self.plan = plan
        if not self._begun:
            return
        place = plan.index(self.me)
        now = asyncio.get_running_loop().time()
        others = [m for m in plan.members if not m.gone and m.node != self.me]
        self._late.replan(now, [m.node for m in others], plan.patience)
        order = {m.node: i for i, m in enumerate(plan.members)}
        self._peers.expect(links(plan, self.me))
        shares = plan.receive_shares(place)
        for member in others:  # all that send to a peer share its link
            self._peers.pace(member.node, member.down, shares[order[member.node]])
        mine = plan.region(place)
        near = {m.node for m in others if plan.region(order[m.node]) == mine}
        self._peers.estimator.region_peers = near if mine >= 0 else None
        self._lengths.begin_attempt()
        self._do(self._exchange.replan(plan))
        self._ask_refused_anew([m.node for m in others])
        self._tell_lengths()
        self._replanned.set()
        self._replanned = asyncio.Event()

    def _ask_refused_anew(self, others: Sequence[NodeId]) -> None:
        """A new plan that keeps a member whose contribution was refused gives it another try: it is asked at once
        to send what is missing here. What was spoiled on the way comes so, and whose bytes are never of use is
        named as soon as they are refused again, not only when it is late."""
        refused, self._refused = self._refused, set()
        self._do([control_frames.ask_state(node) for node in others if node in refused])

    def holds(self, root_: bytes) -> bool:
        """Whether every sealed chunk is here, with digests of this root."""
        digests = [d for d in self._exchange.digests if d is not None]
        return len(digests) == self._chunks.count and root(digests) == root_

    @property
    def progress(self) -> tuple[int, int]:
        """How many sealed chunks are here, and of how many."""
        return sum(d is not None for d in self._exchange.digests), self._chunks.count

    def prove(self, ledger: Sequence[bytes]) -> None:
        """Hold the sealed chunks to the ledger's digests, one for each chunk: members were found to have
        others."""
        if len(ledger) == self._chunks.count and not self._over:
            self._do(self._exchange.prove(ledger))

    @property
    def result(self) -> SealedVector:
        """The sealed chunks. All are here once the listener's `held` was called, and while no newer plan reopened
        one; `RuntimeError` otherwise."""
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

    # What the links ask (atoll.comm.transport.frame_handler.FrameHandler)

    async def buffer_for(self, node: NodeId, header: Header) -> U8 | None:
        """Memory of `header.length` bytes for the payload of a frame of `node`; None: it is of no use. Waits for
        the plan under which the frame was sent where the answer depends on that. Raises `LinkBroken` if that plan
        does not come in time, or no such peer may send the frame."""
        kind, c, length = header.kind, header.chunk, header.length
        if kind in CONTROL_KINDS:
            bits = -(-self._chunks.count // 8)
            resync = kind is FrameKind.RESYNC
            if length != (3 * bits if resync else 0) or not (resync or self._has(c)):
                raise LinkBroken(f"a frame {kind.name} of {length} bytes about chunk {c}")
            settled = resync or await self._settled(node, header) is FrameVerdict.TAKE
            return np.empty(length, np.uint8) if settled else None
        if kind in ANSWERS and length == 0 and self._has(c):
            return np.empty(0, np.uint8)
        if kind in REQUESTS:
            return self._requests.buffer_for(node, kind, c, length)
        if kind not in (FrameKind.CONTRIBUTION, FrameKind.PARTIAL, FrameKind.SEALED) or not self._has(c):
            raise LinkBroken(f"a frame {kind.name} about chunk {c}, of {self._chunks.count}")
        follows = kind is FrameKind.PARTIAL or (kind is FrameKind.SEALED and not self._payloads.fixed_seal_size)
        if follows and await self._settled(node, header) is not FrameVerdict.TAKE:
            return None  # how long it is to be follows from the plan
        if not self._payloads.fits(header, self.plan):
            expected = self._payloads.size(kind, c, self.plan) or "others"
            raise LinkBroken(f"it sent {length} bytes of chunk {c}, expected {expected}")
        if await self._settled(node, header) is not FrameVerdict.TAKE:
            return None
        return self._payloads.buffer(length)

    def arrived(self, node: NodeId, header: Header, payload: U8) -> None:
        """Take a whole frame of `node` in; nothing once the reduction is over. Raises `LinkBroken` if the payload
        is malformed."""
        if self._over:
            return
        c = header.chunk
        match header.kind:
            case FrameKind.CONTRIBUTION | FrameKind.PARTIAL | FrameKind.SEALED:
                self._arrived_chunk(node, header, payload)
            case FrameKind.GET_INPUT | FrameKind.GET_RECEIPT:
                self._requests.asked_by(node, header.kind, c)
            case FrameKind.INPUT | FrameKind.RECEIPT:
                self._requests.arrived(node, header.kind, c, payload)
            case kind if kind in CONTROL_KINDS:
                attempt = header.fence.attempt
                self._do(control_frames.receive(self._exchange, node, kind, c, attempt, payload.tobytes()))
            case _:
                raise LinkBroken(f"a frame {header.kind.name} on a link")

    async def frame(self, node: NodeId, queued: QueuedFrame) -> tuple[Header, memoryview] | None:
        """The frame that was posted for `node`: header and payload, packed over a long path where that pays. None:
        there is nothing to be sent of it any more."""
        kind, c, since = queued
        place, fence = self.plan.index(self.me), self._fence(since)
        payload: U8 | None = None
        match kind:
            case FrameKind.CONTRIBUTION:
                self._sent[c] += 1
                payload = await self._evidence.contribution(self.plan, c)
            case FrameKind.PARTIAL:
                payload = self._region_means.get(c)
            case FrameKind.SEALED:
                payload = self._sealed[c]
            case FrameKind.INPUT | FrameKind.RECEIPT:
                may = self._requests.may_answer(node)
                found = await self.evidence(node, REQUESTS[kind], c) if may else None
                shown = view(b"" if found is None else found)
                return Header(kind, fence, c, len(shown), place=place), shown
            case FrameKind.RESYNC:
                data = b"".join(self._exchange.resync_state(node))
                return Header(kind, self.plan.fence, c, len(data), place=place), memoryview(data)
            case _:
                return Header(kind, fence, c, place=place), memoryview(b"")
        if payload is None:
            return None
        # A short path is seldom slow, and what it carries hard to tell.
        long_path = self._peers.peer(node).long_path
        able = self._payloads.fixed_seal_size or kind is not FrameKind.SEALED
        end = payload.size - self._payloads.signature_size(kind, self.plan)
        if long_path and able and (packed := await self._payloads.pack(kind, c, since, payload[:end])) is not None:
            packed += payload[end:].tobytes()
            return Header(kind, fence, c, len(packed), packed=True, place=place), memoryview(packed)
        return Header(kind, fence, c, payload.size, place=place), payload.data

    async def evidence(self, node: NodeId, kind: FrameKind, c: int) -> Octets | None:
        """Answer `node`, a member or a verifier, that asks for this member's contribution to chunk `c`, or for its
        receipt; None: it is not here."""
        may_ask = node in self.plan.verifiers or any(m.node == node for m in self.plan.members if not m.gone)
        if not self._has(c) or self._over or not may_ask:
            return None
        if kind is FrameKind.GET_INPUT:
            self._shown.add(c)
        return await self._evidence.answer(self.plan, kind, c)

    async def ask(self, node: NodeId, kind: FrameKind, c: int, size: int, exact: bool) -> Octets | None:
        """Ask `node`, over its links, for what it has of chunk `c` for an auditor."""
        return None if self._over else await self._requests.ask(node, kind, c, size, exact)

    def joined(self, node: NodeId) -> None:
        """Ask `node`, to which there is a link again, what it has, and tell it what is here."""
        self._do([control_frames.ask_state(node)])
        self._requests.ask_again(node)

    def spoiled(self, node: NodeId, sentence: str) -> None:
        """Tell that what came from `node` is not what it can have sent."""
        self._listener.spoiled(self.plan, node, sentence)

    def lost(self, node: NodeId, sentence: str) -> None:
        """Report that `node` cannot be reached, or does not do its part, unless that was reported just now."""
        now = asyncio.get_running_loop().time()
        if self._late.may_report(now, node):
            self._listener.lost(self.plan, node, sentence)

    # Chunks

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
            async with asyncio.timeout(PLAN_WITHIN):
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
        self._late.chunk_came(now, node)
        if self._exchange.verdict(node, header.place, kind, c, since) is not FrameVerdict.TAKE:
            self._payloads.give_back(payload)
            return
        try:
            signed = self._payloads.signature_size(kind, self.plan)
            size = self._payloads.size(kind, c, self.plan) - signed
            signature = payload[payload.size - signed :].tobytes()
            payload = payload[: payload.size - signed] if signed else payload
            whole = self._payloads.unpack(c, payload, size) if header.packed else payload
            if kind is FrameKind.SEALED:
                self._payloads.sealing.check(whole, self._chunks.size(c), self.plan.length)
        except Malformed as error:
            self.spoiled(node, sentence := f"chunk {c} as it sent it was refused: {error}")
            self.lost(node, sentence)
            raise LinkBroken(
                sentence
            ) from None  # if it was right when it was sent, it comes again over another link
        if kind is FrameKind.SEALED:
            taken = self._exchange.sealed_arrived(c, sum_ := digest(whole), node)
            if self._exchange.digest(c) == sum_:
                self._is_sealed(c, whole, node == self._exchange.source(c))
                self._measure(c, whole)
            self._do(taken)
        elif kind is FrameKind.PARTIAL:
            size = self._payloads.encoded_size(c)
            mean, listed = whole[:size], places(whole[size:].tobytes())
            if (effects := self._exchange.region_sum_arrived(node, c, listed)) is None:
                self.lost(node, f"its region's mean of chunk {c} was refused: it claims places of others")
                return
            self._executor.signatures[c, header.place] = signature
            self._executor.inbox.put(c, self.plan.index(node), mean)
            self._do(effects)
        else:
            self._executor.signatures[c, header.place] = signature
            self._executor.inbox.put(c, self.plan.index(node), whole)
            self._do(self._exchange.contribution_arrived(node, c))

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendFrame(node, kind, c, since):
                    self._peers.peer(node).queue.post((kind, c, since))
                case MergeChunk() | SumRegion():
                    task = asyncio.create_task(self._merge(self._executor.begin(effect, self.plan)))
                    self._merges.add(task)
                    task.add_done_callback(self._merge_ended)
                case ReportSeal(c, since, sum_, inputs):
                    self._listener.sealed(
                        self.plan,
                        replace(self._terms.pop(c), chunk=c, since=since, digest=sum_, inputs=inputs),
                        self._exchange.chunks_to_seal > 0,
                    )
                case FreeContributions(c):
                    self._executor.free(c)
                    self._region_means.pop(c, None)
                case FreeSealed(c):
                    self._sealed[c] = None
                    self._lengths.forget(c)
                case ReportOrphans(here):
                    self._listener.orphans(self.plan, here)
                case ReportComplete(root_, proven):
                    self._tell_lengths()  # before the commit, which may follow at once
                    self._listener.held(self.plan, root_, proven)
                case ReportForged(c, node):
                    self._listener.forged(self.plan, node, c)
                case ReportMissing(chunks):
                    self._listener.lacking(self.plan, chunks)
                case _:
                    assert_never(effect)

    async def _merge(self, merge: PendingMerge) -> None:
        order, c = merge.order, merge.order.chunk
        try:
            if (found := await self._executor.finish(merge)) is None:
                return
        except UnusableContribution as refused:
            again = self._exchange.contribution_refused(c, order.since, refused.place)
            if again is not None:
                self._executor.inbox.drop(c, refused.place)
                self._do(again)
                sentence = f"its contribution to chunk {c} was refused: {refused.sentence}"
                sender = merge.plan.members[refused.place].node
                self._refused.add(sender)
                self.spoiled(sender, sentence)
                self.lost(sender, sentence)
            return
        payload, sum_ = found.payload, found.digest
        report = SealReport(c, order.since, sum_, order.inputs, found.norms, found.dots, found.reference)
        if isinstance(order, SumRegion):
            effects = self._exchange.region_summed(c, order.since, order.inputs)
            if effects and found.norms:
                self._listener.summed(self.plan, report, self._exchange.chunks_to_seal > 0)
            self._do(effects)
            if effects:
                self._region_means[c] = payload
                self._evidence.merged(merge, found)
            return
        self._terms[c] = report
        effects = self._exchange.chunk_merged(c, order.since, order.inputs, sum_)
        if effects:
            self._evidence.merged(merge, found)
            self._is_sealed(c, payload, True)
        else:
            self._payloads.give_back(payload)  # the chunk has another owner now
        self._do(effects)

    def _is_sealed(self, c: int, payload: U8, of_owner: bool) -> None:
        """The sealed bytes of a chunk are here. This member's own are of no more use then, unless the chunk starts
        anew."""
        self._sealed[c] = payload
        self._on_sealed(c, payload)
        own = self._encoded.release(c) if self._encoded is not None else None
        # If it may have been sealed without them, they may still be on their way, or being read in a merge; to an
        # auditor they may be on their way for long.
        unread = self._only_plan and self._sent[c] <= 1 and c not in self._shown
        if own is not None and of_owner and unread:
            self._payloads.give_back(own)

    def _measure(self, c: int, payload: U8) -> None:
        """See whether what its owner sealed is longer than it can be, and say so before this member holds it."""
        owner, plan = self.plan.owners[c], self.plan
        if owner != NOBODY and plan.looks_at_norms:
            self._lengths.take(c, owner, self._payloads.sealing.square(payload, self._chunks.size(c)))
            self._tell_lengths()

    def _tell_lengths(self) -> None:
        plan = self.plan
        for c, times in self._lengths.too_long(plan.longest):
            if (sum_ := self._exchange.digest(c)) is not None:
                since = plan.since[c] if plan.since else plan.attempt
                self._listener.outsized(plan, c, since, sum_, times)

    def _merge_ended(self, task: "asyncio.Task[None]") -> None:
        self._merges.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error

    # The clock

    def _look(self, now: float) -> None:
        """See who is late."""
        x = self._exchange
        due = dict(x.dues()), set(x.contributors_due()), x.holding_up()
        for order in self._late.look(now, *due, self._peers.heard):
            match order:
                case Ping(node):
                    self._do([control_frames.ping(node)])
                case AskState(node):
                    self._do([control_frames.ask_state(node)])
                case Lost(node, sentence):
                    self.lost(node, sentence)
                case PullFrom(owners):
                    self._do(x.pull_from(owners))
                case _:
                    assert_never(order)


def _nobody(c: int, payload: U8) -> None:
    pass
