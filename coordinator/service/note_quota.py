"""The quota of notes that one member's doings make: notes are for people, and one member is not to flush them.

Called by `journaled_machine` for each event. What is left out is counted, and said with the next note about that
member. Nothing that removes a member is left out. Pure: the caller tells the time.
"""

from atoll.comm.ids import NodeId
from atoll.comm.rate_limits import RateLimit, TokenBuckets
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.events import Effect, Event, Note
from atoll.coordinator.state_machine.state import State

NOTE_LIMIT = RateLimit(0.2, 60)  # notes about one member


class NoteQuota:
    """The notes that each member has left, and how many were left out."""

    def __init__(self) -> None:
        self._buckets = TokenBuckets(NOTE_LIMIT)
        self._left_out: dict[NodeId, int] = {}

    def admit(self, event: Event, state: State, effects: list[Effect], now: float) -> list[Effect]:
        """The effects of an event that led to `state` at `now` (seconds), without notes about its own member that
        are too many."""
        node: NodeId | None = getattr(event, "node", None)
        if node is None or node not in state.members.here:
            if node is not None:
                self._left_out.pop(node, None)
            return effects
        return [shown for effect in effects if (shown := self._shown(effect, node, now)) is not None]

    def _shown(self, effect: Effect, node: NodeId, now: float) -> Effect | None:
        if not isinstance(effect, Note) or effect.node != node:
            return effect
        if not self._buckets.take(node, now):
            self._left_out[node] = self._left_out.get(node, 0) + 1
            return None
        if missing := self._left_out.pop(node, 0):
            return replace(effect, sentence=f"{effect.sentence} ({missing} notes about it before are left out)")
        return effect
