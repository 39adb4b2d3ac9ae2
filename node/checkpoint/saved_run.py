"""The state of a run as a node's disk has it: snapshots and the sealed log, found and brought forward.

What is read here is never changed, and the daemon may be at work meanwhile: a file that it replaces is
`StateMissing`, and who reads begins anew with what is there then. No more than a chunk of the state is in memory.
The uploader (`uploader`) and `atoll export` (`atoll.node.export`) read by it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import Malformed
from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.node.checkpoint import run_manifest, snapshots
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.checkpoint.sealed_log import SealedLog
from atoll.node.checkpoint.snapshots import Snapshot, TensorShapes
from atoll.node.outer.layout import fragments_and_chunks
from atoll.node.outer.method import outer_schedule, seal_format


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The snapshots and the sealed log of one run on a disk, with the manifest that tells the run's config."""

    manifest: RunManifest
    run_id: str  # hexadecimal
    layout: TensorShapes
    chunks: Chunks
    snapshots: tuple[Snapshot, ...]  # the newest first
    log: SealedLog

    @property
    def files(self) -> tuple[Path, ...]:
        """Paths of the snapshots, the newest first."""
        return tuple(s.path for s in self.snapshots)

    @property
    def written_at(self) -> float:
        """Seconds since 1970 when the last of the snapshots was written; 0: all are gone meanwhile."""
        return max((path.stat().st_mtime for path in self.files if path.exists()), default=0.0)

    @property
    def rounds(self) -> list[int]:
        """The rounds whose state the files should bring back, the newest first."""
        found, logged = set[int](), set(self.log.rounds)
        for snapshot in self.snapshots:
            reach = snapshot.first
            while reach >= snapshot.last or reach + 1 in logged:
                if reach >= snapshot.last:
                    found.add(reach)
                if reach + 1 not in logged:
                    break
                reach += 1
        return sorted(found, reverse=True)


class StateMissing(Exception):
    """The disk does not have the state of any round from `round` on."""

    def __init__(self, round_: int, sentence: str) -> None:
        super().__init__(sentence)
        self.round = round_


def choose_run(state_dir: Path, run: str = "") -> SavedRun:
    """The run whose state a node's state directory has; `run`, its name or four digits or more of its id, chooses
    where there are several. Raises `ConfigError` for a folder that is no node's or a choice that is not one run,
    `ResourceError` where no snapshot can be read."""
    if not state_dir.is_dir():
        raise ConfigError(
            f"there is no state directory {state_dir}: give a node's, such as ~/.local/state/atoll/node"
        )
    if (state_dir / "journal.sqlite").exists():
        raise ConfigError(
            f"{state_dir} is a coordinator's, which never has the model: give the state directory of a node"
        )
    if not any((state_dir / name).exists() for name in ("outer", "lock", "node.yaml")):
        raise ConfigError(f"{state_dir} is no node's state directory: give one, such as ~/.local/state/atoll/node")
    paths = sorted(state_dir.glob(f"outer/*/{snapshots.PREFIX}*{snapshots.SUFFIX}"))
    folders = sorted({path.parent for path in paths})
    if not folders:
        raise ResourceError(
            f"there is no snapshot in {state_dir} yet: a node takes its first when it has the run's state, and "
            "none if it is a reducer, has durable=false, or checkpoint.copies leaves them to others"
        )
    everything = [saved for folder in folders if (saved := open_run(folder)) is not None]
    if not everything:
        for path in paths:
            if (other := snapshots.other_format(path)) is not None:
                raise ResourceError(f"{path} cannot be read, {other}: export it with the version that wrote it")
        raise ResourceError(
            f"no snapshot in {state_dir} can be read (damaged, another user's, or without the .json beside its "
            "folder, which a node writes when it starts): start this node, or export from another"
        )
    found = [
        k for k in everything if run in ("", k.manifest.run.name) or (len(run) >= 4 and k.run_id.startswith(run))
    ]
    if len(found) != 1:
        known = ", ".join(
            f"{k.manifest.run.name} ({k.run_id[:8]}, round {max(k.rounds, default=0)})" for k in everything
        )
        wrong = f"{len(found)} of them are {run!r}" if run else "say which"
        named = [k.manifest.run.name for k in everything]
        newest = max(found or everything, key=lambda k: k.written_at)
        name = newest.manifest.run.name
        choice = name if named.count(name) == 1 else newest.run_id[:8]
        raise ConfigError(
            f"{state_dir} has the runs {known}: {wrong}; give --run with a name that only one has, or the start "
            f"of an id; `--run {choice}` is the newest"
        )
    return found[0]


def open_run(folder: Path) -> SavedRun | None:
    """Open the snapshots and the log in the folder of a run; None: nothing there can be read."""
    known = run_manifest.read(folder)
    for path in sorted(folder.glob(f"{snapshots.PREFIX}*{snapshots.SUFFIX}"), reverse=True):
        if known is None or (described := snapshots.describe(path)) is None:
            continue
        run, layout, chunks = described
        if found := snapshots.find(folder, run, layout, chunks):
            log = SealedLog(folder, run, chunks)
            return SavedRun(known, run.hex(), layout, chunks, tuple(found), log)
    return None


def replay_state(
    saved: SavedRun, round_: int
) -> Iterator[tuple[slice, NDArray[np.float32], NDArray[np.float32], bytes]]:
    """The state of a round, chunk by chunk: where it lies in the flat vector, its anchor, its momentum, the digest
    of both. Raises `StateMissing`."""
    config, chunks = saved.manifest.run, saved.chunks
    fragments, _ = fragments_and_chunks(config, saved.layout)
    sealing, schedule, fragment_schedule = (
        seal_format(config, *fragments),
        outer_schedule(config),
        FragmentSchedule(chunks.fragment_count),
    )
    deltas, scratches = np.empty((2, chunks.largest), np.float32)
    for c in range(chunks.count):
        size = chunks.size(c)
        at, both = _stored(saved, c, round_)
        anchor, momentum, delta, scratch = both[:size], both[size:], deltas[:size], scratches[:size]
        fragment, i = chunks.place(c)
        for k in fragment_schedule.rounds(fragment, at, round_):
            payload = saved.log.read(k, i)
            if payload is None:
                raise StateMissing(k, f"chunk {c} of sealed round {k} is damaged or gone")
            try:
                length = sealing.decode(c, payload, delta)
            except Malformed as error:
                raise StateMissing(k, f"chunk {c} of sealed round {k}: {error}") from None
            schedule.at(fragment_schedule.turn(k), length).step(anchor, momentum, delta, scratch)
        yield chunks.span(c), anchor, momentum, digest(both)


def _stored(saved: SavedRun, c: int, newest: int) -> tuple[int, NDArray[np.float32]]:
    """The newest round, up to `newest`, of which a snapshot has chunk `c`; and anchor, momentum then."""
    for snapshot in saved.snapshots:
        if snapshot.at[c] <= newest and (data := snapshot.chunk(c, saved.chunks)) is not None:
            return snapshot.at[c], np.frombuffer(bytearray(data), np.float32)
    raise StateMissing(newest, f"chunk {c} of {saved.snapshots[0].path.name} is damaged or gone")
