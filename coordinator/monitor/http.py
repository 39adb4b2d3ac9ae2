"""The read-only face of the run: a page for people, JSON for scripts, Prometheus for operators."""

import asyncio
import time
from collections.abc import Sequence
from math import inf
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.monitor.alerts import AlertRules
from atoll.coordinator.monitor.contributions import account, contributions
from atoll.coordinator.monitor.figures import facts_of_nodes, last_val_loss, listed
from atoll.coordinator.monitor.members import AtWork, returned
from atoll.coordinator.monitor.recorded import RecordedRun
from atoll.coordinator.monitor.run_metrics import RunCollector
from atoll.coordinator.monitor.web import calm, web
from atoll.coordinator.service.event_loop import STOPPING, EventLoop
from atoll.coordinator.service.goodput import compute_utilisation, fleet_goodput
from atoll.coordinator.service.run_records import RunRecords
from atoll.coordinator.service.telemetry import Vitals
from atoll.coordinator.state_machine.events import CommitRecord, Decision, Failure
from atoll.coordinator.state_machine.members import Member, MemberState
from atoll.coordinator.state_machine.state import Phase, State

METRICS_TTL = 1.0  # seconds that a page of metrics is good for


def app(loop: EventLoop, records: RunRecords, run: str, rules: AlertRules | None = None) -> Starlette:
    """The page, the JSON and the metrics of the run as an ASGI application; nothing in it changes the run.
    `rules`: those of the run's alerts, if any are looked at."""
    metrics_page = MetricsPage(loop, RunCollector(loop, run, rules or AlertRules()))

    async def healthz(_: Request) -> Response:
        wrong = loop.trouble or (STOPPING if loop.draining else "")
        return PlainTextResponse(f"{wrong or 'ok'}\n", status_code=503 if wrong else 200)

    async def metrics_(_: Request) -> Response:
        return Response(await metrics_page.body(), media_type=CONTENT_TYPE_LATEST)

    return web(LiveRun(loop, records, run), [Route("/healthz", healthz), Route("/metrics", metrics_)])


class MetricsPage:
    """The metrics of the process and of the run, as Prometheus reads them."""

    def __init__(self, loop: EventLoop, collector: Collector) -> None:
        """`collector`: of the run's."""
        self._loop, self._collector = loop, collector
        self._writing = asyncio.Semaphore()  # one page is written at a time, in one thread
        self._page, self._good_until = b"", -inf  # seconds of the monotonic clock

    async def body(self) -> bytes:
        """The page, the same for all who ask within `METRICS_TTL` seconds."""
        async with self._writing:
            if time.monotonic() > self._good_until:
                await calm(lambda: self._loop.crowded)
                # Read here, where nothing changes meanwhile; written in a thread: with many members it is long.
                families = [*self._loop.metrics.registry.collect(), *self._collector.collect()]
                self._page = await asyncio.to_thread(_exposition, families)
                self._good_until = time.monotonic() + METRICS_TTL
            return self._page


class _Collected(Collector):
    """Metrics that were read already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def _exposition(families: Sequence[Metric]) -> bytes:
    """Metrics as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(_Collected(families))
    return generate_latest(registry)


class LiveRun:
    """The run of this process, as `RunAnswers` asks for it."""

    live = True

    def __init__(self, loop: EventLoop, records: RunRecords, run: str) -> None:
        self._loop, self.records, self._run = loop, records, run
        self._decided: tuple[int, list[tuple[float, Decision]]] = (0, [])  # how many, as of the last look

    def facts(self) -> RecordedRun:
        state = self._loop.state
        return RecordedRun(self._run, state.config.rounds.total, facts_of_nodes(state))

    def snapshot(self) -> dict[str, Any]:
        return snapshot(self._loop, self._run)

    def decisions(self, since: float, until: float) -> list[tuple[float, Decision]]:
        if (count := self._loop.state.conduct.decisions) != self._decided[0]:
            self._decided = count, self.records.decisions()
        return [(at, decision) for at, decision in self._decided[1] if since <= at <= until]

    def pending(self) -> CommitRecord | None:
        """With what the run's inquiry into it has found so far."""
        state = self._loop.state
        found = state.inquiry.named if state.inquiry is not None else None
        return state.pending if state.pending is None or found is None else replace(state.pending, verdict=found)

    def at_work(self) -> dict[str, AtWork]:
        at_work = self._loop.telemetry.at_work.items()
        return {node: AtWork(vitals.tokens_per_s, vitals.data_wait) for node, vitals in at_work}

    def now(self) -> float:
        return self._loop.clock()

    def failures(self) -> list[Failure]:
        return self._loop.telemetry.failures.latest()

    def round_trips(self) -> dict[NodeId, dict[NodeId, float]]:
        return {node: member.rtts for node, member in self._loop.state.members.here.items() if member.rtts}

    def contributions(self, limit: int, offset: int) -> dict[str, Any]:
        return contributions(self._loop.state, self._run, limit, offset)

    def account(self, node: NodeId) -> dict[str, Any] | None:
        return account(self._loop.state, node)

    def over(self) -> bool:
        return self._loop.stopped

    def crowded(self) -> bool:
        return self._loop.crowded


def snapshot(loop: EventLoop, run: str) -> dict[str, Any]:
    """The run now, as `GET /api/run` shows it."""
    state, now = loop.state, loop.clock()
    meter = loop.telemetry.meter
    seconds = meter.seconds(now)
    credited = {a.node: a.tokens for a in state.credit.nodes.values()}  # tokens
    whole = sum(seconds.values())
    failures = loop.telemetry.failures.latest()
    return {
        "run_id": run,
        "at": now,  # seconds since 1970, by the coordinator's clock
        "incarnation": state.incarnation,
        "epoch": state.epoch,
        "round": state.committed if state.round.phase is Phase.FINISHED else state.round.number,
        "rounds_total": state.config.rounds.total,
        "committed": state.committed,
        "phase": state.round.phase,
        "phase_reason": loop.trouble or state.round.reason,
        "tokens": state.tokens,
        "val_loss_first": state.initial_val_loss,
        "val_loss": last_val_loss(loop),
        "goodput": {bucket: spent / whole if whole else 0.0 for bucket, spent in seconds.items()},
        "goodput_seconds": seconds,
        "fleet_goodput": fleet_goodput(seconds),
        "compute_utilisation": compute_utilisation(seconds),
        "awaited": awaited_names(state),
        "draining": loop.draining,
        "members": [
            _member(m, loop.telemetry.vitals.get(m.node, Vitals()), state, now, credited.get(m.node, 0))
            | {"seconds": {k: round(s, 1) for k, s in meter.of_node(m.node, now).items()}}
            for m in listed(state, now)
        ],
        "members_gone": len(state.members.departed),
        "returned": returned(failures, now, {f.node: state.name(f.node) for f in failures}),
        "events": [{"at": at, "node": note.node, "sentence": note.sentence} for at, note in loop.notes],
    }


def awaited_names(state: State) -> list[str]:
    """Names of the members that the round waits for."""
    r = state.round
    match r.phase:
        case Phase.INNER if r.reached_at is not None:
            waited_for = (n for n in r.participants if n not in state.members.idle)
            late = [n for n in waited_for if n not in r.reached and n not in r.ledger.contributions]
        case Phase.COLLECTING:
            waited_for = (n for n in r.participants if n not in state.members.idle)
            late = [n for n in waited_for if n not in r.ledger.contributions]
        case Phase.REDUCING if r.plan is not None:
            late = [n for n in r.ledger.members if n not in r.completions]
        case _:
            late = []
    return [state.name(n) for n in late]


def _member(member: Member, vitals: Vitals, state: State, now: float, tokens: int) -> dict[str, Any]:
    r, node = state.round, member.node
    return {
        "node_id": node,
        "name": member.name,
        "state": member.shown_state,
        "role": member.role or "trainer",
        "phase": member.phase,
        "round": max(member.state_round, 0),
        "inner_step": member.step[1] if member.step[0] == r.number else 0,
        "reached": node in r.reached,
        "ready": node in r.ledger.contributions,
        "connected": member.connected,
        "tokens_per_s": vitals.tokens_per_s,
        "mfu": vitals.mfu or None,
        "data_wait": vitals.data_wait,
        "loss": vitals.loss or None,
        "gradient_norm": vitals.gradient_norm or None,
        "learning_rate": vitals.learning_rate or None,
        "device_bytes": vitals.device_bytes or None,
        "trainer_rss_bytes": vitals.trainer_rss_bytes or None,
        "last_heard_s": now - member.heard_at,
        "bytes_up": vitals.bytes_up,
        "bytes_down": vitals.bytes_down,
        "rss_bytes": vitals.rss_bytes,
        "address": member.address,
        "progress": vitals.progress,
        "trouble": vitals.trouble,
        "pause": vitals.pause,
        "reason": _story(member, vitals),
        "owner": member.owner,
        "version": member.version,
        "leaf": member.leaf,
        "heard_at": member.heard_at,
        "rate_up": member.rates[0] or None,
        "rate_down": member.rates[1] or None,
        "contributed": tokens,
    }


def _story(member: Member, vitals: Vitals) -> str:
    """Why it is in its state, how far it is with that, and what does not work."""
    if member.state in (MemberState.EVICTED, MemberState.LEFT):
        return member.reason
    now = ": ".join(filter(None, (member.shown_reason, vitals.progress)))
    paused = vitals.pause and f"paused: {vitals.pause}"
    return "; ".join(filter(None, (paused, now, vitals.trouble)))
