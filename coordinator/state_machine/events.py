"""Events that the state machine of a run takes in, and the effects that it asks for in return.

Every event but `Heartbeat` is durable: the shell journals it before any effect of it leaves. Times are seconds on
the coordinator's own clock; nothing in an event is a peer's idea of the time. `life` says which of a node's joins
an event belongs to, `fence` which attempt of a reduce: what is late is refused by them.
"""

from msgspec import Struct

from atoll.comm.evidence import Consequence, Evidence
from atoll.comm.ids import NO_KEY, NO_PIN, NodeId, Pin, PublicKey
from atoll.comm.plan import Fence
from atoll.coordinator.causes.account import Account
from atoll.coordinator.causes.explanation import Verdict


class Started(Struct, frozen=True, gc=False):
    """The coordinator came up for the `incarnation`-th time."""

    incarnation: int
    nonce: bytes = b""  # random, and secret: what this incarnation draws follows from it


class HeardNobody(Struct, frozen=True, gc=False):
    """The coordinator could hear nobody for a while: it was stopped, its disk was full, or its port answers no
    calls."""

    seconds: float = 0.0  # that it stood still; 0: its port answers no calls


class Joined(Struct, frozen=True, gc=False):
    """A node was admitted, for the first time or again under its old id."""

    node: NodeId
    life: int
    name: str
    address: str  # data plane, host:port
    session: str
    leaf: bool = False  # nobody can dial it
    role: str = ""  # "reducer": owns chunks, has no trainer
    pin: Pin = NO_PIN  # of the certificate that its data plane shows
    key: PublicKey = NO_KEY  # the node's for its life: it proved that it has the secret half
    invite: int = 0  # number of the invite that it came with; 0: not known
    owner: str = ""  # whom the invite is for; empty: not known
    version: str = ""  # of its software, as it says; empty: not known


class Connected(Struct, frozen=True, gc=False):
    """The node opened its stream of views."""

    node: NodeId
    life: int


class Disconnected(Struct, frozen=True, gc=False):
    """The node's stream of views broke."""

    node: NodeId
    life: int


class Heartbeat(Struct, frozen=True, gc=False):
    """A heartbeat: volatile, moves the lease and the progress only."""

    node: NodeId
    life: int
    phase: str
    round: int
    inner_step: int
    paused: bool = False  # it says that it may take no steps for now
    saves_bytes: bool = False  # nor exchange anything with peers; then it is paused, too


class LayoutReported(Struct, frozen=True, gc=False):
    """The node has built its model and says how its flat vector is laid out."""

    node: NodeId
    life: int
    numel: int
    digest: bytes
    fragments: tuple[int, ...] = ()  # elements of each, if there is more than one
    evaluates: bool = True  # its trainer can measure a validation loss


class StateReported(Struct, frozen=True, gc=False):
    """The node holds state_round."""

    node: NodeId
    life: int
    round: int
    digest: bytes


class StateRepaired(Struct, frozen=True, gc=False):
    """Chunks of the node's state changed by themselves."""

    node: NodeId
    life: int
    round: int
    chunks: int
    whole: bool  # all are again what they were
    disk: bool = False  # not in its memory: so many files on its disk


class StepsReached(Struct, frozen=True, gc=False):
    """The node has taken the round's inner steps, and takes more until the round closes."""

    node: NodeId
    life: int
    round: int


class Contribution(Struct, frozen=True, gc=False):
    """The work behind one member's delta: what the member told of it, and what the run adds in the ledger."""

    samples: int  # from the front of its lease, earlier rounds' uncommitted ones included
    steps: int  # inner steps of this round
    loss: float  # mean over the samples
    norm: float  # l2, of the delta
    front: int = 0  # first sample of the lease it was trained on
    damping: float = 1.0  # of late work: by how far the anchor went meanwhile
    fresh: bool = False  # nothing of earlier rounds is in it
    skipped: int = 0  # of the samples, those whose steps were left out: the lease goes on behind them
    # The run adds these when it enters the contribution.
    life: int = 0  # of the member that made it
    earlier: int = 0  # samples committed with other fragments, whose steps are in this one's delta as well
    untimely: int = 0  # of the samples, those for whose steps there was no time: they count for nothing

    @property
    def claimed(self) -> int:
        """Samples whose steps are in the delta, and may be: what weights, tokens and the loss are of."""
        return self.samples - self.skipped - self.untimely


class ContributionReady(Struct, frozen=True, gc=False):
    """The node stopped training and can contribute."""

    node: NodeId
    life: int
    round: int
    contribution: Contribution


class ChunksSealed(Struct, frozen=True, gc=False):
    """An owner has merged chunks and sent them to the members."""

    node: NodeId
    life: int
    fence: Fence  # its attempt is the one in which the node got the chunks
    seals: tuple[tuple[int, bytes, bytes], ...]  # (chunk, digest, bitmap of the places in the plan that are in it)
    # l2 of each term of each seal as it was merged, by place, fp32, little-endian; empty: it tells none
    norms: tuple[bytes, ...] = ()
    # (chunk, bitmap of places, norms of their contributions) of what the node averaged as its region's relay
    sums: tuple[tuple[int, bytes, bytes], ...] = ()
    # Of each seal, and of each of the sums: l2 of the delta that an earlier round sealed of the chunk, then each
    # term's length along it, fp32, little-endian; empty: it tells none
    dots: tuple[bytes, ...] = ()
    sum_dots: tuple[bytes, ...] = ()


class OrphansFound(Struct, frozen=True, gc=False):
    """The node tells which of the sealed chunks without an owner it holds."""

    node: NodeId
    life: int
    fence: Fence
    here: tuple[tuple[int, bytes], ...]  # (chunk, digest)


class ReduceComplete(Struct, frozen=True, gc=False):
    """The node has every sealed chunk of the attempt."""

    node: NodeId
    life: int
    fence: Fence
    digest: bytes  # root over the sealed chunks' digests
    bytes_up: int
    bytes_down: int
    up: float = 0.0  # bytes a second that its link carried at best; 0: not known
    down: float = 0.0
    rtts: tuple[tuple[NodeId, float], ...] = ()  # seconds to other members
    inside: float = (
        0.0  # bytes a second that it sent at best to members of its region, and to others; 0: not known
    )
    outside: float = 0.0
    proven: bool = False  # each chunk is the ledger's: its digests were told
    # of other members: bytes a second that came from each at best, and that each took
    seen: tuple[tuple[NodeId, float, float], ...] = ()
    incidents: int = 0  # of the round, that the node tells: bits, as `atoll.comm.incidents.mask` has them


class RoundAccounted(Struct, frozen=True, gc=False):
    """The node, which was asked, accounts for the round."""

    node: NodeId
    life: int
    round: int
    account: Account


class AuditReported(Struct, frozen=True, gc=False):
    """What the node found when it recomputed a sealed chunk."""

    node: NodeId
    life: int
    fence: Fence  # its attempt is the one in which the chunk got its owner
    chunk: int
    digest: bytes = b""  # of what the inputs come to; empty: it cannot be told, or they come to nothing
    receipts: tuple[bytes, ...] = ()  # the owner's, then its relays', as they came (`atoll.comm.receipts`)
    silent: tuple[int, ...] = ()  # places of those who did not give what was asked
    shown: bytes = b""  # of a contribution that is not the receipt's: its record
    relay: int | None = None  # place of a relay whose mean is not what its inputs come to
    norms: bytes = b""  # of what the owner merged, as a seal has them; empty: not told
    sums: tuple[tuple[int, bytes], ...] = ()  # of what relays averaged: place, norms
    busy: bool = False  # nothing: it came to it too late to know whose fault it is that something lacks


class Likeness(Struct, frozen=True, gc=False):
    """Likeness of a delta to the delta of the contributor whose work is replayed."""

    cosine: float
    ratio: float  # of l2 norms, the delta's over that of the contributor's


class ReplayReported(Struct, frozen=True, gc=False):
    """The node, a verifier, has something to say of the contributor's work of the round."""

    node: NodeId
    life: int
    round: int
    contributor: NodeId
    shown: bool  # chunks of what it contributed are here; else it did not show them
    work: Likeness | None = None  # of its work as it was replayed; None: that is not compared yet
    others: tuple[Likeness, ...] = ()  # of others' deltas of the round


class Passage(Struct, frozen=True, gc=False):
    """What the model wrote when its loss was measured, as the evaluator says: for people to read."""

    node: NodeId
    prompt: str  # validation data that it was to go on with
    text: str


class LossEvaluated(Struct, frozen=True, gc=False):
    """The evaluator measured the validation loss of the state of `round`."""

    node: NodeId
    life: int
    round: int
    loss: float
    passage: Passage | None = None


class ChunkForged(Struct, frozen=True, gc=False):
    """A sealed chunk as the peer gave it to the node is not what the ledger says."""

    node: NodeId
    life: int
    peer: NodeId
    fence: Fence
    chunk: int


class SealOutsized(Struct, frozen=True, gc=False):
    """The owner of a chunk since the fence's attempt sealed what no merge of the round's deltas can be, as the
    node has it."""

    node: NodeId
    life: int
    fence: Fence
    chunk: int  # the largest of its chunks
    digest: bytes  # of the chunk as it came to the node
    times: float  # how long they are together, in lengths of the longest delta


class ChunksMissing(Struct, frozen=True, gc=False):
    """The node was told the ledger's digests, and nobody gave it these sealed chunks so."""

    node: NodeId
    life: int
    fence: Fence
    chunks: tuple[int, ...]


class PeerUnreachable(Struct, frozen=True, gc=False):
    """`node` lost its connection to `peer` during an attempt."""

    node: NodeId
    life: int
    peer: NodeId
    fence: Fence
    reason: str


class ReportsRefused(Struct, frozen=True, gc=False):
    """The service's word that reports of the node are refused, as they are more than a member has to make."""

    node: NodeId
    life: int


class Leaving(Struct, frozen=True, gc=False):
    """The node says good-bye."""

    node: NodeId
    life: int
    reason: str
    incidents: int = 0  # of the round, that the node tells: bits, as `atoll.comm.incidents.mask` has them


class Suspected(Struct, frozen=True, gc=False):
    """The clock's verdict (`members.judge`) that the node may be dead."""

    node: NodeId
    life: int
    reason: str


class SuspicionCleared(Struct, frozen=True, gc=False):
    """The clock's verdict that a suspected node is heard again."""

    node: NodeId
    life: int


class Stepped(Struct, frozen=True, gc=False):
    """The heartbeats' first news in this life of the node that its trainer takes inner steps."""

    node: NodeId
    life: int


class Paused(Struct, frozen=True, gc=False):
    """The heartbeats' news that the node takes no inner steps for now, as its owner wants."""

    node: NodeId
    life: int
    saves_bytes: bool = False  # nor does it exchange anything with peers


class Resumed(Struct, frozen=True, gc=False):
    """The heartbeats' news that the node may take inner steps again."""

    node: NodeId
    life: int


class TrainersSeen(Struct, frozen=True, gc=False):
    """The heartbeats' word on members of a round that an inquiry is about and that brought nothing to it: (node,
    inner steps that it told of the round, seconds since it told of any progress)."""

    round: int
    told: tuple[tuple[NodeId, int, float], ...]


class Expired(Struct, frozen=True, gc=False):
    """The clock's verdict that the node is out."""

    node: NodeId
    life: int
    reason: str
    stalled: bool = False  # its trainer hung while the run waited for it
    silence: float = 0.0  # seconds for which it was not heard


class Banned(Struct, frozen=True, gc=False):
    """The operator puts the node out for good, and who has its key."""

    node: NodeId
    reason: str = ""


class Pardoned(Struct, frozen=True, gc=False):
    """The operator holds nothing against the node any more, or against who has or had its key."""

    node: NodeId
    reason: str = ""


class WritesResumed(Struct, frozen=True, gc=False):
    """The journal takes writes again, after so many seconds in which it did not."""

    seconds: float


class Tick(Struct, frozen=True, gc=False):
    """Time passed: grace windows and deadlines may have run out."""


Event = (
    Started
    | HeardNobody
    | Joined
    | Connected
    | Disconnected
    | Heartbeat
    | LayoutReported
    | StateReported
    | StateRepaired
    | StepsReached
    | ContributionReady
    | ChunksSealed
    | OrphansFound
    | ReduceComplete
    | LossEvaluated
    | ChunkForged
    | SealOutsized
    | ChunksMissing
    | AuditReported
    | ReplayReported
    | RoundAccounted
    | PeerUnreachable
    | ReportsRefused
    | Leaving
    | Suspected
    | SuspicionCleared
    | Stepped
    | Paused
    | Resumed
    | TrainersSeen
    | Expired
    | Banned
    | Pardoned
    | WritesResumed
    | Tick
)


Ruling = Banned | Pardoned  # of the operator on a node


class Note(Struct, frozen=True, gc=False):
    """A decision and its reason, for the log, the page and the researcher."""

    sentence: str
    node: NodeId | None = None
    round: int = 0  # that it is about, where it may come in a later one; 0: the one under way, or none
    # Of a note on a slow or failed round; `record.verdict` is the same, once the record is complete.
    verdict: Verdict | None = None


class Decision(Struct, frozen=True, gc=False):
    """A decision of the run on evidence against a member: to be kept, once, with its number."""

    number: int  # counts the run's decisions, from 1
    node: NodeId
    key: str  # hex of the node's public key; empty: not known
    round: int  # that was under way
    evidence: Evidence
    consequence: Consequence
    weight: float = 0.0  # of all strikes that the key has now
    name: str = ""  # the node's
    invite: int = 0  # number of the invite that it came with; 0: not known


class TrainerFigures(Struct, frozen=True, gc=False):
    """What a contributor's trainer told of its inner steps when it last took some; 0: not known."""

    tokens_per_s: float = 0.0
    mfu: float = 0.0  # model FLOPs utilisation of its devices
    gradient_norm: float = 0.0
    learning_rate: float = 0.0
    data_wait: float = 0.0  # share of the inner steps' time spent waiting for data


class Failure(Struct, frozen=True, gc=False):
    """A member's failure and what it cost: told when the round in which it was noticed is committed, and again,
    with the same number, once the member trains again."""

    number: int  # counts the run's failures, from 1
    node: NodeId
    round: int  # that was under way when it was noticed
    reason: str
    at: float  # seconds since 1970; when all was well with the member for the last time
    detected: float  # seconds from then until the run noticed
    recovered: float | None = None  # seconds from then until it trained again, or was heard again; None: not yet
    lost: float = 0.0  # seconds of its inner steps that no commit has
    waited: float = 0.0  # node-seconds that the others waited and exchanged beyond what is usual


class CommitRecord(Struct, frozen=True, gc=False):
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
    shares: dict[NodeId, float] = {}  # of the chunks that each owned in the end
    predicted: float = 0.0  # seconds of the reduce, by the plan; 0: nothing was known of the links
    rates: dict[NodeId, tuple[float, float]] = {}  # bytes a second up, down; by the plan
    levels: int = 1  # 2: the first attempt was planned in two levels
    predictions: dict[str, float] = {}  # seconds: "flat", "two_level"; empty: not known
    regions: tuple[tuple[NodeId, ...], ...] = ()  # of the first attempt's members; empty: all are near
    norms: dict[NodeId, float] = {}  # l2 of each contributor's delta, as it told
    lacking: dict[int, tuple[NodeId, ...]] = {}  # chunk: contributors that are not in it
    scales: dict[NodeId, float] = {}  # of contributors' deltas that were outsized, or late
    # (first, count) that the round consumed, of those who were members to its end
    samples: dict[NodeId, tuple[tuple[int, int], ...]] = {}
    state_digest: str = ""  # hex; of anchor and momentum after the step
    digests: dict[NodeId, str] = {}  # what each member found
    digests_equal: bool | None = None  # None: nobody has told
    val_loss: float | None = None  # of the anchor after the step
    fragment: int = 0  # that was exchanged, from 0
    void: bool = False  # its state was lost with all who held it: it is as if it had not been
    committed_at: float = 0.0  # seconds since 1970
    names: dict[NodeId, str] = {}  # of members and contributors
    losses: dict[NodeId, float] = {}  # of each contributor, mean over its samples
    # of each member: seconds from the first plan of the reduce until it had every sealed chunk
    exchange: dict[NodeId, float] = {}
    verdict: Verdict | None = None  # who or what was to blame, where the round was slow or something failed
    passage: Passage | None = None  # of the anchor after the step
    # The service adds these when it keeps the record.
    config_digest: str = ""  # hex; of the run's config
    decisions: tuple[Decision, ...] = ()  # since the record before, with their evidence
    figures: dict[NodeId, TrainerFigures] = {}  # of contributors
    goodput: dict[str, float] = {}  # node-seconds in each bucket, since the run began
    # of each node: seconds in each bucket since the record before, zeros left out. What was open there and has
    # come to an end since is less than nothing here (`coordinator/service/goodput.py`)
    spent: dict[NodeId, dict[str, float]] = {}
    failures: tuple[Failure, ...] = ()  # noticed, or over, since the record before


class Publish(Struct, frozen=True, gc=False):
    """A commit record is complete: to be kept and shown, once."""

    record: CommitRecord


Effect = Note | Publish | Decision
