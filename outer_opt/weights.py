"""Weights of the members' deltas in the mean.

A weight is relative; the share of the mean follows when it is known whose deltas arrived. Dividing by the weight
of all that were invited instead would shrink the step whenever somebody dies. The coordinator weighs real members
with these functions, the simulator simulated ones.
"""

from collections.abc import Sequence
from statistics import median

QUALITY_BOUND = 4.0  # largest weight by quality, in median weights


def by_tokens(
    tokens: Sequence[float], steps: Sequence[float], measure: Sequence[int] | None = None
) -> list[float]:
    """Weights that are the tokens behind each delta (FedAvg, arXiv 1602.05629, algorithm 1)."""
    return [float(count) for count in tokens]


def equal(tokens: Sequence[float], steps: Sequence[float], measure: Sequence[int] | None = None) -> list[float]:
    """Weights of 1 each, 0 for who trained on nothing (DiLoCo, arXiv 2311.08105, algorithm 1)."""
    return [1.0 if count > 0 else 0.0 for count in tokens]


def by_quality(
    tokens: Sequence[float], steps: Sequence[float], measure: Sequence[int] | None = None
) -> list[float]:
    """Weights of tokens * tokens / steps (Decoupled DiLoCo, arXiv 2604.21428, section 3.2): a larger batch makes
    each token's gradient better. It is quadratic in the batch size, so at most `QUALITY_BOUND` times the
    median of the deltas at the indices `measure`; None: of all."""
    raw = [t * (t / s) if s > 0 else 0.0 for t, s in zip(tokens, steps, strict=True)]
    there = [raw[i] for i in (range(len(raw)) if measure is None else measure) if raw[i] > 0]
    if not there:
        return raw
    most = QUALITY_BOUND * median(there)
    return [min(w, most) for w in raw]


def bounded(weights: Sequence[float], bound: float, measure: Sequence[int] | None = None) -> list[float]:
    """The weights, none above `bound` times the median of those above 0 at the indices `measure` (None: of all); a
    bound of 0: as they are. So whoever says that it trained on more than the others counts little more."""
    there = [weights[i] for i in (range(len(weights)) if measure is None else measure) if weights[i] > 0]
    if not bound or not there:
        return list(weights)
    most = bound * median(there)
    return [min(w, most) for w in weights]


def shares(weights: Sequence[float], factors: Sequence[float] | None = None) -> list[float]:
    """Factors of the deltas in the mean: each weight over the sum of all, times its factor (clipping, damping).
    Raises `ValueError` unless a weight is above 0."""
    total = sum(weights)
    if not total > 0:
        raise ValueError(f"weights {list(weights)}: a mean needs at least one above 0")
    return [w / total * f for w, f in zip(weights, factors or [1.0] * len(weights), strict=True)]
