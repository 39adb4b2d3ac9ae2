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
    """Over 2 / (1 - beta2) inner steps (Ma and Yarats 2021, arXiv 1910.04209), but no more than a quarter of a
    round's. SGD has no moments to lose."""

    steps: int = 0  # over which the rate rises; 0: none
    taken: int = 0

    @classmethod
    def of(cls, inner: InnerConfig, round_steps: int) -> "Rewarming":
        if inner.optimizer is OptimizerName.SGD:
            return cls()
        return cls(min(math.ceil(2 / (1 - inner.beta2)), round_steps // 4))

    def share(self) -> float:
        """Of the scheduled learning rate, for the next inner step."""
        if self.taken >= self.steps:
            return 1.0
        self.taken += 1
        return self.taken / (self.steps + 1)
