"""`atoll bench coordinator`: how much of this machine a coordinator with many members takes.

A real coordinator process with its journal on a disk, and members that other processes simulate over real gRPC
(see `load`): they commit rounds, without a data plane. From the first train order to the last one are measured the
coordinator's CPU time as a share of one core, the most memory it had, and the control time: what a round would be
shorter by for a member if the coordinator needed no time, from the sending of the last contribution's Ready to the
arrival of the plan, and from the sending of the last Held to the arrival of the next train order. The percentiles
are over all members and rounds. Coordinator and members share the machine: the control time tells how busy it is.
"""

import multiprocessing
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import ceil
from multiprocessing.context import SpawnProcess
from pathlib import Path

import click
import msgspec
import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from atoll import configs
from atoll.comm.errors import BenchFailed
from atoll.comm.invite import Invite
from atoll.comm.options import json_option
from atoll.coordinator.bench.load import CHUNK_NUMEL, LoadResult, LoadTask, simulate

SETTINGS = (
    f"reduce.chunk={CHUNK_NUMEL}",
    "rounds.total=0",
    "members.minimum=1",
    "wandb.mode=disabled",
    "security.audit=0",  # its members have no chunks to look at
)
PROGRESS_TIMEOUT = 120.0  # seconds without a word from the members, beyond a round's inner steps
START_TIMEOUT = 20.0  # seconds
POLL_INTERVAL = 0.5  # seconds
Show = Callable[[int, int], None]  # members that joined, rounds that were ordered


@dataclass(frozen=True, slots=True)
class ControlFigures:
    """The measured figures of a coordinator under load, as `--json` prints them; control times are in ms."""

    members: int
    heartbeats_per_s: float
    cpu_share: float  # of one core
    rss_mb: float
    control_ms_p50: float
    control_ms_p99: float
    rounds: int
    reports_per_s: float


@click.command()
@click.option(
    "--members", default=1000, show_default=True, type=click.IntRange(1, 10_000), help="Simulated members."
)
@click.option(
    "--rounds", default=1, show_default=True, type=click.IntRange(min=1), help="Rounds that are measured."
)
@click.option(
    "--period",
    default=56.0,
    show_default=True,
    type=click.FloatRange(0.0, 1e6, min_open=True),
    help="Seconds that a round's inner steps take.",
)
@click.option("--processes", default=2, show_default=True, type=click.IntRange(1, 64), help="For the members.")
@json_option
def coordinator(members: int, rounds: int, period: float, processes: int, as_json: bool) -> None:
    """Serve MEMBERS simulated members on this machine for some rounds; print what it took.

    A round lasts longer than its inner steps, by about four steps and four seconds at least: the members' reports
    are spread as real ones are.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        figures = measure(Path(folder), members, rounds, period, min(processes, members))
    if as_json:
        click.echo(msgspec.json.encode(figures).decode())
        return
    for name, value in msgspec.to_builtins(figures).items():
        click.echo(f"{name:>18}  {value:,.3f}" if isinstance(value, float) else f"{name:>18}  {value:,}")


def measure(
    folder: Path, members: int, rounds: int, period: float, processes: int, committed: int = 0
) -> ControlFigures:
    """Measure one run, from its coordinator's start to its end: `members` members in `processes` processes,
    `rounds` rounds whose inner steps take `period` seconds. `committed`: rounds that the state directory `folder`
    has already. Raises `BenchFailed`."""
    with _coordinator(folder, members) as process:
        invite = _invite(folder, process, members)
        # Where rounds are committed the next one begins with whoever is there first: not all take part.
        first = committed + 2 if committed else 1
        last = first + rounds - 1
        tasks = [
            LoadTask(invite.address, invite.run, invite.token, share, members, last, period)
            for share in _shares(members, processes)
        ]
        with _load(tasks) as (loads, words), _progress(members, rounds) as show:
            patience = PROGRESS_TIMEOUT + period
            watch = BenchWatch(psutil.Process(process.pid), loads, range(first, last + 1), patience)
            while len(watch.results) < len(loads):
                watch.poll(words, show)
            return watch.figures(members)


class BenchWatch:
    """Follows the members, and the coordinator while rounds are committed."""

    def __init__(
        self, coordinator: psutil.Process, loads: Sequence[SpawnProcess], rounds: range, patience: float
    ) -> None:
        self._coordinator, self._loads, self._rounds, self._patience = coordinator, loads, rounds, patience
        self.results: list[LoadResult] = []
        self._joined, self._ordered = 0, Counter[int]()
        self._heard = time.monotonic()
        self._first: tuple[float, float] | None = (
            None  # seconds: when round 1 was ordered, and the CPU's until then
        )
        self._last: tuple[float, float] | None = None
        self._rss = 0  # bytes, the most

    def poll(self, words: "multiprocessing.Queue[object]", show: Show) -> None:
        """Take in one word of the members, or none within `POLL_INTERVAL`. Raises `BenchFailed` when a member
        failed, a process ended, or nothing was heard for too long."""
        try:
            self._take(words.get(timeout=POLL_INTERVAL))
            self._heard = time.monotonic()
        except queue.Empty:
            silent = time.monotonic() - self._heard > self._patience
            dead = self._coordinator.status() == psutil.STATUS_ZOMBIE or any(p.exitcode for p in self._loads)
            if silent or dead:
                what = f"nothing happened for {self._patience:g} s" if silent else "a process ended"
                raise BenchFailed(f"the measurement failed: {what}") from None
        if self._first is not None:
            self._rss = max(self._rss, self._coordinator.memory_info().rss)
        show(self._joined, sum(count == len(self._loads) for count in self._ordered.values()))

    def _take(self, word: object) -> None:
        match word:
            case None:
                self._joined += 1
            case str():
                raise BenchFailed(f"a simulated member failed: {word}")
            case LoadResult():
                self.results.append(word)
            case int():
                self._ordered[word] += 1
                if self._ordered[word] == len(self._loads):
                    times = self._coordinator.cpu_times()
                    now = time.monotonic(), times.user + times.system
                    self._first = self._first or now
                    self._last = now

    def figures(self, members: int) -> ControlFigures:
        """The figures between the first train order and the last one, once every process has sent its result."""
        assert self._first is not None and self._last is not None
        (begun, cpu_before), (ended, cpu_after) = self._first, self._last
        heartbeats = [at for result in self.results for at in result.heartbeats if begun <= at <= ended]
        reports = [at for result in self.results for at in result.reports if begun <= at <= ended]
        control = list(chain(*(control_times(self.results, k) for k in self._rounds)))
        return ControlFigures(
            members=members,
            heartbeats_per_s=len(heartbeats) / (ended - begun),
            cpu_share=(cpu_after - cpu_before) / (ended - begun),
            rss_mb=self._rss / 1e6,
            control_ms_p50=1e3 * percentile(control, 50),
            control_ms_p99=1e3 * percentile(control, 99),
            rounds=len(self._rounds),
            reports_per_s=len(reports) / (ended - begun),
        )


def control_times(results: Sequence[LoadResult], round_: int) -> Iterator[float]:
    """The control time of each member in a round, seconds, as the module defines it."""
    planned = dict(chain(*(result.planned[round_].items() for result in results)))
    ordered = dict(chain(*(result.ordered[round_ + 1].items() for result in results)))
    ready = _last_before(planned.values(), chain(*(result.ready[round_] for result in results)))
    held = _last_before(ordered.values(), chain(*(result.completed[round_] for result in results)))
    for node, at in planned.items():
        yield at - ready + ordered[node] - held


def _last_before(arrivals: Iterable[float], sent: Iterable[float]) -> float:
    """When the last report was sent that the first arrival waited for: for who is too late nobody waits."""
    first = min(arrivals)
    return max(at for at in sent if at < first)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    return sorted(values)[max(ceil(len(values) * percent / 100) - 1, 0)]


@contextmanager
def _coordinator(folder: Path, members: int) -> Iterator[subprocess.Popen[bytes]]:
    """A coordinator process that waits for `members` members."""
    command = [sys.executable, "-P", "-m", "atoll.comm.cli", "coordinator", "start", str(configs.DEMO)]
    command += ["--state-dir", str(folder), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with (folder / "log").open("wb") as log:
        lease = max(20.0, members / 50)  # seconds; else heartbeats alone take more than a core
        command += [
            "security.own_models=true",
            f"members.start={members}",
            f"members.lease={lease:g}",
            f"members.reconnect={lease:g}",
            *SETTINGS,
        ]
        process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)  # Ctrl-C is for the bench
    try:
        yield process
    except BenchFailed:
        lines = (folder / "log").read_text().splitlines()
        click.echo("\n".join(["the end of the coordinator's log:", *lines[-20:]]), err=True)
        raise
    finally:
        process.terminate()
        process.wait(60)


def _invite(folder: Path, process: subprocess.Popen[bytes], members: int) -> Invite:
    """A join URL for all members, once the coordinator is up."""
    from atoll.coordinator.server import invite_url

    deadline = time.monotonic() + START_TIMEOUT
    while "nodes join at" not in (folder / "log").read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchFailed(f"the coordinator did not come up within {START_TIMEOUT:g} s")
        time.sleep(0.1)
    return invite_url(folder, "bench", members, time.time() + 3600)


@contextmanager
def _load(tasks: list[LoadTask]) -> Iterator[tuple[list[SpawnProcess], "multiprocessing.Queue[object]"]]:
    """Processes that simulate members; what they tell comes through the queue."""
    fresh = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    words: multiprocessing.Queue[object] = fresh.Queue()
    loads = [fresh.Process(target=simulate, args=(task, words.put), daemon=True) for task in tasks]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # they inherit it: Ctrl-C is for this process
    pressed: list[int] = []  # another thread may take it, and Python would raise it here, between two starts
    usual = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        try:
            for load in loads:
                load.start()
        finally:
            signal.signal(signal.SIGINT, usual)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pressed:
            raise KeyboardInterrupt
        yield loads, words
    finally:
        for load in loads:
            if load.pid is not None:  # it was started
                load.terminate()
                load.join()


def _shares(members: int, processes: int) -> list[int]:
    return [members // processes + (i < members % processes) for i in range(processes)]


@contextmanager
def _progress(members: int, rounds: int) -> Iterator[Show]:
    """Bars, where standard error is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
        joined = bars.add_task("members", total=members)
        done = bars.add_task("rounds", total=rounds)

        def show(members_: int, ordered: int) -> None:
            bars.update(joined, completed=members_)
            bars.update(done, completed=max(ordered - 1, 0))

        yield show
