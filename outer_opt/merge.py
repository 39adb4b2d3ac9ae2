"""Merging of the members' deltas of one tensor, or of a part of one, into one delta.

The sums are in the order given, which is the plan's. A share of 0 is as if the delta were absent.
"""

from collections.abc import Sequence
from typing import Protocol

from atoll.outer_opt.arrays import Array, norm, scaled

# The norm of a mean direction, 1 at most, below which the directions cancel each other.
MIN_DIRECTION_NORM = 1e-12


class Merge(Protocol):
    """A way to make the members' deltas one: `mean` and `radial` here, the robust ones in `robust_merge`."""

    def __call__(self, deltas: Sequence[Array], shares: Sequence[float], out: Array, scratch: Array) -> None:
        """Write the merged delta into `out` (n,); `deltas` are (n,) each; `scratch` (n,) is overwritten."""


def mean(deltas: Sequence[Array], shares: Sequence[float], out: Array, scratch: Array) -> None:
    """Weighted mean, sum_i share_i delta_i (DiLoCo, arXiv 2311.08105, algorithm 1)."""
    out[...] = 0.0
    for delta, share in zip(deltas, shares, strict=True):
        if share:
            out += scaled(delta, share, scratch)


def radial(deltas: Sequence[Array], shares: Sequence[float], out: Array, scratch: Array) -> None:
    """Radial-directional averaging (Decoupled DiLoCo, arXiv 2604.21428): the mean of the norms times the
    direction of the mean of the directions,

        (sum_i share_i |delta_i|) phi( sum_i share_i phi(delta_i) ),    phi(x) = x / |x|, phi(0) = 0.

    Deltas of different data are nearly orthogonal: a plain mean of M of them is sqrt(M) times shorter than each.
    Where the directions cancel, the plain mean. The norms are of what it is given: where a chunk's border cuts a
    tensor, each stretch of it has norms and a direction of its own.
    """
    norms = [norm(delta) if share else 0.0 for delta, share in zip(deltas, shares, strict=True)]
    mean(deltas, [share / n if n else 0.0 for share, n in zip(shares, norms, strict=True)], out, scratch)
    length = norm(out)
    if length < MIN_DIRECTION_NORM:
        mean(deltas, shares, out, scratch)
    else:
        out *= sum(share * n for share, n in zip(shares, norms, strict=True)) / length
