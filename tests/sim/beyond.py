"""What a node's vectors have beyond the anchor: of each fragment, the samples whose steps it was not counted for.

With one fragment that is what is to be committed. Where fragments take turns, a sample is committed with the first
of them, and its steps are in the deltas of all, each once (`invariants.no_fragment_has_a_step_twice`).
"""

from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.node.state_machine import effects


class Beyond:
    def __init__(self, turns: FragmentSchedule) -> None:
        self._turns = turns
        self._handed = 0  # the round of the last hand-over
        self.applied = 0  # the last round whose sealed bytes were here
        self.clear()

    def clear(self) -> None:
        """The local vector is of no use any more."""
        self._local: list[tuple[int, ...]] = [()] * self._turns.fragments  # the vector's
        self._trained = list(self._local)  # the trainer's, when it handed over, or when it began
        self.vague = False  # whether its steps were committed, or the same ones of an earlier life, it cannot tell

    def of(self, round_: int) -> tuple[int, ...]:
        """Behind the delta of this round."""
        return self._local[self._turns.fragment(round_)]

    def train(self, effect: effects.OrderTraining) -> None:
        """The trainer loads the anchor or the local vector, or takes what is new of them."""
        if effect.continues and not effect.carried:
            self.vague = self.vague or self.applied < self._handed
            if effect.rebased:
                self._trained = list(self._local)
            self._trained[self._turns.fragment(self._handed)] = ()
        elif effect.resume:
            self._trained = list(self._local)
        else:
            self._trained, self.vague = [()] * self._turns.fragments, False

    def hand_over(self, round_: int, samples: list[int]) -> None:
        self._local = self._trained = [(*before, *samples) for before in self._trained]
        self._handed = round_

    def apply(self, round_: int) -> None:
        """The local vector takes the round's fragment from the new anchor."""
        self.applied = round_
        self._local = list(self._local)
        self._local[self._turns.fragment(round_)] = ()
