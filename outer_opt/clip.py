"""No delta is longer than most: an outsized one, wrong or malicious, moves the mean no further than an honest one.

The bound is Covenant-72B's (arXiv 2603.08163), the median of the members' norms. There each tensor has one of its
own; here it is one for the whole delta, since its norm is told before the tensors travel.
"""

from collections.abc import Sequence


def clips(norms: Sequence[float]) -> list[float]:
    """A factor for each delta, of l2 norm `norms`, that brings it down to the median, or 1. Of an even number the
    lower of the middle two, so that of two deltas the smaller counts."""
    nonzero = sorted(n for n in norms if n > 0)
    limit = nonzero[(len(nonzero) - 1) // 2] if nonzero else 0.0
    return [limit / n if n > limit else 1.0 for n in norms]
