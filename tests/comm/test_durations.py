"""Times in words, in their two largest units."""

import pytest

from atoll.comm.durations import in_words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (8000, "2 h 13 min"),
        (86_400, "1 d 0 h"),
        (1e8, "1,157 d 9 h"),
    ],
)
def test_a_time_is_said_in_its_two_largest_units(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
