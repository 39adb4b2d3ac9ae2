"""The files in which a node's disk has one run: the sealed log, the snapshots and the run's manifest.

`CheckpointFiles` finds and opens them, knows which state they bring back, and holds their bytes within the
volunteer's limit: `free_one` gives up, one after the other, what the newest state can do without. The log's and
the snapshots' writers (`log_writer`, `snapshot_writer`) call it in their threads.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from atoll.comm.chunks import Chunks
from atoll.comm.files import DiskFull, Room, make_folder, room
from atoll.node.checkpoint import run_manifest, snapshots
from atoll.node.checkpoint.policy import droppable, first_needed
from atoll.node.checkpoint.problems import Problems
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.checkpoint.sealed_log import SealedLog
from atoll.node.checkpoint.snapshot_set import DamageLog, SnapshotSet
from atoll.node.checkpoint.snapshots import TensorShapes, TornSnapshot

CANNOT_REMOVE = "a file that is not needed cannot be removed from the disk"


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """The folder in which a node's disk keeps one run's state: what run and parameters it is of, how often a
    snapshot is taken, and how many bytes it may have."""

    folder: Path
    run: bytes  # 16, tells the run from others of the same name
    layout: TensorShapes
    every: int  # rounds between two snapshots
    limit: float = 0.0  # bytes that all files may take; 0: what the disk has
    room: Room = room
    manifest: RunManifest = field(default_factory=RunManifest)


class CheckpointFiles:
    """The opened log and snapshots of one run. One thread writes `log`, another `snapshots`."""

    def __init__(
        self, location: CheckpointLocation, chunks: Chunks, problems: Problems, damage: DamageLog
    ) -> None:
        """Open what `location` has, and remove what is of no use there. Raises `OSError` if the folder cannot be
        used; a disk that can only be read is a problem, and its state is used."""
        self.location, self._problems, self._damage = location, problems, damage
        self.snapshot_size = snapshots.snapshot_size(location.run, location.layout, chunks)  # bytes
        self.takes_snapshots = True  # this node is one of those that hold full copies
        make_folder(location.folder)
        self.log = SealedLog(location.folder, location.run, chunks, location.room)
        self.snapshots = SnapshotSet(location.folder, location.run, location.layout, chunks, damage)
        self._remove_useless()
        self._write_manifest()

    def _remove_useless(self) -> None:
        try:
            for path in self.log.clear():
                self._damage.report(path, "its table is damaged, or of another run or format")
        except OSError as error:
            self._problems.report(CANNOT_REMOVE, str(error))

    def _write_manifest(self) -> None:
        location = self.location
        try:
            run_manifest.write(location.folder, location.manifest, location.room)
        except OSError as error:
            name = run_manifest.path_of(location.folder).name
            self._problems.report("atoll export will not know this run", f"its {name} is not written ({error})")

    @property
    def durable_round(self) -> int:
        """The newest round whose state the disk alone can bring back; -1: none."""
        return self.snapshots.reach(self.log.rounds)

    @property
    def size(self) -> int:
        """Bytes of the log and the snapshots."""
        return self.log.size + self.snapshots.size

    @property
    def reserved(self) -> int:
        """Bytes of the log and the snapshots, with the snapshot that is being written."""
        return self.size + (self.snapshot_size if self.snapshots.replacing else 0)

    def drop_round(self, round_: int) -> None:
        """Forget a sealed round that is damaged, or not the state's; it does not count even if its file stays."""
        try:
            self.log.drop(round_)
        except OSError as error:
            self._problems.report(CANNOT_REMOVE, str(error))

    def report_damaged_round(self, round_: int) -> None:
        """Report that a chunk of this sealed round is not what was written, and drop the round."""
        self._damage.report(self.log.path(round_), "a chunk is not what was written")
        self.drop_round(round_)

    # Space

    def reserve_round(self, size: int) -> None:
        """Make room within the limit for a sealed round of `size` bytes. Raises `DiskFull`."""
        limit = self.location.limit
        while limit and self.reserved + size > limit:
            if not self.free_one():
                raise DiskFull(f"disk={limit / 1e9:g} has no room for {size / 1e6:,.1f} MB more")

    def reserve_snapshot(self) -> None:
        """Make room within the limit for a snapshot; on the disk, as far as there is anything to give up. Raises
        `TornSnapshot` where the limit is less than one takes."""
        location, size = self.location, self.snapshot_size
        limit = location.limit or float("inf")
        while self.size + size > limit or location.room(location.folder) < size:
            if self.free_one():
                continue
            if (need := self.size + size) > limit:
                raise TornSnapshot(f"disk={location.limit / 1e9:g} is too little, {need / 1e9:.2g} GB are needed")
            break

    def trim_log(self) -> None:
        """Drop the rounds that no snapshot needs and that nobody would ask for: a peer that lacks more than a
        snapshot's bytes of them fetches the state itself."""
        log, limit = self.log, self.location.limit or float("inf")
        needed = self._first_needed(log.rounds, -1)
        for round_ in droppable(log.sizes, needed, self.snapshot_size, self.reserved - limit):
            log.drop(round_)
        while self.reserved > limit and self.free_one():
            pass

    def free_one(self) -> bool:
        """Give up one file that the newest state can do without; False: there is none."""
        log = self.log
        if self.snapshots.remove_one(log.rounds):
            return True
        rounds = log.rounds
        needed = self._first_needed(rounds, 0)
        for round_ in rounds[:-1]:
            if round_ <= needed:
                log.drop(round_)
                return True
        return False

    def _first_needed(self, rounds: Collection[int], which: int) -> int:
        """The sealed rounds up to this one are not needed to bring snapshot number `which` forward."""
        firsts = [snapshot.first for snapshot in self.snapshots.newest_first]
        return first_needed(firsts, rounds, which, self.takes_snapshots)
