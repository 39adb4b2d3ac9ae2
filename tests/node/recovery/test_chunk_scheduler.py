"""Which chunk a stream from a donor fetches next."""

from atoll.comm.ids import NodeId
from atoll.node.recovery.chunk_scheduler import ChunkScheduler


def whole(_: int) -> int:
    """Parts of a chunk that nobody was asked for: none."""
    return 0


def test_a_stream_takes_what_nobody_has_and_then_what_is_late() -> None:
    requests, a, b = ChunkScheduler(range(3)), NodeId("a"), NodeId("b")
    first = requests.assign(a, 0.0, whole)
    late = requests.assign(b, 0.0, whole)
    assert first is not None and first.chunk == 0 and late is not None and late.chunk == 1
    assert requests.complete(first, 3.0) == []  # a takes three seconds for a chunk
    third = requests.assign(a, 3.0, whole)
    assert third is not None and third.chunk == 2
    requests.record_progress(1, 2.0)
    assert requests.complete(third, 4.0) == []
    assert requests.assign(a, 4.0, whole) is None, "b may be done before a would be"
    assert requests.assign(a, 3.9, whole) is None, "a busy machine may be silent for two seconds"
    stolen = requests.assign(a, 4.1, whole)
    assert stolen is not None and stolen.chunk == 1 and stolen.late
    assert requests.complete(stolen, 5.0) == [late] and requests.complete(late, 5.0) is None
    assert requests.remaining == 0


def test_a_stream_without_work_helps_with_the_chunk_of_which_the_most_parts_were_asked_of_nobody() -> None:
    requests, a, b = ChunkScheduler(range(4)), NodeId("a"), NodeId("b")
    open_ = {0: 0, 1: 3, 2: 5, 3: 9}
    first = requests.assign(a, 0.0, open_.__getitem__)
    others = [requests.assign(b, 0.0, open_.__getitem__) for _ in range(2)]
    assert first is not None and requests.assign(NodeId("c"), 0.0, open_.__getitem__) is not None
    assert requests.assign(b, 0.1, open_.__getitem__) is None, "how fast b is is not known yet"
    assert requests.complete(first, 0.2) == []
    helping = requests.assign(a, 0.2, open_.__getitem__)
    assert helping is not None and helping.chunk == 3 and not helping.late
    again = requests.assign(a, 0.2, open_.__getitem__)
    assert again is not None and again.chunk == 2, "a has a stream at 3"
    assert others[1] is not None and requests.complete(again, 0.3) == [others[1]]


def test_what_a_donor_keeps_to_itself_is_another_ones_that_has_given_nothing_yet_either() -> None:
    requests, a, b = ChunkScheduler(range(2)), NodeId("a"), NodeId("b")
    assert requests.assign(a, 0.0, whole) is not None and requests.assign(a, 0.0, whole) is not None
    assert requests.assign(b, 1.9, whole) is None
    stolen = requests.assign(b, 2.1, whole)
    assert stolen is not None and stolen.late


def test_an_errand_that_came_to_nothing_is_another_donors() -> None:
    requests, a, b = ChunkScheduler(range(1)), NodeId("a"), NodeId("b")
    request = requests.assign(a, 0.0, whole)
    assert request is not None and requests.assign(b, 0.0, whole) is None
    requests.abandon(request)
    again = requests.assign(b, 0.0, whole)
    assert again is not None and again.chunk == 0
