import pytest
import zstandard

from atoll.comm.errors import Refused
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto.packed_plan import MAX_PLAN_SIZE, pack_plan, unpack_plan

PLAN = pb.Plan(round=7, numel=40, members=[pb.PlanMember(node_id=f"n{i}", weight=1.5) for i in range(1000)])


def test_a_view_has_its_plan_again_and_one_without_has_none() -> None:
    view = pb.View(packed_plan=(packed := pack_plan(PLAN)))
    unpack_plan(view)
    assert view == pb.View(plan=PLAN)
    assert len(packed) < len(PLAN.SerializeToString()) / 3
    unpack_plan(empty := pb.View(committed=1))
    assert empty == pb.View(committed=1)


def test_what_is_no_plan_is_refused_with_a_sentence_and_a_large_one_before_it_is_read() -> None:
    large = zstandard.ZstdCompressor().compress(bytes(MAX_PLAN_SIZE + 1))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(PLAN.SerializeToString())
    for frame in (b"no frame", large, unsized, pack_plan(PLAN)[:-9], zstandard.ZstdCompressor().compress(b"\xff")):
        with pytest.raises(Refused, match="the coordinator sent a plan"):
            unpack_plan(pb.View(packed_plan=frame))
