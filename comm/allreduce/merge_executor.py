"""The arithmetic of an owner or relay: it averages the contributions to its chunks (`inbox`) in threads. Their
memory goes back to the pool when they are freed, unless a merge still reads from it.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.comm.allreduce.delta_encoder import EncodedVector, squared_norm
from atoll.comm.allreduce.effects import MergeChunk, SumRegion
from atoll.comm.allreduce.inbox import ContributionInbox, MergeTerm
from atoll.comm.allreduce.payloads import Payloads
from atoll.comm.allreduce.sealing import SealFormat, Term, UnusableContribution, mean_of
from atoll.comm.bitmap import bitmap
from atoll.comm.buffers import thread_scratch
from atoll.comm.byte_view import U8, Octets
from atoll.comm.codecs.codec import Codec, Malformed
from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.comm.plan import Plan
from atoll.comm.workers import workers

NORM_TOLERANCE = 1 + 1e-9  # times by which two norms of the same bytes may differ


@dataclass(frozen=True)
class PendingMerge:
    """A merge that was ordered, with the terms of its sum."""

    order: MergeChunk | SumRegion
    plan: Plan
    terms: list[MergeTerm[U8]]

    @property
    def bounds(self) -> dict[int, float]:
        """The largest norm that each contribution may have, by place: what its sender told of its delta."""
        relays = {relay for relay, _ in self.order.sums} if isinstance(self.order, MergeChunk) else set()
        places = [term.place for term in self.terms if term.place not in relays]
        norms = {i: self.plan.members[i].norm for i in places}
        return {i: norm for i, norm in norms.items() if norm < math.inf}


class MergeExecutor:
    """The contributions at the member `me`, and what is made of them."""

    def __init__(self, me: NodeId, encoded: EncodedVector | None, payloads: Payloads) -> None:
        """`encoded`: this member's own contribution; None: it brings none."""
        self._encoded, self._payloads = encoded, payloads
        self._region_mean = mean_of(payloads.codec)
        self.inbox = ContributionInbox[U8](me)

    def free(self, c: int) -> None:
        """Forget all contributions to chunk `c`; their memory is used again, unless a merge may still read from
        it."""
        for payload in self.inbox.free(c):
            self._payloads.give_back(payload)

    def begin(self, order: MergeChunk | SumRegion, plan: Plan) -> PendingMerge:
        """Take the terms of the merge that is ordered; `finish` it. This member's own contribution is put in only
        there."""
        return PendingMerge(order, plan, self.inbox.begin(order, plan))

    async def finish(self, merge: PendingMerge) -> tuple[U8, bytes] | None:
        """Average and encode a merge that was begun: (bytes, digest). A region's mean has the places of those who
        are in it behind it, as it is sent; the digest leaves them out. None: this member's delta is of no more
        use, nor is its part in the reduce. Raises `UnusableContribution`."""
        order, payloads = merge.order, self._payloads
        c, partial = order.chunk, isinstance(order, SumRegion)
        try:
            own = await self._encoded.chunk(c) if self._encoded is not None else None
            if own is None and self._encoded is not None:
                return None
            terms: list[Term] = []
            for term in merge.terms:
                payload = own if term.payload is None else term.payload
                assert payload is not None
                terms.append((term.place, payload, term.share))
            sealing: SealFormat = self._region_mean if partial else payloads.sealing
            numel = payloads.chunks.size(c)
            size = sealing.size(numel, len(terms))
            regions = len(merge.plan.regions)
            place = np.empty(size + -(-regions // 8), np.uint8) if partial else payloads.buffer(size)
            work = payloads.codec, merge.bounds, sealing, c, terms, merge.plan.length, numel, place[:size]
            try:
                sum_ = await asyncio.get_running_loop().run_in_executor(workers(), seal_chunk, *work)
            except UnusableContribution:
                payloads.give_back(place)
                raise
        finally:
            self.inbox.end(c)
        if partial:
            place[size:] = np.frombuffer(bitmap(order.inputs, regions), np.uint8)
        return place, sum_


def seal_chunk(
    codec: Codec,
    bounds: Mapping[int, float],
    sealing: SealFormat,
    c: int,
    terms: Sequence[Term],
    length: float,
    numel: int,
    out: U8,
) -> bytes:
    """Seal chunk `c`, of `numel` elements, into `out`; returns its digest. `bounds`: norms that terms may have at
    most, by place. `length`: the round's, in usual rounds. Raises `UnusableContribution`."""
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
    if (norm := math.sqrt(squared_norm(decoded))) > bound * NORM_TOLERANCE:
        raise UnusableContribution(
            place, f"its norm is {norm:.3g}, and that of all its chunks was told as {bound:.3g}"
        )
