"""A member's reports to the coordinator, and plans as they travel.

Each report carries the fence of what it speaks of: the plan's, or the newest view's. `ControlClient` sends it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from atoll.comm.allreduce.auditor import AuditFinding
from atoll.comm.allreduce.listener import SealReport
from atoll.comm.bitmap import bitmap, places
from atoll.comm.ids import Epoch, Incarnation, NodeId, Pin, PublicKey, Round
from atoll.comm.incidents import IncidentKind
from atoll.comm.plan import NOBODY, Plan, PlanMember
from atoll.comm.proto import atoll_pb2 as pb

log = logging.getLogger("atoll.node")
# Likeness (cosine, ratio of norms) of the contributor's delta to its work: first its replay, then others' deltas
ReplayFinding = Sequence[tuple[float, float]]


class ReportSender(Protocol):
    """The way of reports to the coordinator."""

    def report(self, report: pb.ReportRequest, more: bool = False) -> None:
        """Send a report when its turn comes; `more`: others of its kind follow soon."""


class Reports:
    """A member's reports to the coordinator, one method each; also a reduction's listener
    (`atoll.comm.allreduce.listener.ReduceListener`)."""

    def __init__(self, control: ReportSender) -> None:
        self.control = control
        self.view: pb.View | None = None  # the newest that the node acts on
        self.remember: Callable[[IncidentKind, NodeId], None] = lambda kind, peer: None  # what was seen of a peer

    # Of the node

    def layout(self, layout: pb.LayoutReported) -> None:
        """Report that the trainer is up and has this model."""
        self.control.report(pb.ReportRequest(fence=self._now(), layout_reported=layout))

    def state(self, round_: int, digest: bytes) -> None:
        """Report that the node holds the state of the round that has this digest; empty: that it was to make
        state 0, and cannot."""
        report = pb.StateReported(round=round_, digest=digest, unable=not digest)
        self.control.report(pb.ReportRequest(fence=self._now(), state_reported=report))

    def repaired(self, round_: int, chunks: int, whole: bool, disk: bool = False) -> None:
        """Report that `chunks` chunks of the round's state had changed by themselves, in memory or, as files, on
        `disk`; `whole`: all are again what they were."""
        report = pb.StateRepaired(round=round_, chunks=chunks, whole=whole, disk=disk)
        self.control.report(pb.ReportRequest(fence=self._now(), state_repaired=report))

    def loss(self, round_: int, loss: float, prompt: str = "", text: str = "") -> None:
        """Report the validation loss of the round's state, in nats a token, and what its model writes."""
        report = pb.LossEvaluated(round=round_, loss=loss, prompt=prompt, text=text)
        self.control.report(pb.ReportRequest(fence=self._now(round_), loss_evaluated=report))

    # Of a round

    def steps_reached(self, round_: int) -> None:
        """Report that the round has its inner steps here; more follow."""
        self.control.report(pb.ReportRequest(fence=self._now(round_), steps_reached=pb.StepsReached()))

    def contribution(self, round_: int, contribution: pb.ContributionReady) -> None:
        """Report that the node's delta of the round can be reduced."""
        self.control.report(pb.ReportRequest(fence=self._now(round_), contribution_ready=contribution))

    def account(self, round_: int, account: pb.RoundAccount) -> None:
        """Report what the node did, waited for and saw in the round, as it was asked to."""
        self.control.report(pb.ReportRequest(fence=self._now(round_), round_account=account))

    # Of an attempt

    def reduce_complete(self, plan: Plan, complete: pb.ReduceComplete) -> None:
        """Report that the node has every sealed chunk of the attempt."""
        self.control.report(pb.ReportRequest(fence=_fence(plan), reduce_complete=complete))

    def orphans_found(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None:
        """Report the plan's chunks without an owner that the node has sealed bytes of, as (chunk, digest)."""
        found = pb.OrphansFound(here=[pb.Seal(chunk=c, digest=digest) for c, digest in here])
        self.control.report(pb.ReportRequest(fence=_fence(plan), orphans_found=found))

    def sealed(self, plan: Plan, seal: SealReport, more: bool) -> None:
        """Report that the node sealed a chunk; `more`: others follow soon."""
        report = pb.ChunksSealed(seals=[_entry(plan, seal)])
        self.control.report(pb.ReportRequest(fence=_fence(plan, seal.since), chunks_sealed=report), more)

    def summed(self, plan: Plan, sum_: SealReport, more: bool) -> None:
        """Report that the node, as its region's relay, averaged a chunk; `more`: other reports follow soon."""
        report = pb.ChunksSealed(sums=[_entry(plan, sum_)])
        self.control.report(pb.ReportRequest(fence=_fence(plan, sum_.since), chunks_sealed=report), more)

    def lost(self, plan: Plan, node: NodeId, sentence: str) -> None:
        """Report that the connection to a member broke, or that it does not do its part."""
        log.warning(f"round {plan.round}, attempt {plan.attempt}: {node}: {sentence}")
        self.remember(IncidentKind.PEER_LOST, node)
        report = pb.PeerUnreachable(node_id=node, reason=sentence[:200])
        self.control.report(pb.ReportRequest(fence=_fence(plan), peer_unreachable=report))

    def forged(self, plan: Plan, node: NodeId, chunk: int) -> None:
        """Report that the sealed chunk as `node` gave it is not the ledger's."""
        log.warning(f"round {plan.round}: chunk {chunk} as {node} gave it is not what the ledger says")
        self.remember(IncidentKind.BYTES_SPOILED, node)
        report = pb.ChunkForged(node_id=node, chunk=chunk)
        self.control.report(pb.ReportRequest(fence=_fence(plan), chunk_forged=report))

    def spoiled(self, plan: Plan, node: NodeId, sentence: str) -> None:
        """Remember that something came from `node` that is not what it can have sent."""
        log.warning(f"round {plan.round}: {node}: {sentence}")
        self.remember(IncidentKind.BYTES_SPOILED, node)

    def outsized(self, plan: Plan, chunk: int, since: int, digest: bytes, times: float) -> None:
        """Report that a chunk's owner sealed what is longer than any merge of the round's deltas."""
        place = plan.owners[chunk]
        owner = None if place == NOBODY else plan.members[place].node
        what = f"what {owner or 'somebody that is gone'} sealed, of chunk {chunk} most,"
        log.warning(f"round {plan.round}: {what} is {times:.3g} times as long as the longest delta")
        if owner is not None:
            self.remember(IncidentKind.BYTES_SPOILED, owner)
        report = pb.SealOutsized(chunk=chunk, digest=digest, times=times)
        self.control.report(pb.ReportRequest(fence=_fence(plan, since), seal_outsized=report))

    def lacking(self, plan: Plan, chunks: tuple[int, ...]) -> None:
        """Report that nobody gave these sealed chunks as the ledger has them."""
        log.warning(f"round {plan.round}: nobody gave {len(chunks)} of its chunks as the ledger has them")
        report = pb.ChunksMissing(chunks=bitmap(chunks, len(plan.owners)))
        self.control.report(pb.ReportRequest(fence=_fence(plan), chunks_missing=report))

    def audited(self, plan: Plan, found: AuditFinding) -> None:
        """Report what an audit of a sealed chunk found."""
        report = pb.AuditReported(
            chunk=found.chunk,
            digest=found.digest,
            receipts=found.receipts,
            silent=found.silent,
            shown=found.shown,
            relay=0 if found.relay is None else found.relay + 1,
            norms=found.norms,
            sums=[pb.RegionNorms(place=place, norms=norms) for place, norms in found.sums],
        )
        self.control.report(pb.ReportRequest(fence=_fence(plan, found.since), audit_reported=report))

    def busy_for_audit(self, plan: Plan, chunk: int, since: int) -> None:
        """Report that the node came to an audit too late, for others, to find anything."""
        report = pb.AuditReported(chunk=chunk, busy=True)
        self.control.report(pb.ReportRequest(fence=_fence(plan, since), audit_reported=report))

    def replay_shown(self, round_: int, node: NodeId, shown: bool) -> None:
        """Report that chunks of what the contributor `node` brought to the round are here, or that it did not show
        them."""
        report = pb.ReplayReported(node_id=node, shown=shown)
        self.control.report(pb.ReportRequest(fence=self._now(round_), replay_reported=report))

    def replayed(self, round_: int, node: NodeId, found: ReplayFinding) -> None:
        """Report how the work of the contributor `node` compares with its replay."""
        work, *others = (pb.Likeness(cosine=cosine, ratio=ratio) for cosine, ratio in found)
        report = pb.ReplayReported(node_id=node, shown=True, work=work, others=others)
        self.control.report(pb.ReportRequest(fence=self._now(round_), replay_reported=report))

    def orphans(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None:
        """Report nothing: only a member that contributes holds sealed chunks."""

    def held(self, plan: Plan, root: bytes, proven: bool) -> None:
        """Report nothing: only a member that contributes holds sealed chunks."""

    def _now(self, round_: int = 0) -> pb.Fence:
        """The newest view's; 0: of no round."""
        incarnation, epoch = (0, 0) if self.view is None else (self.view.incarnation, self.view.epoch)
        return pb.Fence(incarnation=incarnation, epoch=epoch, round=round_)


def _entry(plan: Plan, seal: SealReport) -> pb.Seal:
    inputs = bitmap(seal.inputs, len(plan.members))
    return pb.Seal(
        chunk=seal.chunk,
        digest=seal.digest,
        inputs=inputs,
        norms=seal.norms,
        dots=seal.dots,
        reference=seal.reference,
    )


def _fence(plan: Plan, attempt: int | None = None) -> pb.Fence:
    """The plan's; of an earlier attempt, if one is given."""
    attempt = plan.attempt if attempt is None else attempt
    return pb.Fence(incarnation=plan.incarnation, epoch=plan.epoch, round=plan.round, attempt=attempt)


def plan_of(wire: pb.Plan) -> Plan:
    """The plan as it travels, decoded."""
    chunks = len(wire.owners)
    return Plan(
        Incarnation(wire.incarnation),
        Epoch(wire.epoch),
        Round(wire.round),
        wire.attempt,
        tuple(
            PlanMember(
                NodeId(m.node_id),
                m.address,
                m.weight,
                m.gone,
                m.leaf,
                m.down,
                Pin(m.pin),
                m.scale,
                m.norm,
                PublicKey(m.key),
            )
            for m in wire.members
        ),
        tuple(wire.owners),
        tuple(wire.since),
        frozenset(places(wire.kept)),
        tuple(wire.regions),
        tuple(tuple(wire.relays[i : i + chunks]) for i in range(0, len(wire.relays), chunks or 1)),
        frozenset(places(wire.layered)),
        wire.length,
        wire.salt,
        frozenset(map(NodeId, wire.verifiers)),
        wire.patience,
    )
