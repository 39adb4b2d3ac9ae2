"""What a wandb run shows beside its rows: the best losses, the events, the checkpoints, alerts.

Everything is looked up (the journal, the store), so that it is the same after a restart. The table and the list of
checkpoints cost the server a file each time, so they are sent now and then.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError, ResourceError
from atoll.comm.ids import NodeId
from atoll.coordinator.history.series import F64
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.run_records import RunRecords
from atoll.coordinator.state_machine.events import CommitRecord, Note
from atoll.coordinator.tracking.checkpoint_store import CheckpointStore, StoredCheckpoint
from atoll.coordinator.tracking.events_table import COLUMNS, event_rows, under_way
from atoll.coordinator.tracking.run_summary import RunSummary
from atoll.coordinator.tracking.wandb_run import Value, WandbRun

log = logging.getLogger("atoll.coordinator")
MAX_EVENTS = 500  # the latest, that the table has
TABLE_SECONDS = 600.0  # between two tables; each is a file at wandb's server
STORE_SECONDS = 300.0  # between two looks into the store


class WandbNews:
    """The news of one run for its wandb run, which a process has open."""

    def __init__(self, run: WandbRun, journal: Journal, records: RunRecords, config: RunConfig) -> None:
        self._run, self._journal, self._records = run, journal, records
        self._summary = RunSummary()
        try:
            self._summary.take_series(records.series())
        except ResourceError as error:
            log.warning(f"the best losses in wandb are those from now on, old records cannot be read: {error}")
        self._better = True
        self._shown: list[tuple[float, Note]] = []
        self._table_at = self._checkpoints_at = -inf
        self._found = list[StoredCheckpoint]()  # that wandb has not been told of
        self._troubles = set[str]()  # what does not work
        self._checkpoints: _CheckpointWatch | None = None
        if config.wandb.artifacts:
            self._checkpoints = _CheckpointWatch(config, self._digest)

    def take(self, record: CommitRecord) -> None:
        """Take in a record that the run has a row of now."""
        self._records.add(record)  # to the series
        self._better |= self._summary.take(record)

    def tell(self, now: float, last: bool = False) -> None:
        """Send what is new and due at `now` (seconds); `last`: the run is about to be closed."""
        if self._better:
            self._run.summarize(self._summary.values())
            self._better = False
        if last or now >= self._table_at + TABLE_SECONDS:
            self._table_at = now
            self._try("the events are", self._show_events)
        if self._checkpoints is not None and (last or now >= self._checkpoints_at + STORE_SECONDS / 10):
            self._checkpoints_at = now
            self._found += self._checkpoints.found()
            while self._found and self._try("checkpoints are", lambda: self._refer_to(self._found[0])):
                del self._found[0]

    def alert(self, title: str, sentence: str, on: bool) -> None:
        """Send an alert."""
        self._run.alert(title, sentence, on)

    def _show_events(self) -> None:
        notes = self._journal.notes(MAX_EVENTS)
        if notes != self._shown:
            table = self._records.series()
            rounds, at = table.columns("round", "committed_at")
            self._run.show_table("events", COLUMNS, event_rows(notes, rounds, at, self._names(notes, rounds, at)))
            self._shown = notes

    def _names(self, notes: Sequence[tuple[float, Note]], rounds: F64, committed_at: F64) -> dict[NodeId, str]:
        """The names of the nodes that notes are about, by the records of the rounds then and of those before."""
        then = {under_way(at, rounds, committed_at) for at, note in notes if note.node is not None}
        names: dict[NodeId, str] = {}
        with suppress(ResourceError):  # those that cannot be read name nobody
            for view in self._records.views(sorted({k for number in then for k in (number - 1, number) if k > 0})):
                names |= view.names
        return names

    def _refer_to(self, checkpoint: StoredCheckpoint) -> None:
        facts: dict[str, Value] = {
            "round": checkpoint.round,
            "tokens": checkpoint.tokens,
            "state_digest": checkpoint.state_digest,
        }
        self._run.refer_to("checkpoint", checkpoint.url, facts, ["latest", f"round-{checkpoint.round}"])

    def _try(self, what: str, send: Callable[[], None]) -> bool:
        """Send what wandb first asks its server about; whether that went well. It is tried again when it is
        due."""
        try:
            send()
        except Exception as error:  # of wandb's, or of the client that it has for the store
            if what not in self._troubles:
                log.warning(f"{what} not shown in wandb for now: {error}")
            self._troubles.add(what)
            return False
        self._troubles.discard(what)
        return True

    def _digest(self, round_: int) -> str:
        found = next(self._records.iter_rounds(round_ - 1, 1), None)
        return found.state_digest if found is not None and found.round == round_ else ""


class _CheckpointWatch:
    """A thread that looks into the run's store, which may not answer for as long as it likes."""

    def __init__(self, config: RunConfig, digest_of: Callable[[int], str]) -> None:
        self._config, self._digest_of = config, digest_of
        self._lock, self._found = threading.Lock(), list[StoredCheckpoint]()
        threading.Thread(target=self._watch, name="checkpoints", daemon=True).start()

    def found(self) -> list[StoredCheckpoint]:
        """Those that were found since the last call."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def _watch(self) -> None:
        wait = threading.Event()  # that nobody sets
        try:
            store = CheckpointStore(self._config.checkpoint.remote, self._config.name, self._digest_of)
        except (ImportError, ValueError) as error:
            log.warning(f"checkpoints are not shown in wandb (wandb.artifacts): {error}")
            return
        trouble = ""
        while True:
            try:
                new = store.new()
                with self._lock:
                    self._found += new
                trouble = ""
            except AtollError as error:
                if not trouble:
                    log.warning(f"checkpoints are not shown in wandb for now: {error}")
                trouble = str(error)
            wait.wait(STORE_SECONDS)
