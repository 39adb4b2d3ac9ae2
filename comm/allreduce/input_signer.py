"""The signatures of one node under what it contributes to reduces, and sums for its region.

It never signs two contents of a chunk at one place of one round, whatever happens to the node meanwhile (memory
that changes, work that is begun anew): two signatures that differ would convict it. The content that came first
stays the one that it signed; of another it says nothing.
"""

from typing import Any, NamedTuple, TypeGuard

import numpy as np

from atoll.comm.byte_view import U8
from atoll.comm.receipts import InputRecord, Receipt, sign_input, sign_receipt
from atoll.comm.signatures import SIGNATURE_BYTES, PrivateKey

MAX_ROUNDS = 4  # whose signatures are remembered: a late thread may still sign in the one before


class RoundSignatures(NamedTuple):
    """What was signed in one round."""

    records: dict[tuple[int, int, bool], InputRecord]  # by place, chunk, and whether it is a sum
    receipts: dict[tuple[int, int, int], Receipt]  # by place, chunk, and attempt


class InputSigner:
    """Signs for the owner of one key. Any thread may call it."""

    def __init__(self, key: PrivateKey) -> None:
        self.key = key
        self._rounds: dict[bytes, RoundSignatures] = {}  # by salt, the newest last

    def input(
        self, salt: bytes, chunk: int, place: int, digest: bytes, inputs: tuple[int, ...] = ()
    ) -> InputRecord | None:
        """The record of what this node at `place` contributes to the chunk, by its digest, or of the mean that it
        made of these `inputs` of its region; None: it signed another content."""
        records, key = self._round(salt).records, (place, chunk, bool(inputs))
        if (record := records.get(key)) is None:
            record = records.setdefault(key, sign_input(self.key, salt, chunk, place, digest, inputs))
        return record if (record.digest, record.inputs) == (digest, inputs) else None

    def receipt(
        self, salt: bytes, chunk: int, since: int, place: int, records: tuple[InputRecord, ...], mean: bytes
    ) -> Receipt:
        """The receipt for what this node at `place` made of the chunk's inputs: the first one that it signed."""
        receipts, key = self._round(salt).receipts, (place, chunk, since)
        if (receipt := receipts.get(key)) is None:
            made = sign_receipt(self.key, salt, chunk, since, place, records, mean)
            receipt = receipts.setdefault(key, made)
        return receipt

    def _round(self, salt: bytes) -> RoundSignatures:
        signed = self._rounds.setdefault(salt, RoundSignatures({}, {}))
        while len(self._rounds) > MAX_ROUNDS:
            self._rounds.pop(next(iter(self._rounds)), None)
        return signed


def with_signature(content: U8, signature: bytes) -> U8:
    """The content with a signature behind it, (n + 64,) uint8: in place, where its memory has room there."""
    whole, size = content.base, content.size + SIGNATURE_BYTES
    if _begins(whole, content, size):
        room: U8 = whole[:size]
    else:
        room = np.empty(size, np.uint8)
        room[: content.size] = content
    room[content.size :] = np.frombuffer(signature, np.uint8)
    return room


def _begins(whole: Any, content: U8, size: int) -> TypeGuard[U8]:
    """Whether the content lies at the beginning of memory of so many bytes that may be written to."""
    if not isinstance(whole, np.ndarray) or whole.dtype != np.uint8 or whole.ndim != 1 or whole.size < size:
        return False
    return whole.flags.writeable and whole.ctypes.data == content.ctypes.data
