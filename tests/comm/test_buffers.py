"""Memory that is used again."""

import numpy as np

from atoll.comm.buffers import BufferPool, thread_scratch


def test_what_was_given_back_is_used_again_whatever_part_of_it_is_wanted() -> None:
    buffers = BufferPool()
    part = buffers.take(70, 100)
    part[:] = 7
    buffers.give(part)
    again = buffers.take(80, 90)
    assert again.size == 80 and np.shares_memory(part, again) and not len(buffers)


def test_larger_ones_take_the_place_of_those_that_are_too_small() -> None:
    buffers = BufferPool()
    buffers.give(small := buffers.take(100, 100))
    large = buffers.take(101, 110)
    assert large.size == 101 and not len(buffers)
    buffers.give(small)
    assert not len(buffers)
    buffers.give(large)
    assert len(buffers) == 1


def test_what_did_not_come_from_here_is_left_alone() -> None:
    buffers = BufferPool()
    buffers.give(np.empty(100, np.uint8))
    buffers.take(100, 100)
    buffers.give(np.empty(100, np.uint8))
    buffers.give(np.empty(99, np.uint8)[:50])
    assert not len(buffers)


def test_room_is_as_large_as_asked_for() -> None:
    assert [thread_scratch(n).size for n in (7, 3, 9)] == [7, 3, 9] and np.shares_memory(
        thread_scratch(9), thread_scratch(4)
    )
