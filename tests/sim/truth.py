"""What really happened in the simulated world, whatever the machines believe of it."""

import hashlib
from dataclasses import dataclass, field

from atoll.comm import digest as sums
from atoll.comm.ids import NodeId
from atoll.comm.plan import Fence
from atoll.comm.roster import RosterMember
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.ledger import Entry

CHUNK = 10  # elements
Life = tuple[NodeId, int]
Samples = tuple[int, ...]


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def root(payloads: tuple[bytes, ...]) -> bytes:
    """Here a payload is its own digest."""
    return sums.root(payloads)


def next_state(state: bytes, sealed: bytes) -> bytes:
    """state_k from state_{k-1} and the root over the sealed chunks."""
    return digest("state", state, sealed)


def norm(node: NodeId, samples: int) -> float:
    """What a node says of the norm of its delta: every fifth one's is outsized, as far as honest work can be."""
    return (1.0 + samples % 3 / 10) * (4.0 if int(node[1:]) % 5 == 0 else 1.0)


@dataclass(frozen=True, slots=True)
class Contribution:
    """A node's delta: steps on these samples, beyond that state."""

    node: NodeId
    samples: Samples
    base: bytes  # digest of the state
    behind: Samples = ()  # all samples whose steps it has: where fragments take turns, those of earlier rounds too
    vague: bool = False  # it is known for fewer
    times: float = 1.0  # its norm, in norms that its node told
    turned: bool = False  # by its node, against the last round's


@dataclass(frozen=True, slots=True)
class Mean:
    """The content of one sealed chunk."""

    chunk: int
    contributions: tuple[Contribution, ...]
    weights: tuple[tuple[float, float], ...]  # weight and scale of each
    length: float  # of the round, in usual rounds


@dataclass(slots=True)
class Truth:
    """The log as the coordinator's disk has it, and what the nodes really did and said."""

    roots: list[bytes] = field(default_factory=list)  # over the sealed chunks, by round; round 1 first
    states: list[bytes] = field(default_factory=list)  # digests, by round; state_0 first
    consumed: set[int] = field(default_factory=set)  # samples
    spent: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # samples behind the deltas that were
    # committed, by fragment and chunk
    withheld: set[int] = field(default_factory=set)  # samples of who left while they could be committed
    contributed: dict[tuple[Life, int], Samples] = field(default_factory=dict)  # by round
    tokens: int = 0  # committed
    credited: dict[int, dict[NodeId, int]] = field(default_factory=dict)  # tokens, by round that is not void
    joined: dict[NodeId, tuple[str, str]] = field(default_factory=dict)  # key and owner
    tokens_at: dict[int, int] = field(default_factory=lambda: {0: 0})  # by round
    void: set[int] = field(default_factory=set)  # rounds
    void_roots: dict[int, bytes] = field(default_factory=dict)  # of these, by round, as they were committed
    published: list[int] = field(default_factory=list)  # rounds
    fences: dict[tuple[int, int], Fence] = field(default_factory=dict)  # by (round, attempt)
    vast: set[bytes] = field(default_factory=set)  # payloads that are longer than any delta
    means: dict[bytes, Mean] = field(default_factory=dict)  # by payload
    sealed: dict[tuple[int, int, int], bytes] = field(default_factory=dict)  # (round, since, chunk), honest ones
    held: dict[tuple[NodeId, int], set[tuple[bytes, ...]]] = field(default_factory=dict)  # payloads, by round
    flipped: set[NodeId] = field(default_factory=set)  # nodes that once had other bits than they should
    outsized: set[tuple[NodeId, int]] = field(default_factory=set)  # who sent more than it told, by round
    hurried: set[NodeId] = field(default_factory=set)  # of whose samples some were not believed, for want of time
    framed: dict[int, set[NodeId]] = field(default_factory=dict)  # who said so of others that did not, by round
    turned: set[tuple[NodeId, int]] = field(default_factory=set)  # whose delta was turned, by round
    slandered: dict[int, set[NodeId]] = field(default_factory=dict)  # who said so of others' deltas, by round
    lied: set[int] = field(default_factory=set)  # rounds in which a member lied about bytes
    sessions: dict[str, NodeId] = field(default_factory=dict)  # by secret
    rosters: dict[tuple[int, int], dict[NodeId, RosterMember]] = field(
        default_factory=dict
    )  # by incarnation and view
    lives: set[Life] = field(default_factory=set)  # that joined
    hosts: dict[NodeId, str] = field(default_factory=dict)  # on which a node last joined
    decisions: list[ev.Decision] = field(default_factory=list)  # that became durable
    said: set[ev.Event] = field(default_factory=set)  # every report of every node
    seals: dict[tuple[NodeId, int, int, int], tuple[bytes, bytes]] = field(default_factory=dict)  # the first
    # that was said: digest and inputs, by (owner, round, since, chunk)
    foretold: set[tuple[NodeId, int, int, int, bytes, bytes]] = field(default_factory=set)  # the same, lies of
    # attempts that were still to come: they may arrive in time, or before
    entries: dict[int, tuple[Entry, ...]] = field(default_factory=dict)  # of the ledger, by round
    began: dict[int, int] = field(default_factory=dict)  # the attempt in which these begin, by round
    owners: dict[tuple[int, int, int], NodeId | None] = field(default_factory=dict)  # (round, since, chunk)

    def hear(self, event: ev.Event) -> None:
        """A node reports something."""
        self.said.add(event)
        if isinstance(event, ev.ChunksSealed):
            for chunk, sum_, told in event.seals:
                if inputs := told.rstrip(b"\0"):
                    key = event.node, event.fence.round, event.fence.attempt, chunk
                    if any(r == event.fence.round and a >= event.fence.attempt for r, a in self.fences):
                        self.seals.setdefault(key, (sum_, inputs))
                    else:
                        self.foretold.add((*key, sum_, inputs))
