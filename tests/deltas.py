"""Random deltas, for the tests of outer_opt and of the sparse codec."""

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def deltas(count: int, n: int, seed: int = 0) -> list[F32]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(n).astype(np.float32) * np.float32(1e-2) for _ in range(count)]
