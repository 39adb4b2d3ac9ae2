"""The learning rate of an inner optimizer that lost its moments, or never had any, in a run that is under way.

The first steps of Adam and Muon have the size of their learning rate whatever the gradient is, and point where one
batch does; with the rate of a run's middle they would throw away what the anchor has. So the rate rises linearly
to the scheduled one.
"""

import math
from dataclasses import dataclass

from atoll.comm.config.run import InnerConfig, OptimizerName


@dataclass
class Rewarming:
    """A linear rise over 2 / (1 - beta2) inner steps (Ma and Yarats 2021, arXiv 1910.04209), but no more than a
    quarter of a round's. SGD has no moments to lose."""

    steps: int = 0  # over which the rate rises; 0: none
    steps_taken: int = 0

    @classmethod
    def without_moments(cls, inner: InnerConfig, round_steps: int) -> "Rewarming":
        """The rise for an optimizer without moments, in rounds of so many inner steps."""
        if inner.optimizer is OptimizerName.SGD:
            return cls()
        return cls(min(math.ceil(2 / (1 - inner.beta2)), round_steps // 4))

    def next_factor(self) -> float:
        """The share, 0 to 1, of the scheduled learning rate that the next inner step takes."""
        if self.steps_taken >= self.steps:
            return 1.0
        self.steps_taken += 1
        return self.steps_taken / (self.steps + 1)
