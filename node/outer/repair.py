"""Finds a bit that flipped in this node's memory, and repairs the chunk from the node's disk.

The digests of the finalized state say what anchor and momentum must be until the next commit. They are looked at
when the round's inner steps are taken, while the trainer goes on, so that no delta is from a wrong anchor. A chunk
that changed by itself is made again from a snapshot and the sealed rounds since, and taken if that has its digest.

What flips later, or cannot be repaired, shows in the next commit's digests: the majority's state is the run's, and
who differs fetches the chunks that do. Two nodes have no majority: they look once more before they step, so that
the one whose memory is wrong repairs it, and their digests do not differ.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from atoll.comm.byte_view import Octets
from atoll.node.outer.state import OuterState


class ChunkHistories(Protocol):
    """The disk's means to make a chunk anew (`atoll.node.checkpoint.checkpointer.Checkpointer`)."""

    def chunk_history(self, c: int, round_: int) -> tuple[int, bytes, Sequence[Octets]] | None:
        """Chunk `c` as a snapshot has it: round, anchor and momentum (fp32); and its sealed bytes of the later
        rounds up to `round_`. None: the disk lacks some."""


class ChunkCondition(Enum):
    """The outcome of a look at a chunk of the finalized state."""

    INTACT = "intact"
    REPAIRED = "repaired"
    DAMAGED = "damaged"  # and the disk cannot repair it


def repair_chunk(outer: OuterState, disk: ChunkHistories, c: int) -> ChunkCondition:
    """Check chunk `c` against its digest, and repair it from `disk` if it is not what it was. Blocks: for the
    thread that does the state's arithmetic."""
    if outer.is_intact(c):
        return ChunkCondition.INTACT
    history = disk.chunk_history(c, outer.chunk_rounds[c])
    if history is not None and outer.rebuild_chunk(c, *history):
        return ChunkCondition.REPAIRED
    return ChunkCondition.DAMAGED
