"""`atoll bench trainer`: the built-in trainer beside other training loops of the same model, on the same device.

`builtin` is the trainer as it is shipped, with this command in its daemon's place; `bare` a loop of FSDP2, AdamW
and clipping with nothing of Atoll around it (`atoll.node.trainer.bare_loop`); `torchtitan` that engine under
Atoll, if it is installed. All train the same sequences from the same parameters, in turns of a few seconds, so
that the machine's moods hit all of them; on a CPU all live at once, and those whose turn it is not wait without
computing. A turn's speed is that of its steps after the first. What a round has beside its steps (loading the
anchor, handing over) is not in it.
"""

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TypeVar

import click
import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from atoll.comm.config.load import load_dataclass, load_run
from atoll.comm.config.round_time import tokens_per_step
from atoll.comm.config.run import RunConfig
from atoll.comm.config.shipped import run_file
from atoll.comm.errors import BenchFailed, ConfigError
from atoll.comm.extras import demand
from atoll.comm.options import json_option
from atoll.node.config import Device, NodeConfig, TrainerSpec, check
from atoll.node.devices import resolve
from atoll.node.trainer_channel import (
    Attach,
    DaemonEnd,
    Failed,
    Hello,
    Initialise,
    Initialised,
    LogLine,
    MicroBatch,
    Preparing,
    Progress,
    Reached,
    Ready,
    ToDaemon,
    Train,
)

BUILTIN, TITAN, BARE = "builtin", "torchtitan", "bare"
ENGINES = (BUILTIN, TITAN, BARE)
# Over the run's own settings: the same text and the same rate for all; torch has no fused Muon to compare with.
SETTINGS = (
    "data.kind=stdlib",
    "inner.optimizer=adamw",
    "inner.warmup_tokens=0",
    "inner.decay_tokens=1000000000000",
    "overlap.delay=0",
    "members.stall=3600",
)
WARM_UP_STEPS = 3
SEED = 0
TIMEOUT = 600.0  # seconds without a word from an engine
GRACE = 10.0  # seconds that an engine has to end
TRAINED_BYTES = 16  # of a parameter: itself, its gradient, AdamW's two moments
SHARED_BYTES = 8  # of a parameter: anchor and local vector, which a trainer maps
Runs = dict[str, RunConfig]  # by engine
T = TypeVar("T", bound=ToDaemon)


class TooShort(BenchFailed):
    """A turn whose steps were too few to be timed."""


@dataclass(frozen=True)
class Turn:
    """The figures of one engine's turn."""

    tokens_per_s: float
    mfu: float  # 0: not known
    loss: float  # mean over the turn's steps
    device_bytes: int  # at peak, of all ranks; 0: a CPU


@dataclass
class EngineFigures:
    """The figures of an engine, as `--json` prints them; None: not known, or not measured."""

    tokens_per_s: float | None = None  # median of the turns
    mfu: float | None = None
    peak_bytes: int | None = None  # on the devices; on a CPU of the ranks' processes
    loss: float | None = None  # of the last turn
    beyond_bytes: int | None = None  # on a CPU: without model, gradients, moments, and vectors that it maps
    overhead_percent: float | None = None  # longer than `bare`: median of the turns' ratios
    turns: list[float] = field(default_factory=list)  # tokens/s of each
    note: str = ""  # why it was not measured


@dataclass
class EngineProcess:
    """A launched training loop, with this process in its daemon's place."""

    name: str
    run: RunConfig
    end: DaemonEnd
    process: asyncio.subprocess.Process
    log: Path
    folder: Path
    numel: int = 0
    turns: list[Turn] = field(default_factory=list)
    round: int = 0
    first_sample: int = 0
    peak_bytes: int = 0

    async def begin(self) -> None:
        """Attach it to its vectors, and give the model its first values."""
        self.numel = (await self.answer(Hello)).numel
        paths = [str(self.folder / name) for name in ("anchor", "local")]
        self.vectors: list[NDArray[np.float32]] = [
            np.memmap(path, np.float32, "w+", shape=(self.numel,)) for path in paths
        ]
        if self.name != BARE:
            self.end.send(Attach(paths[0], paths[1], self.numel))
        self.end.send(Initialise(SEED))
        await self.answer(Initialised)

    async def take_turn(self, steps: int) -> None:
        """Train `steps` steps on the samples that follow, from where it was, and note the figures of all but the
        first. Raises `BenchFailed`."""
        self.turns.append(await self._train(steps))

    async def warm_up(self) -> None:
        """Train a few steps of which nothing is noted."""
        with suppress(TooShort):
            await self._train(WARM_UP_STEPS)

    async def _train(self, steps: int) -> Turn:
        size, times = self.run.inner.batch_size, list[tuple[int, float]]()
        self.round += 1
        lease = ((self.first_sample, steps * size),)
        self.end.send(Train(self.round, steps, 1, steps, 0, 1, lease))
        said, loop = Progress(0, 0, 0.0), asyncio.get_running_loop()
        while not isinstance(message := await self.message(), Ready):
            if isinstance(message, Progress):
                times.append((message.step, loop.time()))
                said = message
        self.first_sample += steps * size
        self.peak_bytes = max(self.peak_bytes, resident_peak(self.process.pid))
        if self.name != BARE:
            self.vectors[0][:] = self.vectors[1]
        (first, begun), (last, ended) = times[0], times[-1]
        if last == first:
            raise TooShort(f"a turn of {steps} steps is too short to be measured: give more --steps")
        pace = (last - first) * tokens_per_step(self.run) / (ended - begun)
        mfu = said.mfu / said.tokens_per_s * pace if said.tokens_per_s else 0.0
        return Turn(pace, mfu, message.loss, said.device_bytes)

    async def answer(self, kind: type[T]) -> T:
        """Wait for the next message of this kind; others are passed over. Raises `BenchFailed`."""
        while not isinstance(message := await self.message(), kind):
            pass
        return message

    async def message(self) -> ToDaemon:
        """Wait for the next message. Raises `BenchFailed` where the engine has failed or ended, or is silent."""
        try:
            async with asyncio.timeout(TIMEOUT):
                message = await self.end.receive()
        except TimeoutError:
            raise BenchFailed(f"{self.name} said nothing for {TIMEOUT:g} s") from None
        match message:
            case None:
                raise BenchFailed(f"{self.name} ended: {last_line(self.log)}")
            case Failed(sentence):
                raise BenchFailed(f"{self.name}: {sentence}")
            case (
                Preparing() | Hello() | Initialised() | Progress() | Reached() | Ready() | MicroBatch() | LogLine()
            ):
                return message
            case _:
                raise BenchFailed(f"{self.name} said what it was not asked: {type(message).__name__}")


@click.command()
@click.argument("overrides", nargs=-1)
@click.option("--model", default="demo", show_default=True, help="A shipped run, or a run's YAML file.")
@click.option("--engines", default=",".join(ENGINES), show_default=True, help="Which ones.")
@click.option(
    "--steps",
    default=100,
    show_default=True,
    type=click.IntRange(2),
    help="Measured, of each engine, in all turns.",
)
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1), help="Turns of each engine.")
@click.option("--node", "settings", multiple=True, help="A setting of the machine, key=value.")
@json_option
def trainer(
    overrides: tuple[str, ...],
    model: str,
    engines: str,
    steps: int,
    turns: int,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare training loops of one model on this machine, in turns; OVERRIDES are key=value settings of the run.

    The batch is the run's, in one pass in the bare loop: give inner.batch_size= where it does not fit.
    """
    chosen = tuple(dict.fromkeys(name.strip() for name in engines.split(",")))
    if unknown := set(chosen) - set(ENGINES):
        raise ConfigError(f"there is no engine {', '.join(sorted(unknown))}: choose of {','.join(ENGINES)}")
    demand("the trainer's benchmark", "torch")
    file = run_file(Path(model))
    notes = {name: unavailable(name) for name in chosen}
    runs = {
        name: load_run(file, (*SETTINGS, *settings_of(name), *overrides)) for name in chosen if not notes[name]
    }
    node = load_dataclass(NodeConfig, None, settings)
    check(node)
    for run in runs.values():  # of one batch size
        node, _ = resolve(node, run.inner.batch_size)
    measured = asyncio.run(measure(runs, node, max(2, steps // turns), turns))
    found = {name: measured.get(name) or EngineFigures(note=notes[name]) for name in chosen}
    if as_json:
        click.echo(json.dumps({"engines": {name: vars(figures) for name, figures in found.items()}}))
        return
    for name, figures in found.items():
        click.echo(f"{name:>10}  {figures.note or shown(figures)}")


def shown(figures: EngineFigures) -> str:
    """The figures in a line for people."""
    mfu = "unknown" if figures.mfu is None else f"{100 * figures.mfu:.1f} %"
    beyond, slower = "", ""
    if figures.beyond_bytes is not None:
        beyond = f" ({figures.beyond_bytes / 1e6:,.0f} MB without model, gradients, moments and vectors)"
    if (percent := figures.overhead_percent) is not None:
        slower = f" ({abs(percent):.1f} % {'more' if percent > 0 else 'less'} time than bare)"
    memory = f"{(figures.peak_bytes or 0) / 1e6:,.0f} MB{beyond}"
    return f"{figures.tokens_per_s:,.0f} tokens/s{slower}, MFU {mfu}, {memory}, loss {figures.loss:.3f}"


async def measure(runs: Runs, node: NodeConfig, steps: int, turns: int) -> dict[str, EngineFigures]:
    """The figures of each engine, which takes `turns` turns of `steps` steps. Raises `BenchFailed`."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        # A device's memory may not hold two of them.
        apart = node.device is not Device.CPU and shutil.which("nvidia-smi") is not None
        groups = [{name: run} for name, run in runs.items()] if apart else [runs]
        engines = [
            engine for group in groups for engine in await in_turns(group, node, Path(folder), steps, turns)
        ]
    found = {engine.name: figures_of(engine, node) for engine in engines}
    bare = found.get(BARE)
    for figures in found.values() if bare is not None else ():
        ratios = [b / own for b, own in zip(bare.turns if bare else (), figures.turns, strict=True)]
        figures.overhead_percent = 100 * (median(ratios) - 1)
    return found


async def in_turns(runs: Runs, node: NodeConfig, folder: Path, steps: int, turns: int) -> list[EngineProcess]:
    """Start the engines, have each of them take its turns, and end them."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(launched(name, run, node, folder / name)) for name, run in runs.items()
        ]
        for engine in engines:
            await engine.begin()
            await engine.warm_up()
        for turn in range(turns):  # each way round as often: what the machine gains or loses hits all
            for engine in engines if turn % 2 == 0 else reversed(engines):
                await engine.take_turn(steps)
        return engines


def figures_of(engine: EngineProcess, node: NodeConfig) -> EngineFigures:
    """An engine's figures over its turns."""
    turns = engine.turns
    on_device = max(turn.device_bytes for turn in turns)
    shared = 0 if engine.name == BARE else SHARED_BYTES * node.ranks
    own = engine.peak_bytes - (TRAINED_BYTES + shared) * engine.numel
    return EngineFigures(
        tokens_per_s=median(turn.tokens_per_s for turn in turns),
        mfu=median(turn.mfu for turn in turns) or None,
        peak_bytes=on_device or engine.peak_bytes,
        loss=turns[-1].loss,
        turns=[turn.tokens_per_s for turn in turns],
        beyond_bytes=None if on_device else own,
    )


def unavailable(name: str) -> str:
    """The reason why an engine cannot be measured on this machine; empty: it can be."""
    if name == TITAN and find_spec("torchtitan") is None:
        return "torchtitan is not installed: pip install '.[titan]' in Atoll's clone"
    return ""


def settings_of(name: str) -> tuple[str, ...]:
    """The run's settings that choose the engine."""
    return ("engine=torchtitan",) if name == TITAN else ()


def command_of(name: str, node: NodeConfig) -> tuple[str, ...]:
    """The trainer's own command; empty: the engine is one of the built-in trainer's."""
    if name != BARE:
        return ()
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={node.ranks}")
    return (sys.executable, "-P", *torchrun, "-m", "atoll.node.trainer.bare_loop")


@asynccontextmanager
async def launched(name: str, run: RunConfig, node: NodeConfig, folder: Path) -> AsyncIterator[EngineProcess]:
    """The engine, started by the trainer's launcher; it is ended with the context. Raises `BenchFailed`."""
    folder.mkdir()
    connections: asyncio.Queue[DaemonEnd] = asyncio.Queue()
    channel, file, log = str(folder / "socket"), folder / "spec.json", folder / "log"

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.put_nowait(DaemonEnd(reader, writer))

    spec = TrainerSpec(run, node, channel, str(folder / "cache"), command=command_of(name, node), lan=True)
    file.write_bytes(msgspec.json.encode(spec))
    with closing(await asyncio.start_unix_server(accept, channel, limit=16 << 20)):
        words = (sys.executable, "-P", "-m", "atoll.node.trainer.launcher", "--spec", str(file))
        with log.open("wb") as out:
            # In a session of its own, as torchrun's ranks are: the system may share its cores out by sessions.
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        try:
            yield EngineProcess(name, run, await connected(name, process, connections, log), process, log, folder)
        finally:
            await end(process, connections)


async def connected(
    name: str, process: asyncio.subprocess.Process, connections: asyncio.Queue[DaemonEnd], log: Path
) -> DaemonEnd:
    """The connection of the engine's rank 0. Raises `BenchFailed` where none comes."""
    connecting, exited = asyncio.create_task(connections.get()), asyncio.create_task(process.wait())
    try:
        await asyncio.wait((connecting, exited), timeout=TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done():
            return connecting.result()
        raise BenchFailed(f"{name} did not come up: {last_line(log)}")
    finally:
        connecting.cancel()
        exited.cancel()


async def end(process: asyncio.subprocess.Process, connections: asyncio.Queue[DaemonEnd]) -> None:
    """End an engine and all that it started."""
    family = psutil.Process(process.pid).children(recursive=True) if process.returncode is None else []
    if process.returncode is None:
        process.terminate()
    while not connections.empty():
        connections.get_nowait().close()
    try:
        async with asyncio.timeout(GRACE):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    _, living = await asyncio.to_thread(psutil.wait_procs, family, GRACE)
    for rank in living:
        rank.kill()


def resident_peak(launcher: int) -> int:
    """Bytes of resident memory that the ranks had at most; the sum over them."""
    return sum(high_water(pid) for pid in ranks_below(launcher))


def ranks_below(launcher: int) -> list[int]:
    """Process ids of the ranks: what the launcher has started and what has itself started nothing."""
    family = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
    parents = {process.ppid() for process in family}
    return [process.pid for process in family if process.pid not in parents]


def high_water(pid: int) -> int:
    """The most resident memory that a process had, in bytes; 0 where the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def last_line(log: Path) -> str:
    """The last line of an engine's log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
