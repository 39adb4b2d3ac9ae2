"""Measures how far the anchor went under work that is still owed, for `outer.damping` (`atoll.outer_opt.damping`).

The outer state (`atoll.node.outer.state`) tells how far each round moved each chunk, and at every commit whether
the local vector has work that the round left out. Of a chunk that is fetched instead of stepped, what lies between
counts as one round's. Where fragments take turns, a round moves one of them, and each has a staleness of its own.
"""

import math

from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.outer_opt import damping


class StalenessTracker:
    """The staleness of each fragment's local work, and what it makes the work count."""

    def __init__(self, schedule: FragmentSchedule) -> None:
        self._schedule = schedule
        self._fragments = [damping.AnchorGap() for _ in range(schedule.fragments)]
        # by fragment, for its rounds since the state was final: the squared l2 norm of the anchor's step
        self._squares: list[dict[int, float]] = [{} for _ in self._fragments]

    def damping(self, round: int) -> float:
        """The share, 0 to 1, that the work at hand counts in this round."""
        return self._fragments[self._schedule.fragment(round)].damping

    def record_move(self, fragment: int, round: int, norm: float) -> None:
        """Record that a chunk of the fragment was brought to `round`, which moved its anchor by this l2 norm."""
        squares = self._squares[fragment]
        squares[round] = squares.get(round, 0.0) + norm * norm

    def finalized(self, owed: bool) -> None:
        """Advance each fragment's staleness by the moves since the last call: the state is final. `owed`: the work
        at hand was begun from an earlier anchor."""
        for staleness, squares in zip(self._fragments, self._squares, strict=True):
            for round_ in sorted(squares):
                staleness.advance(math.sqrt(squares[round_]), owed)
            squares.clear()

    def restart(self) -> None:
        """Reset the staleness: training begins from the anchor, and nothing is owed any more."""
        for staleness in self._fragments:
            staleness.reset()
