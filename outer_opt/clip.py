"""Clipping of deltas: an outsized one, wrong or malicious, moves the mean no further than an honest one.

The bound is Covenant-72B's (arXiv 2603.08163), the median of the members' norms. There each tensor has one of its
own; here it is one for the whole delta, since its norm is told before the tensors travel. There all members have
as many inner steps behind their deltas, too; here some have few, and where most do the median is theirs. A delta
grows with its steps, at most in proportion: so the median of the norms for each step, times a delta's own steps,
is a bound as well, and the larger of the two counts.
"""

from collections.abc import Sequence

SMALLEST_FACTOR = 2.0**-149  # the least above 0 that fp32 has, in which deltas are multiplied


def clip_factors(
    norms: Sequence[float], work: Sequence[float], most: float, measure: Sequence[int] | None = None
) -> list[float]:
    """Factors from SMALLEST_FACTOR to 1, one for each delta of l2 norm `norms`, that bring it down to its bound
    where it is longer: to the median of the norms, or, if that is more, to the median of the norms for each unit
    of `work` (steps or samples) times its own. `most`: what a round asks for; nobody's work counts as more. The
    medians are of the deltas at the indices `measure` (None: of all), of an even number the lower of the middle
    two, so that of two deltas the smaller counts; deltas of norm 0 do not count. Without any other, all factors
    are 1."""
    places = [i for i in (range(len(norms)) if measure is None else measure) if norms[i] > 0]
    if not places:
        return [1.0] * len(norms)
    done = [min(w, most) for w in work]
    usual = _lower_median([norms[i] for i in places])
    steep = _lower_median([norms[i] / done[i] for i in places if done[i] > 0] or [0.0])
    limits = (max(usual, steep * w) for w in done)
    return [max(limit / n, SMALLEST_FACTOR) if n > limit else 1.0 for n, limit in zip(norms, limits, strict=True)]


def _lower_median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
