"""The keys of a run's data plane: one after another, each for as long as nobody is expelled. Pure.

All follow from one secret, which the journal keeps, and from how many were expelled: HKDF with SHA-256 (RFC 5869).
So a coordinator that starts again has them, and nobody who knows one can tell the next.
"""

import hashlib
import hmac

KEY_BYTES = 32
MARK_BYTES = 16


class DataKeys:
    """The keys that follow from `secret`, at least 32 random bytes."""

    def __init__(self, secret: bytes) -> None:
        self._extracted = hmac.digest(b"atoll data plane", secret, hashlib.sha256)

    def key(self, number: int) -> bytes:
        """The key that is in force once `number` were expelled: (KEY_BYTES,)."""
        return self._expand(b"key " + number.to_bytes(8, "big"))

    @property
    def mark(self) -> bytes:
        """The mark of the run, the same for ever, and of no use but to tell it from others: (MARK_BYTES,)."""
        return self._expand(b"mark")[:MARK_BYTES]

    def _expand(self, info: bytes) -> bytes:
        """HKDF-Expand to one block."""
        return hmac.digest(self._extracted, info + b"\x01", hashlib.sha256)
