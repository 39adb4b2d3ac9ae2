"""Members of a run as people look for them: who is slow and by how much, who is in trouble, and who was. Pure; it
works on the members of an answer of `GET /api/run`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from atoll.comm.ids import NodeId
from atoll.coordinator.service.failures import BACK_SECONDS, ended_at
from atoll.coordinator.state_machine.events import Failure

SLOW, SLOW_LINK = 1.5, 3.0  # times slower than the median
WAITS_FOR_DATA = 0.2  # share of the inner steps' time
MIN_AWAY_SECONDS = 2.0  # for which a member was away that is told of when it is back
MAX_RETURNED = 6


@dataclass(frozen=True, slots=True)
class AtWork:
    """What a member told of its inner steps."""

    tokens_per_s: float
    data_wait: float = 0.0  # share of the steps' time


def mark_slow(members: list[dict[str, Any]], at_work: Mapping[str, AtWork], last: Mapping[NodeId, float]) -> None:
    """Give each member `pace`, the tokens a second that it is judged by (None: not known), and `slow`: a sentence
    that says how slow it is; None: it is not. `last`: tokens a second of each in the last round; `at_work`: of its
    steps when it last took some, for those that were not in it."""
    working = {m["node_id"]: _at_work(m, at_work) for m in members if is_here(m)}
    paces = {node: last.get(node) or now.tokens_per_s for node, now in working.items()}
    usual = _median(paces.values())
    links = {way: _median(m.get(way) or 0.0 for m in members if is_here(m)) for way in ("rate_up", "rate_down")}
    for m in members:
        pace = paces.get(m["node_id"], 0.0)
        waits = working[m["node_id"]].data_wait if is_here(m) else 0.0
        m["pace"] = pace or None
        said = []
        if 0 < pace * SLOW <= usual:
            said.append(
                f"trains {usual / pace:.1f} times slower than the others ({pace:,.0f} of {usual:,.0f} tokens/s)"
            )
        if waits >= WAITS_FOR_DATA:
            said.append(f"waits for data {waits:.0%} of the time")
        for way, verb in (("rate_up", "sends"), ("rate_down", "receives")):
            if is_here(m) and 0 < (own := m.get(way) or 0.0) * SLOW_LINK <= links[way]:
                said.append(f"{verb} {links[way] / own:.1f} times slower than the others ({own / 1e6:,.1f} MB/s)")
        m["slow"] = "; ".join(said) or None


def _at_work(member: dict[str, Any], known: Mapping[str, AtWork]) -> AtWork:
    """What it does now, where it takes steps, or when it last did."""
    now = AtWork(member["tokens_per_s"], member["data_wait"])
    return now if now.tokens_per_s else known.get(member["node_id"], now)


def _median(values: Iterable[float]) -> float:
    """Of those that are known; 0: there are not two."""
    known = [value for value in values if value > 0]
    return median(known) if len(known) > 1 else 0.0


def returned(failures: Iterable[Failure], now: float, names: Mapping[NodeId, str]) -> list[dict[str, Any]]:
    """The members that failed and are back since `BACK_SECONDS` at most, the latest first, each once."""
    latest = {
        f.node: f
        for f in failures
        if f.recovered is not None and f.recovered >= MIN_AWAY_SECONDS and ended_at(f) > now - BACK_SECONDS
    }
    found: list[dict[str, Any]] = [
        {
            **{"node_id": f.node, "name": names.get(f.node, f.node), "reason": f.reason, "round": f.round},
            **{"since": f.at, "until": ended_at(f)},  # seconds since 1970
        }
        for f in latest.values()
    ]
    return sorted(found, key=lambda one: -one["until"])[:MAX_RETURNED]


def is_here(member: dict[str, Any]) -> bool:
    return member["state"] not in ("left", "evicted")
