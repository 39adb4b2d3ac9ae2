from atoll.comm.ids import Round
from atoll.comm.transport.frame_handler import RoundOrder, round_order


def test_a_frame_of_a_round_to_come_is_held_and_one_of_a_round_that_is_over_is_not() -> None:
    """A peer may begin its reduce before the plan is here."""
    assert round_order(None, Round(3)) is round_order(Round(2), Round(3)) is RoundOrder.AHEAD
    assert round_order(Round(3), Round(3)) is RoundOrder.CURRENT
    assert round_order(Round(4), Round(3)) is RoundOrder.OVER
