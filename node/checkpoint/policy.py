"""Decides what a node's disk is given of the state, and what it gives up. Pure: it is told what the disk has, and
neither writes nor waits.

    a state is finalized --> begin a snapshot now, or after the one that is being taken, or none (`SnapshotPolicy`)
    a snapshot was taken --> which older ones stay (`retained`), which rounds the log need not have (`droppable`)
    a round is committed --> which rounds too many wait for the log (`overflow`)

The checkpointer's writers (`snapshot_writer`, `log_writer`, `checkpoint_files`) and the simulation call it.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

SNAPSHOTS_RETAINED = 2
LOG_LIMIT = 3.0  # bytes of the sealed log, whatever still needs it, by the bytes of a snapshot
QUEUED_ROUNDS_LIMIT = 2  # committed rounds that wait in memory for the disk, at most
Snapshot = TypeVar("Snapshot")


@dataclass(frozen=True, slots=True)
class DiskContent:
    """The part of the run that a disk has, as far as a snapshot's being due depends on it."""

    reach: (
        int  # the newest round whose state the disk brings back, with the rounds that wait for the log; -1: none
    )
    newest_snapshot: int  # the round of the newest sound one; -1: there is none
    damaged: bool = False  # a snapshot is, which a new one would replace
    log_incomplete: bool = False  # a round was lost since the last snapshot was begun


class SnapshotPolicy:
    """The snapshots of one node, one at a time.

    Invariant: once `distrust` was called, no snapshot counts as replaced before one of a state that was finalized
    later was taken.
    """

    def __init__(self, every: int) -> None:
        """`every`: rounds between two snapshots."""
        self._every = every
        self._running = False  # one is being taken
        self._urgent = False  # what is being written cannot be had from the rest of the disk
        self._failed = False  # the last one was not taken
        self._distrusted = False  # what is on the disk may be of a state that is not the run's
        self._replacing_all = False  # the one that is being taken replaces all others
        self._following: bool | None = None  # a state is to follow: whether no peer had it before; None: none is

    @property
    def urgent(self) -> bool:
        """Whether a snapshot is being taken, or is to follow the one at hand, of what the rest of the disk cannot
        bring back."""
        return self._running and (self._urgent or self._following is not None)

    @property
    def replaces_all(self) -> bool:
        """Whether the snapshot that is being taken replaces all others: they may not be the run's."""
        return self._replacing_all

    def distrust(self) -> None:
        """Note that the snapshots on the disk may not be the run's: the next state replaces them, and until then
        they stay."""
        self._distrusted = True

    def finalized(self, round_: int, sole_copy: bool, disk: DiskContent) -> bool:
        """Decide whether a snapshot is to be begun now that the state stands still at `round_`; `ended` says when
        it is taken, or could not be. `sole_copy`: no peer had this state before."""
        # Who else has this state on a disk may be gone when the power fails: each relies on its own.
        needed = sole_copy or disk.reach < round_ or self._distrusted
        if self._running:
            if needed:
                self._following = sole_copy or bool(self._following)
            return False
        due = disk.newest_snapshot < 0 or disk.damaged or round_ - disk.newest_snapshot >= self._every
        if not (needed or self._failed or disk.log_incomplete or due):
            return False
        self._running, self._urgent, self._replacing_all = True, needed, self._distrusted
        self._distrusted = self._failed = False
        return True

    def ended(self, taken: bool) -> bool | None:
        """Take it that the snapshot was taken, or not. None, or the state at hand is to be `finalized` again:
        whether no peer had it."""
        if not taken:
            self._failed, self._distrusted = True, self._distrusted or self._replacing_all
        self._running = self._replacing_all = False
        following, self._following = self._following, None
        return following


def reach(first: int, last: int, rounds: Container[int]) -> int:
    """The newest round whose state a snapshot, the chunks of which are of the rounds `first` to `last`, and the
    sealed bytes of `rounds` bring back; -1: none."""
    newest = first
    while newest + 1 in rounds:
        newest += 1
    return newest if newest >= last else -1


def retained(sound: Sequence[Snapshot], replace_all: bool) -> Sequence[Snapshot]:
    """The older snapshots that stay beside a new one: of the `sound` ones, the newest first, as many as
    `SNAPSHOTS_RETAINED` leaves; with `replace_all` none, as they may be of a state that is not the run's."""
    return [] if replace_all else sound[: SNAPSHOTS_RETAINED - 1]


def first_needed(snapshots: Sequence[int], rounds: Collection[int], which: int, takes_snapshots: bool) -> int:
    """The newest sealed round that is not needed to bring snapshot number `which` forward; `snapshots`: the oldest
    rounds of their chunks, the newest snapshot first. All of `rounds` where there is none, or none is taken."""
    return snapshots[which] if snapshots and takes_snapshots else max(rounds, default=0)


def droppable(sizes: Mapping[int, int], needed: int, snapshot_size: int, excess: float) -> list[int]:
    """The rounds to drop from the log, ascending, never its newest: those up to `needed`, which no snapshot needs,
    as long as the log is larger than a snapshot (a peer that lacks more fetches the state itself), or the files
    take `excess` bytes more than they may; and those that make it larger than `LOG_LIMIT` snapshots. `sizes`:
    bytes of each round."""
    size, dropped = sum(sizes.values()), list[int]()
    for round_ in sorted(sizes)[:-1]:
        if size <= snapshot_size and excess <= 0:
            break
        if round_ <= needed or size > LOG_LIMIT * snapshot_size:
            dropped.append(round_)
            size, excess = size - sizes[round_], excess - sizes[round_]
    return dropped


def overflow(queued: Collection[int], at_work: int, limit: int) -> list[int]:
    """The rounds to forget of those that wait for the log: all but the newest `limit`, and the one that is being
    written."""
    return sorted(set(queued) - {at_work})[:-limit]
