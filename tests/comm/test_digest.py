import hashlib

import numpy as np

from atoll.comm.digest import SIZE, digest, root


def test_a_digest_is_blake2b_of_the_bytes_whatever_buffer_holds_them() -> None:
    x = np.arange(100, dtype=np.float32)
    expected = hashlib.blake2b(x.tobytes(), digest_size=16).digest()
    assert digest(x) == digest(x.tobytes()) == digest(bytearray(x.tobytes())) == digest(x.data) == expected
    assert len(expected) == SIZE


def test_one_flipped_bit_changes_the_digest() -> None:
    x = np.zeros(100, np.uint8)
    before = digest(x)
    x[50] = 1
    assert digest(x) != before


def test_the_root_depends_on_every_digest_and_on_their_order() -> None:
    a, b, c = digest(b"a"), digest(b"b"), digest(b"c")
    assert len({root([a, b]), root([b, a]), root([a, c]), root([a]), root([])}) == 5
