"""The state of the node's machine. Values only: `step` is the one who makes new ones, the daemon reads.

Each of trainer, outer state, work and reduce is a union, so that what cannot be is not written.
"""

from dataclasses import dataclass
from enum import Enum
from math import inf

from atoll.comm.leases import Range
from atoll.comm.proto import atoll_pb2 as pb

Attempt = tuple[int, int]  # (round, attempt)


# The trainer


@dataclass(frozen=True, slots=True)
class Down:
    """The trainer does not run, or has said nothing yet."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The trainer waits for an order, or initialises the model (the outer state is `Moving`, then)."""


@dataclass(frozen=True, slots=True)
class Training:
    """The trainer takes a round's inner steps."""

    round: int
    lease: tuple[Range, ...]
    fresh: bool  # it began from the anchor
    finishing: bool = False  # it was told to stop
    evaluating: bool = False  # it was to evaluate when it was told to go on, and has not answered yet

    @property
    def front(self) -> int:
        """The lease's first sample."""
        return self.lease[0][0]


@dataclass(frozen=True, slots=True)
class Ahead:
    """The trainer handed the work of `round` over, and takes the steps that follow."""

    round: int
    front: int | None  # first sample of what follows; None: the steps are of no use
    waits: bool = False  # it is as far ahead as it may be
    evaluating: bool = False
    held: bool = False  # it was told to go no further


@dataclass(frozen=True, slots=True)
class Evaluating:
    """The trainer measures the validation loss of the state of `round`, and does nothing else."""

    round: int


Trainer = Down | Idle | Training | Ahead | Evaluating


# The outer state


@dataclass(frozen=True, slots=True)
class NoState:
    """The node holds no state of any round."""

    disk_tried: bool = False  # since it fetched last, it asked its disk in vain
    unable: bool = False  # it was to make state 0, and cannot


@dataclass(frozen=True, slots=True)
class At:
    """The outer state stands still at a round."""

    round: int
    digest: bytes
    disk_tried: bool = False  # it asked its disk in vain for an older state


class Move(Enum):
    """A way in which the outer state gets from one round to another."""

    INITIALISE = "initialise"
    APPLY = "apply"  # with sealed bytes that are here
    RECOVER = "recover"  # with what peers have
    REPLACE = "replace"  # the same, of a state that is not the run's
    FALL_BACK = "fall back"  # to what the disk has
    RENUMBER = "renumber"


@dataclass(frozen=True, slots=True)
class Moving:
    """The outer state is between two rounds: nobody may read it."""

    by: Move
    before: NoState | At
    halted: bool = False  # what fetches it was told to stop


OuterPosition = NoState | At | Moving


# What was trained


@dataclass(frozen=True, slots=True)
class Work:
    """The inner steps that the local vector holds beyond the anchor: on the first `samples` of the lease."""

    round: int  # in which it was done
    lease: tuple[Range, ...]
    samples: int
    steps: int = 0  # of this round
    loss: float = 0.0  # mean over the samples that were not skipped
    norm: float = 0.0  # l2, of the local vector's distance from the anchor
    fresh: bool = True  # it began from the anchor, with nothing of earlier rounds
    skipped: int = 0  # of the samples, those whose steps were left out

    @property
    def front(self) -> int:
        """The lease's first sample."""
        return self.lease[0][0]

    @property
    def claimed(self) -> int:
        """The number of samples whose steps the local vector has."""
        return self.samples - self.skipped


@dataclass(frozen=True, slots=True)
class ReadyWork:
    """Work on the state that the node holds: its round can have it."""

    work: Work
    reported: bool = False  # the coordinator was told, and may count on it


@dataclass(frozen=True, slots=True)
class CarriedWork:
    """Work of rounds that left it out, brought to the state that the node holds: the next steps go on top."""

    work: Work


@dataclass(frozen=True, slots=True)
class UnusableWork:
    """Work that was reported and could not be encoded. The coordinator goes by that report for as long as it has
    it: other steps on these samples would count as these."""

    work: Work
    in_ledger: bool = False  # a view has said that the report is there


# The reduce


@dataclass(frozen=True, slots=True)
class Reduced:
    """Every sealed chunk of an attempt is here."""

    attempt: Attempt
    root: bytes  # over the sealed chunks' digests
    in_session: bool = True  # False: that was in an earlier session with the coordinator


@dataclass(frozen=True, slots=True)
class Reducing:
    """The node takes part in an attempt."""

    attempt: Attempt
    before: Reduced | None = None  # an earlier attempt of the round that had come to its end here


@dataclass(frozen=True, slots=True)
class FragmentTurns:
    """The memory of a node of a run whose fragments take turns: a commit takes one fragment's steps, those of the
    others stay."""

    from_local: bool = False  # the local vector has steps of other fragments: training goes on from it
    rebased: bool = False  # since the trainer handed over, the local vector was brought to another anchor
    applied: Work | None = None  # the node's work when it last applied a commit


@dataclass(frozen=True, slots=True)
class Parting:
    """The node's owner wants it to leave once nothing that it has trained waits for a commit."""

    round: int  # the last one that it takes inner steps in, but for those that hand over what it has already
    done: bool = False  # nothing does


@dataclass(frozen=True, slots=True)
class State:
    """The whole state of the node's machine, between two events."""

    stall: float = inf  # seconds without progress after which the coordinator takes a node for hung
    view: pb.View | None = None  # the latest; None: there is none of this session yet
    layout: pb.LayoutReported | None = None  # of the trainer's model; None: it has not said hello yet
    trainer: Trainer = Down()
    outer: OuterPosition = NoState()
    work: ReadyWork | CarriedWork | None = None
    reduce: Reducing | Reduced | None = None
    reached: int | None = None  # the round that has its inner steps here
    evaluated: int | None = None  # the round whose state was measured last
    trouble: str = ""  # why nothing of the latest steps could be used; empty: the latest work was sound
    bad_orders: int = 0  # in a row, of which nothing could be used
    bad_deltas: int = 0  # in a row, that could not be encoded
    doubted_round: int = 0  # the trainer's moments since that round are in doubt; 0: not, or it has dropped them
    unusable: UnusableWork | None = None
    turns: FragmentTurns | None = None  # None: a round exchanges the whole model
    paused: bool = False  # it may take no inner steps for now
    saves_bytes: bool = False  # nor exchange anything with peers
    left: bool = False  # it left a reduce to save bytes, which the coordinator may not have heard yet
    parting: Parting | None = None  # None: it stays

    @property
    def phase(self) -> str:
        """The node's activity, in the goodput meter's words: starting, recovering, inner, sync, waiting or
        paused."""
        match self.trainer:
            case Training(evaluating=True) | Ahead(evaluating=True):
                return "waiting"
            case Ahead(waits=False):
                return "inner"
        if isinstance(self.outer, Moving):
            return "sync" if self.view is not None and self.view.you == "active" else "recovering"
        if isinstance(self.trainer, Down):
            return "starting"
        if isinstance(self.outer, NoState):
            return "recovering"
        if isinstance(self.reduce, Reducing) or (self.ready is not None and self.reduce is not None):
            return "sync"
        if isinstance(self.trainer, Training):
            return "inner"
        return "paused" if self.paused else "waiting"

    @property
    def exchanges_nothing(self) -> bool:
        """Whether the coordinator is to count on nothing that goes over the links to peers."""
        return self.saves_bytes or self.left

    @property
    def round(self) -> int:
        """The round of the state that the node holds, or held when that began to move; -1: none."""
        at = self.outer.before if isinstance(self.outer, Moving) else self.outer
        return at.round if isinstance(at, At) else -1

    @property
    def ready(self) -> Work | None:
        """The work that its round can have; None: there is none."""
        return self.work.work if isinstance(self.work, ReadyWork) else None

    @property
    def carried(self) -> Work | None:
        """The work that its rounds left out, and that was brought to the node's state; None: there is none."""
        return self.work.work if isinstance(self.work, CarriedWork) else None

    @property
    def reduced(self) -> Reduced | None:
        """The latest attempt of which every sealed chunk is here."""
        return self.reduce.before if isinstance(self.reduce, Reducing) else self.reduce

    @property
    def evaluating(self) -> bool:
        """Whether the trainer is to measure a validation loss, and has not answered yet."""
        match self.trainer:
            case Training(evaluating=evaluating) | Ahead(evaluating=evaluating):
                return evaluating
            case trainer:
                return isinstance(trainer, Evaluating)

    @property
    def is_stepping(self) -> bool:
        """Whether the trainer takes inner steps that it has not handed over."""
        match self.trainer:
            case Ahead(waits=waits):
                return not waits
            case trainer:
                return isinstance(trainer, Training)

    @property
    def can_evaluate(self) -> bool:
        """Whether the trainer can measure a validation loss."""
        return self.layout is None or not self.layout.no_evaluation

    @property
    def owes_answer(self) -> bool:
        """Whether the trainer was told to do something that has an end."""
        match self.trainer:
            case Training() | Evaluating() | Ahead(evaluating=True):
                return True
            case Idle():
                return isinstance(self.outer, Moving) and self.outer.by is Move.INITIALISE
            case _:
                return False
