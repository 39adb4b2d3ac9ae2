"""The outer step: SGD with Nesterov momentum on the mean delta.

DiLoCo (arXiv 2311.08105, algorithm 1) with the momentum of Sutskever et al. 2013 as torch.optim.SGD writes it:

    m <- mu m + delta
    theta <- theta - eta (delta + mu m)

Works in place on numpy arrays and torch tensors alike. Each line below is one IEEE operation an element, rounded
once; nothing is fused, so that every machine gets the same bits.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Nesterov:
    lr: float  # eta
    momentum: float  # mu; 0 is plain SGD

    def step(self, anchor: Any, momentum: Any, delta: Any, scratch: Any) -> None:
        """Update `anchor` and `momentum` (n,) fp32 with the mean `delta` (n,); `scratch` (n,) is overwritten."""
        momentum *= self.momentum
        momentum += delta
        scratch[...] = momentum
        scratch *= self.momentum
        scratch += delta
        scratch *= self.lr
        anchor -= scratch
