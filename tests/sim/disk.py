"""What a host's disk has of the run, and how a node writes it: the real policy of snapshots and log
(`atoll.node.checkpoint.policy`), driven as the checkpointer's writers drive it. The disk outlives the processes;
what was being written when one of them died is not on it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.truth import next_state

from atoll.node.checkpoint.policy import (
    QUEUED_ROUNDS_LIMIT,
    DiskContent,
    SnapshotPolicy,
    droppable,
    first_needed,
    overflow,
    reach,
    retained,
)

if TYPE_CHECKING:
    from sim.node import Node

SNAPSHOT_SIZE = 2  # bytes, where a round's are one


@dataclass(frozen=True, slots=True)
class Snapshot:
    first: int  # rounds of its oldest and its newest chunk: those between were applied while it was written
    last: int
    state: bytes  # digest, of `first`


@dataclass(slots=True)
class Disk:
    snapshots: list[Snapshot] = field(default_factory=list)  # the newest first
    log: dict[int, bytes] = field(default_factory=dict)  # root over the sealed chunks, by round

    def reach(self, queued: Iterable[int] = ()) -> int:
        """The newest round that it can bring back, with those that wait for the log."""
        rounds = self.log.keys() | set(queued)
        return max((reach(s.first, s.last, rounds) for s in self.snapshots), default=-1)

    def state(self) -> tuple[int, bytes]:
        """The newest that it can bring back."""
        newest = self.reach()
        for snapshot in self.snapshots:
            if newest >= 0 and reach(snapshot.first, snapshot.last, self.log) == newest:
                state = snapshot.state
                for round_ in range(snapshot.first, newest):
                    state = next_state(state, self.log[round_ + 1])
                return newest, state
        return -1, b""

    def state_before(self, round_: int) -> tuple[int, bytes]:
        """The newest of an earlier round that one of its snapshots leads to."""
        for snapshot in self.snapshots:
            if snapshot.last < round_:
                at, state = snapshot.first, snapshot.state
                while at < round_ - 1 and at + 1 in self.log:
                    at, state = at + 1, next_state(state, self.log[at + 1])
                return (at, state) if at >= snapshot.last else (-1, b"")
        return -1, b""

    def trim(self, takes_snapshots: bool) -> None:
        """Drop what the log need not have."""
        needed = first_needed([s.first for s in self.snapshots], self.log, -1, takes_snapshots)
        for round_ in droppable(dict.fromkeys(self.log, 1), needed, SNAPSHOT_SIZE, 0):
            del self.log[round_]


class Checkpointer:
    """A process's writes to its host's disk; each takes a while."""

    def __init__(self, node: "Node") -> None:
        self.node, self.world = node, node.world
        self._policy = SnapshotPolicy(node.world.config.checkpoint.every)
        self._queue: dict[int, bytes] = {}  # what the log is to have, by round
        self._round_at_work = -1
        self._incomplete = False  # a round was lost since the last snapshot was begun

    @property
    def disk(self) -> Disk | None:
        return self.node.host.disk

    @property
    def _takes_snapshots(self) -> bool:
        view = self.node.machine.view
        return view is None or view.keeps

    def _took(self) -> float:
        """Seconds."""
        return self.world.luck.choice([0.001, 0.05, self.world.luck.uniform(0.0, 1.5)])

    # The log

    def record_round(self, round_: int, sealed: bytes) -> None:
        if self.disk is None:
            return
        self._queue[round_] = sealed
        for oldest in overflow(self._queue, self._round_at_work, QUEUED_ROUNDS_LIMIT):
            self._incomplete = True
            del self._queue[oldest]
        if self._round_at_work < 0:
            self._write(self.disk)

    def _write(self, disk: Disk) -> None:
        """The oldest round first."""
        self._round_at_work = min(self._queue, default=-1)
        if self._queue:
            self.node.later(self._took(), self._written, disk)

    def _written(self, disk: Disk) -> None:
        disk.log[self._round_at_work] = self._queue.pop(self._round_at_work)
        disk.trim(self._takes_snapshots)
        self._write(disk)

    def drop_rounds_after(self, round_: int) -> None:
        if self.disk is not None:
            for later in [r for r in self.disk.log if r > round_]:
                del self.disk.log[later]

    # Snapshots

    def finalized(self, round_: int, state: bytes, sole_copy: bool) -> None:
        disk = self.disk
        if disk is None or not self._takes_snapshots:
            return
        newest = disk.snapshots[0].first if disk.snapshots else -1
        content = DiskContent(disk.reach(self._queue), newest, log_incomplete=self._incomplete)
        if self._policy.finalized(round_, sole_copy, content):
            self._incomplete = False
            self.node.later(self._took(), self._snapped, disk, round_, state)

    def _snapped(self, disk: Disk, first: int, state: bytes) -> None:
        new = Snapshot(first, self.node.state[0], state)
        between = range(new.first + 1, new.last + 1)
        taken = new.last >= new.first >= 0 and all(r in self._queue or r in disk.log for r in between)
        if taken:
            older = [s for s in disk.snapshots if s.first != new.first]
            disk.snapshots[:] = [new, *retained(older, self._policy.replaces_all)]
            disk.trim(self._takes_snapshots)
        following = self._policy.ended(taken)
        if following is not None:
            self.finalized(*self.node.state, following)

    def distrust(self) -> None:
        self._policy.distrust()

    def is_pending(self, round_: int) -> bool:
        """It is writing what it needs to bring back the state of `round_`."""
        if self.disk is None or not self._takes_snapshots or self.disk.reach() >= round_:
            return False
        return self._round_at_work >= 0 or self._policy.urgent
