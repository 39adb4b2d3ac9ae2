"""`atoll bench coordinator`: how much of this machine a coordinator with many members takes.

A real coordinator process with a journal on disk, and members that other processes simulate over real gRPC (see
`load`): they commit rounds without a data plane. Measured from the first train order to the last one: the CPU time
of the coordinator's processes as a share of one core, the most memory they had, and the control time. The control
time of a round and a member is what the round would be shorter by if the coordinator needed no time: from the
sending of the last contribution's Ready to the arrival of the plan, and from the sending of the last Held to the
arrival of the next train order.
"""

import multiprocessing
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import ceil
from pathlib import Path

import click
import msgspec
import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from atoll.comm.errors import AtollError
from atoll.comm.invite import Invite
from atoll.coordinator.load import NUMEL, Result, Task, simulate

RUN_YAML = Path(__file__).with_name("demo.yaml")
PATIENCE = 120.0  # seconds without a word from the members
COME_UP = 20.0  # seconds
SAMPLE = 0.5  # seconds


class BenchFailed(AtollError):
    """What was to be measured did not happen."""


@dataclass(frozen=True, slots=True)
class Figures:
    members: int
    rounds: int
    heartbeats_per_s: float
    reports_per_s: float
    cpu_share: float  # of one core
    rss_mb: float
    control_ms_p50: float
    control_ms_p99: float


@click.command()
@click.option("--members", default=1000, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--period", default=15.0, show_default=True, type=float, help="Seconds of inner steps in a round.")
@click.option(
    "--processes", default=2, show_default=True, type=click.IntRange(1, 64), help="That simulate members."
)
@click.option("--json", "as_json", is_flag=True)
def coordinator(members: int, rounds: int, period: float, processes: int, as_json: bool) -> None:
    """Serve MEMBERS simulated members on this machine for some rounds; print what it took."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        figures = measure(Path(folder), members, rounds, period, min(processes, members))
    if as_json:
        click.echo(msgspec.json.encode(figures).decode())
        return
    for name, value in msgspec.to_builtins(figures).items():
        click.echo(f"{name:>18}  {value:,.3f}" if isinstance(value, float) else f"{name:>18}  {value:,}")


def measure(folder: Path, members: int, rounds: int, period: float, processes: int) -> Figures:
    """One run from its coordinator's start to its end."""
    with _coordinator(folder, members) as process:
        invite = _invite(folder, process, members)
        tasks = [
            Task(invite.address, invite.run, invite.token, share, members, rounds, period)
            for share in _shares(members, processes)
        ]
        with _load(tasks) as words:
            return _watch(psutil.Process(process.pid), words, members, len(tasks), rounds)


def _watch(
    process: psutil.Process, words: "multiprocessing.Queue[object]", members: int, loads: int, rounds: int
) -> Figures:
    """Follow the load processes; sample the coordinator while rounds are committed."""
    results: list[Result] = []
    joined, ordered = 0, dict[int, int]()
    cpu = begun = peak = took = 0.0
    heard = time.monotonic()
    with _progress(members, rounds) as show:
        while len(results) < loads:
            try:
                word = words.get(timeout=SAMPLE)
                heard = time.monotonic()
            except queue.Empty:
                word = 0
            match word:
                case str():
                    raise BenchFailed(f"a simulated member failed: {word}")
                case None:
                    joined += 1
                case int(round_) if round_:
                    ordered[round_] = ordered.get(round_, 0) + 1
                    if ordered[round_] == loads and round_ == 1:
                        begun, cpu = time.monotonic(), _cpu(process)
                    if ordered[round_] == loads and round_ == rounds + 1:
                        took, cpu = time.monotonic() - begun, _cpu(process) - cpu
                case Result():
                    results.append(word)
            if begun:
                peak = max(peak, _rss(process))
            show(joined, sum(count == loads for count in ordered.values()))
            if process.status() == psutil.STATUS_ZOMBIE or time.monotonic() - heard > PATIENCE:
                raise BenchFailed("the coordinator ended, or the members made no progress: see its log above")
    return _figures(results, members, rounds, begun, took, cpu / took, peak / 1e6)


def _figures(
    results: list[Result], members: int, rounds: int, begun: float, took: float, cpu: float, rss: float
) -> Figures:
    times = [1e3 * seconds for round_ in range(1, rounds + 1) for seconds in _control(results, round_)]
    heartbeats, reports = (
        sum(begun <= at <= begun + took for at in chain(*times)) / took
        for times in ([r.heartbeats for r in results], [r.reports for r in results])
    )
    return Figures(members, rounds, heartbeats, reports, cpu, rss, _percentile(times, 50), _percentile(times, 99))


def _control(results: list[Result], round_: int) -> Iterator[float]:
    """The control time of each member in a round, seconds."""
    ready = max(result.ready[round_] for result in results)
    held = max(result.held[round_] for result in results)
    for result in results:
        for node, planned in result.planned[round_].items():
            yield planned - ready + result.ordered[round_ + 1][node] - held


def _percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    return sorted(values)[max(ceil(len(values) * percent / 100) - 1, 0)]


@contextmanager
def _coordinator(folder: Path, members: int) -> Iterator[subprocess.Popen[bytes]]:
    """A coordinator process that waits for `members` members."""
    settings = (f"members.start={members}", "members.lease=20", f"reduce.chunk={NUMEL}", "rounds.total=0")
    command = [sys.executable, "-P", "-m", "atoll.comm.cli", "coordinator", "start", str(RUN_YAML)]
    command += ["--state-dir", str(folder), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, *settings, "wandb.mode=disabled"], stdout=log, stderr=log)
    try:
        yield process
    except BenchFailed:
        click.echo("".join((folder / "log").read_text().splitlines(keepends=True)[-20:]), err=True)
        raise
    finally:
        process.terminate()
        process.wait(60)
        import shutil

        shutil.copy(folder / "log", "/tmp/bench.log")


def _invite(folder: Path, process: subprocess.Popen[bytes], members: int) -> Invite:
    """A join URL for all members, once the coordinator is up."""
    from atoll.coordinator.server import invite_url

    deadline = time.monotonic() + COME_UP
    while "nodes join at" not in (folder / "log").read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchFailed(f"the coordinator did not come up within {COME_UP:g} s")
        time.sleep(0.1)
    return invite_url(folder, "bench", members, time.time() + 3600)


@contextmanager
def _load(tasks: list[Task]) -> Iterator["multiprocessing.Queue[object]"]:
    """Processes that simulate members; what they tell comes through the queue."""
    fresh = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    words: multiprocessing.Queue[object] = fresh.Queue()
    processes = [fresh.Process(target=simulate, args=(task, words.put), daemon=True) for task in tasks]
    for process in processes:
        process.start()
    try:
        yield words
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _shares(members: int, processes: int) -> list[int]:
    return [members // processes + (i < members % processes) for i in range(processes)]


def _cpu(process: psutil.Process) -> float:
    """CPU seconds of the process and its children."""
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def _rss(process: psutil.Process) -> int:
    """Bytes."""
    return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))


@contextmanager
def _progress(members: int, rounds: int) -> Iterator[Callable[[int, int], None]]:
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
