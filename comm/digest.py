"""128-bit digests: two replicas are the same when these are.

blake2b, because it is in the standard library, needs no state, and nobody can make two chunks with one
digest: a chunk fetched from a stranger is the ledger's chunk when its digest is the ledger's.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZE = 16  # bytes


def digest(data: bytes | bytearray | memoryview | NDArray[Any]) -> bytes:
    """The 16 bytes that stand for `data`, which must be contiguous."""
    return hashlib.blake2b(
        np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data, digest_size=SIZE
    ).digest()


def root(digests: Sequence[bytes]) -> bytes:
    """One digest over the chunks' digests, in chunk order."""
    return digest(b"".join(digests))
