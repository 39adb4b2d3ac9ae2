"""How far the anchor went under work that is still owed, for `outer.damping` (`atoll.outer_opt.late`).

The outer state tells how far each round moved each chunk, and at every commit whether the local vector has work
that the round left out. Of a chunk that is fetched instead of stepped, what lies between counts as one round's.
"""

import math

from atoll.outer_opt.late import damping


class Gap:
    def __init__(self) -> None:
        self._squares: dict[int, float] = {}  # of rounds since the state stood still: of its step's l2 norm
        self._usual = 0.0  # |anchor_k - anchor_{k-1}| of the newest round
        self._distance = 0.0  # that the anchor went under the work at hand

    @property
    def damping(self) -> float:
        """What the work at hand counts."""
        return damping(self._distance, self._usual)

    def moved(self, round: int, norm: float) -> None:
        """A chunk was brought to `round`, and moved so far."""
        self._squares[round] = self._squares.get(round, 0.0) + norm * norm

    def settled(self, owed: bool) -> None:
        """The state stands still; `owed`: the work at hand is of before."""
        steps = [math.sqrt(self._squares[k]) for k in sorted(self._squares)]
        self._distance = self._distance + sum(steps) if owed else 0.0
        self._usual = steps[-1] if steps else self._usual
        self._squares.clear()

    def begun(self) -> None:
        """Training begins from the anchor: what was owed is gone."""
        self._distance = 0.0
