"""Plans among four members, a to d, and what a `ReduceProtocol` of one of them does under these."""

from collections.abc import Sequence

from atoll.comm.allreduce.effects import Effect, FrameVerdict, SendFrame
from atoll.comm.allreduce.protocol import ReduceProtocol
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import Plan, PlanMember
from atoll.comm.replace import replace
from atoll.comm.transport.frames import FrameKind

A, B, C, D = (NodeId(name) for name in "abcd")


def plan_of(attempt: int, owners: list[int], gone: str = "", since: tuple[int, ...] = (), kept: int = 0) -> Plan:
    """Among a, b, c and d; the first `kept` chunks are."""
    members = tuple(PlanMember(NodeId(n), f"{n}:1", 1.0, gone=n in gone) for n in "abcd")
    ids = Incarnation(1), Epoch(1), Round(1)
    return Plan(*ids, attempt, members, tuple(owners), since, frozenset(range(kept)))


def begun(me: NodeId, owners: list[int], window: int = 8) -> ReduceProtocol:
    x = ReduceProtocol(me, len(owners), window)
    x.replan(plan_of(1, owners))
    return x


def sends(effects: Sequence[Effect], kind: FrameKind) -> list[tuple[NodeId, int]]:
    return [(e.node, e.chunk) for e in effects if isinstance(e, SendFrame) and e.kind is kind]


def contribute(x: ReduceProtocol, c: int, *nodes: NodeId) -> list[Effect]:
    out: list[Effect] = []
    for node in nodes:
        assert x.verdict(node, "abcd".index(node), FrameKind.CONTRIBUTION, c, 1) is FrameVerdict.TAKE
        out += x.contribution_arrived(node, c)
    return out


def entered(plan: Plan, *nodes: NodeId) -> Plan:
    """With these behind the others."""
    return replace(plan, members=(*plan.members, *(PlanMember(n, f"{n}:2", 1.0) for n in nodes)))
