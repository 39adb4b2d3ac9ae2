"""The audits that a member is named for: each is begun once its view tells of it, and what it found is reported.

A view lists what the coordinator waits for; what it lists no more is not wanted any more.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from atoll.comm.allreduce.auditor import Auditor, AuditOrder
from atoll.comm.bitmap import places
from atoll.comm.errors import AtollError
from atoll.comm.ids import NodeId, Pin
from atoll.comm.plan import Plan
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.control.reports import Reports, plan_of

log = logging.getLogger("atoll.node")
Offer = tuple[NodeId, str, Pin]  # whom a leaf dials: node, address, of its certificate
MAX_AT_ONCE = 4  # audits: each has a connection to every contributor, who accept few of one member
LEAST_SHARE = 0.5  # of an audit's time: with less, who lacks something is not known to be at fault
Key = tuple[int, int, int]  # round, chunk, attempt in which the chunk got its owner


class Audits:
    """One node's audits."""

    def __init__(
        self,
        reports: Reports,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        auditor: Callable[[Plan], Auditor],
    ) -> None:
        """`spawn` starts a task; `auditor` makes who recomputes chunks of the plan's round."""
        self._reports, self._spawn, self._auditor = reports, spawn, auditor
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    def follow(self, view: pb.View) -> None:
        """Begin what the view names this node for, and end what it names it for no more."""
        if not view.audits and not self._tasks:
            return
        wanted = {(view.plan.round, order.chunk, order.since): order for order in view.audits}
        for key in self._tasks.keys() - wanted.keys():
            self._tasks.pop(key).cancel()
        fresh = [key for key in wanted if key not in self._tasks]
        if not fresh:
            return
        plan = plan_of(view.plan)
        for key in fresh:
            self._tasks[key] = self._spawn(self._audit(wanted[key], plan))

    def stop(self) -> None:
        """End all audits: what they find would be of an earlier life of this node."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks = {}

    async def _audit(self, order: pb.Audit, plan: Plan) -> None:
        try:
            plan.validate()
            clock = asyncio.get_running_loop().time
            until = clock() + order.seconds
            inputs = tuple(places(order.inputs))
            async with self._places:
                if (left := until - clock()) < LEAST_SHARE * order.seconds:
                    log.info(f"round {plan.round}, audit of chunk {order.chunk}: other audits took too long")
                    self._reports.busy_for_audit(plan, order.chunk, order.since)
                    return
                asked = AuditOrder(order.chunk, order.since, inputs, left)
                found = await self._auditor(plan).audit(asked, plan)
        except AtollError as error:
            log.warning(f"round {plan.round}, audit of chunk {order.chunk}: {error}")
            return
        except Exception:
            log.exception(f"round {plan.round}, audit of chunk {order.chunk}: a fault of this node")
            return
        self._reports.audited(plan, found)


def offers(view: pb.View) -> list[Offer]:
    """Whom this node dials, as a leaf, to answer there what it is asked."""
    return [(NodeId(d.node_id), d.address, Pin(d.pin)) for d in (*view.serve, *view.auditors)]
