from random import Random

from atoll.comm.bitmap import bit, bitmap, places


def test_bit_i_is_bit_i_mod_8_of_byte_i_div_8() -> None:
    assert bitmap([0, 9, 15], 17) == bytes([0b00000001, 0b10000010, 0])
    assert bitmap([], 0) == b""


def test_what_was_packed_is_found_again() -> None:
    random = Random(1)
    for size in range(40):
        chosen = tuple(i for i in range(size) if random.random() < 0.5)
        packed = bitmap(chosen, size)
        assert len(packed) == (size + 7) // 8
        assert places(packed) == chosen
        assert tuple(i for i in range(size) if bit(packed, i)) == chosen


def test_beyond_the_end_no_bit_is_set() -> None:
    assert not bit(b"\xff", 8) and not bit(b"", 0)
