"""The links of a run: its regions, what each node's link carries, and the round trips between regions. Pure."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine.events import CommitRecord

MAX_REGIONS = 12  # whose round trips are told


def links(record: CommitRecord | None, round_trips: Mapping[NodeId, Mapping[NodeId, float]]) -> dict[str, Any]:
    """Regions and links by a round's record, and by what members tell of round trips (seconds) now."""
    if record is None:
        return {
            "round": 0,
            "regions": [],
            "nodes": [],
            "between": [],
            "predicted": {},
            "measured": 0.0,
            "levels": 1,
        }
    names = record.names
    members = list(dict.fromkeys((*record.members, *record.contributors, *record.rates)))
    regions = [list(region) for region in record.regions] or [members]
    place = {node: at for at, region in enumerate(regions) for node in region}
    return {
        "round": record.round,
        "levels": record.levels,
        "predicted": {"used": record.predicted, **record.predictions},
        "measured": record.seconds.get("reduce", 0.0),
        "regions": [[{"node_id": n, "name": names.get(n, n)} for n in region] for region in regions],
        "between": _between(regions[:MAX_REGIONS], place, round_trips),
        "nodes": [
            {
                "node_id": n,
                "name": names.get(n, n),
                "region": place.get(n),
                "rate_up": record.rates[n][0] if n in record.rates else None,
                "rate_down": record.rates[n][1] if n in record.rates else None,
                "share": record.shares.get(n, 0.0),
                "bytes_up": record.bytes_up.get(n, 0),
                "bytes_down": record.bytes_down.get(n, 0),
            }
            for n in members
        ],
    }


def _between(
    regions: list[list[NodeId]], place: Mapping[NodeId, int], round_trips: Mapping[NodeId, Mapping[NodeId, float]]
) -> list[list[float | None]]:
    """Median round trips (seconds) between the regions' members; empty: none are known."""
    found: dict[tuple[int, int], list[float]] = {}
    for a, to in round_trips.items():
        for b, seconds in to.items():
            if a in place and b in place and place[a] < len(regions) and place[b] < len(regions):
                found.setdefault((min(place[a], place[b]), max(place[a], place[b])), []).append(seconds)
    if not found:
        return []
    size = range(len(regions))
    return [[median(of) if (of := found.get((min(a, b), max(a, b)))) else None for b in size] for a in size]
