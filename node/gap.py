"""How far the anchor went under work that is still owed, for `outer.damping` (`atoll.outer_opt.late`).

The outer state tells how far each round moved each chunk, and at every commit whether the local vector has work
that the round left out. Of a chunk that is fetched instead of stepped, what lies between counts as one round's.
Where fragments take turns, a round moves one of them, and each has a gap of its own.
"""

import math

from atoll.comm.turns import Turns
from atoll.outer_opt.late import damping


class Gap:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        # of each fragment:
        self._squares: list[dict[int, float]] = [{} for _ in range(turns.fragments)]  # of rounds since the state
        # stood still: of its step's l2 norm
        self._usual = [0.0] * turns.fragments  # |anchor_k - anchor_{k-1}| of the newest round
        self._distance = [0.0] * turns.fragments  # that the anchor went under the work at hand

    def damping(self, round: int) -> float:
        """What the work at hand counts in this round."""
        p = self._turns.fragment(round)
        return damping(self._distance[p], self._usual[p])

    def moved(self, fragment: int, round: int, norm: float) -> None:
        """A chunk was brought to `round`, and moved so far."""
        squares = self._squares[fragment]
        squares[round] = squares.get(round, 0.0) + norm * norm

    def settled(self, owed: bool) -> None:
        """The state stands still; `owed`: the work at hand is of before."""
        for p, squares in enumerate(self._squares):
            steps = [math.sqrt(squares[k]) for k in sorted(squares)]
            if steps:
                self._distance[p] = self._distance[p] + sum(steps) if owed else 0.0
                self._usual[p] = steps[-1]
            squares.clear()

    def begun(self) -> None:
        """Training begins from the anchor: what was owed is gone."""
        self._distance = [0.0] * self._turns.fragments
