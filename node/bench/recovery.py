"""`atoll bench recovery`: how fast a node gets the run's state from its peers.

Donors and receiver are real processes with a data plane and an outer state each; the receiver recovers as a node
that joins does. Its clock runs from the first connection to the last chunk checked. Bench and process talk in JSON
lines over the process's standard input and output:

    bench                        process
    DonorSpec        ------->
                     <-------    DonorUp          a donor: its state stands
                     <-------    DonorProgress    the receiver: so much is there that somebody is to be killed
    (empty line)     ------->                     to the receiver: a donor is dead
                     <-------    RecoveryFigures  the receiver: it has the state
    (end of input)   ------->

With --kill one of them is killed when half of the chunks are here; the receiver takes nothing more until that is
done. A killed receiver is started again, and goes on with what its memory-mapped files have. What came twice is
told as a share of the state: it is what several donors were asked for at the end. Not in it is what was on its way
at the death, `MAX_AHEAD_BYTES` a stream at most.
"""

import asyncio
import secrets
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from atoll.comm import log
from atoll.comm.allreduce.sealing import mean_of
from atoll.comm.child_process import die_with_parent
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName, RunConfig
from atoll.comm.errors import AtollError, BenchFailed, ConfigError, ResourceError
from atoll.comm.ids import NodeId, Round, RunId
from atoll.comm.invite import join_host_port
from atoll.comm.options import json_option
from atoll.comm.transport.data_plane import DataPlane
from atoll.node.bench.host import check_host
from atoll.node.daemon.state_server import StateServer
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.state import OuterState
from atoll.node.outer.vector_folders import clear_stale
from atoll.node.preflight import available
from atoll.node.recovery.recovery import Donor, RecoveryProgress, Target, recover
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.schedule import Constant

PROCESS = (sys.executable, "-P", "-m", "atoll.node.bench.recovery")
START_TIMEOUT = 60.0  # seconds, and so many more for each 10 million elements
PROCESS_BYTES = 150 << 20  # bytes of a process without a state
STATE_BYTES = 12  # bytes of an element, with the local vector
T = TypeVar("T")


class DonorSpec(msgspec.Struct, frozen=True):
    """The orders of one process: its state's size and place, and whom to recover from."""

    name: str
    numel: int
    listen: str  # host:port
    key: str  # hex
    folder: str
    digest: str = ""  # hex; of the state to recover
    donors: dict[str, str] = {}  # addresses by name; none: this is a donor
    report_half: bool = False  # of the chunks; another process may go on with what is there


class DonorUp(msgspec.Struct, frozen=True):
    """A donor's report that its state stands."""

    address: str
    digest: str  # hex


class DonorProgress(msgspec.Struct, frozen=True):
    """The receiver's report that half of the chunks are there; it waits until somebody is dead."""

    done: int  # chunks
    received: int  # bytes of chunks that came


class RecoveryFigures(msgspec.Struct, frozen=True):
    """The receiver's report that it has the state, and its figures."""

    seconds: float
    bytes: int  # received, headers included
    per_donor: dict[str, int]  # bytes of chunks that each gave


@click.command()
@click.option(
    "--donors", default=4, show_default=True, type=click.IntRange(1, 64), help="Members that have the state."
)
@click.option(
    "--numel", default=25_000_000, show_default=True, type=click.IntRange(min=1), help="Elements of the state."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Process {i} listens there.")
@click.option(
    "--launch-prefix", "prefix", default="", help="Command that starts process {i}: 'ip netns exec wan{i}'."
)
@click.option("--link", default=0.0, type=click.FloatRange(0.0, 1e9), help="Mbit/s of the receiver's link.")
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(1.0, 1e6),
    help="Seconds that the recovery may take.",
)
@click.option("--kill", type=click.Choice(["donor", "receiver"]), help="When half of the chunks are here.")
@json_option
def recovery(
    donors: int,
    numel: int,
    host: str,
    prefix: str,
    link: float,
    timeout: float,
    kill: str | None,
    as_json: bool,
) -> None:
    """Fetch a state of NUMEL elements, 8 bytes each, from DONORS processes; print how fast it went.

    In --host and --launch-prefix, {i} stands for the number of the process: donors from 1, the receiver after the
    last. The share of its link is told if --link says what that can carry.
    """
    if (need := (donors + 1) * (PROCESS_BYTES + STATE_BYTES * numel)) > (have := available()):
        raise ResourceError(
            f"{donors + 1} processes with {numel:,} elements need about {need / 1e9:.1f} GB of memory, "
            f"{have / 1e9:.1f} GB are available: take fewer of either"
        )
    if not prefix:  # behind one, addresses are others
        check_host(host, range(1, donors + 2))
    start_timeout = START_TIMEOUT * (1 + numel / 10e6)
    key = secrets.token_hex(32)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))

        def start(number: int, name: str, **more: Any) -> subprocess.Popen[bytes]:
            listen = join_host_port(host.replace("{i}", str(number)), 0)
            spec = DonorSpec(name, numel, listen, key, str(folder / name), **more)
            return stack.enter_context(_process(_through(prefix, number), spec))

        stack.callback(clear_stale, folder)
        donor_processes = {f"donor{i}": start(i, f"donor{i}") for i in range(1, donors + 1)}
        up = {name: _receive(process, DonorUp, start_timeout, name) for name, process in donor_processes.items()}
        first = up["donor1"]
        addresses = {name: word.address for name, word in up.items()}

        def receive() -> subprocess.Popen[bytes]:
            return start(
                donors + 1, "receiver", digest=first.digest, donors=addresses, report_half=kill is not None
            )

        receiver, received_before = receive(), 0
        if kill is not None:
            half = _receive(receiver, DonorProgress, start_timeout + timeout, "the receiver")
            victim = receiver if kill == "receiver" else donor_processes["donor1"]
            victim.kill()
            victim.wait()
            if victim is receiver:
                receiver, received_before = receive(), half.received
            else:
                _send(receiver, b"")
        figures = _receive(receiver, RecoveryFigures, start_timeout + timeout, "the receiver")
    rate = figures.bytes / figures.seconds
    result = {
        "donors": donors,
        "numel": numel,
        "killed": kill,
        "seconds": figures.seconds,
        "bytes": figures.bytes,
        "bytes_per_s": rate,
        "link_share": rate * 8 / (link * 1e6) if link else None,
        "twice": (received_before + sum(figures.per_donor.values())) / (8 * numel) - 1,
        "per_donor": figures.per_donor,
    }
    click.echo(msgspec.json.encode(result).decode()) if as_json else _table(result)


def _table(result: dict[str, Any]) -> None:
    console, table = Console(), Table("donor", "MB")
    for name, size in result["per_donor"].items():
        table.add_row(name, f"{size / 1e6:,.2f}")
    share = f", {result['link_share']:.1%} of its link" if result["link_share"] is not None else ""
    size, rate = result["bytes"] / 1e6, result["bytes_per_s"] / 1e6
    console.print(f"{size:,.1f} MB in {result['seconds']:.2f} s: {rate:,.1f} MB/s{share}")
    console.print(f"{result['twice']:.1%} of the state came twice")
    console.print(table)


def _through(prefix: str, number: int) -> list[str]:
    try:
        return [word.replace("{i}", str(number)) for word in shlex.split(prefix)]
    except ValueError as error:
        raise ConfigError(f"--launch-prefix is {prefix!r}: {error}") from None


@contextmanager
def _process(through: list[str], spec: DonorSpec) -> Iterator[subprocess.Popen[bytes]]:
    """It ends when this one does, however that ends; its errors are shown."""
    pipe = subprocess.PIPE
    command = [*through, *PROCESS]
    try:
        process = subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, preexec_fn=lambda: die_with_parent(signal.SIGKILL)
        )
    except OSError as error:
        raise ConfigError(f"cannot start {command[0]!r}: {error.strerror}") from None
    with process:
        try:
            _send(process, msgspec.json.encode(spec))
            yield process
        finally:
            process.kill()
            clear_stale(Path(spec.folder))


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()


def _receive(process: subprocess.Popen[bytes], kind: type[T], seconds: float, who: str) -> T:
    """The line that the process says next."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(seconds):
            raise BenchFailed(f"{who} was not done within {seconds:g} s")
    if not (line := process.stdout.readline()):
        raise BenchFailed(f"{who} ended with exit code {process.wait()}")
    return msgspec.json.decode(line, type=kind)


# The processes


async def serve(spec: DonorSpec) -> None:
    """Be a donor until the standard input ends, or the receiver until the state is there. Raises `BenchFailed`."""
    config = RunConfig().reduce
    codec = make_codec(CodecName.INT8, config.block)
    vectors = SharedVectors.create(spec.numel, Path(spec.folder), owner="bench" if spec.report_half else "")
    outer = OuterState(vectors, Chunks(spec.numel, config.chunk), mean_of(codec), Constant(Nesterov(0.7, 0.9)))
    server = StateServer()
    server.fill(outer)
    plane = await DataPlane.start(spec.listen, RunId("bench"), NodeId(spec.name), bytes.fromhex(spec.key), server)
    try:
        if not spec.donors:
            rng = np.random.default_rng(1)
            for vector in (vectors.anchor, vectors.momentum):
                rng.standard_normal(out=vector, dtype=np.float32)
            outer.initialise(with_momentum=True)
            report(DonorUp(plane.address, outer.finalize().hex()))
            await asyncio.to_thread(sys.stdin.buffer.read)
            return
        outer.resume()
        last = RecoveryProgress(0)
        half = min(outer.chunk_rounds) != max(outer.chunk_rounds)  # then somebody was killed already

        def look(progress: RecoveryProgress) -> None:
            nonlocal last, half
            if spec.report_half and not half and progress.present >= progress.chunks / 2:
                half = True
                report(DonorProgress(progress.present, sum(progress.bytes_from.values())))
                sys.stdin.buffer.readline()  # the loop waits: nothing comes until somebody is dead
            last = progress

        donors = tuple(Donor(NodeId(name), address) for name, address in spec.donors.items())
        target = Target(Round(0), bytes.fromhex(spec.digest), donors)
        with ThreadPoolExecutor(1) as worker:
            began = time.monotonic()
            await recover(outer, target, plane, worker, look)
            seconds = time.monotonic() - began
        if outer.finalize() != target.digest:
            raise BenchFailed("what was fetched is not the donors' state")
        report(
            RecoveryFigures(
                seconds,
                plane.bytes_down,
                {str(node): size for node, size in last.bytes_from.items()},
            )
        )
    finally:
        await plane.close()
        vectors.close()


def report(message: DonorUp | DonorProgress | RecoveryFigures) -> None:
    """Write a report to the standard output."""
    print(msgspec.json.encode(message).decode(), flush=True)


def main() -> None:
    """Be the process whose orders are the first line of the standard input."""
    log.setup(log.LogSetup("peer"))
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=DonorSpec)
    try:
        asyncio.run(serve(spec))
    except AtollError as error:
        print(f"{spec.name}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
