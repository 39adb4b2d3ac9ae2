"""Times in words, in their two largest units."""

import pytest

from atoll.comm.durations import in_words, remaining


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


def test_what_is_yet_to_come_is_said_less_exactly_the_longer_it_is() -> None:
    assert [remaining(s) for s in (61.0, 599.0, 2112.0, 3580.0, 6000.0, 15_700.0, 21_500.0, 30_600.0, 1e5)] == [
        *["1 min 01 s", "9 min 59 s", "35 min", "1 h 00 min", "1 h 40 min", "4 h 20 min", "6 h 00 min"],
        *["9 h 00 min", "1 d 4 h"],
    ]
