"""Whose turn it is, from the round's number alone."""

import pytest

from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.outer_opt.fragments import first_due_steps


def test_fragments_take_turns_from_the_first_round_on() -> None:
    turns = FragmentSchedule(3)
    assert [turns.fragment(k) for k in range(1, 8)] == [0, 1, 2, 0, 1, 2, 0]
    assert [turns.turn(k) for k in range(1, 8)] == [1, 1, 1, 2, 2, 2, 3]
    assert [FragmentSchedule().fragment(k) for k in (1, 2, 9)] == [0, 0, 0]
    assert [FragmentSchedule().turn(k) for k in (1, 2, 9)] == [1, 2, 9]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_rounds_of_all_fragments_are_all_rounds(count: int) -> None:
    turns = FragmentSchedule(count)
    for after in range(12):
        for until in range(after, 14):
            found = [turns.rounds(p, after, until) for p in range(count)]
            assert sorted(k for rounds in found for k in rounds) == list(range(after + 1, until + 1))
            assert all(turns.fragment(k) == p for p, rounds in enumerate(found) for k in rounds)


@pytest.mark.parametrize(("count", "steps"), [(1, 30), (4, 100), (3, 10), (24, 24), (5, 7)])
def test_a_fragment_is_due_after_the_inner_steps_that_its_offset_says(count: int, steps: int) -> None:
    turns, taken = FragmentSchedule(count), 0
    due = [offset + steps * turn for turn in range(3) for offset in first_due_steps(count, steps)]
    for round_, at in enumerate(due, 1):
        taken += turns.steps(round_, steps)
        assert taken == at


def test_a_round_has_a_step_at_least() -> None:
    assert [FragmentSchedule(4).steps(k, 2) for k in range(1, 5)] == [1, 1, 1, 1]
