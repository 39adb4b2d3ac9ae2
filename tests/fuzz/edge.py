"""The coordinator's edge: reports as bytes, between what honest members say, through validation into the state
machine. What the simulation demands of a coordinator's state must hold after each of them.

A script for `play` is one step after another, each of these:

    0 mod 4     a quarter of a second passes
    1 mod 4     each honest member says what its view asks it to
    2 mod 4     member, u16 length, and as many bytes: a report as it is
    3 mod 4     the same, under the fence of the round at hand
"""

import struct
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import DecodeError
from honest_member import CONFIG as PLAIN
from honest_member import said_by, sum_of
from sim.invariants.members import epochs_name_memberships, members_have_the_runs_state
from sim.invariants.rounds import fences_grow, no_round_waits_for_suspects, rounds_close_at_a_quorum

from atoll.comm.config.outer import OuterConfig
from atoll.comm.ids import NodeId
from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.replace import replace
from atoll.coordinator.service import validation, view
from atoll.coordinator.service.journaled_machine import decode, encode
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.ledger import seal_terms
from atoll.coordinator.state_machine.state import State
from atoll.coordinator.state_machine.step import step
from atoll.node.control.reports import plan_of

CONFIG = replace(PLAIN, outer=OuterConfig(damping=True), reduce=replace(PLAIN.reduce, levels=2))
MEMBERS = 4
MAX_STEPS = 60  # of a script


class Edge:
    """A coordinator's machine whose members are in, and whose invariants are checked after every event."""

    def __init__(self) -> None:
        self.state, self.now = State(CONFIG), 0.0
        self.consumed: set[int] = set()
        self._world: Any = SimpleNamespace(truth=SimpleNamespace(fences={}))
        self.feed(ev.Started(1))
        for i in range(1, MEMBERS + 1):
            self.join(NodeId(f"n{i}"), 1)

    def join(self, node: NodeId, life: int) -> None:
        self.feed(ev.Joined(node, life, f"node {node}", f"h{node}:1", f"session {node}"))
        self.feed(ev.Connected(node, life))
        self.feed(ev.LayoutReported(node, life, 40, sum_of("layout")))

    def feed(self, event: ev.Event) -> None:
        """Step one event, and check what must hold behind it."""
        before = self.state
        self.state, _ = step(before, event, self.now)
        after = self.state
        rounds_close_at_a_quorum(before, after)
        no_round_waits_for_suspects(after)
        epochs_name_memberships(before, after)
        members_have_the_runs_state(after)
        if after.round.plan is not None and after.round.plan is not before.round.plan:
            fences_grow(self._world, after.round.plan.fence)
            plan_of(view.view(after, after.round.ledger.members[0]).plan).validate()
        assert after.committed - before.committed in (0, 1)
        leased = [*after.leases.free, *(part for lease in after.leases.by_node.values() for part in lease)]
        samples = [s for first, count in leased for s in range(first, first + count)]
        assert len(samples) == len(set(samples)), "a sample has two places"
        assert self.consumed.isdisjoint(samples), "a sample that was consumed is leased again"
        if after.committed > before.committed:
            self.consumed |= set(range(after.leases.next)).difference(samples)

    def tick(self, seconds: float = 0.25) -> None:
        self.now += seconds
        self.feed(ev.Tick())

    def behave(self) -> None:
        """Every member says one thing that its view asks for; who is out comes back."""
        for i in range(1, MEMBERS + 1):
            node = NodeId(f"n{i}")
            if node not in self.state.members.here:
                self.join(node, self.state.members.departed[node].life + 1)
            elif (event := said_by(self.state, node)) is not None:
                self.feed(event)

    @property
    def fence(self) -> Fence:
        """The fence of the plan in force, or of the round that has none yet."""
        r, state = self.state.round, self.state
        if r.plan is not None:
            return r.plan.fence
        return Fence(state.incarnation, state.epoch, r.number, r.ledger.attempt)  # type: ignore[arg-type]

    def report(self, node: NodeId, request: pb.ReportRequest) -> None:
        """A report by a member's valid session, which is refused with a sentence or is an event."""
        member = self.state.members.here.get(node)
        if member is None:
            return
        try:
            event = validation.event(node, member.life, request)
        except ValueError as error:
            assert len(str(error)) > 10
            return
        self.feed(event)

    def tell(self, node: NodeId, x: float, y: float) -> None:
        """What an honest member would say next, with these numbers in it."""
        member, ledger = self.state.members.here.get(node), self.state.round.ledger
        match said_by(self.state, node) if member is not None else None:
            case ev.ContributionReady(contribution=work):
                numbers: Any = {"loss": y, "delta_norm": x, "damping": y}
                ready = pb.ContributionReady(steps=4, samples=4, front=work.front, **numbers)
                self.report(node, fenced(pb.ReportRequest(contribution_ready=ready), self.fence))
            case ev.ChunksSealed(fence=fence, seals=((chunk, digest, inputs),)):
                terms = len(sum(seal_terms(ledger, chunk, inputs), []))
                one = pb.Seal(chunk=chunk, digest=digest, inputs=inputs)
                one.norms.extend([x] * terms)
                one.dots.extend([y] * terms)
                one.reference = y
                sealed = pb.ChunksSealed(seals=[one])
                self.report(node, fenced(pb.ReportRequest(chunks_sealed=sealed), fence))
            case ev.ReduceComplete(fence=fence, digest=digest):
                done = pb.ReduceComplete(digest=digest, rate_up=x, rate_down=y, rate_inside=y, rate_outside=x)
                for other in self.state.members.here:
                    done.round_trips.add(node_id=other, seconds=y)
                    done.seen.add(node_id=other, up=x, down=y)
                self.report(node, fenced(pb.ReportRequest(reduce_complete=done), fence))
            case ev.LossEvaluated(round=round_):
                told = pb.LossEvaluated(round=round_, loss=y, prompt=str(x), text=3000 * str(y))
                self.report(node, pb.ReportRequest(loss_evaluated=told))
            case _:
                pass

    def end(self) -> None:
        """The state can be shown and read from its journal again; and the run goes on when members behave."""
        for member in self.state.members.here:
            view.view(self.state, member)
        assert decode(encode(self.state), CONFIG) == self.state
        committed = self.state.committed
        for _ in range(400):
            self.behave()
            self.tick()
            if self.state.committed > committed:
                return
        raise AssertionError(f"no round in 100 s of good behaviour: {self.state.round.reason}")


def fenced(request: pb.ReportRequest, fence: Fence) -> pb.ReportRequest:
    request.fence.incarnation, request.fence.epoch = fence.incarnation, fence.epoch
    request.fence.round, request.fence.attempt = fence.round, fence.attempt
    return request


def play(data: bytes) -> None:
    """Run the script in these bytes."""
    edge, at = Edge(), 0
    for _ in range(MAX_STEPS):
        if at >= len(data):
            break
        kind, at = data[at] % 4, at + 1
        if kind == 0:
            edge.tick()
        elif kind == 1:
            edge.behave()
        else:
            node, length, at = data[at : at + 1], data[at + 1 : at + 3].ljust(2, b"\0"), at + 3
            end = at + struct.unpack("<H", length)[0]
            try:
                request = pb.ReportRequest.FromString(data[at:end])
            except DecodeError:  # gRPC answers it
                continue
            finally:
                at = end
            if kind == 3:
                request = fenced(request, edge.fence)
            edge.report(NodeId(f"n{(node or b'0')[0] % (MEMBERS + 1)}"), request)
    edge.end()


def _account() -> pb.RoundAccount:
    """A member's account of a round in which much went wrong."""
    account = pb.RoundAccount(steps=3, computing=1.0, data=2.0, still=4.0, paused=1.0, away=2.0, clock=60.0)
    for kind in range(1, 15):
        account.incidents.add(kind=kind, age=1.0, node_id="n2" if kind % 2 else "", value=kind)
    figures = {"busy": 1.0, "usual": 1e6, "rtt": 0.1, "queue": 0.1, "mute": 6.0, "deaf": 1.0}
    account.links.add(node_id="n3", sent=10**6, received=10**6, segments=1000, resent=100, **figures)
    return account


def script() -> bytes:
    """A round of good behaviour with a report of each kind in between."""
    terms: Any = {"norms": [1.0] * 8, "dots": [0.5] * 8, "reference": 1.0}
    seal = pb.Seal(chunk=0, digest=sum_of(0), inputs=b"\xff", **terms)
    reports = [
        pb.ReportRequest(state_reported=pb.StateReported(round=0, digest=sum_of("state 0"))),
        pb.ReportRequest(contribution_ready=pb.ContributionReady(steps=4, samples=4, loss=2.0, delta_norm=1.0)),
        pb.ReportRequest(chunks_sealed=pb.ChunksSealed(seals=[seal])),
        pb.ReportRequest(reduce_complete=pb.ReduceComplete(digest=sum_of("x"), rate_up=1e6, rate_down=1e6)),
        pb.ReportRequest(peer_unreachable=pb.PeerUnreachable(node_id="n2", reason="reset")),
        pb.ReportRequest(orphans_found=pb.OrphansFound(here=[seal])),
        pb.ReportRequest(chunk_forged=pb.ChunkForged(node_id="n2", chunk=1)),
        pb.ReportRequest(seal_outsized=pb.SealOutsized(chunk=1, digest=bytes(16), times=2.5)),
        pb.ReportRequest(chunks_missing=pb.ChunksMissing(chunks=b"\x05")),
        pb.ReportRequest(loss_evaluated=pb.LossEvaluated(round=1, loss=2.0)),
        pb.ReportRequest(round_account=_account()),
        pb.ReportRequest(leave=pb.Leave(reason="bye", incidents=4)),
    ]
    out = b"\1\1\1\0"
    for report in reports:
        data = report.SerializeToString()
        out += b"\3\4" + struct.pack("<H", len(data)) + data + b"\1\0"
    return out
