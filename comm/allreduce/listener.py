"""The interface through which a reduction tells the coordinator what it must know."""

from dataclasses import dataclass
from typing import Protocol

from atoll.comm.ids import NodeId
from atoll.comm.plan import Plan


@dataclass(frozen=True, slots=True)
class SealReport:
    """An owner's report to the ledger of one chunk that it sealed; or a relay's, of one that it summed."""

    chunk: int
    since: int  # the attempt in which it got the chunk
    digest: bytes
    inputs: tuple[int, ...]  # places in the plan of those whose contributions are in it
    # l2 of each term of the mean as it was merged, by place: contributions, and at relays' places the means of
    # their regions; empty where the plan looks at none
    norms: tuple[float, ...] = ()
    # the length of each term along the delta that an earlier round sealed of this chunk, by place, and the l2 norm
    # of that delta; empty and 0 where this member does not have it
    dots: tuple[float, ...] = ()
    reference: float = 0.0


class ReduceListener(Protocol):
    """The receiver of a reduction's reports to the coordinator. Called in the event loop."""

    def sealed(self, plan: Plan, seal: SealReport, more: bool) -> None:
        """Report that this member has sealed a chunk; `more`: others will follow."""

    def summed(self, plan: Plan, sum_: SealReport, more: bool) -> None:
        """Report that this member, a relay, has averaged a chunk of its region's contributions, whose norms the
        plan looks at; `more`: other reports will follow."""

    def orphans(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None:
        """Report the sealed chunks without an owner that this member has, as (chunk, digest)."""

    def lost(self, plan: Plan, node: NodeId, sentence: str) -> None:
        """Report that `node` cannot be reached, or does not do its part; `sentence` says how."""

    def spoiled(self, plan: Plan, node: NodeId, sentence: str) -> None:
        """Tell that something came from `node` that is not what it can have sent; nothing follows from that
        here."""

    def held(self, plan: Plan, root: bytes, proven: bool) -> None:
        """Report that this member has every sealed chunk. `root`: over their digests; `proven`: these are the
        ledger's."""

    def forged(self, plan: Plan, node: NodeId, chunk: int) -> None:
        """Report that the sealed chunk as `node` gave it is not the ledger's."""

    def outsized(self, plan: Plan, chunk: int, since: int, digest: bytes, times: float) -> None:
        """Report that the owner of a chunk since that attempt sealed, of this digest, what is longer than a
        merge of the round's deltas can be: so many times the longest of them, over all its chunks, of which this
        is the largest."""

    def lacking(self, plan: Plan, chunks: tuple[int, ...]) -> None:
        """Report that nobody gave these sealed chunks as the ledger has them."""
