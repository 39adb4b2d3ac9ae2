"""The arithmetic of an owner or relay: it collects the contributions to its chunks, and averages them in threads.

The contributions to a merge are taken when it is ordered, since a newer plan may free them before it begins. Their
memory goes back to the pool when they are freed, unless a merge, which may have become void, still reads from it.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.comm.allreduce.delta_encoder import EncodedVector, squared_norm
from atoll.comm.allreduce.effects import MergeChunk, SumRegion
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
OWN_CONTRIBUTION = np.empty(0, np.uint8)  # stands for this member's contribution among the terms


@dataclass(frozen=True)
class PendingMerge:
    """A merge that was ordered, with the terms of its sum."""

    order: MergeChunk | SumRegion
    plan: Plan
    terms: list[Term]

    @property
    def bounds(self) -> dict[int, float]:
        """The largest norm that each contribution may have, by place: what its sender told of its delta."""
        relays = {relay for relay, _ in self.order.sums} if isinstance(self.order, MergeChunk) else set()
        norms = {i: self.plan.members[i].norm for i, _, _ in self.terms if i not in relays}
        return {i: norm for i, norm in norms.items() if norm < math.inf}


class MergeExecutor:
    """The contributions at the member `me`, and what is made of them."""

    def __init__(self, me: NodeId, encoded: EncodedVector | None, payloads: Payloads) -> None:
        """`encoded`: this member's own contribution; None: it brings none."""
        self._me, self._encoded, self._payloads = me, encoded, payloads
        self._region_mean = mean_of(payloads.codec)
        self._inbox: dict[tuple[int, int], U8] = {}  # contributions, and regions' means, by chunk and place
        self._readers = Counter[int]()  # by chunk: merges that may read contributions to it in their threads

    def __len__(self) -> int:
        """Contributions, and regions' means, that are here."""
        return len(self._inbox)

    def put(self, c: int, place: int, payload: U8) -> None:
        """Store what the member at `place` sent of chunk `c`: its contribution, or its region's mean."""
        self._inbox[c, place] = payload

    def drop(self, c: int, place: int) -> None:
        """Forget what the member at `place` sent of chunk `c`, which was refused. Its memory is not used again."""
        self._inbox.pop((c, place), None)

    def free(self, c: int) -> None:
        """Forget all contributions to chunk `c`; their memory is used again, unless a merge may still read from
        it."""
        for key in [key for key in self._inbox if key[0] == c]:
            payload = self._inbox.pop(key)
            if not self._readers[c]:  # else a merge that has become void may still read from it
                self._payloads.give_back(payload)

    def clear(self) -> None:
        """Forget everything, as the reduction is over. A merge may still read from what was here: that memory is
        not used again."""
        self._inbox.clear()

    def begin(self, order: MergeChunk | SumRegion, plan: Plan) -> PendingMerge:
        """Take the terms of the merge that is ordered; `finish` it. This member's own contribution is put in only
        there."""
        c = order.chunk
        self._readers[c] += 1
        total = sum(plan.members[i].weight for i in order.inputs)
        sums = dict(order.sums) if isinstance(order, MergeChunk) else {}
        inside = {i for listed in sums.values() for i in listed}
        direct = {i: (i,) for i in order.inputs if i not in inside}
        terms: list[Term] = []
        for i, listed in sorted((direct | sums).items()):
            mine = plan.members[i].node == self._me and (c, i) not in self._inbox
            assert self._encoded is not None or not mine
            payload = OWN_CONTRIBUTION if mine else self._inbox[c, i]
            share = sum(plan.members[k].weight for k in listed) / total
            terms.append((i, payload, share * (plan.members[i].scale if i in direct else 1.0)))
        return PendingMerge(order, plan, terms)

    async def finish(self, merge: PendingMerge) -> tuple[U8, bytes] | None:
        """Average and encode a merge that was begun: (bytes, digest). A region's mean has the places of those who
        are in it behind it, as it is sent; the digest leaves them out. None: this member's delta is of no more
        use, nor is its part in the reduce. Raises `UnusableContribution`."""
        order, terms, payloads = merge.order, merge.terms, self._payloads
        c, partial = order.chunk, isinstance(order, SumRegion)
        try:
            if self._encoded is not None:
                if (own := await self._encoded.chunk(c)) is None:
                    return None
                terms = [(i, own if x is OWN_CONTRIBUTION else x, share) for i, x, share in terms]
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
            self._readers[c] -= 1
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
