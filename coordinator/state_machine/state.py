"""The coordinator's knowledge of the run: frozen records, and the few ways in which all parts change them."""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from itertools import islice
from math import inf
from statistics import median_low

from msgspec import Struct

from atoll.comm.chunks import Chunks
from atoll.comm.config.run import RunConfig
from atoll.comm.evidence import Evidence
from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.comm.ids import NodeId, PublicKey
from atoll.comm.plan import Fence
from atoll.comm.strikes import Strikes
from atoll.coordinator.causes.account import Account
from atoll.coordinator.causes.explanation import Verdict
from atoll.coordinator.causes.observations import Observations, Standing
from atoll.coordinator.causes.slowness import RoundPace
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.credit import CreditBook
from atoll.coordinator.state_machine.events import (
    AuditReported,
    CommitRecord,
    OrphansFound,
    ReduceComplete,
)
from atoll.coordinator.state_machine.leases import Leases
from atoll.coordinator.state_machine.ledger import Ledger
from atoll.coordinator.state_machine.members import Members, MemberState
from atoll.coordinator.state_machine.run_layout import RunLayout


class Phase(StrEnum):
    """Phase of a round; `step` draws the way from one to the next."""

    WAITING = "waiting"  # for members
    INNER = "inner"  # everybody trains
    COLLECTING = "collecting"  # the round closes: members finish their step and say what they have
    REDUCING = "reducing"
    FINISHED = "finished"


WITHOUT_MODEL = (MemberState.JOINING, MemberState.REDUCER)
TRAINING = (Phase.INNER, Phase.COLLECTING, Phase.REDUCING)
CLOSING = (Phase.COLLECTING, Phase.REDUCING)
Pair = tuple[NodeId, NodeId]
SealedBytes = tuple[int, int, bytes]  # of this chunk, its owner's since this attempt, with this digest
Doubt = tuple[NodeId, bool, NodeId]  # of this member's delta, or of its means, as this one tells; empty: all
Sample = tuple[tuple[int, ...], frozenset[tuple[int, int]]]  # chunks, of these: (chunk, its owner's since)
Told = tuple[NodeId, SealedBytes, int]  # by this member, of these, in this attempt


class AttemptState(Struct, frozen=True, gc=False):
    """The attempt in force, beyond what the ledger knows of it."""

    fence: Fence
    opened_at: float  # seconds; later where the coordinator was away since
    # seconds; the same, or since when all is sealed: what is waited for has its time from here
    stage_at: float = 0.0
    orphans: dict[NodeId, OrphansFound] = {}  # who has told which of them it holds
    predicted: float = 0.0  # seconds; 0: nothing is known of the links
    expected: float = 0.0  # the same, by what exchanges took of late, too; 0: neither is known
    patience: float = 0.0  # seconds for which one contributor may hold up an owner; 0: as long as it takes
    # who asked all in vain for which chunks
    missing_chunks: dict[NodeId, tuple[int, ...]] = {}
    forged: frozenset[Pair] = frozenset()  # who told that who gave other bytes than the ledger's
    # seconds; when owners sealed what they sealed last
    sealed_at: dict[NodeId, float] = {}
    # seconds; when members said that they hold everything
    held_at: dict[NodeId, float] = {}


class Parties(Struct, frozen=True, gc=False):
    """Who has something to show of a sealed chunk, by place."""

    owner: int
    relays: frozenset[int]  # besides the owner
    keys: dict[int, PublicKey]  # of all: the owner, the relays, and who contributed


class Look(Struct, frozen=True, gc=False):
    """What a member told of the length of one chunk of another's delta; `norms` alone makes it."""

    node: NodeId  # whose delta it is, or whose mean of a region
    of_mean: bool
    chunk: int
    voice: NodeId  # who told
    square: float  # of the norm


class Audit(Struct, frozen=True, gc=False):
    """The audit of one sealed chunk; `audit` alone changes it.

    Invariant: who has a voice is named.
    """

    chunk: int
    since: int  # the attempt in which its owner got it
    owner: NodeId
    digest: bytes  # that was sealed
    inputs: bytes  # bitmap of the places whose contributions were
    parties: Parties  # as they were when it was opened
    seconds: float  # that an auditor has
    wanted: int  # auditors, as long as they find what was sealed
    norms: bytes = b""  # of what the owner merged, as it told them
    # of what relays averaged, by their places, as they told them; empty: of other inputs
    sums: dict[int, bytes] = {}
    named: dict[NodeId, float] = {}  # auditors; seconds: until when they may answer
    asked: dict[NodeId, float] = {}  # since when they may, in seconds
    took: tuple[float, ...] = ()  # seconds of the answers so far
    voices: dict[NodeId, AuditReported] = {}  # what they found
    away: frozenset[NodeId] = frozenset()  # that were named, and lost their sessions once
    silent: frozenset[NodeId] = frozenset()  # that were named, and found nothing
    busy: frozenset[NodeId] = frozenset()  # of these, who said that they came to it too late
    wide: bool = False  # all able members are named


class Grace(Struct, frozen=True, gc=False):
    """The wait of a round that has its quorum for the others."""

    node: NodeId  # the last one that may make it
    until: float  # seconds


class Moments(Struct, frozen=True, gc=False):
    """When a participant did what the round waits for, in seconds; 0: not yet."""

    reached: float = 0.0  # it had its inner steps
    contributed: float = 0.0
    sealed: float = 0.0  # its latest chunk
    complete: float = 0.0  # it had all


class Inquiry(Struct, frozen=True, gc=False):
    """The inquiry into a committed round that was slow, or in which something failed; `inquiry` alone changes
    it."""

    seen: Observations  # without what is told by accounts
    asked: frozenset[NodeId] = frozenset()  # for an account
    accounts: dict[NodeId, Account] = {}
    until: float = 0.0  # seconds; nobody is waited for longer
    # members that brought nothing to the round, of whom the heartbeats have not been asked yet
    unheard: frozenset[NodeId] = frozenset()
    closed: bool = False  # nobody is waited for any more
    named: Verdict | None = None  # what was noted


class RoundState(Struct, frozen=True, gc=False):
    """The round under way: who takes part, what they told, and the reduce."""

    number: int = 1
    phase: Phase = Phase.WAITING
    reason: str = "no member yet"
    started_at: float = 0.0  # seconds
    # seconds; when the round before closed: with overlap, its makers' steps since count here
    opened_at: float = 0.0
    # in the order in which they first joined; seconds: when each was first counted in the round
    participants: dict[NodeId, float] = {}
    reached: frozenset[NodeId] = frozenset()  # have taken the round's inner steps
    reached_at: float | None = None  # seconds; when they became a quorum
    grace: Grace | None = None  # since then
    closed_at: float | None = None  # seconds; when the members were told to finish
    asked_at: float = 0.0  # seconds; the same, or later: an attempt failed, or not all could hear it then
    planned_at: float | None = None  # seconds; when the first attempt was
    away: dict[NodeId, float] = {}  # seconds; for which that waited, as they and many more may have been dead
    story: str = ""  # why it closed, and why attempts failed: the commit record's reason
    # seconds; nobody is left out before: the coordinator was away, or the last commit's state in doubt
    patient_until: float = 0.0
    held: bool = False  # everybody has all chunks, and the commit waits until the last one's state is known
    # its latest attempt whose plan some may not have had in time: the coordinator was away, or just back
    half_told: int = 0
    slow: frozenset[NodeId] = frozenset()  # whose links are too slow for its reduce: their work counts later
    paused_until: float = 0.0  # seconds; no attempt before: the last one failed and the next is no better
    lost: tuple[Pair, ...] = ()  # whose connections broke in its attempts, once for each time
    accused: frozenset[Pair] = frozenset()  # of these: who said that it could not reach whom
    answers: tuple[float, ...] = ()  # seconds that members took to finish, when told
    ledger: Ledger = Ledger()
    plan: AttemptState | None = None
    completions: dict[NodeId, ReduceComplete] = {}  # members that have every sealed chunk
    # told the digests: members that said so and had others, and all that lack chunks then
    wrong: frozenset[NodeId] = frozenset()
    stragglers: dict[NodeId, float] = {}  # seconds; when those few were told the digests
    forgers: frozenset[NodeId] = frozenset()  # who gave other bytes than the ledger's, as others told
    settled: frozenset[NodeId] = frozenset()  # who held, or lacked, what the ledger says in an attempt before
    clipped: dict[NodeId, int] = {}  # of whose delta, which the run needs, the norm was raised, and how often
    looks: tuple[Look, ...] = ()  # of earlier attempts, at deltas that were longer than told
    # The attempt, and its chunks that were audited for what one, or all, told of a delta, or of a relay's means
    doubted: dict[Doubt, tuple[int, Sample]] = {}
    reopened: int = 0  # attempts for what was told of deltas and could be audited no more
    untold: frozenset[int] = frozenset()  # chunks that were audited as a relay told nothing of its part of them
    broke_off: dict[NodeId, int] = {}  # who ended attempts, without a session and out of reach, and how many
    interrupted: dict[NodeId, float] = {}  # seconds that were lost as it could not be reached, nor had a session
    withdrawn: frozenset[NodeId] = frozenset()  # whose delta was longer than told, and is left out
    sealed_at: float = 0.0  # seconds; when the last chunk was sealed
    salt: bytes = b""  # what its contributions are signed with; empty: they are not
    audits: dict[int, Audit] = {}  # that are not over, by chunk
    audited: dict[int, Audit] = {}  # that are over, and found it well, by chunk
    outsized: frozenset[Told] = frozenset()  # of what was sealed, as members told
    distrusted: frozenset[NodeId] = frozenset()  # who is to own nothing in this round, though nothing is proven
    levels: int = 1  # of its first attempt
    predictions: dict[str, float] = {}  # seconds, of the plans there were to choose from
    # For who asks later why it took so long; nothing else follows from these.
    moments: dict[NodeId, Moments] = {}
    gone: dict[NodeId, Standing] = {}  # participants that went
    farewells: dict[NodeId, int] = {}  # of these, incidents that they told when they left
    changed: dict[NodeId, int] = {}  # whose state changed in memory: so many chunks
    # who told that who gave other bytes than the ledger's, in whichever attempt
    spoiled: tuple[Pair, ...] = ()
    late: frozenset[NodeId] = frozenset()  # who did not finish an attempt in its time
    idled: frozenset[NodeId] = frozenset()  # that were waited for in vain, and rest from then on
    restarts: int = 0  # of the coordinator
    stalled: float = 0.0  # seconds in which the journal took no writes
    # measures the validation loss of the state this round starts from; None: it is measured, or nobody can
    evaluator: NodeId | None = None


class CommittedState(Struct, frozen=True, gc=False):
    """A commit's state, which its digest proves."""

    round: int
    digest: bytes
    tokens: int  # committed


class UnnamedState(Struct, frozen=True, gc=False):
    """The last commit's state but one, of which too few had told what it is when the next round was committed."""

    round: int
    tokens: int  # committed
    makers: frozenset[NodeId]
    took_part: frozenset[NodeId]  # in the round, the makers among them
    fleet: int  # members


class LostState(Struct, frozen=True, gc=False):
    """The time since which nobody holds the state of the last commit, or too few to be believed, and who came back
    in it."""

    seen_at: float  # seconds; when the coordinator last looked, about
    at: float = inf  # seconds; since when nobody has it and an older one is proven, or it is tied
    lost_at: float = inf  # seconds; the same, or later: who had it was here again, too few to be believed
    doubted_at: float = inf  # seconds; since when they were
    silent_at: float = inf  # seconds; since when the run waits for those that made it to say which it is
    alone_at: float = inf  # seconds; since when those here that tell it agree, and nobody proves the one before
    # lives that are trusted and may bring it, and whether they are connected
    returned: frozenset[tuple[NodeId, int, bool]] = frozenset()
    returned_at: float = 0.0  # seconds; when the last of these came, was connected, or was heard again
    all_back_at: float | None = None  # seconds; since when nobody is away who may bring it


class BrokenPath(Struct, frozen=True, gc=False):
    """Two members that could not reach each other, and the rounds in which they could not."""

    pair: Pair  # in the order in which they joined
    rounds: tuple[int, ...]  # ascending
    once: frozenset[int] = frozenset()  # the rounds in which that was once, and neither of them broke with others
    blinks: frozenset[int] = frozenset()  # the rounds in which it broke only as one of them had no session
    blinked: frozenset[NodeId] = frozenset()  # who that was: so one word was enough


class ConductBook(Struct, frozen=True, gc=False):
    """The book of what is held against members, by their keys; `conduct` and `broken_paths` write it."""

    strikes: dict[str, Strikes] = {}  # by `conduct.identity`, the latest last
    # Doubtful evidence of the round under way, with the identity it is against: it counts at the commit, unless it
    # is against most members.
    doubtful: tuple[tuple[NodeId, str, Evidence], ...] = ()
    broken: tuple[BrokenPath, ...] = ()  # `broken_paths` keeps them, the latest last
    # By identity, the latest last: the round whose exchange its member last left by its own will, to save bytes or
    # with a good-bye; `conduct` keeps them.
    exchanges_left: dict[str, int] = {}
    # Likewise: the latest round in which an audit of what its member made came to no end.
    unaudited: dict[str, int] = {}
    decisions: int = 0  # so far


class Beginning(Struct, frozen=True, gc=False):
    """What members said of the run's model and of state 0; `beginning` alone changes it."""

    layouts: dict[NodeId, RunLayout] = {}  # by who told it, until two agree
    settled: bool = False  # two have told the run's layout
    asked: dict[NodeId, float] = {}  # seconds; who is to make state 0, since when
    made: dict[NodeId, bytes] = {}  # digest of what each made itself; empty: it could not
    took: float = 0.0  # seconds that the first of these took for it
    first: bytes = b""  # digest of the state 0 that the run began with
    agreed: bytes = b""  # the same, once a second member made it, too

    def has_others(self, node: NodeId) -> bool:
        """Whether others than this node were the first to be asked for state 0, or made one."""
        return next(iter(self.asked), node) != node or any(d for n, d in self.made.items() if n != node)


class Replay(Struct, frozen=True, gc=False):
    """A contributor's round, for a verifier to replay; `replay` alone changes it."""

    round: int
    node: NodeId  # the contributor
    who: str  # its `conduct.identity`
    life: int  # the verifier's
    lease: data.Lease  # the samples that are in its work
    steps: int
    tokens: int  # committed before the round
    fleet: int  # participants of the round
    digest: bytes  # of the state that the round began with
    chunks: tuple[int, ...]  # that are compared
    places: tuple[int, ...]  # in the plan: the contributor's, then those of others
    expires: float  # seconds; nothing is waited for longer
    since: tuple[int, ...] = ()  # attempts in which the chunks got their owners; empty: not all are sealed yet
    until: float = 0.0  # seconds; until when the commit waits for the chunks to be shown
    seconds: float = 0.0  # of that
    shown: bool = False  # the chunks are with the verifier


class ReplayBook(Struct, frozen=True, gc=False):
    """The replays under way, and what came of earlier ones; `replay` alone changes it."""

    tasks: dict[NodeId, Replay] = {}  # by verifier
    valid: dict[str, int] = {}  # by identity: replays that were well since one was not
    # by identity, the latest last: whether the latest that decided anything found it well
    latest: dict[str, bool] = {}
    # by identity, the latest last: those of the verifiers that it showed nothing since it showed one of them some
    unshown: dict[str, frozenset[str]] = {}
    warm: dict[NodeId, tuple[int, int]] = {}  # by verifier: its life, and replays in it
    before: dict[NodeId, int] = {}  # by verifier: first sample of its latest replay


class State(Struct, frozen=True, gc=False):
    """The run as `step` knows it; the journal rebuilds it from the events."""

    config: RunConfig
    incarnation: int = 0
    nonce: bytes = b""  # secret: what is drawn follows from it
    epoch: int = 0
    # The round above the members: what changes with most events is compared first.
    round: RoundState = RoundState()
    members: Members = Members()
    layout: tuple[int, bytes] | None = None  # numel and digest of the run's flat vector
    fragments: tuple[int, ...] = ()  # elements of each, if they take turns
    committed: int = 0  # the last committed round; 0: the initial state
    digest: bytes = b""  # of state_committed; empty: no member has told yet
    sealed: bytes = b""  # root over the sealed chunks of round `committed`
    # Contributors of round `committed`: they can make its state by themselves.
    makers: frozenset[NodeId] = frozenset()
    # Others of its exchange, for whom the commit did not wait: they may hold the chunks by now, or its state.
    unawaited: frozenset[NodeId] = frozenset()
    fleet: int = 0  # members at that commit, those that were away for a few rounds among them
    known_lately: dict[NodeId, int] = {}  # who took part in a round lately, and the last one in which it did
    losses_at_commit: int = 0  # `members.losses` when its makers made it
    tokens: int = 0  # committed
    beginning: Beginning = Beginning()
    initial_val_loss: float | None = None
    leases: Leases = Leases()
    pending: CommitRecord | None = None  # the last commit, until its digests and validation loss are in
    past: tuple[CommittedState, ...] = ()  # earlier commits, the latest last
    unnamed: UnnamedState | None = None  # the latest of them, where it is not among `past`
    # with error feedback, of each node the last committed round that has bytes of it, and a bitmap of the chunks
    # of that round that have none
    last_counted: dict[NodeId, tuple[int, bytes]] = {}
    # where fragments take turns: of each node and fragment, samples committed with others since a commit had the
    # node's delta of this one
    earlier: dict[NodeId, tuple[int, ...]] = {}
    has_until_member: bool = False  # a commit had the member without which the run does not end
    lost_state: LostState | None = None  # who has the state, or is to say what it is, is waited for
    tied: bool = (
        False  # those who made the last commit's state made different ones, and no more of one than another
    )
    conduct: ConductBook = ConductBook()
    replays: ReplayBook = ReplayBook()
    expulsions: int = 0  # members that were put out for what they did: each has the run's key changed
    credit: CreditBook = CreditBook()  # of `tokens`, all that were committed since the run keeps accounts
    paces: tuple[RoundPace, ...] = ()  # of the rounds before, by which the next are judged
    inquiry: Inquiry | None = None  # into the round of `pending`
    blamed: tuple[str, str, str] = ("", "", "")  # kind, culprit and peer of the verdict on the latest record

    @property
    def holders(self) -> tuple[NodeId, ...]:
        """Living members that hold state_committed."""
        return tuple(n for n, m in self.members.here.items() if m.state_round == self.committed)

    @property
    def state_held(self) -> bool:
        """Whether a living member holds state_committed."""
        return self.committed in self.members.holding

    @property
    def state_given(self) -> bool:
        """Whether a living member holds state_committed, and does not keep it to itself to save bytes."""
        holders = self.members.holding.get(self.committed, 0)
        silent = (self.members.here[n] for n in self.members.saving)
        return holders > sum(m.state_round == self.committed for m in silent)

    @property
    def state_lost(self) -> bool:
        """Whether nobody here gives the state of the last commit to others, or can make it from what it holds."""
        if not self.committed or self.round.phase is Phase.FINISHED or self.state_given:
            return False
        here, saving = self.members.here, self.members.saving
        makers = (n for n in self.makers if n in here and n not in saving)
        return not any(here[n].state is who.MemberState.ACTIVE for n in makers)

    @property
    def awaited_members(self) -> frozenset[NodeId]:
        """Members whose trainers the run waits for."""
        r = self.round
        late: set[NodeId] = set()
        if r.phase in (Phase.INNER, Phase.COLLECTING):
            late = {n for n in r.participants if n not in r.ledger.contributions and n not in self.members.idle}
        if r.phase is Phase.INNER:
            late -= r.reached
        late -= self._fetching(late) if late else set()
        return frozenset(
            late | {*self.beginning.asked} | {n for n in (r.evaluator,) if n is not None and self._evaluates(n)}
        )

    def awaits(self, node: NodeId) -> bool:
        """Whether the run waits for this member's trainer."""
        r = self.round
        if node in self.beginning.asked or (node == r.evaluator and self._evaluates(node)):
            return True
        if r.phase not in (Phase.INNER, Phase.COLLECTING) or node in r.ledger.contributions:
            return False
        done = (r.phase is Phase.INNER and node in r.reached) or node in self.members.idle
        return not done and node in r.participants and not self._fetching({node})

    def _evaluates(self, node: NodeId) -> bool:
        """Whether it is not paused: who is measures nothing."""
        member = self.members.here.get(node)
        return member is None or not member.paused

    def _fetching(self, nodes: set[NodeId]) -> set[NodeId]:
        """Those that cannot train yet: they fetch the state, or would if it could be had."""
        here, there = self.members.here, bool(self.digest) and self.state_given
        lack = {n for n in nodes if here[n].state_round != self.committed}
        return {n for n in lack if not there or here[n].phase in ("sync", "recovering")}

    def has_other_layout(self, numel: int, digest: bytes, fragments: tuple[int, ...]) -> bool:
        """Whether the run's flat vector is known, and laid out otherwise than so."""
        return self.layout is not None and (self.layout, self.fragments) != ((numel, digest), fragments)

    @property
    def turns(self) -> FragmentSchedule:
        return FragmentSchedule(len(self.fragments) or 1)

    @property
    def fragment(self) -> int:
        """The fragment that this round exchanges, from 0."""
        return self.turns.fragment(self.round.number)

    @property
    def chunks(self) -> Chunks:
        """The chunks of this round's fragment. Only once the layout is known."""
        assert self.layout is not None
        return Chunks((self.fragments or self.layout[:1])[self.fragment], self.config.reduce.chunk)

    @property
    def steps(self) -> int:
        """Inner steps of this round."""
        rounds, number = self.config.rounds, self.round.number
        return 1 if number <= rounds.data_parallel else self.turns.steps(number, rounds.inner_steps)

    @property
    def most_steps(self) -> int:
        """Inner steps that a member takes in this round at most."""
        together = self.round.number <= self.config.rounds.data_parallel
        return 1 if together else max(self.steps, int(self.steps * self.config.rounds.ceiling))

    @property
    def inner_time(self) -> float:
        """Seconds that the round's inner steps take the quorum: by pace, for it may have waited as well; 0: not
        known. Of an even number the slower one in the middle counts: half of them may claim any pace."""
        here = self.members.here
        paces = [here[n].pace for n in self.round.reached if n in here and here[n].pace]
        return self.steps / median_low(paces) if paces else 0.0

    @property
    def lease(self) -> int:
        """Samples that one node can use in one round, and until the next one begins."""
        longest = -(-self.config.rounds.inner_steps // self.turns.fragments)
        most = max(longest, int(longest * self.config.rounds.ceiling))
        ahead = max(longest, self.config.overlap.delay) if self.config.overlap.delay else 0
        return (most + ahead) * self.config.inner.batch_size

    def name(self, node: NodeId) -> str:
        member = self.members.here.get(node) or self.members.departed.get(node)
        return member.name if member is not None else str(node)

    def names(self, nodes: Iterable[NodeId], count: int | None = None) -> str:
        """The names of a few members; of many, the first five and how many more.

        `count`: how many nodes there are, where that is known: of many that is all that is said, without a look.
        """
        if count is None:
            nodes = tuple(nodes)
            count = len(nodes)
        elif count > 5:
            return f"{count} members"
        shown = ", ".join(self.name(n) for n in islice(nodes, 5))
        return f"{shown} and {count - 5} more" if count > 5 else shown


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def order(node: NodeId) -> int:
    """Nodes in the order in which they first joined."""
    return int(node[1:])


def exchanges(state: State, node: NodeId) -> bool:
    """Whether the attempt in force counts on the node."""
    r = state.round
    if r.phase is not Phase.REDUCING or (r.held and node in r.completions):
        return False
    return any(e.node == node and not e.gone for e in r.ledger.entries)


def most_common(votes: dict[NodeId, bytes]) -> tuple[bytes, int]:
    """The value that most gave, and how many did."""
    return Counter(votes.values()).most_common(1)[0] if votes else (b"", 0)
