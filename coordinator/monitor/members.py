"""Members of a run as people look for them: who is slow and by how much, and who is in trouble. Pure; it works on
the members of an answer of `GET /api/run`."""

from collections.abc import Mapping
from statistics import median
from typing import Any

SLOW = 1.5  # times slower than the median
WAITS_FOR_DATA = 0.2  # share of the inner steps' time


def mark_slow(members: list[dict[str, Any]], at_work: Mapping[str, float]) -> None:
    """Give each member `slow`: a sentence that says how slow it is; None: it is not. `at_work`: tokens a second of
    each that is known to train, when it last did."""
    paces = {m["node_id"]: m["tokens_per_s"] or at_work.get(m["node_id"], 0.0) for m in members if is_here(m)}
    known = [pace for pace in paces.values() if pace > 0]
    usual = median(known) if len(known) > 1 else 0.0
    for m in members:
        pace, waits = paces.get(m["node_id"], 0.0), m["data_wait"] if is_here(m) else 0.0
        said = []
        if 0 < pace * SLOW <= usual:
            said.append(
                f"trains {usual / pace:.1f} times slower than usual ({pace:,.0f} of {usual:,.0f} tokens/s)"
            )
        if waits >= WAITS_FOR_DATA:
            said.append(f"waits for data {waits:.0%} of the time")
        m["slow"] = "; ".join(said) or None


def is_here(member: dict[str, Any]) -> bool:
    return member["state"] not in ("left", "evicted")
