"""The read-only face of the run: a page for people, JSON for scripts, Prometheus for operators."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from atoll.comm.ids import NodeId
from atoll.coordinator.journal import Journal
from atoll.coordinator.kernel import Kernel
from atoll.coordinator.membership import Member
from atoll.coordinator.service import Vitals

PAGE = Path(__file__).with_name("page.html")


def app(kernel: Kernel, journal: Journal, vitals: dict[NodeId, Vitals], run: str) -> Starlette:
    registry = CollectorRegistry()
    registry.register(_Metrics(lambda: snapshot(kernel, vitals, run)))

    async def page(_: Request) -> Response:
        return HTMLResponse(PAGE.read_text())

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def api_run(_: Request) -> Response:
        return _json(snapshot(kernel, vitals, run))

    async def api_rounds(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        if not since.isdecimal() or len(since) > 18:
            return PlainTextResponse(f"since={since[:40]!r} is not a round number\n", status_code=400)
        return _json(journal.rounds(int(since)))

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    routes = {
        "/": page,
        "/healthz": healthz,
        "/api/run": api_run,
        "/api/rounds": api_rounds,
        "/metrics": metrics,
    }
    return Starlette(routes=[Route(path, endpoint) for path, endpoint in routes.items()])


def snapshot(kernel: Kernel, vitals: dict[NodeId, Vitals], run: str) -> dict[str, Any]:
    """The run now, as `GET /api/run` shows it."""
    state, now = kernel.state, kernel.clock()
    members = [*state.members.here.values(), *state.members.gone.values()]
    return {
        "run_id": run,
        "incarnation": state.incarnation,
        "epoch": state.epoch,
        "round": state.round.number,
        "rounds_total": state.config.rounds.total,
        "committed": state.committed,
        "phase": state.round.phase,
        "phase_reason": state.round.reason,
        "tokens": state.tokens,
        "val_loss_first": state.initial_val_loss,
        "val_loss": _last_val_loss(kernel),
        "goodput": kernel.meter.shares(now),
        "goodput_seconds": kernel.meter.seconds(now),
        "members": [_member(m, vitals.get(m.node), now, state.round.number) for m in members],
        "events": [{"at": at, "node": note.node, "sentence": note.sentence} for at, note in kernel.notes],
    }


def _last_val_loss(kernel: Kernel) -> float | None:
    pending = kernel.state.pending
    if pending is not None and pending.val_loss is not None:
        return pending.val_loss
    return kernel.last_val_loss if kernel.last_val_loss is not None else kernel.state.initial_val_loss


def _member(member: Member, vitals: Vitals | None, now: float, round_: int) -> dict[str, Any]:
    return {
        "node_id": member.node,
        "name": member.name,
        "state": member.state,
        "role": "trainer",
        "phase": member.phase,
        "round": max(member.state_round, 0),
        "inner_step": member.step[1] if member.step[0] == round_ else 0,
        "tokens_per_s": vitals.tokens_per_s if vitals else 0.0,
        "loss": vitals.loss if vitals else None,
        "last_heard_s": now - member.heard_at,
        "bytes_up": vitals.bytes_up if vitals else 0,
        "bytes_down": vitals.bytes_down if vitals else 0,
        "rss_bytes": vitals.rss_bytes if vitals else 0,
        "address": member.address,
        "reason": member.reason,
    }


class _Metrics(Collector):
    """Reads the same snapshot as the page, when it is scraped."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read

    def collect(self) -> Any:
        run = self._read()
        for name, value, what in (
            ("atoll_round", run["round"], "round being trained"),
            ("atoll_committed_rounds", run["committed"], "committed rounds"),
            ("atoll_epoch", run["epoch"], "membership generation"),
            ("atoll_incarnation", run["incarnation"], "lives of the coordinator"),
            ("atoll_tokens", run["tokens"], "committed tokens"),
            ("atoll_val_loss", run["val_loss"], "validation loss of the anchor"),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, what, value=value)
        goodput = GaugeMetricFamily("atoll_node_seconds", "node-seconds in each bucket", labels=["bucket"])
        for bucket, seconds in run["goodput_seconds"].items():
            goodput.add_metric([bucket], seconds)
        yield goodput
        states = GaugeMetricFamily("atoll_members", "members in each state", labels=["state"])
        names = [m["state"] for m in run["members"]]
        for state in sorted(set(names)):
            states.add_metric([state], names.count(state))
        yield states
        for field in ("tokens_per_s", "bytes_up", "bytes_down", "last_heard_s"):
            gauge = GaugeMetricFamily(f"atoll_member_{field}", f"{field} of a member", labels=["node", "name"])
            for m in run["members"]:
                gauge.add_metric([m["node_id"], m["name"]], m[field])
            yield gauge


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
