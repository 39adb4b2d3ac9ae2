"""How much of a delta counts that was computed from an anchor which has moved since.

Gap-aware damping (Barkai, Hakimi & Schuster 2020, arXiv 1909.10802): not the number of rounds between matters but
how far the parameters have gone, in steps of a usual size C. Here the way of all parameters together is measured,
round by round (the paper has a gap of each, and the straight distance), and C is the newest round's step:

    G = 1 + (sum of |theta_k - theta_{k-1}| over the rounds k since) / C,    C = |theta_now - theta_{now-1}|
    delta <- delta / G

So after n rounds of equal steps, wherever these led, a delta counts 1 / (1 + n).
"""

from dataclasses import dataclass


@dataclass
class Staleness:
    """Between the anchor that the work at hand was begun from and the one of now. Of one node and fragment."""

    way: float = 0.0  # sum of the rounds' steps, in l2 norms, that the anchor took under the work at hand
    usual: float = 0.0  # C; 0: there was no round yet

    def moved(self, step: float, owed: bool) -> None:
        """A round moved the anchor by `step`; `owed`: it left work out that is at hand still."""
        self.way = self.way + step if owed else 0.0
        self.usual = step

    def begun(self) -> None:
        """The work at hand is from the newest anchor on."""
        self.way = 0.0

    @property
    def damping(self) -> float:
        """1 / G."""
        return self.usual / (self.usual + self.way) if self.usual > 0 else 1.0
