from atoll.node.control.backoff import LONGEST_BACKOFF_SECONDS, Backoff


def test_pauses_double_up_to_the_limit_are_shortened_at_random_and_begin_again() -> None:
    backoff = Backoff(0.4)
    limits = [0.4, 0.8, 1.6, LONGEST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS]
    assert [backoff.pause(1.0) for _ in limits] == limits
    assert backoff.pause(0.0) == LONGEST_BACKOFF_SECONDS / 2
    backoff.reset()
    assert [backoff.pause(0.0), backoff.pause(0.5)] == [0.2, 0.8 * 0.75]
