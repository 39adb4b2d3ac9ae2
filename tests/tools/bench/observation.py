"""What observing a run costs the coordinator and a node: memory, and seconds of a core.

    PYTHONPATH=tests:tests/tools python -m bench.observation [--members 500] [--past 100000] [--turns 20]

Everything is Atoll's own code on made-up members. Of the coordinator: goodput, failures and vitals from
heartbeats and events, their dump, alerts and scrapes; what it keeps of a round that is to be explained, with the
accounts of all members that may be asked; what its sinks may leave unread; and for pages that are open the curves
of all rounds, the run as it changes, and the changes that are kept and packed for each. Of a node: the figures of
its heartbeats, its incidents, its account of a round, its own scrape. Then a trainer's tokens a second with and
without all of a node's observation beside it (`observed_steps`). Sinks are processes of their own, which give way
to all others.
"""

import asyncio
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import exposition
import msgspec
from bench.observed_steps import NodeObservation, observed_steps, shown
from long_runs import long_record
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from atoll.comm.config.run import RunConfig
from atoll.comm.ids import NodeId
from atoll.comm.incidents import IncidentKind
from atoll.comm.replace import replace
from atoll.coordinator.causes.account import Account, Incident, LinkAccount
from atoll.coordinator.causes.observations import MemberSeen, Observations
from atoll.coordinator.history.series import SeriesTable, series_row
from atoll.coordinator.monitor.alerts import AlertRules
from atoll.coordinator.monitor.http import LiveRun, _exposition
from atoll.coordinator.monitor.run_answers import RunAnswers
from atoll.coordinator.monitor.run_metrics import RunCollector
from atoll.coordinator.monitor.snapshot_feed import MAX_CHANGES, SnapshotFeed
from atoll.coordinator.monitor.web import MAX_LISTENERS, stream_interval, stream_packer
from atoll.coordinator.service.event_loop import EventLoop
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.metrics import Metrics
from atoll.coordinator.service.run_records import RunRecords
from atoll.coordinator.service.telemetry import Vitals
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.inquiry import MAX_ASKED
from atoll.coordinator.state_machine.state import Inquiry, Moments, State
from atoll.coordinator.tracking.sink import SinkKind
from atoll.coordinator.tracking.tracker import MAX_UNREAD
from atoll.node.control.round_account import MAX_INCIDENTS, MAX_LINKS

HEARTBEAT, SCRAPE, SAVE, LOOK = 3.0, 15.0, 10.0, 1.0  # seconds between two
ROUND = 600.0  # seconds, of the rounds that are made up
LOOKS = 10  # at the run, that are timed
BEATS = 20  # heartbeats of a member in such a round, which stand for ROUND / HEARTBEAT


@dataclass(frozen=True, slots=True)
class ObservationCost:
    """The cost of observing a run of so many members."""

    members: int
    kept_bytes: int  # in the coordinator, all the time
    page_bytes: int  # in the coordinator, besides, with as many pages open as it serves
    peak_bytes: int  # all of that, with a scrape, a dump and a chart under way
    heartbeat: float  # seconds of a core, each
    commit: float
    scrape: float
    dump: float
    look: float  # at the alerts
    snapshot: float  # of the run, with what changed in it: for all pages that are open
    change: float  # to tell one page what changed
    chart: float  # of all rounds
    node_heartbeat: float
    node_scrape: float
    node_incident: float
    node_account: float

    @property
    def coordinator_share(self) -> float:
        """Of one core of the coordinator, while no page is open."""
        often = self.heartbeat * self.members / HEARTBEAT + self.look / LOOK
        return often + self.scrape / SCRAPE + self.dump / SAVE + self.commit / ROUND

    def share_with(self, pages: int) -> float:
        """Of one core of the coordinator, with so many pages open, which draw their charts at each commit."""
        shown = (self.snapshot + pages * self.change) / stream_interval(self.snapshot)
        return self.coordinator_share + shown + pages * self.chart / ROUND

    @property
    def node_share(self) -> float:
        """Of one core of a node, of which its trainer has the others; with an incident a second."""
        often = self.node_heartbeat / HEARTBEAT + self.node_incident
        return often + self.node_scrape / SCRAPE + self.node_account / ROUND


class OpenPages:
    """What pages that stay open have the coordinator make and keep, as `RunWeb` does."""

    def __init__(self, source: LiveRun, pages: int) -> None:
        self._source, self.answers, self._feed = source, RunAnswers(source), SnapshotFeed("bench")
        self._packs = [stream_packer() for _ in range(pages)]
        self._seen = ""
        self._latest: tuple[dict[str, Any], bytes] | None = None

    def look(self) -> None:
        """Make the run as it is now, and what changed in it."""
        self._seen = self._feed.id
        answer = self.answers.current(self._source.snapshot(), dict(self._source.at_work()))
        self._latest = answer, msgspec.json.encode(answer)
        self._feed.take(answer)

    def tell(self) -> None:
        """Tell each page what changed."""
        for pack in self._packs:
            told = self._feed.since(self._seen)
            assert told and (pack.compress(told) + pack.flush(zlib.Z_SYNC_FLUSH))

    def chart(self) -> bytes:
        """All rounds' losses in as many points as a wide page asks for."""
        return msgspec.json.encode(self.answers.series({"names": "train_loss,val_loss", "points": "2000"}))


def long_table(past: int) -> SeriesTable:
    """The figures of so many rounds."""
    made, rng = SeriesTable(), random.Random(0)
    of_round = series_row(long_record(1, 2))
    for k in range(1, past + 1):
        made.extend([(k, 1.7e9 + 60.0 * k, 1e6 * k, rng.random(), rng.random(), *of_round[5:])])
    return made


def inquiry(nodes: list[NodeId]) -> Inquiry:
    """An inquiry into a round, in which all who may be asked told as much as they may."""
    draw = random.Random(0).random
    links = [
        tuple(LinkAccount(n, int(1e9 * draw()), int(1e9 * draw()), draw(), draw()) for n in nodes[:MAX_LINKS])
        for _ in range(MAX_ASKED)
    ]
    found = [
        tuple(Incident(IncidentKind.PAUSED, draw(), n, draw()) for n in nodes[:MAX_INCIDENTS])
        for _ in range(MAX_ASKED)
    ]
    accounts = {
        n: Account(20, draw(), draw(), draw(), incidents=incidents, links=of_peers)
        for n, incidents, of_peers in zip(nodes, found, links, strict=False)
    }
    seen = {n: MemberSeen(n, reached=draw(), contributed=draw(), sealed=draw(), complete=draw()) for n in nodes}
    return Inquiry(Observations(1, {}, members=seen), frozenset(accounts), accounts)


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


def measure(folder: Path, members: int, rounds: int, past: int) -> ObservationCost:
    """Observe so many rounds of so many members, behind `past` rounds that are only known by their figures."""
    tracemalloc.start()
    journal = Journal(folder)
    loop = EventLoop(RunConfig(name="reef"), journal, Metrics(), lambda effect: None, _healthy)
    before, state = joined(members)
    start = tracemalloc.get_traced_memory()[0]
    rules, telemetry = AlertRules(), loop.telemetry
    telemetry.record_batch(before, state, [], [], 0.0)
    vitals = Vitals(9000.0, 2.5, 1 << 40, 1 << 40, 1 << 28, mfu=0.4, gradient_norm=0.5, learning_rate=3e-4)
    nodes, now, commits = list(state.members.here), 0.0, 0.0

    def beat(phase: str, round_: int, step: int, some: list[NodeId] = nodes) -> None:
        for node in some:
            told = replace(vitals, loss=2 + step / 1000, bytes_up=step << 30, tokens_per_s=9000.0 + step)
            telemetry.record_heartbeat(ev.Heartbeat(node, 1, phase, round_, step), told, {}, now)

    for k in range(past + 1, past + rounds + 1):
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
    journal.append([], [record])
    moments = {n: Moments(now + k, now + k + 1, now + k + 2, now + k + 3) for k, n in enumerate(nodes)}
    explained = inquiry(nodes)
    last = series_row(record)
    del record, after
    loop._machine.state = state
    kept = tracemalloc.get_traced_memory()[0] - start + len(SinkKind) * MAX_UNREAD
    assert moments and explained.accounts  # are kept until here

    records = RunRecords(journal, folder, "reef")
    records._series = long_table(past)
    records._series.extend([last])
    pages = OpenPages(LiveRun(loop, records, "reef"), MAX_LISTENERS)

    def second(number: int) -> None:
        """The heartbeats of a second."""
        beat("inner", past + rounds + 1, number, nodes[number % round(HEARTBEAT) :: round(HEARTBEAT)])

    for number in range(1, MAX_CHANGES + 2):
        second(number)
        pages.look()
        pages.tell()
    shown = tracemalloc.get_traced_memory()[0] - start + len(SinkKind) * MAX_UNREAD - kept
    collector = RunCollector(loop, "reef", rules)

    def scrape() -> bytes:
        return _exposition([*loop.metrics.registry.collect(), *collector.collect()])

    tracemalloc.reset_peak()
    for work in (scrape, telemetry.dump, pages.look, pages.chart):
        work()
    peak = tracemalloc.get_traced_memory()[1] - start + len(SinkKind) * MAX_UNREAD
    tracemalloc.stop()
    heartbeat = timed(lambda: beat("inner", past + rounds + 1, 7), 5) / members
    commit = timed(lambda: telemetry.meter.cut(), 5) + commits / rounds
    snapshot, change = 0.0, 0.0
    for number in range(LOOKS):
        second(MAX_CHANGES + number)
        snapshot += timed(pages.look, 1) / LOOKS
        change += timed(pages.tell, 1) / MAX_LISTENERS / LOOKS
    return ObservationCost(
        members,
        kept,
        shown,
        peak,
        heartbeat,
        commit,
        timed(scrape, 5),
        timed(telemetry.dump, 5),
        timed(lambda: rules.look(state, now), 100),
        snapshot,
        change,
        timed(pages.chart, 5),
        *of_a_node(),
    )


def of_a_node() -> tuple[float, float, float, float]:
    """Seconds of a core for a heartbeat's figures, a scrape, an incident, and an account."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(exposition.Node())
    watched = NodeObservation()
    return (
        timed(watched.beat, 1000),
        timed(lambda: generate_latest(registry), 100),
        timed(watched.incident, 1000),
        timed(watched.account, 100),
    )


async def _healthy(_: bool) -> None:
    pass


@click.command()
@click.option("--members", default=500, show_default=True)
@click.option("--rounds", default=100, show_default=True, help="Rounds that are observed.")
@click.option("--past", default=100_000, show_default=True, help="Rounds before these, of the curves.")
@click.option("--turns", default=20, show_default=True, help="Turns of a trainer with and without; 0: none.")
def main(members: int, rounds: int, past: int, turns: int) -> None:
    """Print what observing a run costs."""
    with TemporaryDirectory() as folder:
        cost = measure(Path(folder), members, rounds, past)
    for what, value in (
        ("coordinator, kept", f"{cost.kept_bytes / 1e6:.1f} MB"),
        (f"... for {MAX_LISTENERS} pages", f"{cost.page_bytes / 1e6:.1f} MB"),
        ("coordinator, at peak", f"{cost.peak_bytes / 1e6:.1f} MB"),
        ("a heartbeat", f"{1e6 * cost.heartbeat:.0f} us"),
        ("a commit", f"{1e3 * cost.commit:.1f} ms"),
        ("a scrape", f"{1e3 * cost.scrape:.0f} ms"),
        ("a dump", f"{1e3 * cost.dump:.1f} ms"),
        ("a look at the alerts", f"{1e6 * cost.look:.0f} us"),
        ("the run for pages", f"{1e3 * cost.snapshot:.1f} ms"),
        ("a change for a page", f"{1e3 * cost.change:.1f} ms"),
        ("a chart", f"{1e3 * cost.chart:.1f} ms"),
        ("coordinator, all of it", f"{cost.coordinator_share:.2%} of a core"),
        ("... with a page open", f"{cost.share_with(1):.2%} of a core"),
        (f"... with {MAX_LISTENERS} pages open", f"{cost.share_with(MAX_LISTENERS):.2%} of a core"),
        ("a node's heartbeat", f"{1e6 * cost.node_heartbeat:.0f} us"),
        ("a node's scrape", f"{1e3 * cost.node_scrape:.1f} ms"),
        ("an incident", f"{1e6 * cost.node_incident:.0f} us"),
        ("an account", f"{1e6 * cost.node_account:.0f} us"),
        ("node, all of it", f"{cost.node_share:.3%} of a core"),
    ):
        click.echo(f"{what:28} {value}")
    if turns:
        ratios = asyncio.run(observed_steps(turns))
        click.echo(f"{'a trainer, observed':28} {shown(ratios)}")


if __name__ == "__main__":
    main()
