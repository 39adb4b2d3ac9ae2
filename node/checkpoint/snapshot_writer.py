"""Writes snapshots of the outer state, when `SnapshotPolicy` says so, in a thread that gives way to all others.

    finalized --> due? --> a thread copies chunk after chunk, writes them --> the set of snapshots, `on_snapshot`
        |                                     |
        +-- while one is being written: the state that must follow it is noted, and follows

An apply waits for a snapshot no longer than copying one chunk takes. Rounds that are applied while it is written
are of no harm if the log has them. What fails is a problem, and is tried again at the next round.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from atoll.node.checkpoint import snapshots
from atoll.node.checkpoint.checkpoint_files import CheckpointFiles
from atoll.node.checkpoint.log_writer import LogWriter
from atoll.node.checkpoint.policy import DiskContent, SnapshotPolicy
from atoll.node.checkpoint.problems import Problems
from atoll.node.checkpoint.snapshots import Snapshot, TornSnapshot
from atoll.node.outer.state import CorruptChunk, OuterState

NO_SNAPSHOT = "no snapshot was taken"
NICENESS = 10  # of the writing thread


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
        self._policy = SnapshotPolicy(files.location.every)
        self._tokens = 0  # committed at the state that was finalized last
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
        return self._policy.urgent

    def distrust(self) -> None:
        """Note that the snapshots on the disk may not be the run's: the next state replaces them, and until then
        they stay."""
        self._policy.distrust()

    def finalized(self, round_: int, tokens: int, sole_copy: bool) -> None:
        """Take a snapshot if one is due: the state stands still at `round_`, with so many tokens committed.
        `sole_copy`: no peer had this state before."""
        files, log_writer = self._files, self._log_writer
        if not files.takes_snapshots or self._closing:
            return
        self._tokens = tokens
        stored, sound = files.snapshots, files.snapshots.sound
        content = DiskContent(
            stored.reach((*log_writer.logged, *log_writer.queued)),
            sound[0].first if sound else -1,
            stored.has_damage,
            log_writer.incomplete,
        )
        if self._policy.finalized(round_, sole_copy, content):
            log_writer.incomplete = False
            stored.replacing = True
            self.task = asyncio.create_task(self._take(tokens), name="snapshot")

    async def _take(self, tokens: int) -> None:
        taken = False
        try:
            loop = asyncio.get_running_loop()
            new = await loop.run_in_executor(self._thread, self._write, tokens)
            self._files.snapshots.add(new, self._policy.replaces_all)
            self._problems.solve(NO_SNAPSHOT)
            self.on_snapshot()
            await self._log_writer.trim()
            taken = True
        except (TornSnapshot, CorruptChunk, OSError, MemoryError) as error:
            if not self._closing:
                self._problems.report(NO_SNAPSHOT, str(error), error)
        finally:
            self.task, self._files.snapshots.replacing = None, False
            following = self._policy.ended(taken)
            self._on_change()
            if following is not None:
                self.finalized(self._outer.round, self._tokens, following)

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
    """Of this thread alone: on Linux priorities are the threads', elsewhere the process's."""
    if sys.platform != "linux":
        return
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
