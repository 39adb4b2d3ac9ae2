import pytest
import zstandard

from atoll.comm.errors import Refused
from atoll.comm.ids import NodeId, Pin, PublicKey
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto.packed_plan import (
    MAX_PLAN_SIZE,
    OtherRoster,
    pack_plan,
    read_plan,
    stray_members,
    unpack_plan,
)
from atoll.comm.roster import RosterMember

ROSTER = {
    NodeId(f"n{i}"): RosterMember(
        PublicKey(b"%033d" % i), f"10.0.{i // 256}.{i % 256}:4700", Pin(f"pin{i}"), i == 7
    )
    for i in range(1000)
}
PLAN = pb.Plan(round=7, numel=40, owners=[2, 0, 1] * 300, salt=b"salt")
for i, (node, known) in enumerate(ROSTER.items()):
    PLAN.members.add(
        **{"node_id": node, "key": known.key, "address": known.address, "pin": known.pin, "leaf": known.leaf},
        **{"weight": 1.5 + i, "scale": 1 / (1 + i), "norm": i / 7, "down": 100.0 * i},
    )
PLAN.members.add(node_id="n2000", weight=3.0, scale=1.0, gone=True)
PLAN.members.add(node_id="n2", weight=3.0, scale=1.0, gone=True)  # an earlier life of a member


def test_a_view_has_its_plan_again_and_so_has_a_replay_and_one_without_has_none() -> None:
    view = pb.View(packed_plan=(packed := pack_plan(PLAN)), replay=pb.Replay(packed_plan=packed, round=7))
    unpack_plan(view, ROSTER)
    assert view == pb.View(plan=PLAN, replay=pb.Replay(plan=PLAN, round=7))
    unpack_plan(empty := pb.View(committed=1), ROSTER)
    assert empty == pb.View(committed=1)


def test_a_plan_says_nothing_that_the_roster_has() -> None:
    frame = pack_plan(PLAN)
    plain = zstandard.ZstdDecompressor().decompress(frame)
    assert len(frame) < len(PLAN.SerializeToString()) / 4
    assert not any(word in plain for m in ROSTER.values() for word in (m.key, m.address.encode(), m.pin.encode()))
    assert list(read_plan(frame).nodes) == [m.node_id for m in PLAN.members]


@pytest.mark.parametrize(
    "other",
    [
        {n: m for n, m in ROSTER.items() if n != "n3"},
        *(
            ROSTER | {NodeId("n3"): ROSTER[NodeId("n3")]._replace(**change)}
            for change in ({"key": b"k"}, {"address": "10.0.0.4:4700"}, {"pin": "pin4"}, {"leaf": True})
        ),
    ],
)
def test_who_knows_other_members_takes_no_plan_and_who_knows_more_does(other: dict[NodeId, RosterMember]) -> None:
    view = pb.View(packed_plan=pack_plan(PLAN))
    with pytest.raises(OtherRoster, match="round 7 goes by other members"):
        unpack_plan(view, other)
    assert view.packed_plan and not view.HasField("plan")
    unpack_plan(view, ROSTER | {NodeId("n3000"): RosterMember()})
    assert view.plan == PLAN


def test_who_left_or_came_back_since_the_attempt_opened_is_in_the_plan_as_it_was() -> None:
    left, back = NodeId("n3"), NodeId("n5")
    now = {n: m for n, m in ROSTER.items() if n != left} | {back: ROSTER[back]._replace(address="10.9.9.9:1")}
    strays = stray_members(PLAN, now)
    assert strays == {left, back} and not stray_members(PLAN, ROSTER)
    for members in (now, ROSTER):  # also where the roster that is known is still the one of before
        unpack_plan(view := pb.View(packed_plan=pack_plan(PLAN, strays)), members)
        assert view.plan == PLAN


def test_what_is_no_plan_is_refused_with_a_sentence_and_a_large_one_before_it_is_read() -> None:
    large = zstandard.ZstdCompressor().compress(bytes(MAX_PLAN_SIZE + 1))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(PLAN.SerializeToString())
    short = pb.PackedPlan(nodes=["n1", "n2"], weights=[1.0], scales=[1.0, 1.0], norms=[1.0, 1.0], down=[0.0, 0.0])
    members = pb.PackedPlan(plan=PLAN)
    odd = [zstandard.ZstdCompressor().compress(p.SerializeToString()) for p in (short, members)]
    frames = [
        b"no frame",
        large,
        unsized,
        pack_plan(PLAN)[:-9],
        zstandard.ZstdCompressor().compress(b"\xff"),
        *odd,
    ]
    for frame in frames:
        with pytest.raises(Refused, match="the coordinator sent a plan"):
            unpack_plan(pb.View(packed_plan=frame), ROSTER)
