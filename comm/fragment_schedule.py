"""Turns of a model's fragments: they are exchanged one after the other, one a round.

    round      1   2   3   4   5   6 ...          fragment (round - 1) mod P, in turn 1, 1, 1, 1, 2, 2, ...
    fragment   0   1   2   3   0   1 ...          (here P = 4)

Everything follows from the round's number, so coordinator and nodes agree on it without a word. Between two
exchanges of a fragment are H inner steps, spread over the P rounds as evenly as whole steps can be (Streaming
DiLoCo, arXiv 2501.18512: offsets t_p). With one fragment a round is the usual one of H steps.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FragmentSchedule:
    """The fragments, turns and inner steps of all rounds of a run; rounds count from 1, fragments from 0."""

    fragments: int = 1  # P

    def fragment(self, round_: int) -> int:
        """The fragment that is exchanged in a round, 0 to P - 1."""
        return (round_ - 1) % self.fragments

    def turn(self, round_: int) -> int:
        """The number of exchanges of the round's fragment, this one included: the round's number to its outer
        rule."""
        return (round_ - 1) // self.fragments + 1

    def rounds(self, fragment: int, after: int, until: int) -> range:
        """The rounds in which a fragment is exchanged, of those after `after` up to `until`."""
        return range(self.next(fragment, after), until + 1, self.fragments)

    def next(self, fragment: int, after: int) -> int:
        """The first round after `after` in which a fragment is exchanged."""
        return after + 1 + (fragment - after) % self.fragments

    def steps(self, round_: int, inner_steps: int) -> int:
        """The inner steps of a round, at least 1, where the P rounds of a turn have `inner_steps` together."""
        p = self.fragment(round_)
        due = [-(-inner_steps * k // self.fragments) for k in (p, p + 1)]  # inner steps of the turn
        return max(due[1] - due[0], 1)
