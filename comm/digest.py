"""128-bit digests: two replicas are the same when these are.

blake2b, because it is in the standard library, needs no state, and nobody can make two chunks with one
digest: a chunk fetched from a stranger is the ledger's chunk when its digest is the ledger's.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from atoll.comm.codec import Octets, view

SIZE = 16  # bytes


def digest(data: Octets | NDArray[Any]) -> bytes:
    """The 16 bytes that stand for the contiguous bytes of `data`."""
    return hashlib.blake2b(view(data), digest_size=SIZE).digest()


def root(digests: Sequence[bytes]) -> bytes:
    """One digest over the chunks' digests, in chunk order."""
    return digest(b"".join(digests))
