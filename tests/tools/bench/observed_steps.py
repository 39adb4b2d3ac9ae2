"""A small trainer's tokens a second with a node's observation beside it, and without, in turns in one run.

What can be switched off is all that a daemon does so that its node can be observed: the figures of its heartbeats,
its phase clock, its ring of incidents, tallies of its paths, its account of the round, its `/metrics`. It is done
OFTENER times as often as a node does it. The trainer's own meter is part of its loop: it is timed by itself, as a
share of a step. Called by `observation`.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import exposition
import msgspec
import psutil
import torch
from prometheus_client import generate_latest

from atoll.comm.config.load import load_run
from atoll.comm.config.round_time import tokens_per_step
from atoll.comm.config.shipped import run_file
from atoll.comm.ids import NodeId, Round
from atoll.comm.incidents import IncidentKind
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.transport.connection import PathStats
from atoll.comm.transport.path_tally import PathTallies
from atoll.node.bench.trainer import BUILTIN, SETTINGS, EngineProcess, launched
from atoll.node.config import NodeConfig
from atoll.node.control.clock_offset import ClockOffset
from atoll.node.control.round_account import Accountant
from atoll.node.daemon.metrics_page import NodeCollector, registry_of
from atoll.node.daemon.phase_clock import PhaseClock
from atoll.node.daemon.pulse import Pulse
from atoll.node.devices import resolve
from atoll.node.participant.figures import RankMemory, StepMeter
from atoll.node.trainer_channel import Progress

OFTENER = 10  # times
HEARTBEAT, SCRAPE, INCIDENT, SAMPLE = 3.0, 15.0, 1.0, 1.0  # seconds between two, of a node
PEERS = [NodeId(f"n{k}") for k in range(1, 9)]
STEPS = 30  # of a turn
TIMED = 1000  # steps of which the meter's part is timed


@dataclass(frozen=True, slots=True)
class ObservedSteps:
    """What came of it."""

    ratios: list[float]  # tokens/s with observation to those without, of each pair of turns
    step: float  # seconds of a step without
    meter: float  # seconds that the trainer's own meter takes of each step


class NodeObservation:
    """What a node's daemon does so that it can be observed."""

    def __init__(self) -> None:
        self._tallies, self._process = PathTallies(), psutil.Process()
        self._tallies.begin(Round(1))
        self._accountant = Accountant(self._tallies, ClockOffset(), lambda start, end: 0.0)
        self._accountant.book.committed(0, time.monotonic())
        self._phases = PhaseClock(time.monotonic(), "inner")
        self._pulse = Pulse(progress=Progress(1, 7, 2.5, 9000.0, 0.4), said_at=math.inf)
        self._count = 0

    def beat(self) -> bytes:
        """A heartbeat with all its figures, but for sending it, which a node does in any case."""
        now = time.monotonic()
        said = self._pulse.figures(True, now)
        beat = pb.HeartbeatRequest(
            phase="inner",
            round=said.round,
            inner_step=said.step,
            tokens_per_s=said.tokens_per_s,
            mfu=said.mfu,
            loss=said.loss,
            bytes_up=1 << 40,
            bytes_down=1 << 40,
            rss_bytes=self._process.memory_info().rss,
            unanswered=pb.PhaseSeconds(**self._phases.beat(now)),
        )
        self._phases.heard(answered=False)
        return beat.SerializeToString()

    def incident(self) -> None:
        self._count += 1
        kinds = list(IncidentKind)
        self._accountant.record(kinds[self._count % len(kinds)], PEERS[self._count % len(PEERS)], 1.0)

    def sample(self) -> None:
        """A look at the connections to all peers, as in an exchange."""
        self._count += 1
        now, count = time.monotonic(), self._count
        for peer in PEERS:
            path = PathStats(0.01, 0.02, count << 20, count << 20, 0.0, 9 * count, 0, 1e7, busy=float(count))
            self._tallies.add(now, peer, peer, path)  # type: ignore[arg-type]  # a link is only a key there
        self._tallies.end_sample(now)

    def account(self) -> bytes:
        return self._accountant.account(1, time.monotonic()).SerializeToString()

    def status(self) -> dict[str, Any]:
        return exposition.STATUS | {"phase_seconds": self._phases.seconds(time.monotonic())}


@asynccontextmanager
async def observing() -> AsyncIterator[None]:
    """A node's observation, OFTENER times as often, while the context lasts."""
    node = NodeObservation()
    registry = registry_of(NodeCollector(node.status, asyncio.get_running_loop()))

    async def every(seconds: float, what: Callable[[], object]) -> None:
        while True:
            what()
            await asyncio.sleep(seconds / OFTENER)

    async def scrape() -> None:
        while True:
            await asyncio.to_thread(generate_latest, registry)
            await asyncio.sleep(SCRAPE / OFTENER)

    often = ((HEARTBEAT, node.beat), (INCIDENT, node.incident), (SAMPLE, node.sample), (SCRAPE, node.account))
    tasks = [asyncio.create_task(every(seconds, what)) for seconds, what in often]
    tasks.append(asyncio.create_task(scrape()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


async def observed_steps(turns: int, steps: int = STEPS) -> ObservedSteps:
    """Train so many pairs of turns of the demo's model; each way round as often."""
    run = load_run(run_file(Path("demo")), SETTINGS)
    node, _ = resolve(NodeConfig(), run.inner.batch_size)
    paces: dict[bool, list[float]] = {False: [], True: []}
    with TemporaryDirectory(prefix="atoll-bench-") as folder:
        async with launched(BUILTIN, run, node, Path(folder) / BUILTIN) as engine:
            await engine.begin()
            await engine.warm_up()
            for turn in range(turns):
                for observed in (False, True) if turn % 2 == 0 else (True, False):
                    paces[observed].append(await pace_of(engine, steps, observed))
    ratios = [with_ / without for without, with_ in zip(paces[False], paces[True], strict=True)]
    return ObservedSteps(ratios, tokens_per_step(run) / median(paces[False]), meter_seconds())


async def pace_of(engine: EngineProcess, steps: int, observed: bool) -> float:
    """Tokens a second of a turn."""
    async with observing() if observed else contextlib.nullcontext():
        await engine.take_turn(steps)
    return engine.turns[-1].tokens_per_s


def meter_seconds() -> float:
    """Seconds of a core that a step spends on its own figures, reports included, at a hundred steps a second."""
    clock = iter(0.01 * k for k in range(1 << 30))
    meter = StepMeter(1024, 1e9, None, clock=lambda: next(clock))
    memory = RankMemory(torch.device("cpu"))
    began = time.process_time()
    for step in range(TIMED):
        meter.begin()
        with meter.loading():
            pass
        memory.bytes()
        if (speed := meter.end()) is not None:
            msgspec.json.encode(Progress(1, step, 2.5, speed.tokens_per_s, speed.mfu, speed.data_wait))
    return (time.process_time() - began) / TIMED


def shown(found: ObservedSteps) -> str:
    """In a line, for people."""
    low, _, high = quantiles(found.ratios, n=4) if len(found.ratios) > 1 else found.ratios * 3
    return (
        f"{median(found.ratios):.2%} of its tokens/s without (quartiles {low:.2%} to {high:.2%}, "
        f"{len(found.ratios)} pairs of turns, {OFTENER} times as often as a node does it); its own meter takes "
        f"{1e6 * found.meter:.0f} us of a step of {1e3 * found.step:.0f} ms, {found.meter / found.step:.3%}"
    )
