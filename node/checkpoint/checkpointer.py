"""What a node has on its disk, so that the run's state outlives its process: the sealed log, and snapshots.

    a round is committed --> its sealed bytes go to the log                       (one thread)
    the state is settled --> every few rounds a snapshot goes beside it           (another, which gives way)
    the daemon starts    --> the newest snapshot, brought forward by the log: `restore`

Neither delays a round: the log is written from the reduce's own buffers, which are used again when the file is
there, and an apply waits for a snapshot no longer than copying one chunk takes. Before it contributes to the next
round, a node waits up to `PATIENCE` until its disk has the last one (`caught_up`): should all power fail, that is
one round lost at most. A disk that is full or fails is said, and costs nothing else; the next round tries again.

Without a disk the last round's bytes stay in memory until the next reduce needs the room.
"""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.comm.byte_view import U8, Octets
from atoll.comm.digest import digest
from atoll.comm.files import DiskFull, Room, make_folder, room
from atoll.comm.ids import Round
from atoll.node.checkpoint import run_manifest, snapshots
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.checkpoint.sealed_log import SealedLog
from atoll.node.checkpoint.snapshots import Snapshot, TensorShapes, TornSnapshot
from atoll.node.outer.state import CorruptChunk, OuterState

log = logging.getLogger("atoll.node")
PATIENCE = 5.0  # seconds that a contribution waits for the disk at most
KEPT = 2  # snapshots
NO_LOG, NO_SNAPSHOT = "the round is not kept on disk", "no snapshot was taken"
OF_NO_USE = "what is of no use stays on the disk"
MOST_LOG = 3.0  # snapshots' worth of log, whatever still needs it
WAITING = 2  # committed rounds that wait in memory for the disk, at most


@dataclass(frozen=True, slots=True)
class CheckpointLocation:
    """Where on the disk, and how much."""

    folder: Path
    run: bytes  # 16, tells the run from others of the same name
    layout: TensorShapes
    every: int  # rounds between two snapshots
    limit: float = 0.0  # bytes that all files may take; 0: what the disk has
    room: Room = room
    about: RunManifest = field(default_factory=RunManifest)


class Checkpointer:
    def __init__(self, outer: OuterState, give: Callable[[U8], None], place: CheckpointLocation | None) -> None:
        """`give` takes buffers that are of no more use here. `place`: None for a node that writes nothing."""
        self._outer, self._give = outer, give
        self._memory: dict[int, tuple[Sequence[U8], Sequence[bytes]]] = {}  # rounds that are not on the disk
        self._log: SealedLog | None = None
        self._snapshots: list[Snapshot] = []  # the newest first; changed by one thread at a time
        self._turn = threading.Lock()
        self._place = place
        self._whole = 0  # bytes of a snapshot
        self._writing: asyncio.Task[None] | None = None
        self._at_work = -1  # the round that is being written
        self._snapping: asyncio.Task[None] | None = None
        self._gap = False  # a round could not be written
        # (tokens, alone) of what was settled while a snapshot was being taken, and is to follow it
        self._next: tuple[int, bool] | None = None
        self._urgent = False  # what is being written as a snapshot cannot be had from the rest of the disk
        self._doubted = False  # what is on the disk may be of a state that is not the run's
        self._closing = False
        self._changed = asyncio.Event()
        self._quick = ThreadPoolExecutor(1, "log")
        self._slow = ThreadPoolExecutor(1, "snapshot", _give_way)
        self.keeps = True  # this node is one of those that hold full copies
        self.on_snapshot: Callable[[], None] = lambda: None
        self._troubles: dict[str, str] = {}  # what does not work now, and why
        self._damaged: set[Path] = set()  # snapshots that changed on the disk
        self._spoiled = deque[str]()  # files that changed on the disk, until that is told
        if place is not None:
            self._open(place)

    def _open(self, place: CheckpointLocation) -> None:
        self._whole = snapshots.size_of(place.run, place.layout, self._outer.chunks)
        try:
            make_folder(place.folder)
            self._log = SealedLog(place.folder, place.run, self._outer.chunks, place.room)
            self._snapshots = snapshots.find(place.folder, place.run, place.layout, self._outer.chunks)
            for path in snapshots.unread(place.folder, self._snapshots):
                self._spoil(path, "its header is not this run's, or damaged")
                self._damaged.add(path)
        except OSError as error:
            self._say("the state is not kept on disk", f"{place.folder} cannot be used ({error})")
            return
        try:
            for path in self._log.clear():
                self._spoil(path, "its table is not this run's, or damaged")
        except OSError as error:  # a disk that can only be read has a state all the same
            self._say(OF_NO_USE, str(error))
        try:
            run_manifest.write(place.folder, place.about, place.room)
        except OSError as error:
            self._say(
                "atoll export will not know this run",
                f"its {run_manifest.path_of(place.folder).name} is not written ({error})",
            )

    async def close(self) -> None:
        """What is being written to the log is finished, a snapshot is given up."""
        self._closing = True
        await self.quiet()
        self._quick.shutdown()
        self._slow.shutdown()

    async def quiet(self) -> None:
        """Wait until nothing is being written."""
        while at_work := [
            task for task in (self._writing, self._snapping) if task is not None and not task.done()
        ]:
            await asyncio.wait(at_work)

    # What is there

    @property
    def proven(self) -> int:
        """The newest round whose state the disk alone can bring back; -1: none."""
        return self._reach(self._log.rounds if self._log is not None else ())

    def _reach(self, rounds: Sequence[int]) -> int:
        have = set(rounds)
        return max((snapshot.reach(have) for snapshot in self._sound), default=-1)

    @property
    def _sound(self) -> list[Snapshot]:
        """The snapshots of which nothing is known to have changed."""
        return [s for s in self._snapshots if s.path not in self._damaged]

    def spoiled(self) -> list[str]:
        """Names of the files that were found to have changed on the disk, since this was asked last."""
        return [self._spoiled.popleft() for _ in range(len(self._spoiled))]  # the worker may append meanwhile

    def _spoil(self, path: Path, why: str) -> None:
        log.warning(f"{path.name} changed on the disk ({why}): it is not used")
        self._spoiled.append(path.name)

    def _read(self, snapshot: Snapshot, c: int) -> bytes | None:
        """Chunk `c`; where it is not what was written the snapshot does not count any more, and goes when there is
        a better one: until then its other chunks are used."""
        data = snapshot.chunk(c, self._outer.chunks)
        if data is None and self._snapping is None:  # else it may just be going
            with self._turn:
                if snapshot in self._snapshots and snapshot.path not in self._damaged:
                    self._damaged.add(snapshot.path)
                    self._spoil(snapshot.path, f"chunk {c} is not what was written")
        return data

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return (self._log.size if self._log is not None else 0) + sum(s.size for s in self._snapshots)

    @property
    def troubles(self) -> tuple[str, ...]:
        """What does not work now."""
        return tuple(self._troubles)

    @property
    def trouble(self) -> str:
        """The same, and why."""
        return "; ".join(f"{what}: {why}" for what, why in self._troubles.items())

    @property
    def _taken(self) -> int:
        """The same, with the snapshot that is being written."""
        return self.size + (self._whole if self._snapping is not None else 0)

    def restore(self, whole: bool = True) -> int:
        """Bring the outer state to the newest round that the disk can; -1: it cannot, though chunks may be there.
        Not `whole`: newer chunks, which an earlier daemon left in memory, stay.
        Blocks: for the thread that does the state's arithmetic."""
        outer, proven = self._outer, self.proven
        if self._log is None:
            return -1
        if not whole:
            outer.resume(proven)
        for c in range(outer.chunks.count):
            if not whole and outer.at[c] > proven:
                continue
            # A snapshot may have the chunk as of a round that did not reach the log: then from one before it.
            for snapshot in sorted(self._snapshots, key=lambda s: s.at[c] > proven):
                if (data := self._read(snapshot, c)) is not None:
                    outer.put(c, snapshot.at[c], data)
                    break
        round_ = min(outer.at)
        while round_ >= 0 and self._replay(round_ + 1):
            round_ += 1
        return outer.round

    def _replay(self, round_: int) -> bool:
        """Bring all chunks that lag to `round_`, or none."""
        outer = self._outer
        assert self._log is not None
        if min(outer.at) >= round_ or round_ not in self._log:
            return False
        of = outer.chunks.fragment_range(outer.turns.fragment(round_))
        late = [c for c in of if outer.at[c] < round_]
        payloads = [self._log.read(round_, c - of.start) for c in late]
        if any(payload is None for payload in payloads):
            self._spoil(self._log.path(round_), "a chunk is not what was written")
            self._drop(round_)
            return False
        for c, payload in zip(late, payloads, strict=True):
            assert payload is not None  # and its digest says that it was committed
            outer.apply(c, payload)
        outer.pass_over(round_)
        return True

    def chunk(self, c: int, round_: int) -> tuple[int, bytes, list[Octets]] | None:
        """Chunk `c` as a snapshot has it, and its sealed bytes since then (atoll.node.outer.repair.DiskChunks)."""
        fragment, i = self._outer.chunks.place(c)
        for snapshot in self._snapshots:
            since = [self._kept(k, i) for k in self._outer.turns.rounds(fragment, snapshot.at[c], round_)]
            payloads = [payload for payload in since if payload is not None]
            data = self._read(snapshot, c) if len(payloads) == len(since) else None
            if data is not None and snapshot.at[c] <= round_:
                return snapshot.at[c], data, payloads
        return None

    def _kept(self, round_: int, c: int) -> Octets | None:
        """Sealed bytes of the round's chunk `c`; None: they are not here, or not as they were."""
        if (here := self._memory.get(round_)) is not None:
            data = here[0][c].tobytes()
            return data if digest(data) == here[1][c] else None
        return self._log.read(round_, c) if self._log is not None else None

    async def sealed(self, round_: Round, chunk: int) -> Octets | None:
        """The sealed bytes of a committed round's chunk (atoll.comm.transport.data_plane.StateSource)."""
        if (here := self._memory.get(round_)) is not None:
            return here[0][chunk].tobytes() if 0 <= chunk < len(here[0]) else None  # it is used again soon
        if self._log is None or round_ not in self._log:
            return None
        return await asyncio.to_thread(self._log.read, round_, chunk)

    # The log

    def committed(self, round_: int, payloads: Sequence[U8], digests: Sequence[bytes]) -> None:
        """A round's sealed bytes, of a reduce or fetched; nothing but this reads or writes them from now on."""
        self._memory[round_] = payloads, digests
        most = WAITING if self._log is not None else 1
        for old in sorted(set(self._memory) - {self._at_work})[:-most]:
            self._gap = True
            self._forget(old)
        if self._log is not None and self._writing is None:
            self._writing = asyncio.create_task(self._write(self._log), name="sealed log")

    def make_room(self) -> None:
        """A delta is about to be encoded, and needs memory."""
        if self._log is None or NO_LOG in self._troubles:
            for round_ in set(self._memory) - {self._at_work}:
                self._forget(round_)

    async def _write(self, log_: SealedLog) -> None:
        """Write the rounds that wait, the oldest first."""
        loop = asyncio.get_running_loop()
        try:
            while self._memory:
                self._at_work = min(self._memory)
                await loop.run_in_executor(self._quick, self._append, log_, self._at_work)
                self._forget(self._at_work)
                self._troubles.pop(NO_LOG, None)
                self._changed.set()
        except OSError as error:
            self._gap = True
            self._say(NO_LOG, error.strerror or str(error))
        finally:
            self._at_work, self._writing = -1, None
            self._changed.set()

    def _append(self, log_: SealedLog, round_: int) -> None:
        """In the log's thread."""
        assert self._place is not None
        size = sum(payload.nbytes for payload in self._memory[round_][0])
        while self._place.limit and self._taken + size > self._place.limit:
            if not self._squeeze(log_):
                raise DiskFull(f"disk={self._place.limit / 1e9:g} has no room for {size / 1e6:,.1f} MB more")
        try:
            log_.write(round_, *self._memory[round_])
        except OSError:
            if not self._squeeze(log_):
                raise
            log_.write(round_, *self._memory[round_])
        self._tidy(log_)

    def _forget(self, round_: int) -> None:
        for buffer in self._memory.pop(round_)[0]:
            if buffer.flags.writeable:  # those of a reduce
                self._give(buffer)

    def _tidy(self, log_: SealedLog) -> None:
        """Drop the rounds that no snapshot needs and that nobody would ask for: a snapshot is fewer bytes."""
        assert self._place is not None
        whole, limit = self._whole, self._place.limit or float("inf")
        rounds = log_.rounds
        needed = self._snapshots[-1].first if self._snapshots and self.keeps else max(rounds, default=0)
        for round_ in rounds[:-1]:
            if log_.size <= whole and self._taken <= limit:
                return
            if round_ <= needed or log_.size > MOST_LOG * whole:
                log_.drop(round_)
        while self._taken > limit and self._squeeze(log_):
            pass

    def _squeeze(self, log_: SealedLog) -> bool:
        """Give up what the newest state can do without; False: there is nothing."""
        if self._drop_snapshot(log_):
            return True
        rounds = log_.rounds
        needed = self._snapshots[0].first if self._snapshots and self.keeps else max(rounds, default=0)
        for round_ in rounds[:-1]:
            if round_ <= needed:
                log_.drop(round_)
                return True
        return False

    def _drop_snapshot(self, log_: SealedLog) -> bool:
        """What cannot be read as one; else the oldest but the one that proves the newest state."""
        with self._turn:
            path = next(iter(self._damaged - {s.path for s in self._snapshots}), None)
            if path is None and len(self._snapshots) > 1:
                have = set(log_.rounds)
                best = max(self._sound, key=lambda s: s.reach(have), default=None)
                worst = next(s for s in reversed(self._snapshots) if s is not best)
                self._snapshots.remove(worst)
                path = worst.path
            if path is None:
                return False
            self._damaged.discard(path)
            snapshots.remove([path])
            return True

    def behind(self, round_: int) -> bool:
        """The disk cannot bring back the state of `round_` yet, but is being given what it lacks."""
        urgent = self._urgent or self._next is not None
        at_work = self._writing is not None or (self._snapping is not None and urgent)
        return self.keeps and at_work and self.proven < round_

    async def caught_up(self, round_: int) -> None:
        """Wait while it is `behind`, at most `PATIENCE`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while self.behind(round_):
                    self._changed.clear()
                    await self._changed.wait()

    # Snapshots

    def settled(self, round_: int, tokens: int, alone: bool = False) -> None:
        """The state stands still at `round_`, with so many tokens committed: take a snapshot if one is due.
        `alone`: no peer had this state before."""
        if self._log is None or not self.keeps or self._closing:
            return
        # Who else has this state on a disk may be gone when the power fails: each relies on its own.
        lost = self._reach((*self._log.rounds, *self._memory)) < round_
        if self._snapping is not None:
            if alone or lost or self._doubted:
                self._next = tokens, alone or (self._next is not None and self._next[1])
            return
        assert self._place is not None
        sound = self._sound
        due = not sound or bool(self._damaged) or round_ - sound[0].first >= self._place.every
        if due or alone or lost or self._doubted or self._gap:
            doubted, self._doubted = self._doubted, False
            self._urgent, self._gap = alone or lost or doubted, False
            self._snapping = asyncio.create_task(self._snap(self._place, tokens, doubted), name="snapshot")

    def _drop(self, round_: int) -> None:
        """A round that is not the state's."""
        assert self._log is not None
        try:
            self._log.drop(round_)
        except OSError as error:  # it does not count all the same
            self._say(OF_NO_USE, str(error))

    def doubt(self) -> None:
        """The state was not the run's: nor may be what is on the disk. It stays until there is better."""
        self._doubted = True

    def renumbered(self, before: int) -> None:
        """The rounds after `before` are void."""
        for round_ in self._log.rounds if self._log is not None else ():
            if round_ > before:
                self._drop(round_)

    async def _snap(self, place: CheckpointLocation, tokens: int, doubted: bool) -> None:
        try:
            loop = asyncio.get_running_loop()
            new = await loop.run_in_executor(self._slow, self._take, place, tokens)
            with self._turn:
                old = [s for s in self._snapshots if s.path != new.path]
                kept = [] if doubted else [s for s in old if s.path not in self._damaged][: KEPT - 1]
                gone = self._damaged | {s.path for s in old if s not in kept}
                snapshots.remove(gone - {new.path})
                self._snapshots, self._damaged = [new, *kept], set()
            self._troubles.pop(NO_SNAPSHOT, None)
            self.on_snapshot()
            if self._log is not None:
                await loop.run_in_executor(self._quick, self._tidy, self._log)
        except (TornSnapshot, CorruptChunk, OSError, MemoryError) as error:
            self._gap, self._doubted = True, self._doubted or doubted
            if not self._closing:
                self._say(NO_SNAPSHOT, str(error))
        finally:
            self._snapping = None
            self._changed.set()
            following, self._next = self._next, None
            if following is not None:
                self.settled(self._outer.round, *following)

    def _take(self, place: CheckpointLocation, tokens: int) -> Snapshot:
        """In the snapshot thread."""
        log_, limit = self._log, place.limit or float("inf")
        assert log_ is not None
        while self.size + self._whole > limit or place.room(place.folder) < self._whole:
            if self._squeeze(log_):
                continue
            if (need := self.size + self._whole) > limit:
                raise TornSnapshot(f"disk={place.limit / 1e9:g} is too little, {need / 1e9:.2g} GB are needed")
            break
        chunks, copy = self._outer.chunks, self._copy
        new = snapshots.write(place.folder, place.run, place.layout, chunks, tokens, copy, place.room)
        if not all(r in log_ or r in self._memory for r in range(new.first + 1, new.last + 1)):
            snapshots.remove([new.path])
            raise TornSnapshot(
                f"rounds {new.first + 1} to {new.last} were applied meanwhile, and the log lacks one"
            )
        return new

    def _copy(self, c: int) -> tuple[int, NDArray[np.float32], bytes]:
        if self._closing:
            raise TornSnapshot("the node stops")
        round_, both, sum_ = self._outer.copy(c)
        if round_ < 0:
            raise TornSnapshot("the state is being fetched")
        return round_, both, sum_

    def _say(self, what: str, why: str) -> None:
        """Once for as long as it lasts."""
        if what not in self._troubles:
            log.warning(f"{what}: {why}")
        self._troubles[what] = why


def _give_way() -> None:
    """Of this thread alone: on Linux priorities are the threads'."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, 10)
