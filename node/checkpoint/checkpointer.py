"""Keeps a run's outer state on a node's disk, so that it outlives the process: the sealed log, and snapshots.

    a round is committed   --> `record_round`: its sealed bytes go to the log            (`log_writer`)
    the state stands still --> `finalized`: every few rounds a snapshot goes beside it   (`snapshot_writer`)
    the daemon starts      --> `restore`: the newest snapshot, brought forward by the log (`restoring`)
    a bit flips in memory  --> `chunk_history`: what makes the chunk anew

Neither writer delays a round. Before it contributes to the next round, a node waits up to `DISK_WAIT` until its
disk has the last one (`wait_durable`): should all power fail, that is one round lost at most. A disk that is full
or fails is said (`troubles`), and costs nothing else; the next round tries again.

This is the room's door for the daemon (`atoll.node.daemon.outer_loop`); a node without a disk has one, too, that
holds the last round's bytes in memory until the next reduce needs the room.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from atoll.comm.byte_view import U8, Octets
from atoll.comm.ids import Round
from atoll.comm.incidents import IncidentKind
from atoll.node.checkpoint import restoring
from atoll.node.checkpoint.checkpoint_files import CheckpointFiles, CheckpointLocation
from atoll.node.checkpoint.log_writer import LogWriter
from atoll.node.checkpoint.problems import Problems
from atoll.node.checkpoint.snapshot_set import DamageLog
from atoll.node.checkpoint.snapshot_writer import SnapshotWriter
from atoll.node.outer.state import OuterState

DISK_WAIT = 5.0  # seconds that a contribution waits for the disk at most


class Checkpointer:
    """A node's outer state on its disk. Methods are called on the event loop where they do not say otherwise."""

    def __init__(
        self, outer: OuterState, release: Callable[[U8], None], location: CheckpointLocation | None
    ) -> None:
        """`release` takes a reduce's buffer that is of no more use here. `location`: None for a node that writes
        nothing."""
        self._outer = outer
        self._problems, self._damage = Problems(), DamageLog()
        self._change = asyncio.Event()  # what is on the disk may be newer
        self._files: CheckpointFiles | None = None
        if location is not None:
            try:
                self._files = CheckpointFiles(location, outer.chunks, self._problems, self._damage)
            except OSError as error:
                reason = f"{location.folder} cannot be used ({error})"
                self._problems.report("the state is not kept on disk", reason, error)
        self._log_writer = LogWriter(self._files, release, self._problems, self._change.set)
        self._snapshot_writer: SnapshotWriter | None = None
        if self._files is not None:
            self._snapshot_writer = SnapshotWriter(
                outer, self._files, self._log_writer, self._problems, self._change.set
            )

    # The state's life

    def restore(self, keep_newer: bool = False) -> int:
        """Bring the outer state to the newest round that the disk can; returns that round, or -1 if the disk
        cannot, though chunks of the state may be there. `keep_newer`: newer chunks, which an earlier daemon left
        in memory, stay. Blocks: for the thread that does the state's arithmetic."""
        return -1 if self._files is None else restoring.restore(self._outer, self._files, keep_newer)

    def restore_before(self, round_: int) -> int:
        """Bring the outer state back to the newest round before `round_` that the disk can; returns that round, or
        -1 if the disk cannot: then the state is as it was, or where files are damaged nothing whole. Blocks: for
        the thread that does the state's arithmetic."""
        return -1 if self._files is None else restoring.restore_before(self._outer, self._files, round_)

    def record_round(self, round_: int, payloads: Sequence[U8], digests: Sequence[bytes]) -> None:
        """Write a committed round to the log: the sealed bytes, of a reduce or fetched, and their digests, one of
        each for every chunk of its fragment. Nothing but this reads or writes the payloads from now on."""
        self._log_writer.append(round_, payloads, digests)

    def finalized(self, round_: int, tokens: int, sole_copy: bool = False) -> None:
        """Take a snapshot if one is due: the state stands still at `round_`, with so many tokens committed by the
        run. `sole_copy`: no peer had this state before."""
        if self._snapshot_writer is not None:
            self._snapshot_writer.finalized(round_, tokens, sole_copy)

    def distrust(self) -> None:
        """Note that the state was not the run's, and that the disk may not have the run's either: what it has
        stays until the next state that is finalized replaces it."""
        if self._snapshot_writer is not None:
            self._snapshot_writer.distrust()

    def drop_rounds_after(self, round_: int) -> None:
        """Drop the rounds after `round_` from the log: they are void."""
        if self._files is not None:
            for later in [k for k in self._files.log.rounds if k > round_]:
                self._files.drop_round(later)

    # What the disk and the memory have

    @property
    def durable_round(self) -> int:
        """The newest round whose state the disk alone can bring back; -1: none."""
        return -1 if self._files is None else self._files.durable_round

    @property
    def disk_bytes(self) -> int:
        """Bytes of the log and the snapshots on the disk."""
        return 0 if self._files is None else self._files.size

    def chunk_history(self, c: int, round_: int) -> tuple[int, bytes, Sequence[Octets]] | None:
        """Round, anchor and momentum (fp32) of chunk `c` as a snapshot has it, and its sealed bytes of the later
        rounds up to `round_`; None where the disk lacks some. Blocks: for the thread that does the state's
        arithmetic."""
        if self._files is None:
            return None
        return restoring.chunk_history(self._outer, self._files, self._log_writer.read, c, round_)

    async def sealed(self, round_: Round, chunk: int) -> Octets | None:
        """The sealed bytes of a committed round's chunk, counted within its fragment; None: they are not here
        (atoll.comm.transport.data_plane.StateSource)."""
        return await self._log_writer.fetch(round_, chunk)

    # Waiting for the disk

    def is_pending(self, round_: int) -> bool:
        """Whether the disk cannot bring back the state of `round_` yet, but is being given what it lacks."""
        files, snapshot_writer = self._files, self._snapshot_writer
        if files is None or snapshot_writer is None or not files.takes_snapshots:
            return False
        writing = self._log_writer.task is not None or snapshot_writer.urgent
        return writing and files.durable_round < round_

    async def wait_durable(self, round_: int) -> None:
        """Wait while the state of `round_` is on its way to the disk, at most `DISK_WAIT`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DISK_WAIT):
                while self.is_pending(round_):
                    self._change.clear()
                    await self._change.wait()

    def release_buffers(self) -> None:
        """Give back the buffers of rounds that the disk does not take now: a delta is about to be encoded."""
        self._log_writer.release_unwritable()

    async def wait_idle(self) -> None:
        """Wait until nothing is being written."""
        while running := [task for task in self._tasks if task is not None and not task.done()]:
            await asyncio.wait(running)

    @property
    def _tasks(self) -> tuple[asyncio.Task[None] | None, ...]:
        snapshot_writer = self._snapshot_writer
        return self._log_writer.task, snapshot_writer.task if snapshot_writer is not None else None

    async def close(self) -> None:
        """Finish what is being written to the log, give up a snapshot that is being taken, and end both
        threads."""
        if self._snapshot_writer is not None:
            self._snapshot_writer.give_up()
        await self.wait_idle()
        self._log_writer.close()
        if self._snapshot_writer is not None:
            self._snapshot_writer.close()

    # What the coordinator and people ask

    def take_snapshots(self, enabled: bool) -> None:
        """Say whether this node is one of those that hold full copies of the state, and so takes snapshots."""
        if self._files is not None:
            self._files.takes_snapshots = enabled

    def on_snapshot(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a snapshot was taken."""
        if self._snapshot_writer is not None:
            self._snapshot_writer.on_snapshot = listener

    @property
    def incidents(self) -> tuple[IncidentKind, ...]:
        """The kinds of the disk's open problems."""
        return self._problems.incidents

    @property
    def troubles(self) -> tuple[str, ...]:
        """The disk's open problems, in words that name no folder of this machine."""
        return self._problems.names

    @property
    def trouble(self) -> str:
        """The disk's open problems with their reasons, as one line; empty: there are none."""
        return str(self._problems)

    def newly_damaged(self) -> list[str]:
        """Names of the files that were found to have changed on the disk, since this was asked last."""
        return self._damage.drain()
