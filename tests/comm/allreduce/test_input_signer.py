"""A node signs one content of a chunk at a place of a round, whatever becomes of its memory."""

import numpy as np

from atoll.comm.allreduce import input_signer
from atoll.comm.allreduce.input_signer import MAX_ROUNDS, InputSigner, with_signature
from atoll.comm.buffers import BufferPool
from atoll.comm.receipts import InputRecord
from atoll.comm.signatures import SIGNATURE_BYTES, PrivateKey

KEY, SALT = PrivateKey.generate(), b"s" * 16
ONE, OTHER = b"1" * 16, b"2" * 16  # digests


def test_of_one_chunk_at_one_place_it_signs_one_content() -> None:
    signer = InputSigner(KEY)
    first = signer.input(SALT, 3, 1, ONE)
    assert first is not None and first.signed_by(KEY.public, SALT, 3) and first.digest == ONE
    assert signer.input(SALT, 3, 1, OTHER) is None
    assert signer.input(SALT, 3, 1, ONE) == first
    for salt, chunk, place in ((SALT, 4, 1), (SALT, 3, 2), (b"t" * 16, 3, 1)):
        other = signer.input(salt, chunk, place, OTHER)
        assert other is not None and other.signed_by(KEY.public, salt, chunk)
        assert not InputRecord(1, other.digest, other.signature).signed_by(KEY.public, SALT, 3)


def test_a_region_s_mean_is_another_thing_than_its_relay_s_own_contribution() -> None:
    signer = InputSigner(KEY)
    own, mean = signer.input(SALT, 3, 1, ONE), signer.input(SALT, 3, 1, OTHER, (1, 2))
    assert own is not None and mean is not None and mean.inputs == (1, 2)
    assert signer.input(SALT, 3, 1, OTHER, (1, 2, 4)) is None


def test_a_receipt_is_signed_once_too() -> None:
    signer = InputSigner(KEY)
    record = signer.input(SALT, 3, 1, ONE)
    assert record is not None
    first = signer.receipt(SALT, 3, 1, 1, (record,), ONE)
    assert signer.receipt(SALT, 3, 1, 1, (), OTHER) is first
    assert signer.receipt(SALT, 3, 2, 1, (), OTHER) != first


def test_it_remembers_a_few_rounds_and_no_more() -> None:
    signer = InputSigner(KEY)
    for i in range(MAX_ROUNDS + 3):
        signer.input(b"%16d" % i, 0, 0, ONE)
    assert len(signer._rounds) == input_signer.MAX_ROUNDS


def test_a_signature_is_written_behind_a_content_where_its_memory_has_room_and_else_behind_a_copy() -> None:
    pool, signature = BufferPool(), bytes(range(SIGNATURE_BYTES))
    roomy = pool.take(100 + SIGNATURE_BYTES, 200)[:100]
    roomy[:] = 7
    for content in (roomy, np.full(100, 7, np.uint8), np.full(300, 7, np.uint8)[50:150]):
        before = content.base if isinstance(content.base, np.ndarray) else content
        around = before.copy()
        signed = with_signature(content, signature)
        assert signed.tobytes() == bytes([7] * 100) + signature
        assert np.shares_memory(signed, content) is (content is roomy)
        assert content is roomy or (before == around).all()
