"""Reports leave in order, seals travel together, and a new session begins with nothing."""

from math import inf

import pytest

from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.control.outbox import BATCH_SECONDS, ReportOutbox, ReportQueue, SessionLost

KNOWN = pb.Ack(known=True)


def seal(chunk: int, attempt: int = 1) -> pb.ReportRequest:
    return pb.ReportRequest(
        fence=pb.Fence(round=1, attempt=attempt), chunks_sealed=pb.ChunksSealed(seals=[pb.Seal(chunk=chunk)])
    )


def state(round_: int) -> pb.ReportRequest:
    return pb.ReportRequest(state_reported=pb.StateReported(round=round_))


def sent(queue: ReportQueue, now: float = 0.0) -> list[pb.ReportRequest]:
    """Everything that leaves at this time, each acknowledged at once."""
    requests = []
    while not queue.pause(now):
        requests.append(queue.take())
        queue.acknowledge(KNOWN)
    return requests


def chunks(request: pb.ReportRequest) -> list[int]:
    return [s.chunk for s in request.chunks_sealed.seals]


@pytest.fixture
def outbox() -> ReportOutbox:
    outbox = ReportOutbox()
    outbox.begin_session("ada.1")
    return outbox


def test_one_report_of_a_queue_is_in_flight_and_the_other_queues_do_not_wait(outbox: ReportOutbox) -> None:
    queue = outbox.post(state(1), 0.0)
    assert outbox.post(state(2), 0.0) is queue and queue.pause(0.0) == 0
    assert queue.take().state_reported.round == 1 and queue.pause(0.0) == inf
    seals = outbox.post(seal(0), 0.0)
    assert seals is not queue and seals.pause(0.0) == 0
    queue.acknowledge(KNOWN)
    assert [r.state_reported.round for r in sent(queue)] == [2] and queue.pause(0.0) == inf


def test_waiting_seals_of_a_fence_travel_together_and_what_is_in_flight_does_not_change(
    outbox: ReportOutbox,
) -> None:
    queue = outbox.post(seal(0), 0.0)
    first = queue.take()
    for report in (seal(1), seal(2), seal(3, attempt=2), seal(4)):
        outbox.post(report, 0.0)
    assert chunks(first) == [0]
    queue.acknowledge(KNOWN)
    assert [(r.fence.attempt, chunks(r)) for r in sent(queue)] == [(1, [1, 2]), (2, [3]), (1, [4])]


def test_a_seal_waits_for_those_that_follow_soon_but_not_for_long(outbox: ReportOutbox) -> None:
    queue = outbox.post(seal(0), 1.0, more=True)
    assert queue.pause(1.0) == pytest.approx(BATCH_SECONDS)
    outbox.post(seal(1), 1.04, more=True)
    assert queue.pause(1.04) == pytest.approx(BATCH_SECONDS - 0.04)
    assert queue.pause(1.0 + BATCH_SECONDS) == 0
    outbox.post(seal(2), 1.05)
    assert queue.pause(1.05) == 0 and chunks(queue.take()) == [0, 1, 2]


def lost(peer: str, attempt: int = 1, reason: str = "refused") -> pb.ReportRequest:
    unreachable = pb.PeerUnreachable(node_id=peer, reason=reason)
    return pb.ReportRequest(fence=pb.Fence(round=1, attempt=attempt), peer_unreachable=unreachable)


def test_what_is_said_after_a_long_outage_waits_for_one_report_of_each_peer_that_was_lost(
    outbox: ReportOutbox,
) -> None:
    queue = outbox.post(lost("bo"), 0.0)
    queue.take()
    for second in range(1, 100):
        outbox.post(lost("bo", reason=f"no answer for {second} s"), second)
        outbox.post(lost("cy"), second)
    outbox.post(lost("bo", attempt=2), 100.0)
    outbox.post(state(2), 100.0)
    queue.acknowledge(KNOWN)
    told = [(r.fence.attempt, r.peer_unreachable.node_id, r.state_reported.round) for r in sent(queue)]
    assert told == [(1, "bo", 0), (1, "cy", 0), (2, "bo", 0), (0, "", 2)]


def test_a_new_session_drops_what_the_one_before_had_to_say(outbox: ReportOutbox) -> None:
    queue = outbox.post(state(1), 0.0)
    outbox.post(state(2), 0.0)
    queue.take()
    with pytest.raises(SessionLost, match="silent"):
        queue.acknowledge(pb.Ack(known=False, reason="it was silent for too long"))
    queue.take()
    outbox.begin_session("ada.2")
    assert queue.pause(0.0) == inf
    outbox.post(state(3), 0.0)
    assert [(r.session, r.state_reported.round) for r in sent(queue)] == [("ada.2", 3)]


def test_that_a_seal_is_too_long_leaves_before_that_everything_is_held(outbox: ReportOutbox) -> None:
    """Whatever waits beside them: the commit may follow what is held at once."""
    beside = outbox.post(state(1), 0.0)
    assert beside.take() and beside.pause(0.0) == inf
    word = outbox.post(pb.ReportRequest(seal_outsized=pb.SealOutsized(chunk=3)), 0.0)
    assert outbox.post(pb.ReportRequest(reduce_complete=pb.ReduceComplete()), 0.0) is word is not beside
    assert [r.WhichOneof("report") for r in sent(word)] == ["seal_outsized", "reduce_complete"]
