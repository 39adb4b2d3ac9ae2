"""Has the newest state that is whole on a node's disk written by a function, once more from the beginning where
the daemon replaced meanwhile what was being read. Both forms of `atoll export` read by it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from atoll.comm.errors import ResourceError
from atoll.node.checkpoint.saved_run import SavedRun, StateMissing, choose_run

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The facts of an exported model: its run, its round, its parameters, its state's digest."""

    run: str
    round: int
    n_params: int
    state_digest: str  # as the round's commit record has it
    notes: tuple[str, ...] = ()  # sentences about what the export lacks, for people


def write_newest(state_dir: Path, run: str, out: Path, write: Callable[[SavedRun, int], T]) -> T:
    """Call `write(saved, round_)` for the newest round of the run (`run` as in `choose_run`), then for older ones
    while it raises `StateMissing`, and return its result. `out` is what it writes, for errors. Raises
    `ConfigError`, and `ResourceError` where no state is whole or `out` cannot be written."""

    def newest(saved: SavedRun) -> T:
        lacking = StateMissing(1 << 62, f"{saved.snapshots[0].path.name} needs rounds that the log lacks")
        for round_ in saved.rounds:
            if round_ < lacking.round:
                try:
                    return write(saved, round_)
                except StateMissing as error:
                    lacking = error
        raise lacking

    return _whatever_the_daemon_replaces(state_dir, run, out, newest)


def write_round(state_dir: Path, run: str, round_: int, out: Path, write: Callable[[SavedRun, int], T]) -> T:
    """Call `write(saved, round_)` for one round and return its result. Raises what `write_newest` raises."""
    return _whatever_the_daemon_replaces(state_dir, run, out, lambda saved: write(saved, round_))


def _whatever_the_daemon_replaces(state_dir: Path, run: str, out: Path, read: Callable[[SavedRun], T]) -> T:
    while True:
        saved = choose_run(state_dir, run)
        try:
            return read(saved)
        except StateMissing as lacking:
            if choose_run(state_dir, run).files == saved.files:
                raise ResourceError(
                    f"no state of run {saved.manifest.run.name} in {state_dir} is whole ({lacking}): export from "
                    "another node, or start this one, which then fetches what it lacks from its peers"
                ) from None
            # else the daemon has replaced them meanwhile: once more
        except OSError as error:
            raise ResourceError(f"cannot write {out}: {error.strerror or error}") from None
