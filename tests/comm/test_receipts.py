"""Receipts: what they say, and of which bytes they are none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.comm.receipts import (
    MAX_FINDING_BYTES,
    MAX_RECEIPT_BYTES,
    InputRecord,
    MalformedReceipt,
    Receipt,
    receipt_bytes,
    sign_input,
    sign_receipt,
    unpack_receipt,
    unpack_record,
)
from atoll.comm.signatures import PrivateKey

KEYS = [PrivateKey.generate() for _ in range(3)]
SALT = b"s" * 16
RECORDS = (
    sign_input(KEYS[0], SALT, 7, 0, b"a" * 16),
    sign_input(KEYS[1], SALT, 7, 3, b"b" * 16, (3, 4, 9)),
)
RECEIPT = sign_receipt(KEYS[2], SALT, 7, 2, 5, RECORDS, b"m" * 16)


def test_a_receipt_and_its_records_are_read_back_as_they_were_written() -> None:
    assert unpack_receipt(RECEIPT.pack()) == RECEIPT
    for record in RECORDS:
        assert unpack_record(record.pack()) == record
    assert unpack_receipt(RECEIPT.pack()).signed_by(KEYS[2].public, SALT, 7, 2, 5)
    assert all(r.signed_by(KEYS[i].public, SALT, 7) for i, r in enumerate(unpack_receipt(RECEIPT.pack()).records))


def test_a_signature_is_of_one_round_chunk_place_and_content() -> None:
    record = RECORDS[0]
    for salt, chunk in ((b"t" * 16, 7), (SALT, 8)):
        assert not record.signed_by(KEYS[0].public, salt, chunk)
    assert not record.signed_by(KEYS[1].public, SALT, 7)
    for other in (
        InputRecord(1, record.digest, record.signature),
        InputRecord(0, b"c" * 16, record.signature),
        InputRecord(0, record.digest, record.signature, (0,)),
    ):
        assert not other.signed_by(KEYS[0].public, SALT, 7)
    for salt, chunk, since, place in ((b"t" * 16, 7, 2, 5), (SALT, 8, 2, 5), (SALT, 7, 3, 5), (SALT, 7, 2, 4)):
        assert not RECEIPT.signed_by(KEYS[2].public, salt, chunk, since, place)


def test_places_out_of_order_are_refused() -> None:
    for records in (RECORDS[::-1], (RECORDS[0], RECORDS[0])):
        with pytest.raises(MalformedReceipt, match="order"):
            unpack_receipt(sign_receipt(KEYS[2], SALT, 7, 2, 5, records, b"m" * 16).pack())


@pytest.mark.parametrize(
    "size", [0, 1, 80, len(RECEIPT.pack()) - 1, len(RECEIPT.pack()) + 1, MAX_RECEIPT_BYTES + 1]
)
def test_another_length_is_refused(size: int) -> None:
    data = RECEIPT.pack()[:size].ljust(size, b"\0")
    with pytest.raises(MalformedReceipt):
        unpack_receipt(data)
    with pytest.raises(MalformedReceipt):
        unpack_record(data)


class CountedBytes(bytes):
    """Bytes that count what is copied out of them."""

    copied = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.copied += len(found) if isinstance(at, slice) else 0
        return found


def test_a_receipt_of_many_records_is_copied_once() -> None:
    """A stranger's largest receipt may not take seconds of the coordinator: the square of its records did."""
    records = tuple(InputRecord(i, bytes(16), bytes(64)) for i in range(1000))
    data = CountedBytes(Receipt(records, bytes(16), bytes(64)).pack())
    assert len(unpack_receipt(data).records) == 1000
    assert 0 < data.copied <= 2 * len(data)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_receipt_or_refused(data: bytes) -> None:
    for unpack in (unpack_receipt, unpack_record):
        try:
            assert unpack(data).pack() == data
        except MalformedReceipt:
            pass


@pytest.mark.parametrize("count", [1, 3, 40, 12_000])
def test_no_receipts_of_a_chunk_are_larger_than_what_is_taken_of_them(count: int) -> None:
    """Of contributions alone, of sums of one each, and of one sum of them all; those of the relays beside it."""

    def size(*records: InputRecord) -> int:
        return len(Receipt(records, bytes(16), bytes(64)).pack())

    def record(place: int, inputs: tuple[int, ...] = ()) -> InputRecord:
        return InputRecord(place, bytes(16), bytes(64), inputs)

    apart = size(*map(record, range(count)))
    sums = size(*(record(i, (i,)) for i in range(count)))
    assert max(apart, sums, size(record(0, tuple(range(count))))) <= receipt_bytes(count) <= MAX_RECEIPT_BYTES
    assert sums + count * size(record(0)) <= MAX_FINDING_BYTES
