"""Normal numbers that are the same, bit for bit, on every machine.

torch draws with the vector instructions that a processor has, and with other bits where it has others. Members of
a run make the first state each by itself and compare it, so their numbers come from integers (PCG64's stream,
which numpy does not change) and a table of the normal distribution's 2^16 quantiles. `model.initial_value` calls
this.
"""

from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

QUANTILES = 1 << 16
PART = 1 << 22  # numbers that are drawn at once, of 2 bytes each


def exact_normal(count: int, std: float, seed: int) -> NDArray[np.float32]:
    """Numbers of mean 0 and of standard deviation `std`, (count,): each is one of 2^16 quantiles, none further
    than 4.4 standard deviations away. `seed` is not negative."""
    stream, table = np.random.PCG64(seed), (_quantiles() * std).astype(np.float32)
    out = np.empty(count, np.float32)
    for start in range(0, count, PART):
        part = out[start : start + PART]
        words = np.asarray(stream.random_raw(-(-part.size // 4)), "<u8").view("<u2")
        np.take(table, words[: part.size], out=part)
    return out


@cache
def _quantiles() -> NDArray[np.float64]:
    """The middles of the equally likely intervals, symmetric around 0."""
    normal = NormalDist()
    below = [normal.inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES // 2)]
    return np.array(below + [-x for x in reversed(below)])
