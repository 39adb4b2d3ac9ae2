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
import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from atoll.comm.config import CodecName, RunConfig, load_run
from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.comm.invite import join_host_port
from atoll.node.launch import die_with_parent
from atoll.node.resources import available
from atoll.node.synthetic import (
    AtHand,
    Begun,
    Compare,
    Compared,
    Decoded,
    Go,
    Joined,
    Leave,
    Spec,
    Step,
    ToBench,
    ToPeer,
)
from atoll.node.vectors import clear_stale

ATOLL = (sys.executable, "-P", "-m", "atoll.comm.cli")
PEER = (sys.executable, "-P", "-m", "atoll.node.synthetic")
GET = (  # of a page, where the coordinator is; no proxy knows the way there
    *(sys.executable, "-P", "-c"),
    "import sys, urllib.request as r; "
    "print(r.build_opener(r.ProxyHandler({})).open(sys.argv[1], timeout=10).read().decode())",
)
UP = re.compile(r"nodes join at .*page at (http://[^\s\"]+).*\n")
PATIENCE = 60.0  # seconds for a coordinator to come up, for a record to be complete
GOODBYE = 10.0  # seconds for a peer to leave
LINE = 1 << 20  # bytes of what a peer says at once
BASE = 150 << 20  # bytes of a peer without a vector
FP32 = 4  # bytes of an element
VECTORS = 4  # fp32 vectors of a peer: anchor, momentum, local and the decoded mean
PAYLOADS = 8  # encoded vectors of a peer: its own, what arrives, what is sealed, and those of the last rounds
CODECS = [str(name) for name in CodecName if name is not CodecName.SPARSE]  # that a mean can be sent in
W = TypeVar("W", bound=ToBench)
T = TypeVar("T")


class BenchFailed(AtollError):
    """What was to be measured did not happen."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What is to be measured."""

    peers: int
    numel: int
    codec: str
    iters: int
    warmup: int  # rounds before the first iteration
    streams: int  # TCP streams between two peers; 0: automatic
    host: str  # {i} is the peer's number
    prefix: str  # of each peer's command, likewise
    victim: int  # peer to kill; 0: none
    kill_at: float  # of an iteration's usual time
    timeout: float  # seconds for one iteration
    overrides: tuple[str, ...]

    @property
    def rounds(self) -> range:
        return range(1, self.warmup + self.iters + 1)

    def through(self, number: int) -> list[str]:
        """The command that the process of peer `number` is started by."""
        return [word.replace("{i}", str(number)) for word in shlex.split(self.prefix)]

    def any_port(self, number: int) -> str:
        """Where peer `number` listens: HOST:PORT."""
        return join_host_port(self.host.replace("{i}", str(number)), 0)


@dataclass(frozen=True, slots=True)
class Figures:
    """What is printed; the lists of peers are in the order of their numbers."""

    peers: int
    numel: int
    codec: str
    streams: int
    seconds: list[float | None]  # of each iteration; None: it was not committed
    rel_err: float | None  # of the last iteration
    digests_equal: bool  # in every round
    tx_bytes: list[int]  # of each peer, in the last iteration that nobody died in
    rx_bytes: list[int]
    committed: list[bool]  # by every peer that lives
    killed: list[int]
    killed_late: bool  # it had the result before: its death was not in the way
    predicted_s: list[float]  # by the plans; 0: nothing was known of the links
    levels: list[int]  # 2: planned in two levels
    predictions: list[dict[str, float]]  # seconds, of the plans that there were to choose from
    shares: list[dict[str, float]]  # of the chunks that each peer owned, by node id
    rates: dict[str, tuple[float, float]]  # bytes a second up and down, as the last plan had them
    reduce_s: list[float]  # from the plan to the last seal, by the coordinator's clock
    attempts: list[int]
    tx_bytes_killed: list[int | None]  # of each survivor, in the iteration that a peer died in
    rx_bytes_killed: list[int | None]
    cpu_s: list[float]  # of each peer, in the measured part of the same iteration as tx_bytes
    rss_peak_mb: list[float]  # of each peer, its vectors included
    beyond_mb: list[float]  # of each peer, without its vectors and what its process has before the first round
    vector_mb: float
    payload_mb: float  # of one encoded vector


@dataclass(frozen=True, slots=True)
class Lap:
    """One round, as one peer tells it."""

    begun: Begun | None
    decoded: Decoded | None  # None: it did not get the mean from the reduce
    before: AtHand
    after: AtHand | None  # None: it was killed

    @property
    def tx(self) -> int | None:
        return None if self.after is None else self.after.bytes_up - self.before.bytes_up

    @property
    def rx(self) -> int | None:
        return None if self.after is None else self.after.bytes_down - self.before.bytes_down

    @property
    def cpu(self) -> float:
        return 0.0 if self.begun is None or self.decoded is None else self.decoded.cpu - self.begun.cpu


@dataclass
class Course:
    """All rounds so far."""

    laps: list[dict[int, Lap]] = field(default_factory=list)  # of each round, by the peers' numbers
    killed: list[int] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)  # the coordinator's, of every round
    rel_err: float | None = None


# The command


@click.command()
@click.argument("overrides", nargs=-1)
@click.option("--peers", default=4, show_default=True, type=click.IntRange(1, 256))
@click.option(
    "--numel", default=25_000_000, show_default=True, type=click.IntRange(min=1), help="Elements of the vector."
)
@click.option("--codec", default="int8", show_default=True, type=click.Choice(CODECS))
@click.option("--iters", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds to measure...")
@click.option("--warmup", default=1, show_default=True, type=click.IntRange(min=0), help="...after so many.")
@click.option(
    "--streams",
    default=0,
    show_default=True,
    type=click.IntRange(0, 64),
    help="TCP streams between two peers; 0: automatic.",
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
@click.option("--json", "as_json", is_flag=True)
def allreduce(as_json: bool, **options: Any) -> None:
    """Let PEERS processes agree on the mean of their vectors, as in training; print how long it takes.

    In --host and --launch-prefix, {i} stands for the number of the peer, from 1; the coordinator has the number
    after the last. OVERRIDES are key=value settings of the run, which is encrypted with security.tls=on only.
    Times are seconds from the last peer's input to the last result; without --json, rates are of the fp32 vector.

    The exit code is 0 if every iteration was committed by all peers that lived, with equal digests.
    """
    bench = Bench(**options)
    check(bench)
    course, folder = Course(), Path(tempfile.mkdtemp(prefix="atoll-bench-"))
    trouble: AtollError | None
    try:
        with _progress(len(bench.rounds)) as show:
            _run(measure(bench, folder, course, show))
        trouble = shortfall(course)
    except AtollError as error:
        trouble = error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if course.laps:
        figures = summarise(bench, course)
        click.echo(msgspec.json.encode(figures).decode()) if as_json else _table(figures)
    if trouble is not None:
        click.echo(f"the logs of all processes are in {folder}", err=True)
        raise trouble
    shutil.rmtree(folder, ignore_errors=True)


def check(bench: Bench) -> RunConfig:
    """Refuse what cannot be measured; return the run's config."""
    if bench.victim > bench.peers:
        raise ConfigError(f"--kill-peer is {bench.victim}: there are {bench.peers} peers")
    if bench.victim and (bench.peers < 2 or len(bench.rounds) < 2):
        raise ConfigError(
            "--kill-peer needs a second peer, and a round before the last to know when: add --warmup"
        )
    try:
        bench.through(1)
    except ValueError as error:
        raise ConfigError(f"--launch-prefix is {bench.prefix!r}: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        config = load_run(_write_run(bench, Path(folder)), bench.overrides)
    encoded = FP32 if config.reduce.codec is CodecName.FP32 else 2
    need = bench.peers * (BASE + bench.numel * (VECTORS * FP32 + PAYLOADS * encoded))
    if need > (have := available()):
        raise ResourceError(
            f"{bench.peers} peers with {bench.numel:,} elements need about {need / 1e9:.1f} GB of memory, "
            f"{have / 1e9:.1f} GB are available: take fewer of either"
        )
    return config


def _write_run(bench: Bench, folder: Path) -> Path:
    """A run whose rounds wait for nothing but the reduce."""
    living = bench.peers - (bench.victim > 0)
    settings = {
        "name": "bench",
        "data": {"eval_every": 1 << 40},
        "rounds": {
            "inner_steps": 1,
            "ceiling": 1.0,
            "quorum": 1.0,
            "total": 0,
            "collect": bench.timeout,
            "reduce_timeout": bench.timeout,
        },
        "reduce": {"codec": bench.codec},
        "members": {
            "start": bench.peers,
            "minimum": min(2, living),
            "lease": 60.0,  # a machine this busy may be late with a heartbeat
            "reconnect": 1.0,
            "stall": 10 * bench.timeout,
        },
        "security": {"tls": "off"},  # as what it is compared with
        "wandb": {"mode": "disabled"},
    }
    path = folder / "run.yaml"
    path.write_bytes(msgspec.yaml.encode(settings))
    return path


def _run(work: Coroutine[Any, Any, None]) -> None:
    """`work` to its end, its clearing up included, when SIGTERM or SIGINT comes."""

    async def with_signals() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await work

    try:
        asyncio.run(with_signals())
    except asyncio.CancelledError:
        raise click.Abort from None


# The orchestration


async def measure(bench: Bench, folder: Path, course: Course, show: Callable[[int], None]) -> None:
    """One run, from its coordinator's start to its end. What was measured is in `course`, also when it fails."""
    async with AsyncExitStack() as stack:
        page = await stack.enter_async_context(_coordinator(bench, folder))
        url = await _invite(bench, folder)
        numbers = range(1, bench.peers + 1)
        peers = [await stack.enter_async_context(_peer(bench, n, folder, url)) for n in numbers]
        await _together(PATIENCE + bench.timeout, "the first round did not begin", (p.come_up() for p in peers))
        for round_ in bench.rounds:
            kill_after = None
            if bench.victim and round_ == bench.rounds[-1]:
                kill_after = bench.kill_at * _usual(bench, course)
            course.laps.append(await _lap(bench, peers, round_, kill_after, course.killed))
            show(round_)
        course.records = await _records(bench, page, bench.rounds[-1])
        living = [peer for peer in peers if peer.number not in course.killed]
        order = comparison(course.records[-1], {peer.node: peer.number for peer in peers})
        late = "the exact mean was not computed"
        course.rel_err = (await _together(bench.timeout, late, [living[0].compare(order)]))[0]
        for peer in living:
            peer.tell(Leave())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE):
                await asyncio.gather(*(peer.process.wait() for peer in living))


async def _lap(
    bench: Bench, peers: Sequence["PeerProcess"], round_: int, kill_after: float | None, killed: list[int]
) -> dict[int, Lap]:
    """One round of all peers, whose inputs are at hand; they have those of the next when it returns."""
    for peer in peers:
        peer.tell(Go(round_))
    victim = bench.victim if kill_after is not None else 0
    all_have_it = asyncio.Barrier(len(peers) - (victim > 0))
    laps = [
        peer.die(kill_after or 0.0) if peer.number == victim else peer.lap(round_, all_have_it) for peer in peers
    ]
    if victim:
        killed.append(victim)
    done = await _together(bench.timeout, f"round {round_} was not committed by every living peer", laps)
    return dict(zip((peer.number for peer in peers), done, strict=True))


async def _together(seconds: float, otherwise: str, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of the work on all peers; the first error ends it."""
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except TimeoutError:
        raise BenchFailed(f"{otherwise} within {seconds:g} s") from None
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _usual(bench: Bench, course: Course) -> float:
    """Seconds of an iteration so far; of the last warm-up round where none was measured."""
    seconds = [s for lap in course.laps if (s := duration(lap)) is not None]
    if not seconds:
        raise BenchFailed("no round was committed, so it cannot be told when to kill a peer")
    return median(seconds[bench.warmup :] or seconds[-1:])


class PeerProcess:
    """A peer, from outside."""

    def __init__(self, number: int, process: Process, log: Path) -> None:
        self.number, self.process, self._log = number, process, log
        self.pid, self.node = process.pid, ""
        self._at_hand: AtHand | None = None

    def tell(self, order: ToPeer) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def hear(self) -> ToBench | None:
        """What it says next; None: it has ended."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        try:
            return _to_bench.decode(line) if line.endswith(b"\n") else None
        except msgspec.MsgspecError:
            raise BenchFailed(f"peer {self.number} said what is no word of a peer: {line[:200]!r}") from None

    async def expect(self, kind: type[W]) -> W:
        word = await self.hear()
        if not isinstance(word, kind):
            did = await self._ended() if word is None else f"said {word}"
            raise BenchFailed(f"peer {self.number} {did} where {kind.__name__} was expected: {_tail(self._log)}")
        return word

    async def _ended(self) -> str:
        """How, in words; it has closed its output."""
        with contextlib.suppress(TimeoutError):
            code = await asyncio.wait_for(self.process.wait(), GOODBYE)
            return f"ended with exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        return "fell silent"

    async def come_up(self) -> None:
        joined = await self.expect(Joined)
        self.pid, self.node = joined.pid, joined.node
        self._at_hand = await self.expect(AtHand)

    async def lap(self, round_: int, all_have_it: asyncio.Barrier) -> Lap:
        """Tells of a round, until the input of the next one is at hand."""
        assert self._at_hand is not None and self._at_hand.round == round_
        before, begun = self._at_hand, await self.expect(Begun)
        word = await self.hear()
        decoded = word if isinstance(word, Decoded) else None
        await all_have_it.wait()
        self.tell(Step(round_))
        after = word if isinstance(word, AtHand) else await self.expect(AtHand)
        self._at_hand = after
        return Lap(begun, decoded, before, after)

    async def die(self, after: float) -> Lap:
        """By SIGKILL, so many seconds from now."""
        assert self._at_hand is not None
        await asyncio.sleep(after)
        self.kill()
        begun = decoded = None
        while (word := await self.hear()) is not None:
            begun = word if isinstance(word, Begun) else begun
            decoded = word if isinstance(word, Decoded) else decoded
        return Lap(begun, decoded, self._at_hand, None)

    async def compare(self, order: Compare) -> float:
        self.tell(order)
        return (await self.expect(Compared)).rel_err

    def kill(self) -> None:
        """The process, and the one that it was started through if that still is another."""
        for pid in {self.pid, self.process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


_to_bench = msgspec.json.Decoder(ToBench)


# Processes


@asynccontextmanager
async def _coordinator(bench: Bench, folder: Path) -> AsyncIterator[str]:
    """A coordinator that waits for the peers; gives the address of its page."""
    number, log = bench.peers + 1, folder / "coordinator.log"
    where = ("--state-dir", str(folder / "coordinator"))
    listen = ("--listen", bench.any_port(number), "--http", bench.any_port(number))
    run = str(_write_run(bench, folder))
    command = [*ATOLL, "coordinator", "start", run, *where, *listen, *bench.overrides]
    process = await _start([*bench.through(number), *command], log, DEVNULL, DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE
        while (up := UP.search(log.read_text())) is None:
            if process.returncode is not None or time.monotonic() > deadline:
                raise BenchFailed(f"the coordinator did not come up: {_tail(log)}")
            await asyncio.sleep(0.05)
        yield up[1]
    finally:
        await _end(process)


@asynccontextmanager
async def _peer(bench: Bench, number: int, folder: Path, url: str) -> AsyncIterator[PeerProcess]:
    state_dir, log = folder / f"peer{number}", folder / f"peer{number}.log"
    threads = str(max(1, (os.cpu_count() or 1) // bench.peers))
    settings = {name: threads for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")}
    if bench.streams:
        settings["ATOLL_STREAMS"] = str(bench.streams)
    process = await _start([*bench.through(number), *PEER], log, PIPE, PIPE, settings)
    peer = PeerProcess(number, process, log)
    try:
        peer.tell(Spec(number, bench.numel, url, str(state_dir), bench.any_port(number), PATIENCE))
        yield peer
    finally:
        if process.returncode is None:
            peer.kill()
        await _end(process)
        clear_stale(state_dir)  # a peer that was killed left its vectors behind


async def _start(
    command: list[str], log: Path, stdin: int, stdout: int, settings: dict[str, str] | None = None
) -> Process:
    """A child that ends when this process does, however that ends, and does not hear Ctrl-C."""
    try:
        with log.open("wb") as out:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
                stdout=stdout,
                stderr=out,
                env=os.environ | (settings or {}),
                limit=LINE,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )
    except OSError as error:
        raise ConfigError(f"cannot start {command[0]!r}: {error.strerror}") from None


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _invite(bench: Bench, folder: Path) -> str:
    """A join URL for all peers; made on the coordinator's journal, without a network."""
    where = ("--state-dir", str(folder / "coordinator"))
    return await _ask([*ATOLL, "invite", *where, "--uses", str(bench.peers)], folder / "invite.log")


async def _records(bench: Bench, page: str, rounds: int) -> list[dict[str, Any]]:
    """The commit records of all rounds, once the last one's digests are in."""
    through, deadline = bench.through(bench.peers + 1), time.monotonic() + PATIENCE
    with tempfile.TemporaryDirectory() as folder:
        while True:
            text = await _ask([*through, *GET, f"{page}/api/rounds?since=0"], Path(folder, "log"))
            records: list[dict[str, Any]] = msgspec.json.decode(text)
            if len(records) >= rounds:
                return records[:rounds]
            if time.monotonic() > deadline:
                raise BenchFailed(f"the coordinator has {len(records)} commit records after {rounds} rounds")
            await asyncio.sleep(0.2)


async def _ask(command: list[str], log: Path) -> str:
    """What a short command prints."""
    process = await _start(command, log, DEVNULL, PIPE)
    try:
        async with asyncio.timeout(PATIENCE):
            said, _ = await process.communicate()
    except TimeoutError:
        raise BenchFailed(f"{shlex.join(command[:6])} ... did not answer within {PATIENCE:g} s") from None
    finally:
        await _end(process)
    if process.returncode:
        raise BenchFailed(f"{shlex.join(command[:6])} ... failed: {_tail(log)}")
    return said.decode().strip()


def _tail(log: Path) -> str:
    """The last line of a log that has words, where an error says what it was."""
    lines = (line.strip(" |+-") for line in reversed(log.read_text(errors="replace").split("\n")))
    return next(filter(None, lines), "it said nothing")


# Figures


def duration(laps: dict[int, Lap]) -> float | None:
    """Seconds from the last input to the last result; None if a peer that lives has none."""
    begun = [lap.begun.at for lap in laps.values() if lap.begun is not None]
    decoded = [lap.decoded.at if lap.decoded else None for lap in laps.values() if lap.after is not None]
    times = [at for at in decoded if at is not None]
    return max(times) - max(begun) if begun and times and len(times) == len(decoded) else None


def comparison(record: dict[str, Any], numbers: dict[str, int]) -> Compare:
    """What arrived, as the commit record has it; `numbers` are the peers' by their ids."""
    # All bring as much; who died weighs less in the record, by the part of the vector that has its delta.
    weights = {numbers[node]: 1.0 for node in record["contributors"]}
    lacking = {int(c): tuple(numbers[node] for node in nodes) for c, nodes in record["lacking"].items()}
    return Compare(record["round"], weights, lacking)


def shortfall(course: Course) -> BenchFailed | None:
    """What is wrong with a course that came to its end."""
    for round_, laps in enumerate(course.laps, 1):
        late = [n for n, lap in laps.items() if lap.after is not None and lap.decoded is None]
        if late:
            return BenchFailed(
                f"peer {late[0]} fetched the state of round {round_}: it did not get the mean in time"
            )
    for record in course.records:
        if not record["digests_equal"]:
            return BenchFailed(f"the peers' states differ after round {record['round']}")
    return None


def summarise(bench: Bench, course: Course) -> Figures:
    measured = course.laps[bench.warmup :]
    seconds = [duration(laps) for laps in measured] + [None] * (bench.iters - len(measured))
    records = course.records[bench.warmup :]
    full = [laps for laps in course.laps if all(lap.after is not None for lap in laps.values())]
    whole = full[-1] if full else {}
    cut = course.laps[-1] if course.laps[-1] is not whole else {}
    last = [lap.after or lap.before for lap in course.laps[-1].values()]
    return Figures(
        peers=bench.peers,
        numel=bench.numel,
        codec=bench.codec,
        streams=bench.streams,
        seconds=seconds,
        rel_err=course.rel_err,
        digests_equal=bool(course.records) and all(record["digests_equal"] for record in course.records),
        tx_bytes=[lap.tx or 0 for lap in whole.values()],
        rx_bytes=[lap.rx or 0 for lap in whole.values()],
        committed=[took is not None for took in seconds],
        killed=course.killed,
        killed_late=any(lap.decoded is not None for lap in course.laps[-1].values() if lap.after is None),
        reduce_s=[record["seconds"]["reduce"] for record in records],
        predicted_s=[record["predicted"] for record in records],
        levels=[record["levels"] for record in records],
        predictions=[record["predictions"] for record in records],
        shares=[record["shares"] for record in records],
        rates=records[-1]["rates"] if records else {},
        attempts=[record["attempts"] for record in records],
        tx_bytes_killed=[lap.tx for lap in cut.values()],
        rx_bytes_killed=[lap.rx for lap in cut.values()],
        cpu_s=[lap.cpu for lap in whole.values()],
        rss_peak_mb=[at_hand.rss_peak / 1e6 for at_hand in last],
        beyond_mb=[at_hand.beyond / 1e6 for at_hand in last],
        vector_mb=FP32 * bench.numel / 1e6,
        payload_mb=last[0].payload / 1e6,
    )


def _table(figures: Figures) -> None:
    streams = f"{figures.streams} streams" if figures.streams else "streams as the nodes choose"
    title = f"{figures.peers} peers, {figures.numel:,} elements, {figures.codec}, {streams}"
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
