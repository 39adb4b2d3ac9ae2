"""Runs that are watched: a journal that rounds are committed to, and the sinks' processes that hear of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

from long_runs import long_record

from atoll.comm.config.run import RunConfig, to_json
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.state_machine.events import CommitRecord, Failure, Note, Publish, Started
from atoll.coordinator.tracking.tracker import Tracker


def record(number: int, members: int = 3) -> CommitRecord:
    """The record of a round."""
    failed = (Failure(1, NodeId("n2"), 3, "silent for 5 s", 1.7e9, 5.0, 20.0, 1.0, 9.0),) if number == 3 else ()
    val_loss = 4.0 + 1 / number if number != 2 else None
    return replace(long_record(number, members), val_loss=val_loss, failures=failed)


class WatchedRun:
    """A run in a state directory, without nodes: its rounds are made up. `serve` is a coordinator's life."""

    def __init__(self, state_dir: Path, config: RunConfig, members: int = 3) -> None:
        self.state_dir, self.config, self.members = state_dir, config, members
        self.committed = 0
        self.tracker: Tracker
        self._journal: Journal

    def serve(
        self, rounds: int, seen: Callable[[], object], then: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Commit so many rounds, wait until `seen` holds, do `then`, and stop."""
        with closing(Journal(self.state_dir)) as self._journal:
            self._journal.set_meta("config", to_json(self.config).decode())
            asyncio.run(self._serve(rounds, seen, then))

    def commit(self, rounds: int) -> None:
        """Commit so many more rounds."""
        for number in range(self.committed + 1, self.committed + rounds + 1):
            made = record(number, self.members)
            note = (made.committed_at - 1.0, Note(f"round {number} is about to close", NodeId("n1")))
            self._journal.append([(made.committed_at, Started(number))], [made], [note])
            self.tracker.tell(Publish(made))
        self.committed += rounds

    async def until(self, seen: Callable[[], object], seconds: float = 60.0) -> None:
        """Return once `seen` holds."""
        deadline = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < deadline, f"it was not seen within {seconds:g} s"
            await asyncio.sleep(0.05)

    async def _serve(
        self, rounds: int, seen: Callable[[], object], then: Callable[[], Awaitable[None]] | None
    ) -> None:
        async with Tracker(self.config, self._journal, self.state_dir) as self.tracker:
            self.commit(rounds)
            await self.until(seen)
            if then is not None:
                await then()
