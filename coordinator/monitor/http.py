"""The read-only face of the run: a page for people, JSON for scripts, Prometheus for operators."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from atoll.coordinator.monitor.alerts import AlertRules
from atoll.coordinator.monitor.contributions import DEFAULT_ACCOUNTS, MAX_ACCOUNTS, contributions
from atoll.coordinator.monitor.figures import last_val_loss, listed
from atoll.coordinator.monitor.run_metrics import RunCollector
from atoll.coordinator.service.event_loop import STOPPING, EventLoop
from atoll.coordinator.service.goodput import compute_utilisation, fleet_goodput
from atoll.coordinator.service.run_records import RunRecords
from atoll.coordinator.service.telemetry import Vitals
from atoll.coordinator.state_machine.events import CommitRecord
from atoll.coordinator.state_machine.members import Member, MemberState
from atoll.coordinator.state_machine.state import Phase, State

PAGE_FILE = Path(__file__).with_name("page.html")
SNAPSHOT_TTL = 0.2  # seconds that an answer of /api/run is good for
DEFAULT_RECORDS, MAX_RECORDS = 200, 1000  # commit records in an answer: where nothing is said, and at most
MAX_ANSWER_BYTES = 8 << 20  # of commit records; a longer answer ends early, and the reader asks on from there
RECORD_FIELDS = {field.name: None for field in fields(CommitRecord)}


def app(loop: EventLoop, records: RunRecords, run: str, rules: AlertRules | None = None) -> Starlette:
    """The page, the JSON and the metrics of the run as an ASGI application; nothing in it changes the run.
    `rules`: those of the run's alerts, if any are looked at."""
    collector = RunCollector(loop, run, rules or AlertRules())
    answer, made_at = b"", -SNAPSHOT_TTL  # of /api/run: with a thousand members it is made once for all who ask

    reading = asyncio.Semaphore()  # one answer is put together at a time, in one thread: writes need some, too

    async def page(_: Request) -> Response:
        return HTMLResponse(PAGE_FILE.read_text())

    async def healthz(_: Request) -> Response:
        wrong = loop.trouble or (STOPPING if loop.draining else "")
        return PlainTextResponse(f"{wrong or 'ok'}\n", status_code=503 if wrong else 200)

    async def api_run(_: Request) -> Response:
        nonlocal answer, made_at
        if loop.clock() - made_at > SNAPSHOT_TTL:
            answer, made_at = msgspec.json.encode(snapshot(loop, run)), loop.clock()
        return Response(answer, media_type="application/json")

    async def api_rounds(request: Request) -> Response:
        try:
            since, limit, wanted = _asked(request.query_params)
        except ValueError as error:
            return PlainTextResponse(f"{error}\n", status_code=400)
        async with reading:
            body = await asyncio.to_thread(_records, records, since, limit, wanted)
        return Response(body, media_type="application/json")

    async def api_contributions(request: Request) -> Response:
        try:
            limit = _number(request.query_params, "limit", DEFAULT_ACCOUNTS)
            offset = _number(request.query_params, "offset", 0)
            if not limit:
                raise ValueError(f"limit=0 asks for nothing: give 1 to {MAX_ACCOUNTS}")
        except ValueError as error:
            return PlainTextResponse(f"{error}\n", status_code=400)
        async with reading:
            said = await asyncio.to_thread(contributions, loop.state, run, limit, offset)
            body = msgspec.json.encode(said)
        return Response(body, media_type="application/json")

    async def metrics_(_: Request) -> Response:
        # Read here, where nothing changes meanwhile; written in a thread, for with a thousand members it is long.
        families = [*loop.metrics.registry.collect(), *collector.collect()]
        async with reading:
            body = await asyncio.to_thread(_exposition, families)
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    routes = {
        "/": page,
        "/healthz": healthz,
        "/api/run": api_run,
        "/api/rounds": api_rounds,
        "/api/contributions": api_contributions,
        "/metrics": metrics_,
    }
    return Starlette(routes=[Route(path, endpoint) for path, endpoint in routes.items()])


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


def _asked(query: QueryParams) -> tuple[int, int, tuple[str, ...]]:
    """`since`, `limit` and the fields of what is answered. Raises `ValueError` with a sentence."""
    since, limit = _number(query, "since", 0), _number(query, "limit", DEFAULT_RECORDS)
    if not limit:
        raise ValueError(f"limit=0 asks for nothing: give 1 to {MAX_RECORDS}")
    asked = query.get("fields", "")
    wanted = dict.fromkeys(asked.split(",")) if asked else RECORD_FIELDS
    if odd := sorted(wanted.keys() - RECORD_FIELDS.keys()):
        raise ValueError(f"a record has no {odd[0][:40]!r}")
    return since, min(limit, MAX_RECORDS), tuple(wanted)


def _number(query: QueryParams, name: str, default: int) -> int:
    """The number of this name. Raises `ValueError` with a sentence."""
    given = query.get(name, str(default))
    if not given.isdecimal() or len(given) > 18:
        raise ValueError(f"{name}={given[:40]!r} is not a number")
    return int(given)


def _records(records: RunRecords, since: int, limit: int, wanted: tuple[str, ...]) -> bytes:
    """These fields of the commit records after `since`, as a JSON list: of the first `limit`, or of as many as
    `MAX_ANSWER_BYTES` allow."""
    answer, length = list[bytes](), 0
    with closing(records.iter_rounds(since, limit)) as found:
        for record in found:
            answer.append(msgspec.json.encode({name: getattr(record, name) for name in wanted}))
            length += len(answer[-1])
            if length >= MAX_ANSWER_BYTES:
                break
    return b"[" + b",".join(answer) + b"]"


def snapshot(loop: EventLoop, run: str) -> dict[str, Any]:
    """The run now, as `GET /api/run` shows it."""
    state, now = loop.state, loop.clock()
    meter = loop.telemetry.meter
    seconds = meter.seconds(now)
    whole = sum(seconds.values())
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
            _member(m, loop.telemetry.vitals.get(m.node, Vitals()), state, now)
            | {"seconds": {k: round(s, 1) for k, s in meter.of_node(m.node, now).items()}}
            for m in listed(state, now)
        ],
        "members_gone": len(state.members.departed),
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


def _member(member: Member, vitals: Vitals, state: State, now: float) -> dict[str, Any]:
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
    }


def _story(member: Member, vitals: Vitals) -> str:
    """Why it is in its state, how far it is with that, and what does not work."""
    if member.state in (MemberState.EVICTED, MemberState.LEFT):
        return member.reason
    now = ": ".join(filter(None, (member.shown_reason, vitals.progress)))
    paused = vitals.pause and f"paused: {vitals.pause}"
    return "; ".join(filter(None, (paused, now, vitals.trouble)))
