"""The effects that `ReduceProtocol` answers, as values: `Reduction` and the simulation carry them out, in the
order given.

A chunk is an index into the model's chunks, a place one into the plan's members. `since` is the attempt in which
the chunk got its owner: it tells which frames and merges are late.
"""

from dataclasses import dataclass
from enum import Enum

from atoll.comm.ids import NodeId
from atoll.comm.transport.frames import FrameKind


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send `node` a frame of this kind about a chunk, as soon as there is a link."""

    node: NodeId
    kind: FrameKind
    chunk: int = 0
    since: int = 0


@dataclass(frozen=True, slots=True)
class MergeChunk:
    """Average these contributions to a chunk, seal the mean, and call `ReduceProtocol.chunk_merged`, or
    `contribution_refused`."""

    chunk: int
    since: int
    inputs: tuple[int, ...]  # places, in the order of the sum
    sums: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (relay, those of the inputs that its region's sum holds)


@dataclass(frozen=True, slots=True)
class SumRegion:
    """Average these contributions of this relay's region to a chunk, and call `ReduceProtocol.region_summed`, or
    `contribution_refused`."""

    chunk: int
    since: int
    inputs: tuple[int, ...]  # places, in the order of the sum


@dataclass(frozen=True, slots=True)
class ReportSeal:
    """Tell the coordinator to enter this chunk as sealed in the ledger."""

    chunk: int
    since: int
    digest: bytes
    inputs: tuple[int, ...]  # places of those whose contributions are in it


@dataclass(frozen=True, slots=True)
class FreeContributions:
    """Free what is here of others' contributions to this chunk, and its region's sum, except one made just now."""

    chunk: int


@dataclass(frozen=True, slots=True)
class FreeSealed:
    """Free the sealed bytes of this chunk: they are void."""

    chunk: int


@dataclass(frozen=True, slots=True)
class ReportOrphans:
    """Tell the coordinator which sealed chunks without an owner this member holds."""

    here: tuple[tuple[int, bytes], ...]  # (chunk, digest)


@dataclass(frozen=True, slots=True)
class ReportComplete:
    """Tell the coordinator that this member holds every sealed chunk."""

    root: bytes  # of their digests
    proven: bool = False  # each digest is the ledger's, which was told before


@dataclass(frozen=True, slots=True)
class ReportForged:
    """Tell the coordinator that `node` gave other bytes of a sealed chunk than the ledger has."""

    chunk: int
    node: NodeId


@dataclass(frozen=True, slots=True)
class ReportMissing:
    """Tell the coordinator that these chunks alone are lacking: nobody gave them as the ledger has them."""

    chunks: tuple[int, ...]


Effect = (
    SendFrame
    | MergeChunk
    | SumRegion
    | ReportSeal
    | FreeContributions
    | FreeSealed
    | ReportOrphans
    | ReportComplete
    | ReportForged
    | ReportMissing
)


class FrameVerdict(Enum):
    """The decision on a frame whose header has come."""

    TAKE = "take"
    HOLD = "hold"  # its sender has a newer plan: decide when that is here
    DISCARD = "discard"  # it is late, or comes twice
