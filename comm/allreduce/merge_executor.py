"""The arithmetic of an owner or relay: it averages the contributions to its chunks (`inbox`) in threads, and keeps
what their senders signed. Their memory goes back to the pool when they are freed, unless a merge still reads from
it.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.comm.allreduce.delta_encoder import EncodedVector
from atoll.comm.allreduce.delta_samples import DeltaSample
from atoll.comm.allreduce.effects import MergeChunk, SumRegion
from atoll.comm.allreduce.inbox import ContributionInbox, MergeTerm
from atoll.comm.allreduce.input_signer import InputSigner
from atoll.comm.allreduce.payloads import Payloads
from atoll.comm.allreduce.sealing import SealFormat, Term, UnusableContribution, mean_of
from atoll.comm.bitmap import bitmap
from atoll.comm.byte_view import U8, Octets
from atoll.comm.codecs.codec import Codec, Malformed
from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.comm.plan import Plan
from atoll.comm.receipts import InputRecord
from atoll.comm.transport.frames import FrameKind
from atoll.comm.workers import workers

LARGEST_NORM = float(np.finfo(np.float32).max)  # that travels; what is beyond is told as this


@dataclass(frozen=True)
class PendingMerge:
    """A merge that was ordered, with the terms of its sum."""

    order: MergeChunk | SumRegion
    plan: Plan
    terms: list[MergeTerm[U8]]


@dataclass(frozen=True)
class MergedChunk:
    """An encoded mean. That of a region has behind it, as it is sent, the places of those who are in it, and its
    relay's signature; the digest leaves them out."""

    payload: U8
    digest: bytes
    norms: tuple[float, ...]  # l2 of each term as it was merged, by place; empty: the plan looks at none
    dots: tuple[float, ...] = ()  # of each term along `reference`, by place; empty: that is not known
    reference: float = 0.0  # l2 of the delta that an earlier round sealed of this chunk
    records: tuple[InputRecord, ...] = ()  # what the senders of its terms signed, in plan order


class MergeExecutor:
    """The contributions at the member `me`, and what is made of them."""

    def __init__(
        self,
        me: NodeId,
        encoded: EncodedVector | None,
        payloads: Payloads,
        signer: InputSigner | None = None,
        samples: Callable[[int], DeltaSample | None] | None = None,
    ) -> None:
        """`encoded`: this member's own contribution; None: it brings none. `signer`: for regions' means; None:
        they are not signed. `samples`: of a chunk's delta of an earlier round, for those of which there is one;
        None: there are none."""
        self._me, self._encoded, self._payloads, self._signer = me, encoded, payloads, signer
        self._region_mean, self._samples = mean_of(payloads.codec), samples
        self.inbox = ContributionInbox[U8](me)
        self.signatures: dict[tuple[int, int], bytes] = {}  # by chunk and place: what came with the contributions

    def free(self, c: int) -> None:
        """Forget all contributions to chunk `c`; their memory is used again, unless a merge may still read from
        it."""
        for payload in self.inbox.free(c):
            self._payloads.give_back(payload)
        for key in [key for key in self.signatures if key[0] == c]:
            del self.signatures[key]

    def begin(self, order: MergeChunk | SumRegion, plan: Plan) -> PendingMerge:
        """Take the terms of the merge that is ordered; `finish` it. This member's own contribution is put in only
        there."""
        return PendingMerge(order, plan, self.inbox.begin(order, plan))

    async def finish(self, merge: PendingMerge) -> MergedChunk | None:
        """Average and encode a merge that was begun, of contributions that their senders signed, if the plan has a
        salt. None: this member's delta is of no more use, nor is its part in the reduce. Raises
        `UnusableContribution`."""
        order, payloads = merge.order, self._payloads
        c, partial = order.chunk, isinstance(order, SumRegion)
        try:
            own = await self._encoded.chunk(c) if self._encoded is not None else None
            if own is None and self._encoded is not None:
                return None
            terms: list[Term] = []
            sent: list[tuple[MergeTerm[U8], bytes]] = []
            for term in merge.terms:
                payload = own if term.payload is None else term.payload
                assert payload is not None
                terms.append((term.place, payload, term.share))
                if term.payload is not None and merge.plan.salt:
                    sent.append((term, self.signatures.get((c, term.place), b"")))
            sealing: SealFormat = self._region_mean if partial else payloads.sealing
            numel = payloads.chunks.size(c)
            size = sealing.size(numel, len(terms))
            length = payloads.size(FrameKind.PARTIAL, c, merge.plan) if partial else size
            place = np.empty(length, np.uint8) if partial else payloads.buffer(size)
            measured = payloads.codec if merge.plan.looks_at_norms else None
            work = measured, sealing, c, terms, merge.plan.length, numel, place[:size]
            sample = self._samples(c) if measured is not None and self._samples is not None else None

            def compute() -> MergedChunk:
                records = tuple(verified_record(merge.plan, c, term, signature) for term, signature in sent)
                sum_, norms = seal_chunk(*work)
                if partial:
                    self._complete(order.inputs, merge.plan, c, place, size, sum_)
                if sample is None:
                    return MergedChunk(place, sum_, norms, records=records)
                dots = sample.dots(payloads.codec, [payload for _, payload, _ in terms], norms)
                return MergedChunk(place, sum_, norms, dots, sample.norm, records)

            try:
                return await asyncio.get_running_loop().run_in_executor(workers(), compute)
            except UnusableContribution:
                payloads.give_back(place)
                raise
        finally:
            self.inbox.end(c)

    def _complete(self, inputs: tuple[int, ...], plan: Plan, c: int, place: U8, size: int, mean: bytes) -> None:
        """Put behind a region's mean, of `size` bytes and this digest, which places are in it, and this member's
        signature."""
        end = size + -(-len(plan.regions) // 8)
        place[size:end] = np.frombuffer(bitmap(inputs, len(plan.regions)), np.uint8)
        if plan.salt:
            me = plan.index(self._me)
            record = self._signer.input(plan.salt, c, me, mean, inputs) if self._signer is not None else None
            place[end:] = np.frombuffer(record.signature, np.uint8) if record is not None else 0


def verified_record(plan: Plan, c: int, term: MergeTerm[U8], signature: bytes) -> InputRecord:
    """The record of a contribution to chunk `c`, or of a region's mean, that another member sent and signed.
    Raises `UnusableContribution` if it did not sign these bytes."""
    assert term.payload is not None
    member = plan.members[term.place]
    summed = term.inputs if plan.relays_for(c, term.place) else ()
    record = InputRecord(term.place, digest(term.payload), signature, summed)
    if member.key and not record.signed_by(member.key, plan.salt, c):
        raise UnusableContribution(term.place, "its signature is not of these bytes")
    return record


def seal_chunk(
    codec: Codec | None,
    sealing: SealFormat,
    c: int,
    terms: Sequence[Term],
    length: float,
    numel: int,
    out: U8,
) -> tuple[bytes, tuple[float, ...]]:
    """Seal chunk `c`, of `numel` elements, into `out`; returns its digest, and the l2 norm of each term, which
    `codec` encoded (None: of none). `length`: the round's, in usual rounds. Raises `UnusableContribution`."""
    norms = () if codec is None else tuple(_norm(codec, place, payload, numel) for place, payload, _ in terms)
    sealing.seal(c, terms, length, numel, out)
    return digest(out), norms


def _norm(codec: Codec, place: int, payload: Octets, numel: int) -> float:
    try:
        return min(math.sqrt(codec.square(payload, numel)), LARGEST_NORM)
    except Malformed as error:
        raise UnusableContribution(place, str(error)) from None
