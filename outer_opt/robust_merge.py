"""Merges of the members' deltas that a few wrong ones cannot move far: centered clipping and trimmed means.

They take the arguments of `merge.Merge`, and use only operations that IEEE arithmetic rounds once, in a fixed
order: the same deltas and shares give the same bits on every machine, with numpy and with torch. Shares may add up
to less than 1, where deltas are clipped or damped: the merged delta is as much shorter.

Real nodes and simulated ones merge chunk by chunk. A trimmed mean is of each coordinate by itself, so that it is
the same by chunks and at once. Centered clipping measures distances, and so does it in each chunk: a delta that is
far off in one chunk counts in full in the others, and one whose wrongness is all in one chunk is bounded there by
the distances in that chunk, not by those of the whole delta.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.outer_opt.arrays import Array, norm, scaled

ITERATIONS = 3  # of centered clipping; the middle moves by a few hundredths of the radius in a fourth
COORDINATES_AT_ONCE = 1 << 16  # that a trimmed mean sorts together, to stay within the processor's caches


def centered(deltas: Sequence[Array], shares: Sequence[float], out: Array, scratch: Array) -> None:
    """Centered clipping (Karimireddy, He & Jaggi, ICML 2021, arXiv 2012.10333, algorithm 2):

        v <- v + sum_i p_i (x_i - v) min(1, tau / |x_i - v|),    p_i = share_i / sum of the shares,

    from v = 0, `ITERATIONS` times, tau the median of the distances |x_i - v| by weight, anew in each iteration:
    so a delta that lies anywhere moves v no further than one that is as far from it as the median. Where all are
    equally far, it is the mean; else it is off the mean by sum_i p_i max(0, |x_i - v| - tau) at most, v and tau
    those of the last iteration.

    The paper begins with the last round's merged delta. From 0 the owner of a chunk, and whoever recomputes it,
    need nothing but the contributions.
    """
    total = sum(shares)
    present = [(np.asarray(delta), share / total) for delta, share in zip(deltas, shares, strict=True) if share]
    away, middle = np.asarray(scratch), np.zeros(len(out), np.float32)
    step = np.empty_like(middle)
    for _ in range(ITERATIONS if present else 0):
        distances = [norm(np.subtract(delta, middle, out=away)) for delta, _ in present]
        radius = weighted_median(distances, [part for _, part in present])
        step[...] = 0.0
        for (delta, part), distance in zip(present, distances, strict=True):
            factor = part * (radius / distance) if distance > radius else part
            np.subtract(delta, middle, out=away)
            step += scaled(away, factor, away)
        middle += step
    scaled(middle, total, np.asarray(out))


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The smallest of `values` that, with those below it, has half of the weight."""
    half, passed = sum(weights) / 2, 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        passed += weight
        if passed >= half:
            return value
    return max(values)  # the sum in another order is rounded otherwise


@dataclass(frozen=True)
class TrimmedMean:
    """Coordinate-wise weighted trimmed mean (Yin, Chen, Ramchandran & Bartlett, ICML 2018, arXiv 1803.01498).

    Of each coordinate the values are sorted, and those at both ends left out that have `trim` of the weight
    together; one that lies across that border counts with what is left of its weight. So values of less than
    `trim` of the weight, whatever they are, leave the result between the smallest and the largest of the others.
    With equal weights of n members and trim = b / n it is the paper's, of n - 2 b values.
    """

    trim: float  # share of the weight, in [0, 0.5)

    def __call__(self, deltas: Sequence[Array], shares: Sequence[float], out: Array, scratch: Array) -> None:
        """Merge as `merge.Merge` has it; the weights and sums are in fp64, and the result is rounded once."""
        total = sum(shares)
        present = [(np.asarray(x), share / total) for x, share in zip(deltas, shares, strict=True) if share]
        result = np.asarray(out)
        result[...] = 0.0
        if not present:
            return
        parts = np.array([part for _, part in present])
        for start in range(0, len(result), COORDINATES_AT_ONCE):
            span = slice(start, start + COORDINATES_AT_ONCE)
            values = np.stack([delta[span] for delta, _ in present])  # (members, coordinates)
            order = np.argsort(values, axis=0, kind="stable")
            sorted_, above = np.take_along_axis(values, order, axis=0), np.cumsum(parts[order], axis=0)
            np.clip(above, self.trim, 1.0 - self.trim, out=above)  # weight up to each value, within the borders
            sum_ = (above[0] - self.trim) * sorted_[0]
            for k in range(1, len(present)):
                sum_ += (above[k] - above[k - 1]) * sorted_[k]
            # The borders are at least as far apart as what was summed, but for the rounding of the weights.
            result[span] = sum_ * (total / (above[-1] - self.trim))
