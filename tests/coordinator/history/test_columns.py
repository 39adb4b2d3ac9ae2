"""Columns of numbers hold them exactly, in few bytes, and refuse what is none."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.comm.rounding import rounded
from atoll.coordinator.history.columns import BadColumn, pack, unpack

INTEGERS = st.integers(-(1 << 63) + 1, (1 << 63) - 1)
FLOATS = st.one_of(
    st.floats(), st.floats(width=32), st.floats(allow_nan=False, allow_infinity=False).map(lambda x: rounded(x, 8))
)


@pytest.mark.hypothesis
@given(st.lists(INTEGERS, max_size=50))
def test_integers_come_back(values: list[int]) -> None:
    if values and max(values) - min(values) >= 1 << 64:
        values = values[:1]
    found = unpack(pack(values), len(values))
    assert found == values and all(isinstance(value, int) for value in found)


@pytest.mark.hypothesis
@given(st.lists(FLOATS, max_size=50))
def test_floats_come_back_bit_for_bit_but_for_the_sign_of_zero(values: list[float]) -> None:
    found = list(map(float, unpack(pack(values), len(values))))
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(found, values, strict=True))


@pytest.mark.parametrize(
    ("values", "most"),
    [
        ([7.0] * 1000, 10),
        ([float(k) for k in range(1_000_000, 1_000_200)], 11 + 200),
        ([rounded(math.exp(k / 50), 8) for k in range(-500, 500)], 2 + 2 * 1000),
        ([rounded(math.exp(k / 50), 16) for k in range(-500, 500)], 2 + 3 * 1000),
        ([math.exp(k / 50) for k in range(-500, 500)], 2 + 8 * 1000),
    ],
)
def test_a_column_takes_as_many_bytes_as_its_digits_need(values: list[float], most: int) -> None:
    assert len(pack(values)) <= most


@pytest.mark.parametrize(
    "column",
    [b"", b"x", b"=", b"=\xc1", b"i", b"i\x09" + bytes(30), b"i\x01" + bytes(8), b"f\x05abcde", b"f\x04abc"],
)
def test_other_bytes_are_refused(column: bytes) -> None:
    with pytest.raises(BadColumn):
        unpack(column, 2)


@pytest.mark.hypothesis
@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 24))
def test_a_rounded_number_is_the_nearest_with_so_many_bits(value: float, bits: int) -> None:
    found = rounded(value, bits)
    assert abs(found / 2 - value / 2) <= max(abs(value) * 2.0**-bits, 2.0**-1074)
    assert rounded(found, bits) == found
