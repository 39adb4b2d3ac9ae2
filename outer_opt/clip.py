"""Clipping of deltas: an outsized one, wrong or malicious, moves the mean no further than an honest one.

The bound is Covenant-72B's (arXiv 2603.08163), the median of the members' norms. There each tensor has one of its
own; here it is one for the whole delta, since its norm is told before the tensors travel.
"""

from collections.abc import Sequence

SMALLEST_FACTOR = 2.0**-149  # the least above 0 that fp32 has, in which deltas are multiplied


def clip_factors(norms: Sequence[float], measure: Sequence[int] | None = None) -> list[float]:
    """Factors from SMALLEST_FACTOR to 1, one for each delta of l2 norm `norms`, that bring it down to the median
    where it is longer. The median is of the deltas at the indices `measure` (None: of all), of an even number the
    lower of the middle two, so that of two deltas the smaller counts; deltas of norm 0 do not count. Without any
    other, all factors are 1."""
    nonzero = sorted(norms[i] for i in (range(len(norms)) if measure is None else measure) if norms[i] > 0)
    if not nonzero:
        return [1.0] * len(norms)
    limit = nonzero[(len(nonzero) - 1) // 2]
    return [max(limit / n, SMALLEST_FACTOR) if n > limit else 1.0 for n in norms]
