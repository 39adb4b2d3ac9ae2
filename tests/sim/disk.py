"""What a host's disk has of the run, as `atoll.node.checkpoint.checkpointer` writes it: snapshots, and the log
since. It outlives the processes; what was being written when one of them died is not on it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.truth import next_state

if TYPE_CHECKING:
    from sim.node import Node

SNAPSHOTS_RETAINED = 2
DISK_WAIT = 5.0  # seconds that a contribution waits for the disk at most


@dataclass(slots=True)
class Disk:
    snapshots: list[tuple[int, bytes]] = field(default_factory=list)  # round and digest, the newest first
    log: dict[int, bytes] = field(default_factory=dict)  # root over the sealed chunks, by round

    def state(self) -> tuple[int, bytes]:
        """The newest that it can bring back."""
        if not self.snapshots:
            return -1, b""
        round_, state = self.snapshots[0]
        while (sealed := self.log.get(round_ + 1)) is not None:
            round_, state = round_ + 1, next_state(state, sealed)
        return round_, state


class Checkpointer:
    """A process's writes to its host's disk; each takes a while."""

    def __init__(self, node: "Node") -> None:
        self.node, self.world = node, node.world
        self.writing: dict[int, bytes] = {}  # what the log is to have, by round
        self._snapping = self._urgent = self._distrusted = False

    @property
    def disk(self) -> Disk | None:
        return self.node.host.disk

    @property
    def keeps(self) -> bool:
        view = self.node.machine.view
        return view is not None and view.keeps

    def _took(self) -> float:
        """Seconds."""
        return self.world.luck.choice([0.001, 0.05, self.world.luck.uniform(0.0, 1.5)])

    def record_round(self, round_: int, sealed: bytes) -> None:
        if self.disk is not None:
            self.writing[round_] = sealed
            self.node.later(self._took(), self._written, self.disk, round_)

    def _written(self, disk: Disk, round_: int) -> None:
        disk.log[round_] = self.writing.pop(round_)

    def finalized(self, round_: int, state: bytes, sole_copy: bool) -> None:
        disk = self.disk
        if disk is None or not self.keeps or self._snapping:
            return
        due = not disk.snapshots or round_ - disk.snapshots[0][0] >= self.world.config.checkpoint.every
        unreachable = Disk(disk.snapshots, disk.log | self.writing).state()[0] < round_
        if due or sole_copy or unreachable or self._distrusted:
            self._snapping, self._urgent = True, sole_copy or unreachable or self._distrusted
            self.node.later(self._took(), self._snapped, disk, (round_, state), self._distrusted)

    def _snapped(self, disk: Disk, new: tuple[int, bytes], distrusted: bool) -> None:
        self._snapping = False
        disk.snapshots[:] = (
            [new] if distrusted else [new, *(s for s in disk.snapshots if s[0] != new[0])][:SNAPSHOTS_RETAINED]
        )
        self._distrusted = self._distrusted and not distrusted
        for old in [r for r in disk.log if r <= disk.snapshots[-1][0]]:
            del disk.log[old]

    def distrust(self) -> None:
        self._distrusted = True

    def drop_rounds_after(self, round_: int) -> None:
        if self.disk is not None:
            for later in [r for r in self.disk.log if r > round_]:
                del self.disk.log[later]

    def is_pending(self, round_: int) -> bool:
        """It is writing what it needs to bring back the state of `round_`."""
        if self.disk is None or not self.keeps or self.disk.state()[0] >= round_:
            return False
        return bool(self.writing) or (self._snapping and self._urgent)
