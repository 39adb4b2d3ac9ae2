"""What really happened in the simulated world, whatever the machines believe of it."""

import hashlib
from dataclasses import dataclass, field

from atoll.comm.ids import NodeId
from atoll.comm.plan import Fence
from atoll.coordinator import events as ev

Life = tuple[NodeId, int]
Samples = tuple[int, ...]


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def root(payloads: tuple[bytes, ...]) -> bytes:
    """As `atoll.comm.digest.root` has it: here a payload is its own digest."""
    return hashlib.blake2b(b"".join(payloads), digest_size=16).digest()


def next_state(state: bytes, sealed: bytes) -> bytes:
    """state_k from state_{k-1} and the root over the sealed chunks."""
    return digest("state", state, sealed)


@dataclass(frozen=True, slots=True)
class Contribution:
    """A node's delta: steps on these samples, beyond that state."""

    node: NodeId
    samples: Samples
    base: bytes  # digest of the state


@dataclass(frozen=True, slots=True)
class Mean:
    """The content of one sealed chunk."""

    chunk: int
    contributions: tuple[Contribution, ...]
    weights: tuple[float, ...]


@dataclass(slots=True)
class Truth:
    """The log as the coordinator's disk has it, and what the nodes really did and said."""

    roots: list[bytes] = field(default_factory=list)  # over the sealed chunks, by round; round 1 first
    states: list[bytes] = field(default_factory=list)  # digests, by round; state_0 first
    consumed: set[int] = field(default_factory=set)  # samples
    published: list[int] = field(default_factory=list)  # rounds
    fences: dict[tuple[int, int], Fence] = field(default_factory=dict)  # by (round, attempt)
    means: dict[bytes, Mean] = field(default_factory=dict)  # by payload
    sealed: dict[tuple[int, int, int], bytes] = field(default_factory=dict)  # (round, attempt, chunk), honest ones
    held: dict[tuple[Life, Fence], tuple[bytes, ...]] = field(default_factory=dict)  # payloads, by chunk
    flipped: set[NodeId] = field(default_factory=set)  # nodes that once had other bits than they should
    said: set[ev.Event] = field(default_factory=set)  # every report of every node
    seals: dict[tuple[NodeId, Fence, int], bytes] = field(default_factory=dict)  # the first that was said

    def hear(self, event: ev.Event) -> None:
        """A node reports something."""
        self.said.add(event)
        if isinstance(event, ev.Sealed):
            for chunk, seal in event.seals:
                self.seals.setdefault((event.node, event.fence, chunk), seal)
