"""Plain SGD on the mean delta. With lr = 1 the anchor becomes the mean of the members' parameters.

That is local SGD (Stich 2019, arXiv 1805.09767) and FedAvg (arXiv 1602.05629, algorithm 1); with error feedback
in place of momentum it is SparseLoCo's outer step (arXiv 2508.15706, algorithm 1):

    theta <- theta - eta delta
"""

from dataclasses import dataclass

from atoll.outer_opt.arrays import Array, scaled


@dataclass(frozen=True)
class Sgd:
    """The `Rule` without momentum: theta <- theta - eta delta (local SGD, arXiv 1805.09767)."""

    lr: float  # eta

    def step(self, anchor: Array, momentum: Array, delta: Array, scratch: Array) -> None:
        """Update `anchor` (n,) fp32 with the mean `delta` (n,); `momentum` stays, `scratch` is overwritten."""
        anchor -= scaled(delta, self.lr, scratch)
