"""SGD with Nesterov momentum on the mean delta: the outer step of DiLoCo (arXiv 2311.08105, algorithm 1).

The momentum is that of Sutskever et al. 2013 as torch.optim.SGD writes it, without dampening:

    m <- mu m + delta
    theta <- theta - eta (delta + mu m)

Not a running mean: under a constant delta the steps grow to eta / (1 - mu) of it.
"""

from dataclasses import dataclass

from atoll.outer_opt.arrays import Array


@dataclass(frozen=True)
class Nesterov:
    """The `Rule` of DiLoCo (arXiv 2311.08105, algorithm 1), in the form of torch.optim.SGD(nesterov=True)."""

    lr: float  # eta
    momentum: float  # mu; 0 is plain SGD

    def step(self, anchor: Array, momentum: Array, delta: Array, scratch: Array) -> None:
        """m <- mu m + delta; theta <- theta - eta (delta + mu m), on `momentum` and `anchor` (n,) fp32 in place.
        `delta` (n,) is the mean; `scratch` (n,) is overwritten."""
        momentum *= self.momentum
        momentum += delta
        scratch[...] = momentum
        scratch *= self.momentum
        scratch += delta
        scratch *= self.lr
        anchor -= scratch
