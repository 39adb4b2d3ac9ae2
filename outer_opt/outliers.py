"""Deltas that are unlike the others of their round, by two numbers of each that cost next to nothing.

Whoever merges a chunk sees its stretch of every delta x_i, and knows the delta m that the fragment's last round
was sealed as. It sums

    squares_i = |x_i|^2    dots_i = <x_i, m>

and over all chunks these give a delta's norm and its cosine to the last round. What is odd is measured against the
other members' of the same round, never against a number that is right for one model and wrong for the next. The
coordinator and `atoll simulate` call `odd_ones`; what follows from it, over rounds, is not said here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

MIN_DELTAS = 4  # of fewer it cannot be said which are the odd ones
LONGEST = 5.0  # median norms that a delta may have
SHORTEST = 0.05  # median norms that it must have: a slow node's have fewer steps behind them
SPREADS = 8.0  # standard deviations, as the median deviation tells them, that a cosine may be off the median
MIN_DEVIATION = 0.15  # that a cosine may be off the median, however near one another the others are
MIN_PART = 0.5  # of the median cosine itself, that one may be off it; noise is off by 1, a reversed delta by 2


@dataclass(frozen=True)
class DeltaScore:
    """A delta, compared with the others of its round."""

    norm: float  # in median norms
    cosine: float  # to the delta that the last round of the fragment was sealed as; 0: there is none
    offset: float | None  # of the cosine from the median; None: it is not compared


def scores(
    squares: Sequence[float], dots: Sequence[float], reference: float, fresh: Sequence[bool] | None = None
) -> list[DeltaScore]:
    """Scores of the deltas of a round. `reference`: the sum of squares of the last round's; 0: there is none.
    `fresh`: whether each was begun from the last round's anchor (None: all were)."""
    fresh = fresh or [True] * len(squares)
    norms = [sqrt(square) for square in squares]
    usual = median([n for n in norms if n > 0] or [1.0])
    cosines = [d / (n * sqrt(reference)) if n and reference else 0.0 for n, d in zip(norms, dots, strict=True)]
    compared = [f and n > 0 for f, n in zip(fresh, norms, strict=True)]
    middle = median([c for c, counts in zip(cosines, compared, strict=True) if counts] or [0.0])
    triples = zip(norms, cosines, compared, strict=True)
    return [DeltaScore(n / usual, c, c - middle if counts else None) for n, c, counts in triples]


def odd_ones(
    squares: Sequence[float], dots: Sequence[float], reference: float, fresh: Sequence[bool] | None = None
) -> dict[int, str]:
    """Indices of the deltas that are unlike most, and what is odd about each, as a clause that begins with "its
    delta". Empty where half of them or more would be: then it is the round that is odd, and nobody's fault.

    Deltas that are not `fresh` are compared by their length alone. Work that the last round left out begins from
    an anchor before it, and is honestly turned against what was merged since.
    """
    found: dict[int, str] = {}
    if len(squares) < MIN_DELTAS:
        return found
    all_ = scores(squares, dots, reference, fresh)
    offsets = [score.offset for score in all_ if score.offset is not None]
    usual = median([score.cosine for score in all_ if score.offset is not None] or [0.0])
    # 1.4826 median deviations are a standard deviation, where they are normally distributed.
    spread = 1.4826 * median([abs(offset) for offset in offsets] or [0.0])
    limit = max(SPREADS * spread, MIN_DEVIATION, MIN_PART * abs(usual))
    for i, score in enumerate(all_):
        if score.norm > LONGEST or score.norm < SHORTEST:
            found[i] = f"its delta is {score.norm:.3g} times as long as the median"
        elif reference and score.offset is not None and len(offsets) >= MIN_DELTAS and abs(score.offset) > limit:
            found[i] = f"its delta has cosine {score.cosine:.2f} to the last round's, the median {usual:.2f}"
    return {} if 2 * len(found) >= len(squares) else found
