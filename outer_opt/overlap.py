"""Adoption of the new anchor by a node: at once, or after it has trained on while the delta travelled; and what
it keeps of work that the round left out.

`sent` are the local parameters that the delta was computed from, `local` those of now, tau inner steps later.
All work in place on `local` (n,); `scratch` (n,) is overwritten.
"""

from dataclasses import dataclass
from typing import Protocol

from atoll.outer_opt.arrays import Array, scaled


class Adopt(Protocol):
    """A way to take the new anchor."""

    def __call__(self, local: Array, anchor: Array, sent: Array, scratch: Array) -> None:
        """Move `local` (n,) in place to where training goes on from; `anchor` and `sent` (n,) stay."""


def replace(local: Array, anchor: Array, sent: Array, scratch: Array) -> None:
    """Set local <- anchor: the node stood still during the exchange (DiLoCo, arXiv 2311.08105), or gives up the
    tau steps."""
    local[...] = anchor


def rebase(local: Array, anchor: Array, sent: Array, scratch: Array) -> None:
    """Set local <- anchor + (local - sent): what was trained meanwhile is put on top of the new anchor. With the
    old anchor as `sent`, all of what a round left out is kept.

    To hide the exchange behind a round's inner steps, and count the delta late, is CO2's (arXiv 2401.16265) and
    DiLoCo's with delayed outer gradients (arXiv 2502.12996); this way to keep the steps is ours."""
    local -= sent
    local += anchor


@dataclass(frozen=True)
class Mix:
    """Set local <- alpha local + (1 - alpha) anchor (Streaming DiLoCo, arXiv 2501.18512; 0.5 there)."""

    alpha: float

    def __call__(self, local: Array, anchor: Array, sent: Array, scratch: Array) -> None:
        local *= self.alpha
        local += scaled(anchor, 1.0 - self.alpha, scratch)


LEFT_OUT_MIX = Mix(0.5)
"""The share that a node keeps of what a round left out. The others went about the same way, so that all of its own
on top of theirs (`rebase`) goes that way twice, and its parameters without theirs (DiLoCo, arXiv 2311.08105,
section 3.1) pull back what the outer momentum has gained. Halfway is about where the mean with its delta would
be."""
