"""A bit that flips in the memory of this node is found by the node itself, and mended from its disk.

The digests of the settled state say what anchor and momentum must be until the next commit. They are looked at
when the round's inner steps are taken, while the trainer goes on, so that no delta is from a wrong anchor. A chunk
that changed by itself is made again from a snapshot and the sealed rounds since, and taken if that has its digest.

What flips later, or cannot be mended, shows in the next commit's digests: the majority's state is the run's, and
who differs fetches the chunks that do. Two nodes have no majority: they look once more before they step, so that
the one whose memory is wrong mends it, and their digests do not differ.
"""

from collections.abc import Sequence
from typing import Protocol

from atoll.comm.byte_view import Octets
from atoll.node.outer.state import OuterState


class DiskChunks(Protocol):
    """What the node has on its disk."""

    def chunk(self, c: int, round_: int) -> tuple[int, bytes, Sequence[Octets]] | None:
        """Chunk `c` as a snapshot has it: round, anchor and momentum; and its sealed bytes up to `round_`."""


def mend(outer: OuterState, disk: DiskChunks, c: int) -> bool | None:
    """Look at chunk `c`, and mend it; None: there is nothing to mend, False: it cannot be. Blocks: for the thread
    that does the state's arithmetic."""
    if outer.sound(c):
        return None
    found = disk.chunk(c, outer.at[c])
    return found is not None and outer.remake(c, *found)
