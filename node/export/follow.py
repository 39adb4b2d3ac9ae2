"""`atoll export --every N`: a job beside a node that exports each Nth committed round as FOLDER/round-000120.

    look at the state directory --> the rounds that are due, the oldest first --> one folder each --> the oldest go
              ^                                                                                          |
              +------------------------------------- wait ----------------------------------------------+

What was done is what is in FOLDER: killed and started again, the job goes on behind the newest folder. It ends
when the run does, whose last round it exports too. A round that the node's disk no longer brings back, because the
job was not there in time, is named and left out.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.comm.folders import clear_abandoned, remove_folder
from atoll.node.checkpoint.saved_run import SavedRun, choose_run
from atoll.node.export.folder import check_replaceable
from atoll.node.export.newest_state import ExportResult
from atoll.node.export.weights import SUFFIX, read_facts

POLL_INTERVAL = 5.0  # seconds between two looks at the state directory
AMOUNT = re.compile(r"\d[\d,]*\.\d+")  # such as the room on a disk, which is another each time
FOLDER_NAME = re.compile(r"round-(\d{6,})")


class Exporter(Protocol):
    """Writes the state of a round to a folder (`folder.FolderExporter`)."""

    def export(self, out: Path, round_: int | None = None) -> ExportResult: ...


@dataclass
class Follower:
    """The job. Its failures are sentences for `say`; it tries again with the next look."""

    state_dir: Path
    run: str  # as in `choose_run`
    folder: Path
    every: int  # rounds
    keep: int  # newest folders that stay; 0: all
    exporter: Exporter
    say: Callable[[str], None]
    finished: Callable[[int], bool] | None = None  # whether the run ended with a round; None: nobody knows
    # Called with the newest folder until it succeeds, and at each start: done twice, it does nothing.
    publish: Callable[[str, int, Path], None] | None = None
    _published: int = field(default=-1, init=False)
    _checked: set[int] = field(default_factory=set, init=False)  # rounds whose folders are exports of this run
    # Of this look and of the one before, without the amounts in them.
    _troubles: set[str] = field(default_factory=set, init=False)
    _troubles_before: set[str] = field(default_factory=set, init=False)
    _begun: bool = field(default=False, init=False)  # something was exported

    def follow(self, wait: Callable[[float], bool]) -> None:
        """Export until the run is finished, or `wait(seconds)` says True, which ends the job. Raises
        `ConfigError`."""
        while not self.look():
            if wait(POLL_INTERVAL):
                return

    def look(self) -> bool:
        """Export what is due now; True: the run is finished and nothing is left to do. Raises `ConfigError`."""
        self._troubles_before, self._troubles = self._troubles, set()
        try:
            saved = choose_run(self.state_dir, self.run)
        except ResourceError as error:  # the node has only begun
            self._report(str(error))
            return False
        self._check_folder(saved)
        rounds = sorted(saved.rounds)
        total = saved.manifest.run.rounds
        last = rounds[-1] if rounds else 0
        over = (0 < total.total <= last and not total.until_member) or self._finished(last)
        done = max(self.exported(), default=None)
        due = due_rounds(rounds, self.every, done, last if over else None)
        if done is not None and (gone := missed_rounds(rounds, self.every, done)):
            self._report(f"rounds {', '.join(map(str, gone))} are no longer on the node's disk, and are left out")
        failed = [r for r in (due[-self.keep :] if self.keep else due) if not self._export(r)]
        self._remove_old()
        published = self._publish(saved.manifest.run.name)
        return over and not failed and published

    def _finished(self, last: int) -> bool:
        try:
            return self.finished is not None and self.finished(last)
        except AtollError as error:
            self._report(str(error))
            return False

    def exported(self) -> list[int]:
        """The rounds that are in the folder, ascending."""
        if not self.folder.is_dir():
            return []
        found = (FOLDER_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        rounds = (int(match[1]) for match in found if match)
        return sorted({round_ for round_ in rounds if self.path(round_).is_dir()})

    def path(self, round_: int) -> Path:
        """The folder of a round."""
        return self.folder / f"round-{round_:06d}"

    def _export(self, round_: int) -> bool:
        try:
            done = self.exporter.export(self.path(round_), round_)
        except ConfigError:
            raise
        except AtollError as error:
            self._report(f"round {round_} is not exported: {error}")
            return False
        self._checked.add(round_)
        if not self._begun:
            for note in done.notes:
                self.say(note)
        self._begun = True
        self.say(f"run {done.run}, round {round_}: {done.n_params:,} parameters are in {self.path(round_)}")
        return True

    def _remove_old(self) -> None:
        """Remove all but the newest folders, and what killed jobs have left of others."""
        clear_abandoned(self.folder, "round-[0-9]*")
        for old in self.exported()[: -self.keep] if self.keep else []:
            try:
                remove_folder(self.path(old))
            except OSError as error:
                self._report(f"{self.path(old)} cannot be removed: {error.strerror}")

    def _publish(self, run: str) -> bool:
        """Publish the newest folder; False: it has to be tried again."""
        newest = max(self.exported(), default=self._published)
        if self.publish is None or newest == self._published:
            return True
        try:
            self.publish(run, newest, self.path(newest))
        except ConfigError:
            raise
        except AtollError as error:
            self._report(str(error))
            return False
        self._published = newest
        return True

    def _check_folder(self, saved: SavedRun) -> None:
        """Raise `ConfigError` if the folder has exports of another run, or folders with such names that are no
        exports: none of them is this job's to count, or to remove."""
        for round_ in sorted(set(self.exported()) - self._checked):
            check_replaceable(folder := self.path(round_), overwrite=True)
            runs = {read_facts(path).get("run_id", "") for path in folder.glob(f"*{SUFFIX}")} - {""}
            if not runs:
                raise ConfigError(f"{folder} is empty, and no export: give --out another folder")
            if others := sorted(runs - {saved.run_id}):
                raise ConfigError(
                    f"{self.folder} has exports of another run ({others[0][:8]}, this one is "
                    f"{saved.run_id[:8]}): give --out another folder"
                )
            self._checked.add(round_)

    def _report(self, trouble: str) -> None:
        """Say what does not work, once for as long as it lasts."""
        key = AMOUNT.sub("", trouble)
        if key not in self._troubles | self._troubles_before:
            self.say(trouble)
        self._troubles.add(key)


def due_rounds(rounds: Sequence[int], every: int, done: int | None, last: int | None) -> list[int]:
    """The rounds to export now, ascending: of `rounds`, which the disk brings back, each `every`th that is newer
    than `done`, the newest that was exported (None: none was); and `last`, the run's last one (None: it goes
    on)."""
    after = -1 if done is None else done
    return [r for r in sorted(rounds) if r > after and (r == last or (r > 0 and r % every == 0))]


def missed_rounds(rounds: Sequence[int], every: int, done: int) -> list[int]:
    """The rounds after `done` that were to be exported and that the disk no longer brings back, ascending."""
    if not rounds:
        return []
    first = done - done % every + every
    return [r for r in range(first, max(rounds) + 1, every) if r not in rounds]
