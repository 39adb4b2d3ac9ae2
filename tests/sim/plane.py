"""A node's data plane, as `atoll.comm.plane` and `atoll.comm.reduce` behave: one attempt of a reduce at a time,
fenced; a member that fails is reported; and the state for those who lack it.

    contribution (member -> owners)  ->  mean, sealed (owner)  ->  result (owner -> members)  ->  held
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.truth import Contribution, Mean, digest, root

from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator import events as ev
from atoll.node import machine

if TYPE_CHECKING:
    from sim.node import Node

PATIENCE = 4.0  # seconds that a stream waits for its attempt to begin here
ANSWER = 1.5  # seconds that a donor has to answer


@dataclass(slots=True)
class Attempt:
    """One attempt of the reduce, at one member."""

    fence: Fence
    members: list[NodeId]
    addresses: list[str]
    weights: list[float]
    owners: list[int]
    me: int
    contributions: dict[int, Contribution]  # by member
    payloads: dict[int, bytes] = field(default_factory=dict)  # by chunk
    merged: bool = False

    @property
    def mine(self) -> list[int]:
        return [c for c, owner in enumerate(self.owners) if owner == self.me]


class Plane:
    def __init__(self, node: "Node") -> None:
        self.node, self.world = node, node.world
        self.attempt: Attempt | None = None
        self.newest: Fence | None = None
        self.held: tuple[bytes, ...] = ()  # the payloads of the last attempt that was completed here
        self._early: list[tuple[Fence, NodeId, Node, Contribution]] = []
        self._asked = 0  # number of the latest request to a donor

    # The reduce

    def begin(self, wire: pb.Plan, contribution: Contribution) -> None:
        fence = fence_of(wire)
        if self.newest is not None and fence <= self.newest:
            self.node.say(f"is asked for an attempt that is not newer: {fence}")
            return
        members = [NodeId(m.node_id) for m in wire.members]
        me = members.index(self.node.me)
        attempt = self.attempt = Attempt(
            fence,
            members,
            [m.address for m in wire.members],
            [m.weight for m in wire.members],
            list(wire.owners),
            me,
            {me: contribution},
        )
        self.newest, self.held = fence, ()
        timeout = 0.8 * self.world.config.rounds.reduce_timeout
        self.node.later(timeout, self._late, attempt)
        for i in range(len(members)):
            if i != me:
                self._send(attempt, i, "contribution", contribution)
        early, self._early = self._early, []
        for other, sender, process, theirs in early:
            if self.newest is not None and other <= self.newest:
                self.contribution(other, sender, process, theirs)
            else:
                self._early.append((other, sender, process, theirs))
        self._merge_if_complete(attempt)

    def cancel(self) -> None:
        self.attempt = None

    def _send(self, attempt: Attempt, i: int, what: str, load: object) -> None:
        """To member `i` of the attempt; it is lost when nobody is there any more."""
        peer = attempt.members[i]
        process = self.world.at(attempt.addresses[i])
        if process is None or not process.alive or process.me != peer:
            if self.world.rng.random() < 0.7:  # else the host is gone without a word
                self.node.later(self.world.rng.uniform(0.02, 1.0), self.broken, attempt.fence, peer, "refused")
            return
        call = process.plane.contribution if what == "contribution" else process.plane.result
        broken = lambda: self.broken(attempt.fence, peer, "the connection broke")  # noqa: E731
        args = (attempt.fence, self.node.me, self.node, load)
        self.world.network.carry(self.node, process, broken, call, *args)

    def contribution(self, fence: Fence, sender: NodeId, process: "Node", load: Contribution) -> None:
        attempt = self.attempt
        if attempt is not None and attempt.fence == fence:
            if sender in attempt.members:
                attempt.contributions[attempt.members.index(sender)] = load
                self._merge_if_complete(attempt)
        elif self.newest is None or fence > self.newest:
            self._early.append((fence, sender, process, load))
            self.node.later(PATIENCE, self._impatient, fence, sender, process)
        else:
            self._refuse(fence, process)

    def _impatient(self, fence: Fence, sender: NodeId, process: "Node") -> None:
        waiting = [entry for entry in self._early if entry[:2] == (fence, sender)]
        if waiting:
            self._early = [entry for entry in self._early if entry[:2] != (fence, sender)]
            self._refuse(fence, process)

    def _refuse(self, fence: Fence, process: "Node") -> None:
        self.world.network.send(
            self.node, process, process.plane.broken, fence, self.node.me, "it refused this member's stream"
        )

    def result(self, fence: Fence, sender: NodeId, _: "Node", payloads: dict[int, bytes]) -> None:
        attempt = self.attempt
        if attempt is not None and attempt.fence == fence:
            attempt.payloads |= payloads
            self._finish_if_complete(attempt)

    def _merge_if_complete(self, attempt: Attempt) -> None:
        if len(attempt.contributions) == len(attempt.members) and not attempt.merged:
            attempt.merged = True
            self.node.later(self.world.seal_time, self._seal, attempt)

    def _seal(self, attempt: Attempt) -> None:
        """Seal the chunks that this member owns, tell the ledger, send them to all."""
        if attempt is not self.attempt:
            return
        ordered = tuple(attempt.contributions[i] for i in range(len(attempt.members)))
        payloads = {}
        for c in attempt.mine:
            payloads[c] = self.world.sealed(attempt.fence, Mean(c, ordered, tuple(attempt.weights)))
        attempt.payloads |= payloads
        self._tell(attempt, payloads)
        two_faced = self.node.host.lies_about("bytes")
        for i in range(len(attempt.members)):
            if i != attempt.me:
                other = {c: self.world.forged(p) for c, p in payloads.items()} if two_faced and i % 2 else payloads
                self._send(attempt, i, "result", other)
        self._finish_if_complete(attempt)

    def _tell(self, attempt: Attempt, payloads: dict[int, bytes]) -> None:
        """The ledger: the digests of these chunks; or what a liar says."""
        lies_about, told = self.node.host.lies_about, payloads
        if lies_about("seal"):
            told = {c: digest("a lie", p) for c, p in payloads.items()}
        if lies_about("owner"):
            told = {c: told.get(c, digest("not mine", c)) for c in range(len(attempt.owners))}
        if told:
            self.node.report(lambda n, life: ev.Sealed(n, life, attempt.fence, tuple(told.items())))
        if told and lies_about("seal again"):
            again = tuple((c, digest("again", p)) for c, p in told.items())
            self.node.report(lambda n, life: ev.Sealed(n, life, attempt.fence, again))

    def _finish_if_complete(self, attempt: Attempt) -> None:
        # Not before its own chunks are out: `reduce` returns when everything is sent and received.
        if not attempt.merged or len(attempt.payloads) < len(attempt.owners) or attempt is not self.attempt:
            return
        self.attempt = None
        self.held = tuple(attempt.payloads[c] for c in range(len(attempt.owners)))
        self.world.truth.held[self.node.session, attempt.fence] = self.held
        mine = root(self.held)
        told = digest("a lie", mine) if self.node.host.lies_about("held") else mine
        self.node.feed(machine.ReduceHeld((attempt.fence.round, attempt.fence.attempt), mine))
        self.node.report(lambda n, life: ev.Held(n, life, attempt.fence, told, 1000, 1000))

    def broken(self, fence: Fence, peer: NodeId, reason: str) -> None:
        """The connection with a member broke: this member's attempt is over."""
        if self.attempt is not None and self.attempt.fence == fence and peer in self.attempt.members:
            self.attempt = None
            self.node.report(lambda n, life: ev.PeerLost(n, life, peer, fence, reason))

    def _late(self, attempt: Attempt) -> None:
        if attempt is not self.attempt:
            return
        silent = [i for i in range(len(attempt.members)) if i not in attempt.contributions]
        owing = [attempt.owners[c] for c in range(len(attempt.owners)) if c not in attempt.payloads]
        blamed = next((i for i in (*silent, *owing) if i != attempt.me), None)
        if blamed is None:
            self.attempt = None
        else:
            self.broken(attempt.fence, attempt.members[blamed], "it was too late")

    # The state

    def recover(self, order: machine.Recover) -> None:
        self._ask(order, 0)

    def _ask(self, order: machine.Recover, i: int) -> None:
        donors = order.view.donors
        self._asked += 1
        if i >= len(donors):
            self.node.later(0.2, self.node.not_recovered)
            return
        process = self.world.at(donors[i].address)
        if process is not None and process.alive and process.me == donors[i].node_id:
            call = process.plane.give
            self.world.network.send(self.node, process, call, self.node, self._asked, order, i)
        self.node.later(ANSWER, self._next, self._asked, order, i)

    def _next(self, number: int, order: machine.Recover, i: int) -> None:
        if number == self._asked:
            self._ask(order, i + 1)

    def give(self, to: "Node", number: int, order: machine.Recover, i: int) -> None:
        state = self.node.state_of(order.view.committed)
        self.world.network.send(self.node, to, to.plane.given, number, order, i, state)

    def given(self, number: int, order: machine.Recover, i: int, state: bytes) -> None:
        if number != self._asked:
            return
        if state != order.view.state_digest:
            self._ask(order, i + 1)
        else:
            self._asked += 1
            self.node.later(self.world.seal_time, self.node.recovered, order)


def fence_of(plan: pb.Plan) -> Fence:
    return Fence(Incarnation(plan.incarnation), Epoch(plan.epoch), Round(plan.round), plan.attempt)
