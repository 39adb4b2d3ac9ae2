"""How much each member's delta counts.

A weight is relative; the share of the mean follows when it is known whose deltas arrived. Dividing by the weight
of all that were invited instead would shrink the step whenever somebody dies.
"""

from collections.abc import Sequence
from statistics import median

BOUND = 4.0  # times the median weight


def by_tokens(tokens: Sequence[float], steps: Sequence[float]) -> list[float]:
    """The tokens behind each delta (FedAvg, arXiv 1602.05629, algorithm 1)."""
    return [float(count) for count in tokens]


def equal(tokens: Sequence[float], steps: Sequence[float]) -> list[float]:
    """1 each, 0 for who trained on nothing (DiLoCo, arXiv 2311.08105, algorithm 1)."""
    return [1.0 if count > 0 else 0.0 for count in tokens]


def by_quality(tokens: Sequence[float], steps: Sequence[float]) -> list[float]:
    """tokens * tokens / steps (Decoupled DiLoCo, arXiv 2604.21428, section 3.2): a larger batch makes each
    token's gradient better. It is quadratic in the batch size, so at most `BOUND` times the median."""
    raw = [t * (t / s) if s > 0 else 0.0 for t, s in zip(tokens, steps, strict=True)]
    there = [w for w in raw if w > 0]
    return [min(w, BOUND * median(there)) for w in raw] if there else raw


def shares(weights: Sequence[float], factors: Sequence[float] | None = None) -> list[float]:
    """What to multiply each delta with in the mean: its weight over the sum of all, times its factor."""
    total = sum(weights)
    if not total > 0:
        raise ValueError(f"weights {list(weights)}: a mean needs at least one above 0")
    return [w / total * f for w, f in zip(weights, factors or [1.0] * len(weights), strict=True)]
