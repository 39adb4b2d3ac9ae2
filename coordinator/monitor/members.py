"""Members of a run as people look for them: who is slow and by how much, and who is in trouble. Pure; it works on
the members of an answer of `GET /api/run`."""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from atoll.comm.ids import NodeId

SLOW, SLOW_LINK = 1.5, 3.0  # times slower than the median
WAITS_FOR_DATA = 0.2  # share of the inner steps' time


def mark_slow(members: list[dict[str, Any]], at_work: Mapping[str, float], last: Mapping[NodeId, float]) -> None:
    """Give each member `slow`: a sentence that says how slow it is; None: it is not. `last`: tokens a second of
    each in the last round; `at_work`: of its steps when it last took some, for those that were not in it."""
    paces = {
        m["node_id"]: last.get(m["node_id"]) or m["tokens_per_s"] or at_work.get(m["node_id"], 0.0)
        for m in members
        if is_here(m)
    }
    usual = _median(paces.values())
    links = {way: _median(m.get(way) or 0.0 for m in members if is_here(m)) for way in ("rate_up", "rate_down")}
    for m in members:
        pace, waits = paces.get(m["node_id"], 0.0), m["data_wait"] if is_here(m) else 0.0
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


def _median(values: Iterable[float]) -> float:
    """Of those that are known; 0: there are not two."""
    known = [value for value in values if value > 0]
    return median(known) if len(known) > 1 else 0.0


def is_here(member: dict[str, Any]) -> bool:
    return member["state"] not in ("left", "evicted")
