"""A reduce's plan as views carry it: the same bytes for all members, made once, and short.

What the roster has of the members it does not repeat: it names the digest of that, and who unpacks it fills in
what its own roster has, if that is the same. Of members that left or came back since the attempt opened, its
strays, it has all itself: so it stays what it was. The rest is in columns, which compress well. A frame states its
own size and may be wrong: it is asked what it declares, and refused before that is allocated.
"""

import zstandard
from google.protobuf.message import DecodeError

from atoll.comm.bitmap import bit, bitmap
from atoll.comm.errors import Refused
from atoll.comm.ids import NodeId, Pin, PublicKey
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.roster import Members, RosterMember, digest_of

MAX_PLAN_SIZE = 16 << 20  # bytes; a hundred thousand members would fit


class OtherRoster(ValueError):
    """A plan that goes by another roster than the one that is here: all of it is to be asked for."""


def stray_members(plan: pb.Plan, members: Members) -> frozenset[NodeId]:
    """Those of the plan's members that are not gone and that `members` has not, or otherwise."""
    here = [(NodeId(m.node_id), _known(m)) for m in plan.members if not m.gone]
    return frozenset(node for node, known in here if members.get(node) != known)


def pack_plan(plan: pb.Plan, strays: frozenset[NodeId] = frozenset()) -> bytes:
    """One zstandard frame of the plan, for `pb.View.packed_plan`. `strays`: members that its readers' roster may
    not have as the plan has them."""
    members = plan.members
    here = [m for m in members if not m.gone]
    packed = pb.PackedPlan(
        plan=plan,
        nodes=[m.node_id for m in members],
        weights=[m.weight for m in members],
        scales=[m.scale for m in members],
        norms=[m.norm for m in members],
        down=[m.down for m in members],
        gone=bitmap((i for i, m in enumerate(members) if m.gone), len(members)),
        roster=digest_of((NodeId(m.node_id), _known(m)) for m in here),
        strays=[
            pb.RosterMember(node_id=m.node_id, key=m.key, address=m.address, pin=m.pin, leaf=m.leaf)
            for m in here
            if m.node_id in strays
        ],
    )
    packed.plan.ClearField("members")
    return zstandard.ZstdCompressor(level=3).compress(packed.SerializeToString())


def _known(member: pb.PlanMember | pb.RosterMember) -> RosterMember:
    return RosterMember(PublicKey(member.key), member.address, Pin(member.pin), member.leaf)


def unpack_plan(view: pb.View, members: Members) -> None:
    """Fill in `view.plan` from `view.packed_plan`, if the view has one, and empty that; the same for the plan of a
    replay. `members`: the roster that the view goes by. Raises `Refused` where it is no frame of a plan, and
    `OtherRoster` where the plan goes by other members: then nothing is changed."""
    mine = _filled_in(read_plan(view.packed_plan), members) if view.packed_plan else None
    replayed = _filled_in(read_plan(view.replay.packed_plan), members) if view.replay.packed_plan else None
    if mine is not None:
        view.plan.CopyFrom(mine)
        view.ClearField("packed_plan")
    if replayed is not None:
        view.replay.plan.CopyFrom(replayed)
        view.replay.ClearField("packed_plan")


def read_plan(frame: bytes) -> pb.PackedPlan:
    """The plan in a frame, without what the roster has. Raises `Refused` where it is no frame of a plan."""
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= MAX_PLAN_SIZE:
            raise Refused(f"the coordinator sent a plan of {size} bytes: at most {MAX_PLAN_SIZE} are read")
        packed = pb.PackedPlan.FromString(zstandard.ZstdDecompressor().decompress(frame))
    except (zstandard.ZstdError, DecodeError) as error:
        raise Refused(f"the coordinator sent a plan that cannot be read: {error}") from None
    count, columns = len(packed.nodes), (packed.weights, packed.scales, packed.norms, packed.down)
    if packed.plan.members or any(len(column) != count for column in columns):
        raise Refused(f"the coordinator sent a plan whose columns are not those of its {count} members")
    return packed


def _filled_in(packed: pb.PackedPlan, members: Members) -> pb.Plan:
    nodes = [NodeId(node) for node in packed.nodes]
    if packed.strays:
        members = {**members, **{NodeId(m.node_id): _known(m) for m in packed.strays}}
    gone = [bit(packed.gone, i) for i in range(len(nodes))]
    known = [RosterMember() if out else members.get(node) for node, out in zip(nodes, gone, strict=True)]
    here = [(node, m) for node, m, out in zip(nodes, known, gone, strict=True) if m is not None and not out]
    if None in known or digest_of(here) != packed.roster:
        raise OtherRoster(f"the plan of round {packed.plan.round} goes by other members than this node knows")
    plan = packed.plan
    for i, (node, member) in enumerate(zip(nodes, known, strict=True)):
        assert member is not None
        planned = plan.members.add(node_id=node, address=member.address, pin=member.pin, key=member.key)
        planned.leaf, planned.gone, planned.down = member.leaf, gone[i], packed.down[i]
        planned.weight, planned.scale, planned.norm = packed.weights[i], packed.scales[i], packed.norms[i]
    return plan
