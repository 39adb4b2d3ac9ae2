"""The schedule of the coordinator's ticks, and from when on it may judge its members by the clock. Pure.

    silent for more than MAX_TICK_GAP (stopped, or its disk was full) --> nobody is judged for a while
    its port answers no calls (`excuse`)                              --> nor now

While the coordinator itself was away it heard nobody, so silence says nothing. Members then have as long to be
heard as after a restart, and the machine is told (`HeardNobody`) before it takes in anything else: to it all of
them would be late. Asked by `group_commit`. Times are seconds on the coordinator's clock.
"""

from math import inf

from atoll.coordinator.state_machine import inquiry, members
from atoll.coordinator.state_machine.events import Event, HeardNobody
from atoll.coordinator.state_machine.state import State

TICK_INTERVAL = 0.25  # seconds
MAX_TICK_GAP = 2.0  # seconds without a tick after which the coordinator, not its members, was silent


class TickSchedule:
    """The moments of the coordinator's ticks, and the grace that its members have after a gap between two."""

    def __init__(self, now: float) -> None:
        """Let the first tick come one interval after `now`."""
        self._ticked_at = self._seen_at = now
        self._judging_from = -inf  # nobody is judged before: the coordinator was away
        self._told_at = -inf  # when the machine was told so last
        self._refused = False  # calls are refused, and it is to be told

    def wait(self, now: float) -> float:
        """Seconds until the next tick; 0 or less where it is due."""
        return self._ticked_at + TICK_INTERVAL - now

    def due(self, now: float) -> bool:
        """Whether it is time for the next tick."""
        return self.wait(now) <= 0

    def excuse(self, now: float) -> None:
        """Judge nobody for a while from `now` on: calls are refused, so members cannot be heard."""
        self._judging_from = max(self._judging_from, now + members.RECONNECT_GRACE_SECONDS)
        self._refused = self._refused or now - self._told_at >= MAX_TICK_GAP

    def absence(self, now: float) -> list[Event]:
        """The word to the machine that the coordinator heard nobody until `now`, if it did not: asked whenever
        something is taken in."""
        gap, self._seen_at = now - self._seen_at, now
        if gap > MAX_TICK_GAP:
            self.excuse(now)
        elif not self._refused:
            return []
        self._refused, self._told_at = False, now
        return [HeardNobody(gap if gap > MAX_TICK_GAP else 0.0)]

    def judge(self, state: State, now: float) -> list[Event]:
        """Tick at `now`: the clock's verdicts on the members of `state`, none while they have grace, and what
        heartbeats tell for an inquiry."""
        if now - self._ticked_at > MAX_TICK_GAP:
            self.excuse(now)
        self._ticked_at = now
        heard = inquiry.judge(state, now)
        if now <= self._judging_from:
            return heard
        return heard + members.judge(state.members, state.config.members, state.awaited_members, now)
