"""The run that `atoll bench allreduce` measures: its coordinator and peers as processes, driven round by round."""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec

from atoll.comm.child_process import die_with_parent
from atoll.comm.errors import BenchFailed, ConfigError
from atoll.node.bench.allreduce_figures import (
    AllreduceBench,
    BenchHistory,
    RoundTiming,
    comparison,
    duration,
)
from atoll.node.bench.synthetic import (
    ApplyStep,
    Compare,
    Compared,
    Decoded,
    Leave,
    PeerJoined,
    PeerReady,
    PeerSpec,
    RoundBegun,
    StartRound,
    ToBench,
    ToPeer,
)
from atoll.node.outer.vector_folders import clear_stale

ATOLL = (sys.executable, "-P", "-m", "atoll.comm.cli")
PEER = (sys.executable, "-P", "-m", "atoll.node.bench.synthetic")
FETCH_PAGE = (  # run where the coordinator is: no proxy knows the way there
    *(sys.executable, "-P", "-c"),
    "import sys, urllib.request as r; "
    "print(r.build_opener(r.ProxyHandler({})).open(sys.argv[1], timeout=10).read().decode())",
)
COORDINATOR_UP = re.compile(r"nodes join at .*page at (http://[^\s\"]+).*\n")
ANSWER_TIMEOUT = 60.0  # seconds for a coordinator to come up, for a record to be complete
EXIT_TIMEOUT = 10.0  # seconds for a peer to leave
MAX_LINE = 1 << 20  # bytes of one report of a peer
W = TypeVar("W", bound=ToBench)
T = TypeVar("T")


async def measure(bench: AllreduceBench, folder: Path, history: BenchHistory, show: Callable[[int], None]) -> None:
    """Measure one run, from its coordinator's start to its end. `history` has the figures, also when it fails.
    Raises `BenchFailed`, or `ConfigError` where a command cannot be started."""
    async with AsyncExitStack() as stack:
        page = await stack.enter_async_context(_coordinator(bench, folder))
        url = await _invite(bench, folder)
        numbers = range(1, bench.peers + 1)
        peers = [await stack.enter_async_context(_peer(bench, n, folder, url)) for n in numbers]
        await _of_all(
            ANSWER_TIMEOUT + bench.timeout, "the first round did not begin", (p.come_up() for p in peers)
        )
        for round_ in bench.rounds:
            kill_after = None
            if bench.victim and round_ == bench.rounds[-1]:
                kill_after = bench.kill_at * _usual_seconds(bench, history)
            history.rounds.append(await _round(bench, peers, round_, kill_after, history.killed))
            show(round_)
        history.records = await _records(bench, page, bench.rounds[-1])
        living = [peer for peer in peers if peer.number not in history.killed]
        order = comparison(history.records[-1], {peer.node: peer.number for peer in peers})
        late = "the exact mean was not computed"
        history.rel_err = (await _of_all(bench.timeout, late, [living[0].compare(order)]))[0]
        for peer in living:
            peer.send(Leave())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_TIMEOUT):
                await asyncio.gather(*(peer.process.wait() for peer in living))


async def _round(
    bench: AllreduceBench, peers: Sequence["PeerProcess"], round_: int, kill_after: float | None, killed: list[int]
) -> dict[int, RoundTiming]:
    """One round of all peers, whose inputs are at hand; they have those of the next when it returns."""
    for peer in peers:
        peer.send(StartRound(round_))
    victim = bench.victim if kill_after is not None else 0
    all_decoded = asyncio.Barrier(len(peers) - (victim > 0))
    timings = [
        peer.kill_after(kill_after or 0.0) if peer.number == victim else peer.run_round(round_, all_decoded)
        for peer in peers
    ]
    if victim:
        killed.append(victim)
    done = await _of_all(bench.timeout, f"round {round_} was not committed by every living peer", timings)
    return dict(zip((peer.number for peer in peers), done, strict=True))


async def _of_all(seconds: float, otherwise: str, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of the work on all peers; the first error ends it."""
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except TimeoutError:
        raise BenchFailed(f"{otherwise} within {seconds:g} s") from None
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _usual_seconds(bench: AllreduceBench, history: BenchHistory) -> float:
    """Seconds of an iteration so far; of the last warm-up round where none was measured."""
    seconds = [s for timing in history.rounds if (s := duration(timing)) is not None]
    if not seconds:
        raise BenchFailed("no round was committed, so it cannot be told when to kill a peer")
    return median(seconds[bench.warmup :] or seconds[-1:])


class PeerProcess:
    """The process of a peer, as the bench sees it: orders go in, reports come out."""

    def __init__(self, number: int, process: Process, log: Path) -> None:
        self.number, self.process, self._log = number, process, log
        self.pid, self.node = process.pid, ""
        self._ready: PeerReady | None = None

    def send(self, order: ToPeer) -> None:
        """Write an order to the peer's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def receive(self) -> ToBench | None:
        """Read the peer's next report; None: the process has ended. Raises `BenchFailed` for any other line."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        try:
            return _to_bench.decode(line) if line.endswith(b"\n") else None
        except msgspec.MsgspecError:
            raise BenchFailed(f"peer {self.number} said what is no word of a peer: {line[:200]!r}") from None

    async def expect(self, kind: type[W]) -> W:
        """Read the next report, which must be of `kind`. Raises `BenchFailed` with the end of the peer's log."""
        word = await self.receive()
        if not isinstance(word, kind):
            did = await self._ended() if word is None else f"said {word}"
            raise BenchFailed(f"peer {self.number} {did} where {kind.__name__} was expected: {_tail(self._log)}")
        return word

    async def _ended(self) -> str:
        """How, in words; it has closed its output."""
        with contextlib.suppress(TimeoutError):
            code = await asyncio.wait_for(self.process.wait(), EXIT_TIMEOUT)
            return f"ended with exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        return "fell silent"

    async def come_up(self) -> None:
        """Wait until the peer has joined, and has the input of the first round."""
        joined = await self.expect(PeerJoined)
        self.pid, self.node = joined.pid, joined.node
        self._ready = await self.expect(PeerReady)

    async def run_round(self, round_: int, all_decoded: asyncio.Barrier) -> RoundTiming:
        """Follow the peer through a round, until it has the input of the next one."""
        assert self._ready is not None and self._ready.round == round_
        before, begun = self._ready, await self.expect(RoundBegun)
        word = await self.receive()
        decoded = word if isinstance(word, Decoded) else None
        await all_decoded.wait()
        self.send(ApplyStep(round_))
        after = word if isinstance(word, PeerReady) else await self.expect(PeerReady)
        self._ready = after
        return RoundTiming(begun, decoded, before, after)

    async def kill_after(self, seconds: float) -> RoundTiming:
        """Kill the peer so many seconds from now; returns what it had of its last round."""
        assert self._ready is not None
        await asyncio.sleep(seconds)
        self.kill()
        begun = decoded = None
        while (word := await self.receive()) is not None:
            begun = word if isinstance(word, RoundBegun) else begun
            decoded = word if isinstance(word, Decoded) else decoded
        return RoundTiming(begun, decoded, self._ready, None)

    async def compare(self, order: Compare) -> float:
        """The relative error of the mean that the peer has decoded."""
        self.send(order)
        return (await self.expect(Compared)).rel_err

    def kill(self) -> None:
        """Kill the process, and the one that it was started through if that still is another."""
        for pid in {self.pid, self.process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


_to_bench = msgspec.json.Decoder(ToBench)


# Processes


def write_run(bench: AllreduceBench, folder: Path) -> Path:
    """Write the config of a run whose rounds wait for nothing but the reduce."""
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
        "security": {"tls": "off", "audit": "0", "own_models": True},  # as what it is compared with; no model
        "wandb": {"mode": "disabled"},
    }
    path = folder / "run.yaml"
    path.write_bytes(msgspec.yaml.encode(settings))
    return path


@asynccontextmanager
async def _coordinator(bench: AllreduceBench, folder: Path) -> AsyncIterator[str]:
    """A coordinator that waits for the peers; gives the address of its page."""
    number, log = bench.peers + 1, folder / "coordinator.log"
    where = ("--state-dir", str(folder / "coordinator"))
    listen = ("--listen", bench.listen_address(number), "--http", bench.listen_address(number))
    run = str(write_run(bench, folder))
    command = [*ATOLL, "coordinator", "start", run, *where, *listen, *bench.overrides]
    process = await _start([*bench.command_prefix(number), *command], log, DEVNULL, DEVNULL)
    try:
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while (up := COORDINATOR_UP.search(log.read_text())) is None:
            if process.returncode is not None or time.monotonic() > deadline:
                raise BenchFailed(f"the coordinator did not come up: {_tail(log)}")
            await asyncio.sleep(0.05)
        yield up[1]
    finally:
        await _end(process)


@asynccontextmanager
async def _peer(bench: AllreduceBench, number: int, folder: Path, url: str) -> AsyncIterator[PeerProcess]:
    state_dir, log = folder / f"peer{number}", folder / f"peer{number}.log"
    threads = str(max(1, (os.cpu_count() or 1) // bench.peers))
    settings = {name: threads for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")}
    if bench.streams:
        settings["ATOLL_STREAMS"] = str(bench.streams)
    process = await _start([*bench.command_prefix(number), *PEER], log, PIPE, PIPE, settings)
    peer = PeerProcess(number, process, log)
    try:
        listen = bench.listen_address(number)
        peer.send(PeerSpec(number, bench.numel, url, str(state_dir), listen, ANSWER_TIMEOUT, bench.threads))
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
                limit=MAX_LINE,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )
    except OSError as error:
        raise ConfigError(f"cannot start {command[0]!r}: {error.strerror}") from None


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _invite(bench: AllreduceBench, folder: Path) -> str:
    """A join URL for all peers; made on the coordinator's journal, without a network."""
    where = ("--state-dir", str(folder / "coordinator"))
    return await _output_of([*ATOLL, "invite", *where, "--uses", str(bench.peers)], folder / "invite.log")


async def _records(bench: AllreduceBench, page: str, rounds: int) -> list[dict[str, Any]]:
    """The commit records of all rounds, once the last one's digests are in."""
    prefix, deadline = bench.command_prefix(bench.peers + 1), time.monotonic() + ANSWER_TIMEOUT
    records = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        while True:
            since = records[-1]["round"] if records else 0
            text = await _output_of(
                [*prefix, *FETCH_PAGE, f"{page}/api/rounds?since={since}"], Path(folder, "log")
            )
            records += msgspec.json.decode(text)
            if len(records) >= rounds:
                return records[:rounds]
            if time.monotonic() > deadline:
                raise BenchFailed(f"the coordinator has {len(records)} commit records after {rounds} rounds")
            await asyncio.sleep(0.2)


async def _output_of(command: list[str], log: Path) -> str:
    """What a short command prints."""
    process = await _start(command, log, DEVNULL, PIPE)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            output, _ = await process.communicate()
    except TimeoutError:
        raise BenchFailed(f"{shlex.join(command[:6])} ... did not answer within {ANSWER_TIMEOUT:g} s") from None
    finally:
        await _end(process)
    if process.returncode:
        raise BenchFailed(f"{shlex.join(command[:6])} ... failed: {_tail(log)}")
    return output.decode().strip()


def _tail(log: Path) -> str:
    """The last line of a log that has words, where an error says what it was."""
    lines = (line.strip(" |+-") for line in reversed(log.read_text(errors="replace").split("\n")))
    return next(filter(None, lines), "it said nothing")
