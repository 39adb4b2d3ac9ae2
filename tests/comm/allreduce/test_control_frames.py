"""What a member makes of a frame that brings no chunk, and which late chunks it asks of others."""

import pytest

from atoll.comm.allreduce import control_frames
from atoll.comm.allreduce.control_frames import CONTROL_KINDS, Resync
from atoll.comm.allreduce.effects import Effect, SendFrame
from atoll.comm.allreduce.protocol import PULLS_AT_ONCE, ReduceProtocol
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import Plan, PlanMember
from atoll.comm.transport.frames import FrameKind

A, B, C = (NodeId(name) for name in "abc")
CHUNKS = 6
PLAN = Plan(
    Incarnation(1), Epoch(1), Round(1), 1, tuple(PlanMember(n, f"{n}:1", 1.0) for n in (A, B, C)), (1,) * CHUNKS
)


def begun() -> ReduceProtocol:
    """A member that has sent one contribution to B, which owns all."""
    exchange = ReduceProtocol(A, CHUNKS, 1)
    assert exchange.replan(PLAN) == [SendFrame(B, FrameKind.CONTRIBUTION, 0, 1)]
    return exchange


def receive(exchange: ReduceProtocol, kind: FrameKind, c: int) -> list[Effect]:
    nothing = bytes(3)
    return control_frames.receive(exchange, B, kind, c, 1, nothing if kind is FrameKind.RESYNC else b"")


@pytest.mark.parametrize("purpose", Resync)
def test_what_is_missing_is_sent_again_after_a_break_and_not_for_a_mere_ping(purpose: Resync) -> None:
    sent = {
        Resync.TELL: [SendFrame(B, FrameKind.CONTRIBUTION, 0, 1)],
        Resync.TELL_AND_ASK: [
            SendFrame(B, FrameKind.CONTRIBUTION, 0, 1),
            SendFrame(B, FrameKind.RESYNC, Resync.TELL),
        ],
        Resync.PING: [SendFrame(B, FrameKind.RESYNC, Resync.PONG)],
        Resync.PONG: [],
    }
    assert receive(begun(), FrameKind.RESYNC, purpose) == sent[purpose]


def test_a_purpose_that_nobody_knows_changes_nothing() -> None:
    assert receive(begun(), FrameKind.RESYNC, 4) == []


def test_frames_about_a_chunk_go_to_the_protocol() -> None:
    assert receive(begun(), FrameKind.MERGED, 0) == [SendFrame(B, FrameKind.CONTRIBUTION, 1, 1)]
    assert receive(begun(), FrameKind.WANT, 0) == [SendFrame(B, FrameKind.LACK, 0, 1)]
    assert receive(begun(), FrameKind.LACK, 0) == []


def test_a_frame_that_brings_a_chunk_is_none_of_them() -> None:
    assert FrameKind.SEALED not in CONTROL_KINDS
    with pytest.raises(ValueError, match="brings a chunk"):
        receive(begun(), FrameKind.SEALED, 0)


def test_a_few_of_a_late_owners_chunks_are_asked_of_others_at_once() -> None:
    wanted = [SendFrame(C, FrameKind.WANT, c, 1) for c in range(PULLS_AT_ONCE)]
    assert begun().pull_from({B}) == wanted
    assert begun().pull_from({C}) == [], "it owns nothing"
