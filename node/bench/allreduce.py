"""`atoll bench allreduce`: how long a round takes from the last input to the last result.

A coordinator with its journal, and a node daemon for each peer, are real processes that talk over real sockets;
only the trainers are stand-ins (see `synthetic`). An iteration is a round of the run. Its clock starts when the
last peer's trainer says Ready, with nothing encoded, and stops when the last peer that lives knows of the commit
and has the mean as fp32: encoding, control plane, ledger, transfer, commit and decoding are inside. What a node
does with the mean, the outer step and its digests, is not: it begins when all have it, and the next iteration
starts when every peer is done.

With `--kill-peer` a peer is killed in the last iteration, which the others must commit all the same.
"""

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from atoll.comm.config.load import load_run
from atoll.comm.config.run import CodecName, RunConfig
from atoll.comm.cores import usable_cores
from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.comm.extras import demand
from atoll.comm.options import json_option
from atoll.comm.workers import threads_of
from atoll.node.bench.allreduce_figures import (
    FP32,
    AllreduceBench,
    AllreduceFigures,
    BenchHistory,
    shortfall,
    summarise,
)
from atoll.node.bench.allreduce_peers import measure, write_run
from atoll.node.bench.host import check_host
from atoll.node.preflight import available

PROCESS_BYTES = 150 << 20  # memory of a peer without a vector
VECTORS = 4  # fp32 vectors of a peer: anchor, momentum, local and the decoded mean
PAYLOADS = 8  # encoded vectors of a peer: its own, what arrives, what is sealed, and those of the last rounds
CODECS = [str(name) for name in CodecName if name is not CodecName.SPARSE]  # formats that a mean can be sent in


@click.command()
@click.argument("overrides", nargs=-1)
@click.option(
    "--peers", default=4, show_default=True, type=click.IntRange(1, 256), help="Members, a process each."
)
@click.option(
    "--numel", default=25_000_000, show_default=True, type=click.IntRange(min=1), help="Elements of the vector."
)
@click.option(
    "--codec", default="int8", show_default=True, type=click.Choice(CODECS), help="Encoding of what is sent."
)
@click.option("--iters", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds to measure...")
@click.option("--warmup", default=1, show_default=True, type=click.IntRange(min=0), help="...after so many.")
@click.option(
    "--streams",
    default=0,
    show_default=True,
    type=click.IntRange(0, 64),
    help="TCP streams between two peers; 0: automatic.",
)
@click.option(
    "--threads",
    default=lambda: threads_of(usable_cores()),
    show_default="half of the cores, as alone on the machine",
    type=click.IntRange(1, 256),
    help="Threads of each peer that encode and merge.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Peer {i} listens there.")
@click.option(
    "--launch-prefix", "prefix", default="", help="Command that starts peer {i}, as in 'ip netns exec wan{i}'."
)
@click.option("--kill-peer", "victim", default=0, type=click.IntRange(min=0), help="In the last iteration.")
@click.option(
    "--kill-at",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0.0, 100.0),
    help="When, in an iteration's usual time.",
)
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(1.0, 1e6),
    help="Seconds that one iteration may take.",
)
@json_option
def allreduce(as_json: bool, **options: Any) -> None:
    """Let PEERS processes agree on the mean of their vectors, as in training; print how long it takes.

    In --host and --launch-prefix, {i} stands for the number of the peer, from 1; the coordinator has the number
    after the last. OVERRIDES are key=value settings of the run, which is encrypted with security.tls=on only, and
    audited with security.audit=auto only.
    Times are seconds from the last peer's input to the last result; without --json, rates are of the fp32 vector.

    The exit code is 0 if every iteration was committed by all peers that lived, with equal digests.
    """
    demand("atoll bench allreduce", "numba")
    bench = AllreduceBench(**options)
    history = BenchHistory(audit=check(bench).security.audit)
    folder = Path(tempfile.mkdtemp(prefix="atoll-bench-"))
    trouble: AtollError | None
    try:
        with _progress(len(bench.rounds)) as show:
            _run(measure(bench, folder, history, show))
        trouble = shortfall(history)
    except AtollError as error:
        trouble = error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if history.rounds:
        figures = summarise(bench, history)
        click.echo(msgspec.json.encode(figures).decode()) if as_json else _table(figures)
    if trouble is not None and any(log.stat().st_size for log in folder.glob("*.log")):
        click.echo(f"the logs of all processes are in {folder}", err=True)
        raise trouble
    shutil.rmtree(folder, ignore_errors=True)
    if trouble is not None:
        raise trouble


def check(bench: AllreduceBench) -> RunConfig:
    """The run's config. Raises `ConfigError` or `ResourceError` for what cannot be measured."""
    if bench.victim > bench.peers:
        raise ConfigError(f"--kill-peer is {bench.victim}: there are {bench.peers} peers")
    if bench.victim and (bench.peers < 2 or len(bench.rounds) < 2):
        raise ConfigError(
            "--kill-peer needs a second peer, and a round before the last to know when: add --warmup"
        )
    try:
        bench.command_prefix(1)
    except ValueError as error:
        raise ConfigError(f"--launch-prefix is {bench.prefix!r}: {error}") from None
    if not bench.prefix:  # behind one, addresses are others
        check_host(bench.host, range(1, bench.peers + 2))
    with tempfile.TemporaryDirectory() as folder:
        config = load_run(write_run(bench, Path(folder)), bench.overrides)
    encoded = FP32 if config.reduce.codec is CodecName.FP32 else 2
    need = bench.peers * (PROCESS_BYTES + bench.numel * (VECTORS * FP32 + PAYLOADS * encoded))
    if need > (have := available()):
        raise ResourceError(
            f"{bench.peers} peers with {bench.numel:,} elements need about {need / 1e9:.1f} GB of memory, "
            f"{have / 1e9:.1f} GB are available: take fewer of either"
        )
    return config


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, its clearing up included when SIGTERM or SIGINT comes."""

    async def with_signals() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await work

    try:
        asyncio.run(with_signals())
    except asyncio.CancelledError:
        raise click.Abort from None


def _table(figures: AllreduceFigures) -> None:
    streams = f"{figures.streams} streams" if figures.streams else "streams as the nodes choose"
    threads = f"{figures.threads} codec thread{'s' if figures.threads > 1 else ''} each"
    title = f"{figures.peers} peers, {figures.numel:,} elements, {figures.codec}, {streams}, {threads}"
    table = Table("iteration", "seconds", "MB/s", "plan to seal", "attempts")
    for column in table.columns:
        column.justify = "right"
    for i, took in enumerate(figures.seconds):
        rate = f"{figures.vector_mb / took:,.0f}" if took else "-"
        known = i < len(figures.reduce_s)
        table.add_row(
            f"{i + 1}",
            f"{took:.3f}" if took is not None else "not committed",
            rate,
            f"{figures.reduce_s[i]:.3f}" if known else "-",
            f"{figures.attempts[i]}" if known else "-",
        )
    console = Console()
    console.print(title)
    console.print(table)
    each = Table("peer", "sent MB", "received MB", "CPU s", "peak MB")
    for column in each.columns:
        column.justify = "right"
    rows = zip(figures.tx_bytes, figures.rx_bytes, figures.cpu_s, figures.rss_peak_mb, strict=False)
    for number, (tx, rx, cpu, rss) in enumerate(rows, 1):
        died = " (killed, with the result)" if figures.killed_late else " (killed)"
        name = f"{number}{died if number in figures.killed else ''}"
        each.add_row(name, f"{tx / 1e6:,.2f}", f"{rx / 1e6:,.2f}", f"{cpu:.3f}", f"{rss:,.0f}")
    console.print(each)
    error = "not known" if figures.rel_err is None else f"{figures.rel_err:.2e}"
    equal = "equal" if figures.digests_equal else "NOT equal"
    console.print(f"relative error {error}, digests {equal}; one encoded vector is {figures.payload_mb:,.2f} MB")


@contextmanager
def _progress(rounds: int) -> Iterator[Callable[[int], None]]:
    """A bar, where standard error is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("rounds", total=rounds)
        yield lambda done: bars.update(bar, completed=done)
