"""`atoll export`: the anchor of a node's newest state as a safetensors file, to be loaded without Atoll.

It reads what the node has on its disk (`atoll.node.checkpoint.checkpointer`), whether its daemon runs or not, and
changes nothing there. Chunk after chunk is read from a snapshot, brought forward by the sealed log, and
written to its place in the file: of a model of any size, no more than a chunk is in memory.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import Malformed
from atoll.comm.config.engine import Engine
from atoll.comm.digest import digest, root
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.files import Room, atomic_write, room, write_all
from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.node.checkpoint import hf_llama, run_manifest, snapshots
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.checkpoint.sealed_log import SealedLog
from atoll.node.checkpoint.snapshots import Snapshot, TensorShapes, safetensors_header
from atoll.node.outer.layout import fragments_and_chunks
from atoll.node.outer.method import outer_schedule, seal_format

CONFIG = "config.json"
WEIGHTS = "model.safetensors"  # where transformers looks for them
PUBLIC_MODE = 0o666  # within the umask: a model is made to be passed on


class TensorNaming(StrEnum):
    """The names that an exported file gives the parameters."""

    NAMES = "names"  # the parameters' own
    LLAMA = "llama"  # Hugging Face's LlamaForCausalLM


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


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The facts of an exported model: its run, its round, its parameters, its state's digest."""

    run: str
    round: int
    n_params: int
    state_digest: str  # as the round's commit record has it


class StateMissing(Exception):
    """The disk does not have the state of any round from `round` on."""

    def __init__(self, round_: int, sentence: str) -> None:
        super().__init__(sentence)
        self.round = round_


def export(
    state_dir: Path, out: Path, naming: TensorNaming, run: str = "", overwrite: bool = False, room: Room = room
) -> ExportResult:
    """Write the model to `out`, and `config.json` beside it. `run`: name or mark, where the node has kept several.
    Raises `ConfigError`, `ResourceError`."""
    _check_out(out, naming, overwrite)
    while True:
        saved = choose_run(state_dir, run)
        tensors = _tensors(saved, naming)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            return _newest(saved, out, tensors, naming, room)
        except StateMissing as lacking:
            if choose_run(state_dir, run).files == saved.files:
                raise ResourceError(
                    f"no state of run {saved.manifest.run.name} in {state_dir} is whole ({lacking}): export from "
                    "another node, or start this one, which then fetches what it lacks from its peers"
                ) from None
            # else the daemon has replaced them meanwhile: once more
        except OSError as error:
            raise ResourceError(f"cannot write {out}: {error.strerror or error}") from None


def choose_run(state_dir: Path, run: str = "") -> SavedRun:
    """The run whose state a node's state directory has; `run`, its name or four digits or more of its id, chooses
    where there are several. Raises `ConfigError` for a folder that is no node's or a choice that is not one run,
    `ResourceError` where no snapshot can be read."""
    if not state_dir.is_dir():
        raise ConfigError(f"there is no state directory {state_dir}: give a node's, such as ~/.atoll/node")
    if (state_dir / "journal.sqlite").exists():
        raise ConfigError(
            f"{state_dir} is a coordinator's, which never has the model: give the state directory of a node"
        )
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
        wrong = f"{len(found)} of them are {run!r}" if run else "say which with --run"
        raise ConfigError(
            f"{state_dir} has the runs {known}: {wrong}; give a name that only one has, or what is in brackets"
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


def _newest(saved: SavedRun, out: Path, tensors: TensorShapes, naming: TensorNaming, room: Room) -> ExportResult:
    """Write the newest state that is whole."""
    lacking = StateMissing(1 << 62, f"{saved.snapshots[0].path.name} needs rounds that the log lacks")
    for round_ in saved.rounds:
        if round_ < lacking.round:
            try:
                return _write(saved, round_, out, tensors, naming, room)
            except StateMissing as error:
                lacking = error
    raise lacking


def _write(
    saved: SavedRun, round_: int, out: Path, tensors: TensorShapes, naming: TensorNaming, room: Room
) -> ExportResult:
    newest = next(s for s in saved.snapshots if s.first <= round_)
    config = saved.manifest.run
    facts = {
        "run": config.name,
        "run_id": saved.run_id,
        "round": str(round_),
        "tokens": str(newest.tokens),
        "tokens_round": str(newest.first),  # after which so many tokens were committed
        "state_digest": "0" * 32,
    }
    start = len(safetensors_header({"format": "pt", **facts}, tensors))
    with atomic_write(out, start + 4 * saved.chunks.numel, room, PUBLIC_MODE) as file:
        digests = []
        for span, anchor, _, chunk_digest in replay_state(saved, round_):
            write_all(file, [anchor.data.cast("B")], start + 4 * span.start)
            digests.append(chunk_digest)
        facts["state_digest"] = root(digests).hex()
        write_all(file, [memoryview(safetensors_header({"format": "pt", **facts}, tensors))], 0)
        model = asdict(config.titan if config.engine is Engine.TORCHTITAN else config.model)
        plain = {**facts, "engine": config.engine, "build": saved.manifest.model, "model": model}
        model_config = hf_llama.config(config.model) if naming is TensorNaming.LLAMA else plain
        text = json.dumps(model_config, indent=2).encode() + b"\n"
        with atomic_write(out.with_name(CONFIG), len(text), room, PUBLIC_MODE) as beside:
            write_all(beside, [memoryview(text)], 0)
    return ExportResult(config.name, round_, saved.chunks.numel, facts["state_digest"])


def _tensors(saved: SavedRun, naming: TensorNaming) -> TensorShapes:
    """What the file calls the parameters, in the order of the flat vector."""
    if naming is TensorNaming.NAMES:
        return saved.layout
    if saved.manifest.model:
        raise ConfigError(
            f"this node trains a model of its own (model={saved.manifest.model}), the llama layout is of the "
            "run's built-in one: export it with --layout names"
        )
    if (run := saved.manifest.run).engine is Engine.TORCHTITAN:
        raise ConfigError(
            f"run {run.name} trains torchtitan's {run.titan.config}, the llama layout is of the built-in model: "
            "export it with --layout names, and have torchtitan turn that into Hugging Face's layout, "
            "python -m atoll.node.engines.titan_weights to-hf MODEL.safetensors FOLDER "
            f"--module {run.titan.module} --config {run.titan.config}"
        )
    return hf_llama.to_llama_names(saved.layout, saved.manifest.run.model)


def _check_out(out: Path, naming: TensorNaming, overwrite: bool) -> None:
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name a file, such as {out / WEIGHTS}")
    if out.suffix != snapshots.SUFFIX:
        raise ConfigError(f"{out.name} will be a safetensors file: give --out {out.with_suffix(snapshots.SUFFIX)}")
    if naming is TensorNaming.LLAMA and out.name != WEIGHTS:
        raise ConfigError(f"transformers looks for {WEIGHTS}, not {out.name}: give --out {out.with_name(WEIGHTS)}")
    for path in (out, out.with_name(CONFIG)):
        if path.exists() and not overwrite:
            raise ConfigError(f"{path} exists: give --overwrite, or --out in another folder")
