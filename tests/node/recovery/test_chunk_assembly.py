"""The parts of a chunk: two streams meet in the middle, and nothing is asked of two but what is late."""

from atoll.node.recovery.chunk_assembly import ChunkAssembly


def test_two_streams_meet_in_the_middle_and_nothing_comes_twice() -> None:
    parts, chunk = ChunkAssembly(10, 2), bytes(range(10))
    first, second = parts.join(), parts.join()
    asked = [
        parts.next(first, False),
        parts.next(second, False),
        parts.next(first, False),
        parts.next(second, False),
    ]
    assert asked == [(0, 2), (8, 10), (2, 4), (6, 8)] and parts.unrequested == 1
    parts.add(second, 8, chunk[8:10])
    assert parts.front == 0
    parts.add(first, 0, chunk[:2])
    assert parts.front == 2 and parts.next(first, False) == (4, 6)
    assert parts.next(first, False) is None and parts.next(second, False) is None
    parts.add(second, 6, chunk[6:8])
    parts.add(first, 2, chunk[2:4])
    assert parts.front == 4 and not parts.complete
    parts.add(first, 4, chunk[4:6])
    assert parts.front == 10 and parts.complete and parts.data == chunk


def test_what_one_was_asked_for_that_is_gone_others_are() -> None:
    parts = ChunkAssembly(10, 2, resumed=bytearray(b"ab"))
    first, second = parts.join(), parts.join()
    assert [parts.next(first, False) for _ in range(3)] == [(2, 4), (4, 6), (6, 8)]
    assert parts.next(second, False) == (8, 10)
    assert parts.next(second, True) == (2, 4), "it is late"
    parts.add(first, 2, b"cd")
    parts.leave(first)
    assert parts.unrequested == 2 and [parts.next(second, False) for _ in range(3)] == [(4, 6), (6, 8), None]


def test_nobody_helps_where_it_must_be_known_who_gave_what() -> None:
    parts = ChunkAssembly(10, 2, single_donor=True)
    assert parts.unrequested == 0 and parts.next(parts.join(), False) == (0, 2)
