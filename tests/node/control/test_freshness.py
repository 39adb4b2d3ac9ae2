from atoll.node.control.freshness import STALE_STREAM_SECONDS, StreamFreshness


def test_a_stream_is_given_up_that_was_behind_for_too_long_and_the_next_one_has_its_time() -> None:
    stream, late = StreamFreshness(), STALE_STREAM_SECONDS + 0.1
    stream.see((2, 7))
    assert not stream.is_stale((2, 7), 0.0) and not stream.is_stale((2, 8), 1.0)
    assert not stream.is_stale((2, 9), 1.0 + STALE_STREAM_SECONDS) and stream.is_stale((2, 9), 1.0 + late)
    stream.open_stream()
    assert not stream.is_stale((2, 9), 2.0 + late) and stream.is_stale((2, 9), 2.0 + 2 * late)


def test_a_newer_view_makes_it_fresh_and_one_that_was_overtaken_changes_nothing() -> None:
    stream, late = StreamFreshness(), STALE_STREAM_SECONDS + 0.1
    stream.see((2, 7))
    stream.is_stale((3, 1), 0.0)
    stream.see((2, 6))
    assert stream.is_stale((3, 1), late)
    stream.see((3, 1))
    assert not stream.is_stale((2, 8), late)  # an acknowledgement of the incarnation before
    stream.begin_session()
    assert not stream.is_stale((3, 1), 0.0) and stream.is_stale((3, 1), late)
