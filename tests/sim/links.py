"""The links of a simulated node to its peers, which break, delay and reorder frames. They follow the real
`LinkPolicy` and `round_order`, as `atoll.comm.transport.peer_links` does.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol, assert_never

from sim.truth import Contribution

from atoll.comm.ids import NodeId, Round
from atoll.comm.plan import PlanMember
from atoll.comm.transport.frame_handler import RoundOrder, round_order
from atoll.comm.transport.frames import FrameKind, QueuedFrame
from atoll.comm.transport.link_policy import Dial, LeafMissing, LinkPolicy, LinkTimes, Pause, Rest

if TYPE_CHECKING:
    from sim.node import Node
    from sim.world import World

HOLD_TIME = 4.0  # seconds that a frame of a round, or attempt, to come is held
KNOCK_TIME, KNOCKS = 0.25, 8  # seconds until who is not accepted yet is looked at again; how often at most
DIAL_TIME = 1.0  # seconds after which a dial that nobody answers has failed
TIMES = LinkTimes(other_side=0.5, leaf=4.0, redial=(0.2, 0.5, 1.0))


@dataclass(frozen=True, slots=True)
class Partial:
    """A region's mean."""

    places: tuple[int, ...]
    contributions: tuple[Contribution, ...]
    weights: tuple[tuple[float, float], ...]  # and scales


Payload = Contribution | Partial | bytes | None


class Frame(NamedTuple):
    kind: FrameKind
    round: Round
    attempt: int
    chunk: int
    place: int  # of its sender in its plan
    payload: Payload


class Handler(Protocol):
    """A reduce, as the links know it."""

    round: Round

    def frame(self, node: NodeId, queued: QueuedFrame) -> Frame | None: ...
    def arrived(self, node: NodeId, frame: Frame) -> bool:
        """Take it in; False: its plan is not here yet."""

    def joined(self, node: NodeId) -> None: ...
    def lost(self, node: NodeId, sentence: str) -> None: ...


class Link:
    """A connection of two processes; each learns for itself that it broke."""

    def __init__(self, world: "World", a: "Node", b: "Node") -> None:
        self.world, self.ends = world, (a, b)
        self.made = world.engine.now  # seconds
        self.broken = False

    def other(self, end: "Node") -> "Node":
        return self.ends[0] if end is self.ends[1] else self.ends[1]

    def carry(self, source: "Node", frame: Frame) -> None:
        """Bring it over, unless the link breaks before."""
        world, to = self.world, self.other(source)
        if self.broken:
            return
        if source.silent or to.silent:  # until bytes may be spent again, or enough of it was waited for
            world.engine.after(0.2, self.carry, source, frame)
            return
        network, fate = world.network, world.rng.random()
        if not to.alive or (source.place, to.place) in network.cut or (to.place, source.place) in network.cut:
            if fate < 0.5:
                self.snap()
            else:  # sent again, until somebody has enough of it
                world.engine.after(world.rng.uniform(0.5, 2.0), self.carry, source, frame)
            return
        late = world.rng.uniform(0.3, 1.5) if fate < network.loss else network.delay(source, to)
        world.engine.after(late, to.wake, to.plane.links.receive, self, source.me, frame)

    def snap(self) -> None:
        """What is on it may be lost."""
        if not self.broken:
            self.broken = True
            for end in self.ends:
                delay = self.world.rng.choice([0.0, 0.1, 1.0]) * self.world.rng.random()
                end.later(delay, end.plane.links.broke, self)


@dataclass(slots=True)
class HeldFrame:
    node: NodeId
    frame: Frame
    timed: bool = False  # a timer runs after which its link breaks


@dataclass(slots=True, eq=False)
class Peer:
    """Another node, as `atoll.comm.transport.peer` has it."""

    node: NodeId
    address: str = ""
    links: list[Link] = field(default_factory=list)
    waiting: dict[QueuedFrame, None] = field(default_factory=dict)  # to be sent
    heard: float = 0.0  # seconds
    policy: LinkPolicy = field(default_factory=lambda: LinkPolicy(TIMES))
    turn: int = 0  # number of the step that is to come of having links; 0: none are wanted
    step: Rest | Pause | None = None  # what is being done until then


class Links:
    """The links of one process."""

    def __init__(self, node: "Node") -> None:
        self.node, self.world = node, node.world
        self.peers: dict[NodeId, Peer] = {}
        self._handler: Handler | None = None
        self._held: dict[Link, deque[HeldFrame]] = {}  # frames of a round, or plan, to come, and those behind them
        self._turns = count(1)

    # The reduce under way

    def begin(self, handler: Handler) -> None:
        self._handler = handler
        self.peers = {node: peer for node, peer in self.peers.items() if peer.links or peer.turn}
        for peer in self.peers.values():
            peer.waiting.clear()
            peer.policy.begin_reduce()

    def end(self, handler: Handler) -> None:
        if self._handler is not handler:
            return
        self._handler = None
        for peer in self.peers.values():
            peer.waiting.clear()
            peer.turn = 0
            for link in peer.links[peer.policy.link_target :] if peer.policy.primary else ():
                link.snap()
        for link, held in list(self._held.items()):
            if held[0].frame.round == handler.round:
                held.popleft()
                self._go_on(link)

    def expect(self, members: list[tuple[PlanMember, bool]]) -> None:
        """Have links to these, and to no others; (member, whether this side dials first)."""
        expected = {member.node for member, _ in members}
        for peer in self.peers.values():
            if peer.node not in expected:
                peer.turn = 0
                for link in list(peer.links):
                    link.snap()
        for member, primary in members:
            peer = self.peer(member.node)
            other = peer.address != member.address
            if other or not peer.turn or peer.policy.primary != primary:
                peer.address = member.address
                peer.policy.expect(primary, member.leaf, other)
                peer.policy.link_target = self.world.rng.choice([1, 1, 2])
                self._turn(peer, self.world.rng.uniform(0, 0.02))

    def admit(self, members: Collection[NodeId]) -> None:
        """Close the links of who is no member any more."""
        for peer in self.peers.values():
            if peer.node not in members:
                peer.turn = 0
                for link in list(peer.links):
                    link.snap()

    def peer(self, node: NodeId) -> Peer:
        if node not in self.peers:
            self.peers[node] = Peer(node)
        return self.peers[node]

    def heard(self, node: NodeId) -> float | None:
        """Seconds; None: there is no link."""
        peer = self.peer(node)
        return peer.heard if peer.links else None

    # Having links

    def _turn(self, peer: Peer, after: float) -> None:
        """Have the next step then, and nothing before."""
        peer.turn, peer.step = next(self._turns), None
        self.node.later(after, self._step, peer, peer.turn)

    def _step(self, peer: Peer, turn: int) -> None:
        if peer.turn != turn:
            return
        match step := peer.policy.next_step(len(peer.links)):
            case Rest():
                peer.step = step
            case Pause(seconds):
                self._turn(peer, seconds * self.world.rng.uniform(0.9, 1.1))
                peer.step = None if peer.links else step
            case LeafMissing():
                self._lost(peer, "it is a leaf and did not dial")
                self._turn(peer, 0.0)
            case Dial(count):
                self._dial(peer, count)
            case _:
                assert_never(step)

    def _changed(self, peer: Peer) -> None:
        """There is a link more, or less."""
        if peer.turn and (isinstance(peer.step, Rest) or (peer.step is not None and peer.links)):
            self._turn(peer, 0.0)

    def _knock(self, peer: Peer, turn: int, count: int, knocks: int) -> None:
        if peer.turn == turn:
            self._dial(peer, count, knocks)

    def _dial(self, peer: Peer, count: int, knocks: int = 0) -> None:
        node, to, network = self.node, self.world.at(peer.address), self.world.network
        if to is None or not to.alive or to.me != peer.node or to.control.left or to.silent or node.silent:
            self._failed(peer, count, "refused")
        elif to.stopped or {(node.place, to.place), (to.place, node.place)} & network.cut:
            peer.turn = next(self._turns)
            self.node.later(DIAL_TIME, self._unanswered, peer, peer.turn, count)
        elif not to.control.admits(node) and knocks < KNOCKS:  # it waits for its view, and then for no longer
            peer.turn = next(self._turns)
            self.node.later(KNOCK_TIME, self._knock, peer, peer.turn, count, knocks + 1)
        elif not to.control.admits(node):
            self._failed(peer, count, "it refused: this is no member of the run")
        else:
            for _ in range(count):
                link = Link(self.world, node, to)
                to.plane.links.adopt(node.me, link)
                self.adopt(to.me, link)
            self._turn(peer, 0.0)

    def _unanswered(self, peer: Peer, turn: int, count: int) -> None:
        if peer.turn == turn:
            self._failed(peer, count, "no answer")

    def _failed(self, peer: Peer, count: int, sentence: str) -> None:
        for _ in range(count):
            peer.policy.dial_failed()
            self._lost(peer, sentence)
        self._turn(peer, 0.0)

    def _lost(self, peer: Peer, sentence: str) -> None:
        if not peer.links and self._handler is not None:
            self._handler.lost(peer.node, sentence)

    def adopt(self, node: NodeId, link: Link) -> None:
        """Use a link until it breaks."""
        peer = self.peer(node)
        peer.links.append(link)
        peer.heard = self.node.clock
        if peer.policy.link_opened() and self._handler is not None:
            self._handler.joined(node)
        self._changed(peer)
        self._pump(peer)

    def broke(self, link: Link) -> None:
        self._held.pop(link, None)
        for peer in self.peers.values():
            if link in peer.links:
                peer.links.remove(link)
                peer.policy.link_broke(self.world.engine.now - link.made)
                if peer.policy.link_closed(len(peer.links)) and self._handler is not None:
                    self._handler.joined(peer.node)
                self._changed(peer)

    # Frames

    def post(self, node: NodeId, queued: QueuedFrame) -> None:
        peer = self.peer(node)
        peer.waiting[queued] = None
        self._pump(peer)

    def _pump(self, peer: Peer) -> None:
        """Send what waits, if there is a link."""
        while peer.links and peer.waiting:
            queued = next(iter(peer.waiting))
            del peer.waiting[queued]
            if self._handler is not None and (frame := self._handler.frame(peer.node, queued)) is not None:
                self.world.rng.choice(peer.links).carry(self.node, frame)

    def receive(self, link: Link, node: NodeId, frame: Frame) -> None:
        peer = self.peer(node)
        if link not in peer.links:  # this end is closed
            return
        peer.heard = self.node.clock
        if link in self._held:
            self._held[link].append(HeldFrame(node, frame))
        elif not self._take(node, frame):
            self._hold(link, HeldFrame(node, frame))

    def _take(self, node: NodeId, frame: Frame) -> bool:
        """False: it is to be held."""
        handler = self._handler
        order = round_order(None if handler is None else handler.round, frame.round)
        if order is RoundOrder.CURRENT and handler is not None:
            return handler.arrived(node, frame)
        return order is RoundOrder.OVER

    def _hold(self, link: Link, held: HeldFrame) -> None:
        self._held.setdefault(link, deque()).appendleft(held)
        if not held.timed:
            held.timed = True
            self.node.later(HOLD_TIME, self._held_in_vain, link, held)

    def _held_in_vain(self, link: Link, held: HeldFrame) -> None:
        if link in self._held and self._held[link][0] is held:
            link.snap()

    def release(self) -> None:
        """A round or an attempt has begun: look again at what was held."""
        for link in list(self._held):
            self._go_on(link)

    def _go_on(self, link: Link) -> None:
        queue = self._held.pop(link)
        while queue:
            held = queue.popleft()
            if not self._take(held.node, held.frame):
                self._held[link] = queue
                return self._hold(link, held)
