"""The rest between two steps, and a trainer that is told to go no further ahead."""

import pytest

from atoll.comm.config.outer import OverlapConfig
from atoll.comm.config.run import InnerConfig, RoundsConfig, RunConfig
from atoll.node.participant.duty import LONGEST_SECONDS, rest, rest_seconds
from atoll.node.participant.training_cursor import TrainingCursor
from atoll.node.trainer_channel import Train

OVERLAPPED = RunConfig(
    inner=InnerConfig(batch_size=2), rounds=RoundsConfig(inner_steps=5), overlap=OverlapConfig(delay=3)
)
ORDER = Train(4, 5, 1, 9, 0, 1, lease=((0, 40),))


@pytest.mark.parametrize("duty", [0.01, 0.25, 0.5, 0.9, 1.0])
def test_steps_take_their_share_of_the_time(duty: float) -> None:
    step = 0.2
    assert step / (step + rest_seconds(step, duty)) == pytest.approx(duty)


def test_a_rest_is_bounded_and_ends_where_there_is_a_command() -> None:
    assert rest_seconds(600.0, 0.01) == LONGEST_SECONDS
    rest(600.0, 0.01, lambda: True)  # returns


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
