"""The contributions that an owner or relay has, and the terms of the merges that are made of them. Pure: a payload
may be anything, memory in a `MergeExecutor`, a list of samples in the simulation.

The terms of a merge are taken when it is ordered, since a newer plan may free contributions before it begins. What
a merge may still read from is never given back, also when the merge has become void.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

from atoll.comm.allreduce.effects import MergeChunk, SumRegion
from atoll.comm.ids import NodeId
from atoll.comm.plan import Plan

Payload = TypeVar("Payload")


@dataclass(frozen=True, slots=True)
class MergeTerm(Generic[Payload]):
    """One term of a merge: a contribution, or the mean that a relay made of its region."""

    place: int  # of who sent it
    inputs: tuple[int, ...]  # places of those whose contributions are in it
    share: float  # by which it is weighed
    payload: Payload | None  # None: this member's own contribution


class ContributionInbox(Generic[Payload]):
    """The contributions, and regions' means, at the member `me`."""

    def __init__(self, me: NodeId) -> None:
        self._me = me
        self._payloads: dict[tuple[int, int], Payload] = {}  # by chunk and place
        self._readers = Counter[int]()  # by chunk: merges that may read contributions to it

    def __len__(self) -> int:
        """Contributions, and regions' means, that are here."""
        return len(self._payloads)

    def put(self, c: int, place: int, payload: Payload) -> None:
        """Store what the member at `place` sent of chunk `c`: its contribution, or its region's mean."""
        self._payloads[c, place] = payload

    def drop(self, c: int, place: int) -> None:
        """Forget what the member at `place` sent of chunk `c`, which was refused. Its memory is not used again."""
        self._payloads.pop((c, place), None)

    def free(self, c: int) -> list[Payload]:
        """Forget all contributions to chunk `c`; returns those whose memory may be used again: none of them while
        a merge, which may have become void, may still read from it."""
        freed = [self._payloads.pop(key) for key in [key for key in self._payloads if key[0] == c]]
        return [] if self._readers[c] else freed

    def clear(self) -> None:
        """Forget everything, as the reduction is over. A merge may still read from what was here: that memory is
        not used again."""
        self._payloads.clear()

    def begin(self, order: MergeChunk | SumRegion, plan: Plan) -> list[MergeTerm[Payload]]:
        """Take the terms of the merge that is ordered, in plan order; `end` it when they are not read any more."""
        c = order.chunk
        self._readers[c] += 1
        members, total = plan.members, sum(plan.members[i].weight for i in order.inputs)
        sums = dict(order.sums) if isinstance(order, MergeChunk) else {}
        inside = {i for listed in sums.values() for i in listed}
        direct = {i: (i,) for i in order.inputs if i not in inside}
        terms: list[MergeTerm[Payload]] = []
        for i, listed in sorted((direct | sums).items()):
            own = members[i].node == self._me and (c, i) not in self._payloads
            share = sum(members[k].weight for k in listed) / total * (members[i].scale if i in direct else 1.0)
            terms.append(MergeTerm(i, listed, share, None if own else self._payloads[c, i]))
        return terms

    def end(self, c: int) -> None:
        """Take it that a merge of chunk `c` reads no contribution any more."""
        self._readers[c] -= 1
