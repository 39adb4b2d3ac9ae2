"""One wandb run for the whole life of a run of ours, however often the coordinator starts. A `Sink`.

The run's id is kept in the journal. wandb's step is the round, and there is one row a round, nothing else: so line
k of the history is the same row whoever sends it, and what is sent twice, by a process that was killed and by the
one after it, is there once.

    online     the server says which step it has, and the rounds after that are sent
    offline    this machine's files say it; a process begins a file of its own where the one before it really ends,
               and `wandb sync` puts them together

What was written offline before a run went online is sent from the journal, so those files need no sync any more.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.comm.config.run import RunConfig, WandbMode
from atoll.coordinator.tracking import wandb_file
from atoll.coordinator.tracking.figures import Row
from atoll.coordinator.tracking.wandb_settings import init_arguments, init_settings

log = logging.getLogger("atoll.coordinator")
FOLDER = "wandb"  # in the state directory, or WANDB_DIR
MAX_TITLE = 63  # characters, by wandb's own rule
ALERT_SECONDS = 300.0  # in which wandb sends one alert of a title
Value = str | float | int


class WandbRun:
    """The wandb run, open to be written to."""

    def __init__(self, config: RunConfig, state_dir: Path, run_id: str, mode: WandbMode) -> None:
        """Create the run, or resume it. Raises what wandb raises."""
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb, self._online = wandb, mode is WandbMode.ONLINE
        folder = Path(os.environ.get("WANDB_DIR") or state_dir) / FOLDER
        before = wandb_file.files_of(folder, run_id)
        for file in before:
            wandb_file.tidy(file)
        arguments = init_arguments(config, state_dir, run_id, mode)
        self._run = wandb.init(**arguments, settings=wandb.Settings(**init_settings(os.environ)))
        for axis in ("round", "tokens"):
            self._run.define_metric(axis, hidden=True)
        self._run.define_metric("*", step_metric="round")
        self._run.define_metric("loss/*", step_metric="tokens")
        if self._online:
            self.last = max(self._run.starting_step - 1, 0)
            self._offline = [file for file in before if file.parent.name.startswith("offline-")]
        else:
            self.last = max(map(wandb_file.last_step, before), default=0)
            self._offline = []

    def write(self, row: Row) -> None:
        step = int(row["round"])
        shown = {name: value for name, value in row.items() if name != "committed_at"}
        self._run.log(shown | {"_timestamp": row["committed_at"]}, step=step, commit=True)
        self.last = step

    def flush(self) -> None:
        while self._offline:
            wandb_file.mark_synced(self._offline.pop())

    def summarize(self, values: Mapping[str, Value]) -> None:
        """Set figures of the run as a whole; those of the last round are there by themselves."""
        self._run.summary.update(dict(values))

    def show_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Value]]) -> None:
        """Set a table of the run, in the place of the one of this name."""
        self._run.summary[name] = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])

    def alert(self, title: str, sentence: str, on: bool) -> None:
        """Have wandb tell whoever wants to be told of something that begins (`on`), or is over."""
        self._run.alert(title[:MAX_TITLE], sentence, level="ERROR" if on else "INFO", wait_duration=ALERT_SECONDS)

    def refer_to(self, name: str, url: str, facts: Mapping[str, Value], aliases: Sequence[str]) -> None:
        """Log an artifact of type model that says where a checkpoint is; none of its bytes are read."""
        artifact = self._wandb.Artifact(name, type="model", metadata=dict(facts))
        artifact.add_reference(url, name="checkpoint", checksum=False)
        self._run.log_artifact(artifact, aliases=list(aliases))

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # `finish` alone returns a moment before wandb's own process has closed the file
