"""How much of a delta counts that was computed from an anchor which has moved since.

Gap-aware damping (Barkai, Hakimi & Schuster 2020, arXiv 1909.10802; here with one gap for all parameters): not
the number of rounds between matters but how far the parameters have gone, measured in usual steps C:

    G = 1 + |theta_now - theta_then| / C,        delta <- delta / G
"""

from atoll.outer_opt.arrays import Array, norm


def damping(distance: float, usual: float) -> float:
    """1 / G for an anchor that went `distance` since the delta's was taken, where `usual` is one round's step."""
    return 1.0 if distance <= 0.0 or usual <= 0.0 else usual / (usual + distance)


def distance(now: Array, then: Array, scratch: Array) -> float:
    """|now - then|; `scratch` (n,) is overwritten."""
    scratch[...] = now
    scratch -= then
    return norm(scratch)
