import random
from pathlib import Path

import numpy as np
from blake3 import blake3

from atoll.comm.digest import DIGEST_SIZE, READ_SIZE, digest, digest_of_file, root


def test_a_digest_is_blake3_of_the_bytes_cut_to_sixteen_whatever_buffer_holds_them() -> None:
    x = np.arange(100, dtype=np.float32)
    expected = blake3(x.tobytes()).digest()[:16]
    assert digest(x) == digest(x.tobytes()) == digest(bytearray(x.tobytes())) == digest(x.data) == expected
    assert len(expected) == DIGEST_SIZE


def test_the_digest_of_nothing_is_that_of_the_papers_test_vectors() -> None:
    assert digest(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc949"


def test_the_digest_of_a_file_is_that_of_all_its_bytes(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(2 * READ_SIZE + 1)
    (tmp_path / "file").write_bytes(data)
    assert digest_of_file(tmp_path / "file") == digest(data)


def test_one_flipped_bit_changes_the_digest() -> None:
    x = np.zeros(100, np.uint8)
    before = digest(x)
    x[50] = 1
    assert digest(x) != before


def test_the_root_depends_on_every_digest_and_on_their_order() -> None:
    a, b, c = digest(b"a"), digest(b"b"), digest(b"c")
    assert len({root([a, b]), root([b, a]), root([a, c]), root([a]), root([])}) == 5
