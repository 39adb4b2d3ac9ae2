"""Gap-aware damping: how much of a delta counts that was computed from an anchor which has moved since.

By Barkai, Hakimi & Schuster 2020 (arXiv 1909.10802): not the number of rounds between matters but
how far the parameters have gone, in steps of a usual size C. Here the way of all parameters together is measured,
round by round (the paper has a gap of each, and the straight distance), and C is the newest round's step:

    G = 1 + (sum of |theta_k - theta_{k-1}| over the rounds k since) / C,    C = |theta_now - theta_{now-1}|
    delta <- delta / G

So after n rounds of equal steps, wherever these led, a delta counts 1 / (1 + n).
"""

from dataclasses import dataclass


@dataclass
class AnchorGap:
    """The gap between the anchor that a node's uncounted work was begun from and today's, for one fragment."""

    distance: float = 0.0  # sum of the steps' l2 norms that the anchor took since that work was begun
    usual_step: float = 0.0  # C; 0: there was no round yet

    def advance(self, step: float, owed: bool) -> None:
        """Count a round that moved the anchor by `step` (l2 norm); `owed`: it left work out that is still to be
        counted."""
        self.distance = self.distance + step if owed else 0.0
        self.usual_step = step

    def reset(self) -> None:
        """Close the gap: work begins from the newest anchor."""
        self.distance = 0.0

    @property
    def damping(self) -> float:
        """The factor 1 / G of a delta, in (0, 1]; 1 before the first round."""
        return self.usual_step / (self.usual_step + self.distance) if self.usual_step > 0 else 1.0
