"""Judges whether what a trainer computes can be used. Pure: it is told of each step, and answers with a sentence
when there is something wrong.

Bad arithmetic has three signs:

- The gradients of several steps in a row are not finite: the parameters, or the device, are broken.
- The loss leaves the range that it has had since the order began, and stays outside: one batch far above the
  others says nothing. Where the order began from an earlier state than the last one, its losses are higher than
  before, and rightly so: what came before the order is not looked at. The range is a robust one, the median and
  a multiple of the interquartile range (Tukey 1977, whose far outliers are 3 of them beyond the quartiles; 5 are
  6.7 standard deviations of a normal loss). OLMo 2 (arXiv 2501.00656, section 3) calls 7 standard deviations
  from the average of the last 1000 steps a spike; PaLM (arXiv 2204.02311, section 5.1) goes back to an earlier
  state where one appears, as a node does that begins its order anew from the anchor.
- Steps were taken at a learning rate above zero, and the parameters are what they were.

The thresholds are wide: a false alarm costs a node its steps of the round.
"""

from collections import deque
from collections.abc import Sequence

NOT_FINITE_STEPS = 3  # in a row that are left out before something counts as wrong
HIGH_LOSS_STEPS = 10  # in a row whose loss is out of range
LOSS_WINDOW_STEPS = 200  # last steps from whose losses the range is taken
FIRST_STEPS = 20  # of an order, which have no range yet
INTERQUARTILE_RANGES = 5.0  # above the median, at least
RELATIVE_WIDTH = 0.25  # of the median above it, at least: the loss of a model that knows its text hardly varies
MIN_WIDTH = 0.1  # nats a token above the median, at least
# Nats a token above what the order began with, or as much as that was: what is higher is out of range in any case.
LARGEST_RISE = 1.0


class TrainingHealth:
    """The record of one trainer's steps. `begin` it with each order that starts from other parameters."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the steps so far: the parameters are replaced."""
        self._losses = deque[float](maxlen=LOSS_WINDOW_STEPS)  # those in range
        self._start = list[float]()  # the first of them
        self._not_finite = 0  # steps in a row
        self._high = 0  # steps in a row

    @property
    def is_sound(self) -> bool:
        """Whether the last step was as it should be."""
        return not self._not_finite and not self._high

    def record(self, loss: float, skipped: bool) -> str:
        """Enter a step: its loss, in nats a token, and whether it was left out for a gradient that was not finite.
        Returns what is wrong; empty: nothing."""
        if skipped:
            self._not_finite += 1
            if self._not_finite < NOT_FINITE_STEPS:
                return ""
            return f"the gradients of {self._not_finite} steps in a row were not finite"
        self._not_finite = 0
        if self._losses and loss > (limit := self._limit()):
            self._high += 1
            if self._high < HIGH_LOSS_STEPS:
                return ""
            return (
                f"the loss left its range: it is {loss:.4g}, and was above {limit:.4g} for {self._high} steps in "
                f"a row, where the order began with {self._start[0]:.4g}"
            )
        self._high = 0
        self._losses.append(loss)
        if len(self._start) < FIRST_STEPS:
            self._start.append(loss)
        return ""

    def _limit(self) -> float:
        """The largest loss that is in range."""
        start = quartiles(self._start)[1]
        largest = start + max(start, LARGEST_RISE)
        if len(self._losses) < FIRST_STEPS:
            return largest
        low, median, high = quartiles(self._losses)
        width = max(INTERQUARTILE_RANGES * (high - low), RELATIVE_WIDTH * abs(median), MIN_WIDTH)
        # Where the order began is in range, too: the text may become easier for a while.
        return min(max(median, quartiles(self._start)[2]) + width, largest)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The values that a quarter, a half and three quarters of `values` are at most; there must be one."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4], ordered[(len(ordered) - 1) // 2], ordered[3 * (len(ordered) - 1) // 4]
