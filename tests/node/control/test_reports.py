"""What a member reports of what others sealed."""

import math

from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.incidents import IncidentKind
from atoll.comm.plan import NOBODY, Plan, PlanMember
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.control.reports import Reports


class Sent(list[pb.ReportRequest]):
    """What would go to the coordinator."""

    def report(self, report: pb.ReportRequest, more: bool = False) -> None:
        self.append(report)


def test_of_what_somebody_sealed_that_is_gone_it_is_said_too_that_it_is_too_long() -> None:
    sent, seen = Sent(), list[NodeId]()
    reports = Reports(sent)
    reports.remember = lambda kind, peer: seen.append(peer) if kind is IncidentKind.BYTES_SPOILED else None
    members = (PlanMember(NodeId("n1"), "", 1.0, norm=1.0), PlanMember(NodeId("n2"), "", 1.0, norm=math.inf))
    plan = Plan(Incarnation(1), Epoch(1), Round(3), 2, members, (1, NOBODY), (1, 2), kept=frozenset({1}))
    for chunk, since in ((0, 1), (1, 2)):
        reports.outsized(plan, chunk, since, bytes(16), 3.0)
    assert seen == ["n2"]
    assert [(r.seal_outsized.chunk, r.fence.attempt) for r in sent] == [(0, 1), (1, 2)]
    assert all(r.seal_outsized.digest == bytes(16) and r.seal_outsized.times == 3.0 for r in sent)
