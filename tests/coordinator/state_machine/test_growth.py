"""A round's work grows with the members, not with their square: counted in bytecodes, not in seconds.

What Python does in one bytecode, as to copy a dict of all members, is not seen: it is a hundred times cheaper.
"""

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from scenario import CONFIG

from atoll.comm.bitmap import bitmap
from atoll.comm.digest import digest, root
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine.state import Phase, State
from atoll.coordinator.state_machine.step import step

SMALL, LARGE = 25, 100  # members
SAME = 1.25  # times the work for each member


def bytecodes(work: Callable[[], None]) -> int:
    """How many Python runs for it."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


class Fleet:
    """Members that report in no order, each of whom owns a chunk."""

    def __init__(self, members: int) -> None:
        limits, reduce = replace(CONFIG.members, start=members), replace(CONFIG.reduce, chunk=1)
        self.state, self.now = State(replace(CONFIG, members=limits, reduce=reduce)), 0.0
        self.nodes = [NodeId(f"n{i}") for i in range(1, members + 1)]
        self.random = random.Random(7)
        self.feed(ev.Started(1))

    def feed(self, event: ev.Event) -> None:
        self.state, _ = step(self.state, event, self.now)

    def in_no_order(self) -> list[NodeId]:
        return self.random.sample(self.nodes, len(self.nodes))

    def join(self) -> None:
        for node in self.nodes:
            self.feed(ev.Joined(node, 1, str(node), f"{node}:1", f"session of {node}"))
            self.feed(ev.Connected(node, 1))
            self.feed(ev.LayoutReported(node, 1, len(self.nodes), digest(b"layout")))
        for node in (*self.nodes[:2], *self.in_no_order()):
            self.feed(ev.StateReported(node, 1, 0, digest(b"state 0")))
        assert self.state.round.phase is Phase.INNER

    def train(self) -> None:
        self.now += 10
        for node in self.in_no_order():
            self.feed(ev.StepsReached(node, 1, 1))
        assert self.state.round.phase is Phase.COLLECTING
        for node in self.in_no_order():
            front = data.front(self.state.leases.by_node[node])
            self.feed(ev.ContributionReady(node, 1, 1, ev.Contribution(10, 10, 2.0, 1.0, front)))

    def reduce(self) -> None:
        plan, owners, all_ = self.state.round.plan, self.state.round.ledger.owners, len(self.nodes)
        assert plan is not None and set(owners) == set(self.nodes)
        digests = [digest(b"%d" % c) for c in range(all_)]
        inputs, whole = bitmap(range(all_), all_), root(digests)
        for c, owner in enumerate(owners):
            seals = ((c, digests[c], inputs),)
            self.feed(ev.ChunksSealed(owner or self.nodes[0], 1, plan.fence, seals, (bytes(4 * all_),)))
        for node in self.in_no_order():
            self.feed(ev.ReduceComplete(node, 1, plan.fence, whole, 1, 1))
        assert self.state.committed == 1 and self.state.round.phase is Phase.INNER

    def tell(self) -> None:
        for node in self.in_no_order():
            self.feed(ev.StateReported(node, 1, 1, digest(b"state 1")))
        assert self.state.digest and self.state.pending is not None and self.state.pending.digests_equal


def test_a_member_costs_as_much_work_among_many_as_among_few() -> None:
    few, many = Fleet(SMALL), Fleet(LARGE)
    for part in ("join", "train", "reduce", "tell"):
        small, large = (bytecodes(getattr(fleet, part)) / len(fleet.nodes) for fleet in (few, many))
        assert large < SAME * small, f"{part}: {large:.0f} bytecodes a member among many, {small:.0f} among few"
