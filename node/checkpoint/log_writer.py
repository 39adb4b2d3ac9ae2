"""Committed rounds on their way to the sealed log: each waits in memory until a thread has written it.

The log is written from the reduce's own buffers, which are used again when the file is there: a round costs no
copy and delays nothing. A disk that is too slow or full loses the oldest waiting rounds (`incomplete`), and a
snapshot then closes the gap. Without a disk the newest round stays in memory until the next reduce needs the room.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from atoll.comm.byte_view import U8, Octets
from atoll.comm.digest import digest
from atoll.node.checkpoint.checkpoint_files import CheckpointFiles
from atoll.node.checkpoint.policy import QUEUED_ROUNDS_LIMIT, overflow
from atoll.node.checkpoint.problems import Problems

NOT_LOGGED = "the round is not kept on disk"


@dataclass(frozen=True, slots=True)
class _QueuedRound:
    payloads: Sequence[U8]  # sealed bytes of each chunk of the round's fragment
    digests: Sequence[bytes]


class LogWriter:
    """Writes rounds to the sealed log, the oldest first. Its methods are called on the event loop, but for
    `read`."""

    def __init__(
        self,
        files: CheckpointFiles | None,
        release: Callable[[U8], None],
        problems: Problems,
        on_change: Callable[[], None],
    ) -> None:
        """`files`: None where nothing is written. `release` takes a reduce's buffer that is of no more use here.
        `on_change` is called when a round was written, or could not be."""
        self._files, self._release, self._problems, self._on_change = files, release, problems, on_change
        self._queue: dict[int, _QueuedRound] = {}  # by round
        self._round_at_work = -1
        self._thread = ThreadPoolExecutor(1, "log")
        self.task: asyncio.Task[None] | None = None  # while rounds are being written
        self.incomplete = False  # a round was lost since the last snapshot was begun

    def close(self) -> None:
        """End the thread, once it has finished what it writes."""
        self._thread.shutdown()

    @property
    def queued(self) -> tuple[int, ...]:
        """Rounds that wait in memory."""
        return tuple(self._queue)

    @property
    def logged(self) -> tuple[int, ...]:
        """Rounds that the log has, ascending."""
        return () if self._files is None else self._files.log.rounds

    def append(self, round_: int, payloads: Sequence[U8], digests: Sequence[bytes]) -> None:
        """Queue a committed round. Nothing but this reads or writes its payloads from now on."""
        self._queue[round_] = _QueuedRound(payloads, digests)
        limit = QUEUED_ROUNDS_LIMIT if self._files is not None else 1
        for oldest in overflow(self._queue, self._round_at_work, limit):
            self.incomplete = True
            self._forget(oldest)
        if self._files is not None and self.task is None:
            self.task = asyncio.create_task(self._write_queue(self._files), name="sealed log")

    def release_unwritable(self) -> None:
        """Give back the memory of rounds that the disk does not take now: a delta is about to need it."""
        if self._files is None or NOT_LOGGED in self._problems:
            for round_ in set(self._queue) - {self._round_at_work}:
                self._forget(round_)

    def read(self, round_: int, i: int) -> Octets | None:
        """Sealed bytes of the round's chunk `i`, counted within its fragment, from memory or disk; None: they are
        not here, or not as they were. Blocks; for any thread."""
        if (queued := self._queue.get(round_)) is not None:
            data = queued.payloads[i].tobytes()
            return data if digest(data) == queued.digests[i] else None
        return self._files.log.read(round_, i) if self._files is not None else None

    async def fetch(self, round_: int, i: int) -> Octets | None:
        """Sealed bytes of the round's chunk `i`, counted within its fragment, for a peer, who checks their digest;
        None: they are not here."""
        if (queued := self._queue.get(round_)) is not None:
            payloads = queued.payloads
            return payloads[i].tobytes() if 0 <= i < len(payloads) else None  # the buffer is used again soon
        if self._files is None or round_ not in self._files.log:
            return None
        return await asyncio.to_thread(self._files.log.read, round_, i)

    async def trim(self) -> None:
        """Drop what the log need not have, in the thread that writes it. Raises `OSError`."""
        if self._files is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._files.trim_log)

    async def _write_queue(self, files: CheckpointFiles) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._queue:
                round_ = self._round_at_work = min(self._queue)
                await loop.run_in_executor(self._thread, _write_round, files, round_, self._queue[round_])
                self._forget(round_)
                self._problems.solve(NOT_LOGGED)
                self._on_change()
        except OSError as error:
            self.incomplete = True
            self._problems.report(NOT_LOGGED, error.strerror or str(error), error)
        finally:
            self._round_at_work, self.task = -1, None
            self._on_change()

    def _forget(self, round_: int) -> None:
        for buffer in self._queue.pop(round_).payloads:
            if buffer.flags.writeable:  # those of a reduce
                self._release(buffer)


def _write_round(files: CheckpointFiles, round_: int, queued: _QueuedRound) -> None:
    """In the log's thread."""
    files.reserve_round(sum(payload.nbytes for payload in queued.payloads))
    try:
        files.log.write(round_, queued.payloads, queued.digests)
    except OSError:
        if not files.free_one():
            raise
        files.log.write(round_, queued.payloads, queued.digests)
    files.trim_log()
