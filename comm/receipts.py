"""Receipts of a reduce: what a member signed of what it sent, and what a chunk's owner, or a region's relay,
signed of what it made of that. With them an audit can tell who of all of them lied.

    contributor --chunk, input record--> owner --receipt: all records, the mean's digest--> auditor

An input record says: this member, at this place of the plan, contributed these bytes to this chunk. Of one round
(the plan's salt) an honest member signs one record of a chunk at a place, and an owner one receipt of a chunk for
each attempt in which it got it. So who signed two that differ is a liar, whoever else lies: that is proof, which
everybody can check who has the plan's keys.

Nobody signs a digest that stands for two contents: it is 128 bits of BLAKE3, of which 2^64 tries find two alike.

Packed, all numbers little-endian: a record is place (2 bytes), number of places p (2), those places (2p), digest
(16), signature (64); a receipt is its records, the digest of the mean (16), and its signature (64).
"""

import struct
from dataclasses import dataclass

from atoll.comm.digest import DIGEST_SIZE
from atoll.comm.ids import PublicKey
from atoll.comm.signatures import SIGNATURE_BYTES, PrivateKey, sign, verify

SALT_BYTES = 16
MAX_RECEIPT_BYTES = 1 << 20  # of a packed receipt
MAX_FINDING_BYTES = 3 * MAX_RECEIPT_BYTES  # of all receipts of a chunk: its owner's, and its relays' together
_HEAD = struct.Struct("<HH")
_END = DIGEST_SIZE + SIGNATURE_BYTES  # bytes behind the places of a record, and the records of a receipt


def receipt_bytes(inputs: int) -> int:
    """The most bytes of a receipt for the contributions of so many places, summed by relays or not."""
    return min(inputs * (_HEAD.size + 2 + _END) + _END, MAX_RECEIPT_BYTES)


class MalformedReceipt(ValueError):
    """Bytes that are no receipt, or no record."""


@dataclass(frozen=True, slots=True)
class InputRecord:
    """A member's signed word that it contributed bytes of this digest to a chunk."""

    place: int  # its place in the plan
    digest: bytes  # of the encoded contribution, or of the mean that a relay made of its region
    signature: bytes
    inputs: tuple[int, ...] = ()  # of a relay: the places whose contributions are in its mean

    def signed_by(self, key: PublicKey, salt: bytes, chunk: int) -> bool:
        """Whether the owner of this key signed it, of this chunk in the round with this salt."""
        return verify(key, self.signature, *_input_parts(salt, chunk, self.place, self.digest, self.inputs))

    def pack(self) -> bytes:
        """The record as the module's docstring has it."""
        return _HEAD.pack(self.place, len(self.inputs)) + _places(self.inputs) + self.digest + self.signature


@dataclass(frozen=True, slots=True)
class Receipt:
    """A signed word of a chunk's owner, or of a region's relay: which inputs it had, and what it made of them."""

    records: tuple[InputRecord, ...]  # in plan order
    mean: bytes  # digest of the sealed bytes, or of the region's encoded mean
    signature: bytes

    def signed_by(self, key: PublicKey, salt: bytes, chunk: int, since: int, place: int) -> bool:
        """Whether the member at `place`, which has this key, signed it, of this chunk since that attempt in the
        round with this salt."""
        return verify(key, self.signature, *_receipt_parts(salt, chunk, since, place, self.records, self.mean))

    def pack(self) -> bytes:
        """The receipt as the module's docstring has it."""
        return b"".join(record.pack() for record in self.records) + self.mean + self.signature


def sign_input(
    key: PrivateKey, salt: bytes, chunk: int, place: int, digest: bytes, inputs: tuple[int, ...] = ()
) -> InputRecord:
    """The record of a contribution with this digest, or of a region's mean of these inputs, of the member at
    `place`."""
    return InputRecord(place, digest, sign(key, *_input_parts(salt, chunk, place, digest, inputs)), inputs)


def sign_receipt(
    key: PrivateKey, salt: bytes, chunk: int, since: int, place: int, records: tuple[InputRecord, ...], mean: bytes
) -> Receipt:
    """The receipt of the member at `place`, for what it made of these records."""
    return Receipt(records, mean, sign(key, *_receipt_parts(salt, chunk, since, place, records, mean)))


def unpack_record(data: bytes) -> InputRecord:
    """The record in `data`, which is all of it. Raises `MalformedReceipt`."""
    record, end = _record_at(data, 0)
    if end != len(data):
        raise MalformedReceipt(f"a record of {end} bytes has {len(data)}")
    return record


def unpack_receipt(data: bytes) -> Receipt:
    """The receipt in `data`, with records of ascending places. Raises `MalformedReceipt`."""
    if not _END < len(data) <= MAX_RECEIPT_BYTES:
        raise MalformedReceipt(f"a receipt of {len(data)} bytes")
    records, at, end = list[InputRecord](), 0, len(data) - _END
    packed = data[:end]  # once: a copy for each record would take the square of their number
    while at < end:
        record, at = _record_at(packed, at)
        if records and record.place <= records[-1].place:
            raise MalformedReceipt("its places are not in order")
        records.append(record)
    return Receipt(tuple(records), data[end : end + DIGEST_SIZE], data[end + DIGEST_SIZE :])


def _record_at(data: bytes, at: int) -> tuple[InputRecord, int]:
    """The record that begins there, and where it ends."""
    if len(data) < at + _HEAD.size:
        raise MalformedReceipt("it ends in a record")
    place, count = _HEAD.unpack_from(data, at)
    first = at + _HEAD.size
    then = first + 2 * count
    if len(data) < then + _END:
        raise MalformedReceipt("it ends in a record")
    inputs = struct.unpack_from(f"<{count}H", data, first)
    digest = data[then : then + DIGEST_SIZE]
    return InputRecord(place, digest, data[then + DIGEST_SIZE : then + _END], inputs), then + _END


def _places(places: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(places)}H", *places)


def _input_parts(salt: bytes, chunk: int, place: int, digest: bytes, inputs: tuple[int, ...]) -> tuple[bytes, ...]:
    return b"atoll input", salt, struct.pack("<IH", chunk, place), digest, _places(inputs)


def _receipt_parts(
    salt: bytes, chunk: int, since: int, place: int, records: tuple[InputRecord, ...], mean: bytes
) -> tuple[bytes, ...]:
    said = b"".join(record.pack() for record in records)
    return b"atoll receipt", salt, struct.pack("<IIH", chunk, since, place), said, mean
