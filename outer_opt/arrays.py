"""Operations that numpy arrays and torch tensors share, and a norm that has the same bits for both."""

import math
from typing import Any

import numpy as np

Array = Any  # (n,) fp32, a numpy array or a torch tensor on the CPU


def norm(x: Array) -> float:
    """The l2 norm of `x`; its squares are summed in fp64 in a fixed order, the second half onto the first."""
    squares = np.asarray(x).astype(np.float64).reshape(-1)
    squares *= squares
    n = squares.size
    while n > 1:
        half = (n + 1) // 2
        squares[: n - half] += squares[half:n]
        n = half
    return math.sqrt(squares[0]) if n else 0.0


def scaled(x: Array, factor: float, out: Array) -> Array:
    """`out = factor x`; returns `out`. The factor is rounded to the array's type first."""
    out[...] = x
    out *= factor
    return out


def dot(x: Array, y: Array) -> float:
    """The scalar product of `x` and `y` (n,), in fp64; by no BLAS, whose threads cost more than they save here."""
    product = np.asarray(x).astype(np.float64)
    product *= np.asarray(y)
    return float(product.sum())
