"""How far the anchor went under work that is still owed, for `outer.damping` (`atoll.outer_opt.damping`).

The outer state tells how far each round moved each chunk, and at every commit whether the local vector has work
that the round left out. Of a chunk that is fetched instead of stepped, what lies between counts as one round's.
Where fragments take turns, a round moves one of them, and each has a gap of its own.
"""

import math

from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.outer_opt import damping


class StalenessTracker:
    def __init__(self, turns: FragmentSchedule) -> None:
        self._turns = turns
        self._gaps = [damping.AnchorGap() for _ in range(turns.fragments)]
        # of each fragment's rounds since the state stood still: of its step's l2 norm
        self._squares: list[dict[int, float]] = [{} for _ in self._gaps]

    def damping(self, round: int) -> float:
        """What the work at hand counts in this round."""
        return self._gaps[self._turns.fragment(round)].damping

    def moved(self, fragment: int, round: int, norm: float) -> None:
        """A chunk was brought to `round`, and moved so far."""
        squares = self._squares[fragment]
        squares[round] = squares.get(round, 0.0) + norm * norm

    def settled(self, owed: bool) -> None:
        """The state stands still; `owed`: the work at hand is of before."""
        for gap, squares in zip(self._gaps, self._squares, strict=True):
            for round_ in sorted(squares):
                gap.advance(math.sqrt(squares[round_]), owed)
            squares.clear()

    def begun(self) -> None:
        """Training begins from the anchor: what was owed is gone."""
        for gap in self._gaps:
            gap.reset()
