"""The rest between two steps, and a trainer that is told to go no further ahead."""

import pytest
from msgspec.structs import replace

from atoll.comm.config.outer import OverlapConfig
from atoll.comm.config.run import InnerConfig, RoundsConfig, RunConfig
from atoll.node.participant.duty import FIRST_REST_SECONDS, SLICE_SECONDS, Duty, rest, rest_seconds
from atoll.node.participant.participant import DEADLINE_SHARE
from atoll.node.participant.training_cursor import TrainingCursor
from atoll.node.state_machine.step import STALL_SHARE
from atoll.node.trainer_channel import Train

OVERLAPPED = RunConfig(
    inner=InnerConfig(batch_size=2), rounds=RoundsConfig(inner_steps=5), overlap=OverlapConfig(delay=3)
)
ORDER = Train(4, 5, 1, 9, 0, 1, lease=((0, 40),))


@pytest.mark.parametrize("duty", [0.01, 0.25, 0.5, 0.9, 1.0])
def test_steps_take_their_share_of_the_time(duty: float) -> None:
    step = 0.2
    assert step / (step + rest_seconds(step, duty)) == pytest.approx(duty)


def test_what_passes_between_two_steps_anyway_is_rest_too() -> None:
    now = [100.0]
    duty = Duty(300.0, lambda: now[0])
    duty.stepped(2.0, 0.5)
    assert duty.owed == 2.0
    now[0] += 1.5
    assert duty.owed == 0.5
    now[0] += 60.0
    assert duty.owed == 0.0
    duty.stepped(2.0, 1.0)
    assert duty.owed == 0.0


def test_a_first_step_which_compiled_asks_for_a_minute_at_most() -> None:
    duty = Duty(300.0, lambda: 100.0)
    duty.stepped(600.0, 0.01)
    assert duty.owed == FIRST_REST_SECONDS
    duty.stepped(10.0, 0.05)
    assert duty.owed == pytest.approx(190.0)


@pytest.mark.parametrize("stall", [2.0, 30.0, 300.0, 3600.0])
def test_no_rest_makes_a_trainer_look_hung(stall: float) -> None:
    """Of a rest and a step that its own watchdog lets take so long; so for the daemon, and for the coordinator."""
    longest = Duty(stall).longest
    assert DEADLINE_SHARE * stall < STALL_SHARE * stall, "the daemon's clock begins anew with each slice of a rest"
    assert longest + DEADLINE_SHARE * stall < stall
    assert SLICE_SECONDS < STALL_SHARE * stall


def test_a_rest_ends_where_there_is_a_command_and_has_as_many_slices_on_each_rank() -> None:
    assert next(rest(600.0, lambda: True))
    for seconds, slices in ((0.01, 1), (SLICE_SECONDS, 1), (SLICE_SECONDS + 0.01, 2)):
        assert list(rest(seconds, lambda: False)) == [False] * slices


def test_a_trainer_that_is_to_rest_stops_below_the_floor_of_its_round() -> None:
    cursor = TrainingCursor(OVERLAPPED, replace(ORDER, floor=4))
    cursor.count_step(2.0, False, 0.1)
    cursor.finishing = True
    assert not cursor.is_complete
    cursor.rests = True
    assert cursor.is_complete
    ready = cursor.hand_over()
    assert (ready.steps, ready.samples, ready.ahead) == (1, 2, False)


def test_a_trainer_that_is_to_rest_before_its_first_step_hands_nothing_over() -> None:
    cursor = TrainingCursor(OVERLAPPED, ORDER)
    cursor.finishing = cursor.rests = True
    assert cursor.is_complete and cursor.hand_over().samples == 0


def test_a_trainer_that_rests_hands_over_and_takes_no_step_ahead() -> None:
    for rests in (False, True):
        cursor = TrainingCursor(OVERLAPPED, ORDER)
        cursor.count_step(2.0, False, 0.1)
        cursor.finishing, cursor.rests = True, rests
        assert cursor.is_complete and cursor.hand_over().ahead is not rests


def test_a_trainer_that_is_held_while_it_is_ahead_stops_there_and_goes_on_when_it_is_told_to() -> None:
    cursor = TrainingCursor(OVERLAPPED, ORDER)
    for _ in range(5):
        cursor.count_step(2.0, False, 0.1)
    cursor.finishing = True
    assert cursor.hand_over().ahead
    cursor.count_step(2.0, False, 0.1)
    assert not cursor.is_stalled
    cursor.rests = True
    assert cursor.is_stalled and cursor.steps == 1
    cursor.go_on(Train(5, 5, 1, 9, 0, 1, lease=((10, 40),), continues=True))
    assert not cursor.is_stalled and not cursor.rests and cursor.steps == 1, "the step that it took counts"
