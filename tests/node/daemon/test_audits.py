"""The audits of a node: those for which there is no place yet wait, and their time runs meanwhile."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from atoll.comm.allreduce.auditor import AuditFinding, Auditor, AuditOrder
from atoll.comm.plan import Plan
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.control.reports import Reports
from atoll.node.daemon.audits import MAX_AT_ONCE, Audits

SECONDS = 20.0


class Clocked(asyncio.SelectorEventLoop):
    """A loop whose clock a test puts forward."""

    ahead = 0.0  # seconds

    def time(self) -> float:
        return super().time() + self.ahead


class Slow:
    """Stands for the auditor: it keeps its place until it is let go."""

    def __init__(self) -> None:
        self.orders: list[AuditOrder] = []
        self.go = asyncio.Event()

    async def audit(self, order: AuditOrder, plan: Plan) -> AuditFinding:
        self.orders.append(order)
        await self.go.wait()
        return AuditFinding(order.chunk, order.since)


class Told:
    """Stands for the reports: it keeps the findings."""

    def __init__(self) -> None:
        self.findings: list[AuditFinding] = []
        self.busy: list[int] = []

    def audited(self, plan: Plan, found: AuditFinding) -> None:
        self.findings.append(found)

    def busy_for_audit(self, plan: Plan, chunk: int, since: int) -> None:
        self.busy.append(chunk)


def view(chunks: int) -> pb.View:
    members = [pb.PlanMember(node_id=name, address=f"{name}:1", weight=1.0, scale=1.0) for name in ("ada", "bo")]
    plan = pb.Plan(
        round=1,
        attempt=1,
        incarnation=1,
        epoch=1,
        members=members,
        owners=[0] * chunks,
        since=[1] * chunks,
        length=1.0,
    )
    audits = [pb.Audit(chunk=c, since=1, inputs=b"\x03", seconds=SECONDS) for c in range(chunks)]
    return pb.View(plan=plan, audits=audits)


@pytest.mark.parametrize("late", [False, True])
def test_the_time_of_an_audit_runs_from_its_order_while_it_waits_for_a_place(late: bool) -> None:
    """With less than half of it left nobody is said to show nothing: the node says that it was busy."""

    async def body(loop: Clocked) -> None:
        slow, told, tasks = Slow(), Told(), list[asyncio.Task[None]]()

        def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            tasks.append(loop.create_task(work))
            return tasks[-1]

        auditor = cast(Callable[[Plan], Auditor], lambda plan: slow)
        audits = Audits(cast(Reports, told), spawn, auditor)
        audits.follow(view(MAX_AT_ONCE + 1))
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(slow.orders) == MAX_AT_ONCE
        loop.ahead = 15.0 if late else 8.0
        slow.go.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        done = MAX_AT_ONCE + (not late)
        assert [order.chunk for order in slow.orders] == list(range(done))
        assert {found.chunk for found in told.findings} == set(range(done))
        assert told.busy == list(range(done, MAX_AT_ONCE + 1))
        assert all(SECONDS - 1.0 < order.seconds <= SECONDS for order in slow.orders[:MAX_AT_ONCE])
        if not late:
            assert SECONDS / 2 < slow.orders[-1].seconds <= SECONDS - 8.0

    loop = Clocked()
    try:
        loop.run_until_complete(body(loop))
    finally:
        loop.close()
