"""What a member tells the coordinator of a reduce, and plans as they travel.

Each report carries the fence of what it speaks of: the plan's, or the newest view's.
"""

import logging
from typing import Any

from atoll.comm.allreduce.reduction import SealReport
from atoll.comm.bitmap import bitmap, places
from atoll.comm.ids import Epoch, Incarnation, NodeId, Pin, Round
from atoll.comm.plan import Plan, PlanMember
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.control.client import ControlClient

log = logging.getLogger("atoll.node")


class Reports:
    """A reduction's outcome (`atoll.comm.allreduce.reduction.ReduceListener`) and all else that a member
    reports."""

    def __init__(self, control: ControlClient) -> None:
        self.control = control
        self.view: pb.View | None = None  # the newest that the node acts on

    def of_round(self, round_: int, **report: Any) -> None:
        """Tell the coordinator something of a round, or with 0 of none."""
        incarnation, epoch = (0, 0) if self.view is None else (self.view.incarnation, self.view.epoch)
        fence = pb.Fence(incarnation=incarnation, epoch=epoch, round=round_)
        self.control.report(pb.ReportRequest(fence=fence, **report))

    def of(self, plan: Plan, attempt: int | None = None, more: bool = False, **report: Any) -> None:
        """Tell the coordinator something of an attempt, the plan's unless told. `more`: others of its kind follow
        soon."""
        attempt = plan.attempt if attempt is None else attempt
        fence = pb.Fence(incarnation=plan.incarnation, epoch=plan.epoch, round=plan.round, attempt=attempt)
        self.control.report(pb.ReportRequest(fence=fence, **report), more)

    def sealed(self, plan: Plan, seal: SealReport, more: bool) -> None:
        sealed = pb.Seal(chunk=seal.chunk, digest=seal.digest, inputs=bitmap(seal.inputs, len(plan.members)))
        self.of(plan, seal.since, more, chunks_sealed=pb.ChunksSealed(seals=[sealed]))

    def lost(self, plan: Plan, node: NodeId, sentence: str) -> None:
        log.warning(f"round {plan.round}, attempt {plan.attempt}: {node}: {sentence}")
        self.of(plan, peer_unreachable=pb.PeerUnreachable(node_id=node, reason=sentence[:200]))

    def forged(self, plan: Plan, node: NodeId, chunk: int) -> None:
        log.warning(f"round {plan.round}: chunk {chunk} as {node} gave it is not what the ledger says")
        self.of(plan, chunk_forged=pb.ChunkForged(node_id=node, chunk=chunk))

    def lacking(self, plan: Plan, chunks: tuple[int, ...]) -> None:
        log.warning(f"round {plan.round}: nobody gave {len(chunks)} of its chunks as the ledger has them")
        self.of(plan, chunks_missing=pb.ChunksMissing(chunks=bitmap(chunks, len(plan.owners))))

    def orphans(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None:
        pass  # only who contributes holds sealed chunks

    def held(self, plan: Plan, root: bytes, proven: bool) -> None:
        pass


def plan_of(wire: pb.Plan) -> Plan:
    """The plan as it travels, decoded."""
    chunks = len(wire.owners)
    return Plan(
        Incarnation(wire.incarnation),
        Epoch(wire.epoch),
        Round(wire.round),
        wire.attempt,
        tuple(
            PlanMember(NodeId(m.node_id), m.address, m.weight, m.gone, m.leaf, m.down, Pin(m.pin), m.scale, m.norm)
            for m in wire.members
        ),
        tuple(wire.owners),
        tuple(wire.since),
        frozenset(places(wire.kept)),
        tuple(wire.regions),
        tuple(tuple(wire.relays[i : i + chunks]) for i in range(0, len(wire.relays), chunks or 1)),
        frozenset(places(wire.layered)),
        wire.length,
    )
