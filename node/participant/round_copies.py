"""The places where a trainer keeps copies of the round at hand: in memory, else on the node's disk.

A copy has 12 bytes a parameter, with AdamW; one a minute would be 2.6 TB a day for 150M parameters, which wears a
disk out. So it goes to a folder in /dev/shm that the daemon has made, and removes: the daemon lives on when the
trainer dies. A machine that loses power loses its work of the round. Where memory has no room, copies go to the
disk, so rarely that they write no more than `DISK_BYTES_PER_DAY`.
"""

import time
from collections.abc import Callable
from pathlib import Path

from atoll.comm.files import room
from atoll.node.participant.optimizer_files import ROUND, OptimizerFiles
from atoll.node.participant.rank_group import RankGroup
from atoll.node.preflight import available

MEMORY_SHARE = 0.25  # of the memory that is available, which one more copy may take
DISK_BYTES_PER_DAY = 100e9  # a consumer's disk is warranted for about 300 GB a day over five years
DAY = 86400.0  # seconds


class RoundCopies:
    """Chooses between the two places. Every rank calls `attach`, `newest`, `choose` and `begun` at the same time;
    what rank 0 finds counts."""

    def __init__(
        self, ranks: RankGroup, disk: OptimizerFiles, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ranks, self._disk, self._clock = ranks, disk, clock
        self._memory: OptimizerFiles | None = None
        self._disk_from = 0.0  # seconds; from when on the disk may have another copy

    def attach(self, folder: Path) -> None:
        """Use that folder in memory."""
        self._memory = OptimizerFiles(folder, room=memory_room, prefix=ROUND)

    def newest(self) -> tuple[int, OptimizerFiles]:
        """The number of the newest copy, 0 where there is none, and where it is."""
        found = [(files.rounds[0], i) for i, files in enumerate(self._places) if files.rounds]
        number, i = map(int, self._ranks.total(*(max(found, default=(0, 0)) if not self._ranks.rank else (0, 0))))
        return number, self._places[i]

    def where(self, files: OptimizerFiles) -> str:
        """The place, in words."""
        return "on this node's disk" if files is self._disk else "in this node's memory"

    def choose(self, size: int) -> OptimizerFiles | None:
        """The place for another copy, of `size` bytes; None: there is none for now."""
        choice = 0
        if self._memory is not None and self._memory.has_room(size):
            choice = 2
        elif self._clock() >= self._disk_from:
            choice = 1
        choice = int(self._ranks.total(float(choice) if not self._ranks.rank else 0.0)[0])
        return self._places[choice - 1] if choice else None

    def begun(self, files: OptimizerFiles, size: int) -> None:
        """Say that a copy of `size` bytes is being written there."""
        if files is self._disk:
            self._disk_from = self._clock() + DAY * size / DISK_BYTES_PER_DAY

    def keep_only(self, files: OptimizerFiles) -> None:
        """Remove what the other place has: there is a newer copy."""
        for other in self._places:
            if other is not files:
                other.clear()

    def end_reading(self) -> None:
        """Say that this trainer did not die of the copy with which it began, if it did."""
        for files in self._places:
            for number in files.rounds:
                files.end_reading(number)

    def clear(self) -> None:
        """Remove all copies."""
        for files in self._places:
            files.clear()

    @property
    def _places(self) -> list[OptimizerFiles]:
        return [self._disk] if self._memory is None else [self._disk, self._memory]


def memory_room(folder: Path) -> int:
    """Bytes that a copy may take in a folder in memory."""
    return min(room(folder), int(MEMORY_SHARE * available()))
