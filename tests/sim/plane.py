"""A node's data plane: its links, the reduce under way, and the state for those who lack it."""

from typing import TYPE_CHECKING, Any

from sim.engine import Call
from sim.links import KNOCK_TIME, Links, Peer
from sim.reduce import Reduce
from sim.truth import Contribution

from atoll.comm.digest import DIGEST_SIZE
from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.control.reports import plan_of
from atoll.node.state_machine import effects

if TYPE_CHECKING:
    from sim.node import Node

DONOR_TIMEOUT = 1.5  # seconds that a donor has to answer


class Plane:
    def __init__(self, node: "Node") -> None:
        self.node, self.world = node, node.world
        self.links = Links(node)
        self.reduce: Reduce | None = None
        self._last: Reduce | None = None  # the latest one, over or not
        self._asked = 0  # number of the latest request to a donor

    @property
    def peers(self) -> dict[NodeId, Peer]:
        return self.links.peers

    @property
    def held(self) -> tuple[bytes, ...]:
        """The payloads of the last round that is complete here."""
        return () if self._last is None else self._last.held

    # The reduce

    def begin(self, wire: pb.Plan, contribution: Contribution | None) -> None:
        """Take part in the round's reduce, or go on with it under this plan. None: it only owns chunks."""
        plan = plan_of(wire)
        plan.validate()
        reduce = self.reduce
        if reduce is not None and reduce.round == plan.round:
            assert plan.attempt > reduce.plan.attempt, f"an attempt that is not newer: {plan.fence}"
            reduce.replan(plan)
            return
        self.cancel()
        self.reduce = self._last = Reduce(self.node, self.links, plan, contribution)
        self.reduce.begin()
        if self.node.thrift is not None:
            self.node.later(self.world.faults.soon_in_an_exchange(), self.node.thrift)
            self.node.thrift = None

    def cancel(self) -> None:
        if self.reduce is not None:
            self.reduce.end()
        self.reduce = None

    def prove(self, round_: int, ledger: bytes) -> None:
        """The digests of the round's sealed chunks, one after the other."""
        if (reduce := self.reduce) is not None and reduce.round == round_:
            digests = [ledger[i : i + DIGEST_SIZE] for i in range(0, len(ledger), DIGEST_SIZE)]
            if len(digests) == reduce.exchange.chunk_count:
                reduce.do(reduce.exchange.prove(digests))

    def holds(self, sealed: bytes) -> bool:
        """Whether it has the sealed chunks with this root."""
        return self.reduce is not None and self.reduce.holds(sealed)

    def result(self) -> tuple[bytes, ...]:
        """The sealed chunks, all of them."""
        if self.reduce is None:
            raise RuntimeError(f"{self.node.me} is to apply what is not here")
        return self.reduce.result()

    # The state

    def recover(self, order: effects.Recover) -> None:
        self.cancel()
        self._ask(order, 0)

    def stop_recovery(self) -> None:
        """What came is kept, which may be chunks of another round."""
        self._end(0.0, self.node.not_recovered)

    def _end(self, seconds: float, call: Call, *args: Any) -> None:
        """The recovery is over after so many seconds, unless it ends otherwise before that."""
        self._asked += 1
        self.node.later(seconds, self._over, self._asked, call, *args)

    def _over(self, number: int, call: Call, *args: Any) -> None:
        if number == self._asked:
            self._asked += 1
            call(*args)

    def _ask(self, order: effects.Recover, i: int) -> None:
        donors = order.view.donors
        if i >= len(donors):
            return self._end(0.2, self.node.not_recovered)
        self._asked += 1
        process = self.world.at(donors[i].address) if donors[i].address else self.node  # to which leaves offer it
        if process is not None and process.alive and process.me == donors[i].node_id:
            call = process.plane.give
            self.world.network.send(self.node, process, call, self.node, self._asked, order, i)
        self.node.later(DONOR_TIMEOUT, self._next, self._asked, order, i)

    def _next(self, number: int, order: effects.Recover, i: int) -> None:
        if number == self._asked:
            self._ask(order, i + 1)

    def give(self, to: "Node", number: int, order: effects.Recover, i: int) -> None:
        if self.node.silent:
            return
        if not self.node.control.admits(to):  # it may be so new that this node's view does not know of it yet
            self.node.later(KNOCK_TIME, self.give, to, number, order, i)
            return
        state = self.node.passed_on(order.view.committed)
        self.world.network.send(self.node, to, to.plane.given, number, order, i, state)

    def given(self, number: int, order: effects.Recover, i: int, state: bytes) -> None:
        if number != self._asked:
            return
        if state != order.view.state_digest:
            self._ask(order, i + 1)
        else:
            self._end(self.world.seal_time, self.node.recovered, order)
