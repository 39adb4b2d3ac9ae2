"""What observing a run costs the coordinator and a node: memory, and seconds of a core.

    PYTHONPATH=tests:tests/tools python -m bench.observation [--members 500] [--rounds 200]

Everything is the coordinator's own code on made-up members: goodput, failures and vitals from heartbeats and
events, their dump, alerts, and scrapes. A node's is its phase clock and its own scrape.
"""

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import exposition
from long_runs import long_record
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from atoll.comm.config.run import RunConfig
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.monitor.alerts import AlertRules
from atoll.coordinator.monitor.http import _exposition
from atoll.coordinator.monitor.run_metrics import RunCollector
from atoll.coordinator.service.event_loop import EventLoop
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.metrics import Metrics
from atoll.coordinator.service.telemetry import Vitals
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.state import State
from atoll.node.daemon.phase_clock import PhaseClock

HEARTBEAT, SCRAPE, SAVE, LOOK = 3.0, 15.0, 10.0, 1.0  # seconds between two
ROUND = 600.0  # seconds, of the rounds that are made up
BEATS = 20  # heartbeats of a member in such a round, which stand for ROUND / HEARTBEAT


@dataclass(frozen=True, slots=True)
class ObservationCost:
    """The cost of observing a run of so many members."""

    members: int
    kept_bytes: int  # in the coordinator, all the time
    peak_bytes: int  # with a scrape and a dump under way
    heartbeat: float  # seconds of a core, each
    commit: float
    scrape: float
    dump: float
    look: float  # at the alerts
    node_heartbeat: float
    node_scrape: float

    @property
    def coordinator_share(self) -> float:
        """Of one core of the coordinator."""
        often = self.heartbeat * self.members / HEARTBEAT + self.look / LOOK
        return often + self.scrape / SCRAPE + self.dump / SAVE + self.commit / ROUND

    @property
    def node_share(self) -> float:
        """Of one core of a node, of which its trainer has the others."""
        return self.node_heartbeat / HEARTBEAT + self.node_scrape / SCRAPE


def timed(work: Callable[[], object], times: int) -> float:
    """Seconds of a core that `work` takes, mean of so many times."""
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def joined(members: int) -> tuple[State, State]:
    """A run before and after so many members joined."""
    before = State(RunConfig())
    here = before.members
    for k in range(1, members + 1):
        here = who.join(here, NodeId(f"n{k}"), 1, f"gpu-{k}", f"10.0.0.1:{k}", "", 0.0)
    return before, replace(before, members=here)


def measure(folder: Path, members: int, rounds: int) -> ObservationCost:
    """Observe so many rounds of so many members."""
    tracemalloc.start()
    loop = EventLoop(RunConfig(name="reef"), Journal(folder), Metrics(), lambda effect: None, _healthy)
    before, state = joined(members)
    start = tracemalloc.get_traced_memory()[0]
    rules, telemetry = AlertRules(), loop.telemetry
    telemetry.record_batch(before, state, [], [], 0.0)
    vitals = Vitals(9000.0, 2.5, 1 << 40, 1 << 40, 1 << 28, mfu=0.4, gradient_norm=0.5, learning_rate=3e-4)
    nodes, now, commits = list(state.members.here), 0.0, 0.0

    def beat(phase: str, round_: int, step: int) -> None:
        for node in nodes:
            telemetry.record_heartbeat(ev.Heartbeat(node, 1, phase, round_, step), vitals, {}, now)

    for k in range(1, rounds + 1):
        for step in range(BEATS):
            now += ROUND / BEATS
            phase = "inner" if step < BEATS - 2 else ("waiting", "sync")[step - BEATS]
            beat(phase, k, 10 * step)
            if step == BEATS - 3:
                for node in nodes:
                    telemetry.meter.record_contribution(node, k, carries=False)
        record = replace(long_record(k, members), contributors=dict.fromkeys(nodes, 1.0), members=tuple(nodes))
        after = replace(state, committed=k, pending=record)
        commits += timed(partial(telemetry.record_batch, state, after, [], [], now), 1)
        rules.record(telemetry.complete(record))
        state = replace(after, pending=None)
    del record, after
    loop._machine.state = state
    kept = tracemalloc.get_traced_memory()[0] - start
    collector = RunCollector(loop, "reef", rules)

    def scrape() -> bytes:
        return _exposition([*loop.metrics.registry.collect(), *collector.collect()])

    tracemalloc.reset_peak()
    scrape(), telemetry.dump()
    peak = tracemalloc.get_traced_memory()[1] - start
    tracemalloc.stop()
    heartbeat = timed(lambda: beat("inner", rounds + 1, 7), 5) / members
    commit = timed(lambda: telemetry.meter.cut(), 5) + commits / rounds
    return ObservationCost(
        members,
        kept,
        peak,
        heartbeat,
        commit,
        timed(scrape, 5),
        timed(telemetry.dump, 5),
        timed(lambda: rules.look(state, now), 100),
        *of_a_node(),
    )


def of_a_node() -> tuple[float, float]:
    """Seconds of a core for a heartbeat's part of the phase clock, and for a scrape."""
    clock, registry = PhaseClock(0.0, "inner"), CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(exposition.Node())
    return timed(lambda: clock.beat(time.monotonic()), 1000), timed(lambda: generate_latest(registry), 100)


async def _healthy(_: bool) -> None:
    pass


@click.command()
@click.option("--members", default=500, show_default=True)
@click.option("--rounds", default=100, show_default=True)
def main(members: int, rounds: int) -> None:
    """Print what observing a run costs."""
    with TemporaryDirectory() as folder:
        cost = measure(Path(folder), members, rounds)
    for what, value in (
        ("coordinator, kept", f"{cost.kept_bytes / 1e6:.1f} MB"),
        ("coordinator, at peak", f"{cost.peak_bytes / 1e6:.1f} MB"),
        ("a heartbeat", f"{1e6 * cost.heartbeat:.0f} us"),
        ("a commit", f"{1e3 * cost.commit:.1f} ms"),
        ("a scrape", f"{1e3 * cost.scrape:.0f} ms"),
        ("a dump", f"{1e3 * cost.dump:.1f} ms"),
        ("a look at the alerts", f"{1e6 * cost.look:.0f} us"),
        ("coordinator, all of it", f"{cost.coordinator_share:.2%} of a core"),
        ("node, all of it", f"{cost.node_share:.3%} of a core"),
    ):
        click.echo(f"{what:24} {value}")


if __name__ == "__main__":
    main()
