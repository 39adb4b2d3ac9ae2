"""A member's record of one chunk in a round's reduce, and of what it sends to one peer: the memory of
`ReduceProtocol`, which alone changes it, and draws how the states follow one another.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from atoll.comm.ids import NodeId


class ChunkState(Enum):
    """A chunk's progress at this member."""

    AWAITED = "awaited"  # its sealed bytes are to come from elsewhere
    COLLECTING = "collecting"  # contributions to it, and regions' sums, come here
    MERGING = "merging"  # all of them are here, and are being averaged
    SEALED = "sealed"  # its sealed bytes are here; others ask for them
    SERVED = "served"  # its sealed bytes are here, and are sent from here to those whom this member serves


@dataclass(slots=True)
class ChunkRecord:
    """One chunk at this member.

    Invariants: `digest` is None unless the state is SEALED or SERVED. `arrived` and `region_sums` are empty unless
    it is COLLECTING or MERGING. The places of `region_sums` are all in `arrived`.
    """

    state: ChunkState = ChunkState.AWAITED
    since: int = -1  # the attempt in which it got its owner; -1: none that is known here
    # Where contributions go and sealed bytes come from: its owner, or the relay that leads there; None: no owner.
    source: NodeId | None = None
    relayed: bool = False  # this member sums it for its region; the owner is another
    summed: bool = False  # that sum was made
    arrived: set[int] = field(default_factory=set)  # places whose contributions are here, alone or in a sum
    region_sums: dict[int, tuple[int, ...]] = field(default_factory=dict)  # relay's place: places in its sum
    digest: bytes | None = None  # of the sealed bytes that are here
    giver: NodeId | None = None  # from whom those are
    ledger_digest: bytes | None = None  # what `digest` has to be; None: the ledger was not told
    asked: list[NodeId] = field(default_factory=list)  # for the sealed bytes, one after another


@dataclass(slots=True)
class SendWindow:
    """The chunks that this member sends to one owner or relay: bounded by those that are not merged there yet."""

    queue: deque[int] = field(default_factory=deque)  # chunks, to be sent in this order
    in_flight: set[int] = field(default_factory=set)  # chunks that were sent, and not merged there yet
