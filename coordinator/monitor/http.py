"""The read-only face of the run: a page for people, JSON for scripts, Prometheus for operators."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from atoll.comm.ids import NodeId
from atoll.coordinator.monitor.contributions import contributions
from atoll.coordinator.monitor.recorded import NodeFacts, RecordedRun
from atoll.coordinator.monitor.web import web
from atoll.coordinator.service.event_loop import STOPPING, EventLoop
from atoll.coordinator.service.run_records import RunRecords
from atoll.coordinator.service.telemetry import Vitals
from atoll.coordinator.state_machine.events import CommitRecord
from atoll.coordinator.state_machine.members import Member, MemberState
from atoll.coordinator.state_machine.state import Phase, State

MAX_GONE = 50  # members that are gone and listed
GONE_MEMORY = 86_400.0  # seconds that a member that is gone is listed
TRAINER_FIGURES = {  # of the vitals: metrics of each member where they are known
    "mfu": "model FLOPs utilisation",
    "data_wait": "share of the inner steps' time spent waiting for data",
    "gradient_norm": "norm of the last gradient",
    "learning_rate": "inner learning rate",
    "device_bytes": "memory at peak on the devices",
    "trainer_rss_bytes": "resident memory of the trainer's processes",
}


def app(loop: EventLoop, records: RunRecords, run: str) -> Starlette:
    """The page, the JSON and the metrics of the run as an ASGI application; nothing in it changes the run."""
    loop.metrics.registry.register(_Run(loop))

    async def healthz(_: Request) -> Response:
        wrong = loop.trouble or (STOPPING if loop.draining else "")
        return PlainTextResponse(f"{wrong or 'ok'}\n", status_code=503 if wrong else 200)

    async def metrics_(_: Request) -> Response:
        return Response(generate_latest(loop.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return web(LiveRun(loop, records, run), [Route("/healthz", healthz), Route("/metrics", metrics_)])


class LiveRun:
    """The run of this process, as `RunAnswers` asks for it."""

    live = True

    def __init__(self, loop: EventLoop, records: RunRecords, run: str) -> None:
        self._loop, self.records, self._run = loop, records, run

    def facts(self) -> RecordedRun:
        state = self._loop.state
        known = (*state.members.departed.values(), *state.members.here.values())
        nodes = {m.node: NodeFacts(m.role or "trainer", m.owner, m.version) for m in known}
        return RecordedRun(self._run, state.config.rounds.total, nodes)

    def snapshot(self) -> dict[str, Any]:
        return snapshot(self._loop, self._run)

    def pending(self) -> CommitRecord | None:
        return self._loop.state.pending

    def at_work(self) -> dict[str, float]:
        return {node: vitals.tokens_per_s for node, vitals in self._loop.telemetry.at_work.items()}

    def now(self) -> float:
        return self._loop.clock()

    def round_trips(self) -> dict[NodeId, dict[NodeId, float]]:
        return {node: member.rtts for node, member in self._loop.state.members.here.items() if member.rtts}

    def contributions(self, limit: int) -> dict[str, Any]:
        return contributions(self._loop.state, self._run, limit)

    def over(self) -> bool:
        return self._loop.stopped


def snapshot(loop: EventLoop, run: str) -> dict[str, Any]:
    """The run now, as `GET /api/run` shows it."""
    state, now = loop.state, loop.clock()
    meter = loop.telemetry.meter
    credited = {account.node: account.tokens for account in state.credit.nodes.values()}  # tokens
    return {
        "run_id": run,
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
        "goodput": meter.shares(now),
        "goodput_seconds": meter.seconds(now),
        "awaited": awaited_names(state),
        "draining": loop.draining,
        "members": [
            _member(m, loop.telemetry.vitals.get(m.node, Vitals()), state, now, credited.get(m.node, 0))
            for m in _listed(state, now)
        ],
        "members_gone": len(state.members.departed),
        "events": [{"at": at, "node": note.node, "sentence": note.sentence} for at, note in loop.notes],
    }


def last_val_loss(loop: EventLoop) -> float | None:
    """The latest validation loss, nats a token; None: none was measured yet."""
    pending = loop.state.pending
    if pending is not None and pending.val_loss is not None:
        return pending.val_loss
    return loop.last_val_loss if loop.last_val_loss is not None else loop.state.initial_val_loss


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


def _listed(state: State, now: float) -> list[Member]:
    """The members, and of those that are gone the latest of the last day."""
    gone = [m for m in list(state.members.departed.values())[-MAX_GONE:] if now - m.heard_at < GONE_MEMORY]
    return [*state.members.here.values(), *gone]


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


class _Run(Collector):
    """The run's own figures, read when they are scraped."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        state, now = self._loop.state, self._loop.clock()
        loss = last_val_loss(self._loop)
        yield CounterMetricFamily("atoll_committed_rounds", "committed rounds", value=state.committed)
        yield CounterMetricFamily("atoll_tokens", "committed tokens", value=state.tokens)
        yield CounterMetricFamily("atoll_epochs", "membership generations", value=state.epoch)
        yield CounterMetricFamily("atoll_incarnations", "lives of the coordinator", value=state.incarnation)
        yield GaugeMetricFamily("atoll_round", "round being trained", value=state.round.number)
        if loss is not None:
            yield GaugeMetricFamily("atoll_val_loss", "validation loss of the anchor", value=loss)
        phases = GaugeMetricFamily("atoll_phase", "1 for the phase of the round", labels=["phase"])
        for phase in Phase:
            phases.add_metric([phase], int(state.round.phase is phase))
        yield phases
        # Open inner time counts as inner until it is lost, so the buckets can shrink.
        goodput = GaugeMetricFamily("atoll_node_seconds", "node-seconds in each bucket", labels=["bucket"])
        for bucket, seconds in self._loop.telemetry.meter.seconds(now).items():
            goodput.add_metric([bucket], seconds)
        yield goodput
        listed = _listed(state, now)
        states = GaugeMetricFamily("atoll_members", "members in each state", labels=["state"])
        for standing, count in Counter(m.shown_state for m in listed).items():
            states.add_metric([standing], count)
        yield states
        labels = ["node", "name"]
        pace = GaugeMetricFamily("atoll_member_tokens_per_s", "tokens a second of a member", labels=labels)
        up = CounterMetricFamily("atoll_member_bytes_up", "bytes that a member sent", labels=labels)
        down = CounterMetricFamily("atoll_member_bytes_down", "bytes that a member received", labels=labels)
        silent = GaugeMetricFamily("atoll_member_last_heard_s", "seconds since a heartbeat", labels=labels)
        figures = {
            name: GaugeMetricFamily(f"atoll_member_{name}", f"{what} of a member", labels=labels)
            for name, what in TRAINER_FIGURES.items()
        }
        for m in listed:
            vitals = self._loop.telemetry.vitals.get(m.node, Vitals())
            who = [m.node, m.name]
            pace.add_metric(who, vitals.tokens_per_s)
            up.add_metric(who, vitals.bytes_up)
            down.add_metric(who, vitals.bytes_down)
            silent.add_metric(who, now - m.heard_at)
            for name, family in figures.items():
                if (value := getattr(vitals, name)) or name == "data_wait":  # 0: it is not known
                    family.add_metric(who, value)
        yield from (pace, up, down, silent, *figures.values())
