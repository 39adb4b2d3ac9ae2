"""What can happen to a run, as the state machine is told it, and what the machine asks for in return.

Every event but `Heard` is durable: the shell journals it before any effect of it leaves. Times are seconds on
the coordinator's own clock; nothing in an event is a peer's idea of the time.
"""

from dataclasses import dataclass, field

from atoll.comm.ids import NodeId


@dataclass(frozen=True, slots=True)
class Started:
    """The coordinator came up for the `incarnation`-th time."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Joined:
    node: NodeId
    name: str
    address: str  # data plane, host:port
    session: str


@dataclass(frozen=True, slots=True)
class Connected:
    """The node opened its stream of views."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The node's stream of views broke."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat: volatile, moves the lease and the progress only."""

    node: NodeId
    phase: str
    round: int
    inner_step: int


@dataclass(frozen=True, slots=True)
class LayoutKnown:
    node: NodeId
    numel: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StateAt:
    node: NodeId
    round: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class BecameReady:
    node: NodeId
    round: int
    steps: int
    tokens: int
    samples: int
    loss: float
    delta_norm: float
    first_sample: int  # of the lease it was trained on


@dataclass(frozen=True, slots=True)
class Sealed:
    node: NodeId
    round: int
    attempt: int
    seals: tuple[tuple[int, bytes], ...]  # (chunk, digest)


@dataclass(frozen=True, slots=True)
class Held:
    node: NodeId
    round: int
    attempt: int
    digest: bytes  # root over the sealed chunks' digests
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    node: NodeId
    round: int
    loss: float


@dataclass(frozen=True, slots=True)
class PeerLost:
    """`node` lost its connection to `peer` during an attempt."""

    node: NodeId
    peer: NodeId
    round: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Leaving:
    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Expired:
    """The member is out by the clock: `membership.overdue` knows heartbeats, the journal does not."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: grace windows and deadlines may have run out."""


Event = (
    Started
    | Joined
    | Connected
    | Disconnected
    | Heard
    | LayoutKnown
    | StateAt
    | BecameReady
    | Sealed
    | Held
    | Evaluated
    | PeerLost
    | Leaving
    | Expired
    | Tick
)


@dataclass(frozen=True, slots=True)
class Note:
    """A decision and its reason, for the log, the page and the researcher."""

    sentence: str
    node: NodeId | None = None


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One outer step, as everybody will remember it."""

    round: int
    epoch: int
    attempts: int
    members: tuple[NodeId, ...]
    contributors: dict[NodeId, float]  # weight: the tokens each contributed
    tokens: int  # committed by the run, this round included
    train_loss: float  # token-weighted mean over the contributors
    seconds: dict[str, float]
    bytes_up: dict[NodeId, int]
    bytes_down: dict[NodeId, int]
    reason: str  # why the round closed when it did
    sealed_digest: str  # hex; root over the sealed chunks
    state_digest: str = ""  # hex; of anchor and momentum after the step
    digests: dict[NodeId, str] = field(default_factory=dict)  # what each member found
    digests_equal: bool = False
    val_loss: float | None = None  # of the anchor after the step


@dataclass(frozen=True, slots=True)
class Publish:
    """A commit record is complete: to be kept and shown, once."""

    record: CommitRecord


Effect = Note | Publish
