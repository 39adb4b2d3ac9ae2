"""An outer rule: how the anchor moves by the merged delta. `nesterov` and `sgd` are the two there are."""

from typing import Protocol

from atoll.outer_opt.arrays import Array


class Rule(Protocol):
    """`state_k = step(state_{k-1}, delta_k)`, with the coefficients of one round (`schedule`)."""

    def step(self, anchor: Array, momentum: Array, delta: Array, scratch: Array) -> None:
        """Move `anchor` and `momentum` (n,) in place by the merged `delta` (n,); `scratch` (n,) is overwritten.
        Element by element: parts of a vector may be stepped one after another."""
