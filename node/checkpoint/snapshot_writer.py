"""Decides when a snapshot of the outer state is due, and writes it in a thread that gives way to all others.

    finalized --> due? --> a thread copies chunk after chunk, writes them --> the set of snapshots, `on_snapshot`
        |                                     |
        +-- while one is being written: the state that must follow it is noted, and follows

An apply waits for a snapshot no longer than copying one chunk takes. Rounds that are applied while it is written
are of no harm if the log has them. What fails is a problem, and is tried again at the next round.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.node.checkpoint import snapshots
from atoll.node.checkpoint.checkpoint_files import CheckpointFiles
from atoll.node.checkpoint.log_writer import LogWriter
from atoll.node.checkpoint.problems import Problems
from atoll.node.checkpoint.snapshots import Snapshot, TornSnapshot
from atoll.node.outer.state import CorruptChunk, OuterState

NO_SNAPSHOT = "no snapshot was taken"
NICENESS = 10  # of the writing thread


@dataclass(frozen=True, slots=True)
class _FollowingState:
    """What was finalized while a snapshot was being taken, and is to follow it."""

    tokens: int
    sole_copy: bool


class SnapshotWriter:
    """Takes a run's snapshots, one at a time. Its methods are called on the event loop."""

    def __init__(
        self,
        outer: OuterState,
        files: CheckpointFiles,
        log_writer: LogWriter,
        problems: Problems,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when a snapshot was taken, or could not be."""
        self._outer, self._files, self._log_writer = outer, files, log_writer
        self._problems, self._on_change = problems, on_change
        self._thread = ThreadPoolExecutor(1, "snapshot", _give_way)
        self._following: _FollowingState | None = None
        self._urgent = False  # what is being written cannot be had from the rest of the disk
        self._failed = False  # the last one was not taken
        self._distrusted = False  # what is on the disk may be of a state that is not the run's
        self._closing = False
        self.task: asyncio.Task[None] | None = None  # while one is being taken
        self.on_snapshot: Callable[[], None] = lambda: None

    def give_up(self) -> None:
        """Leave the snapshot that is being written unfinished, and begin no other: the node stops."""
        self._closing = True

    def close(self) -> None:
        """End the thread; nothing is being taken any more."""
        self._thread.shutdown()

    @property
    def urgent(self) -> bool:
        """Whether a snapshot is being taken, or is to follow the one at hand, of what the rest of the disk cannot
        bring back."""
        return self.task is not None and (self._urgent or self._following is not None)

    def distrust(self) -> None:
        """Note that the snapshots on the disk may not be the run's: the next state replaces them, and until then
        they stay."""
        self._distrusted = True

    def finalized(self, round_: int, tokens: int, sole_copy: bool) -> None:
        """Take a snapshot if one is due: the state stands still at `round_`, with so many tokens committed.
        `sole_copy`: no peer had this state before."""
        files, log_writer = self._files, self._log_writer
        if not files.takes_snapshots or self._closing:
            return
        # Who else has this state on a disk may be gone when the power fails: each relies on its own.
        unreachable = files.snapshots.reach((*log_writer.logged, *log_writer.queued)) < round_
        needed = sole_copy or unreachable or self._distrusted
        if self.task is not None:
            if needed:
                earlier = self._following is not None and self._following.sole_copy
                self._following = _FollowingState(tokens, sole_copy or earlier)
            return
        if needed or self._failed or log_writer.incomplete or self._due(round_):
            distrusted = self._distrusted
            self._urgent = needed
            self._distrusted = self._failed = log_writer.incomplete = False
            files.snapshots.replacing = True
            self.task = asyncio.create_task(self._take(tokens, distrusted), name="snapshot")

    def _due(self, round_: int) -> bool:
        stored = self._files.snapshots
        sound = stored.sound
        return not sound or stored.has_damage or round_ - sound[0].first >= self._files.location.every

    async def _take(self, tokens: int, distrusted: bool) -> None:
        """`distrusted`: the new snapshot replaces all others."""
        try:
            loop = asyncio.get_running_loop()
            new = await loop.run_in_executor(self._thread, self._write, tokens)
            self._files.snapshots.add(new, replace_all=distrusted)
            self._problems.solve(NO_SNAPSHOT)
            self.on_snapshot()
            await self._log_writer.trim()
        except (TornSnapshot, CorruptChunk, OSError, MemoryError) as error:
            self._failed, self._distrusted = True, self._distrusted or distrusted
            if not self._closing:
                self._problems.report(NO_SNAPSHOT, str(error))
        finally:
            self.task, self._files.snapshots.replacing = None, False
            self._on_change()
            following, self._following = self._following, None
            if following is not None:
                self.finalized(self._outer.round, following.tokens, following.sole_copy)

    def _write(self, tokens: int) -> Snapshot:
        """In the snapshot thread. Raises `TornSnapshot`, `CorruptChunk`, `OSError`, `MemoryError`."""
        location, chunks = self._files.location, self._outer.chunks
        self._files.reserve_snapshot()
        new = snapshots.write(
            location.folder, location.run, location.layout, chunks, tokens, self._copy, location.room
        )
        queued = self._log_writer.queued  # asked first: a round is in the log before it leaves the queue
        if not all(r in queued or r in self._files.log for r in range(new.first + 1, new.last + 1)):
            snapshots.remove([new.path])
            raise TornSnapshot(
                f"rounds {new.first + 1} to {new.last} were applied meanwhile, and the log lacks one"
            )
        return new

    def _copy(self, c: int) -> tuple[int, NDArray[np.float32], bytes]:
        if self._closing:
            raise TornSnapshot("the node stops")
        round_, both, digest = self._outer.copy_chunk(c)
        if round_ < 0:
            raise TornSnapshot("the state is being fetched")
        return round_, both, digest


def _give_way() -> None:
    """Of this thread alone: on Linux priorities are the threads'."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
