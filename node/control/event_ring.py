"""The latest incidents of a node, in a ring of bounded size: what it accounts for when it is asked about a round.
Pure: told the time, in seconds of a clock that does not go back."""

from collections import deque
from dataclasses import dataclass

from atoll.comm.ids import NodeId
from atoll.comm.incidents import IncidentKind

SIZE = 256  # incidents
REPEAT_SECONDS = 1.0  # within which the same again is no other incident


@dataclass(frozen=True, slots=True)
class NodeIncident:
    """What happened on the node, or what it saw of a peer."""

    at: float  # seconds
    kind: IncidentKind
    peer: NodeId | None = None
    value: float = 0.0  # what it is, `IncidentKind` says


class EventRing:
    """Incidents in the order in which they happened; the oldest give way."""

    def __init__(self, size: int = SIZE) -> None:
        self._incidents = deque[NodeIncident]((), size)

    def record(self, now: float, kind: IncidentKind, peer: NodeId | None = None, value: float = 0.0) -> None:
        """Enter an incident; one that repeats what was entered just now takes its place, so that what happens with
        each chunk leaves room for other things."""
        before = next((i for i in reversed(self._incidents) if (i.kind, i.peer) == (kind, peer)), None)
        if before is not None and now - before.at < REPEAT_SECONDS:
            self._incidents.remove(before)
        self._incidents.append(NodeIncident(now, kind, peer, value))

    def between(self, start: float, end: float) -> list[NodeIncident]:
        """The incidents from `start` to `end`, in seconds, the latest of each kind and peer, the oldest first."""
        found: dict[tuple[IncidentKind, NodeId | None], NodeIncident] = {}
        for incident in self._incidents:
            if start <= incident.at <= end:
                found.pop((incident.kind, incident.peer), None)
                found[incident.kind, incident.peer] = incident
        return list(found.values())
