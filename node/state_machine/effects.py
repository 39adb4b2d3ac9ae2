"""The effects that the node's machine asks for, each with all that is needed to carry it out."""

from dataclasses import dataclass

from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.state_machine.state import Work
from atoll.node.trainer_channel import Evaluated

# To the trainer


@dataclass(frozen=True, slots=True)
class OrderInitialisation:
    """Make state 0; answered by `StateMoved`, or by `MoveFailed` where others make it, too (`witness`) and this
    node cannot."""

    witness: bool = False


@dataclass(frozen=True, slots=True)
class OrderTraining:
    """Take the inner steps that the view orders, on what its lease has behind the first `carried` samples."""

    view: pb.View
    carried: int  # samples from the front of the lease that the local vector has
    resume: bool  # start from the local vector, for it has work; else from the anchor
    continues: bool  # the trainer has begun: its steps since it handed over go on top of the one or the other
    rebased: bool  # of a trainer that goes on: what it has of other fragments is to be rebased
    keeps_uncounted: bool  # these steps go on top of some that are to count yet, if only in other fragments
    doubted_round: int = 0  # the moments that the trainer has since that round are in doubt; 0: they are not


@dataclass(frozen=True, slots=True)
class OrderEvaluation:
    """Measure the validation loss of the state of `round`; answered by `Evaluated`."""

    round: int


@dataclass(frozen=True, slots=True)
class FinishTraining:
    """Stop after the inner step at hand; answered by `Ready`. With `rest` no step is taken ahead from there."""

    round: int
    rest: bool = False


@dataclass(frozen=True, slots=True)
class HoldTraining:
    """Go no further ahead of that round's `Ready` than the inner step at hand; answered by `Waits`."""

    round: int


@dataclass(frozen=True, slots=True)
class EndTrainer:
    """End a trainer that made no progress for `seconds`, though it owes an answer; another is started."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LeaveRun:
    """End this life of the node, which cannot train, with this sentence."""

    sentence: str


# The reduce


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode the work's delta; `EncodingBegun` when it can be reported, which the disk or the norm may delay."""

    work: Work


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Take part in a round's reduce with this work, or go on with it under this plan."""

    plan: pb.Plan
    work: Work


@dataclass(frozen=True, slots=True)
class VerifySeals:
    """Hold the sealed chunks that have the digests of this view, and say so: others were found here."""

    view: pb.View


@dataclass(frozen=True, slots=True)
class StopReduce:
    """End this node's part in the reduce under way."""


# The outer state


@dataclass(frozen=True, slots=True)
class Apply:
    """Step to the view's committed round with the sealed bytes that the reduce left here; `MoveFailed` if these
    are not the ones that it names, as some were given up under a later plan."""

    view: pb.View


@dataclass(frozen=True, slots=True)
class Recover:
    """Bring the state to the view's committed round with the peers' help. `differs`: it is of that round, and not
    the run's. With `rebase` what was trained comes along, as `outer.left_out` says."""

    view: pb.View
    differs: bool
    rebase: bool


@dataclass(frozen=True, slots=True)
class StopRecovery:
    """End the recovery under way, and keep what came; answered by `MoveFailed`, or by `StateMoved` where that was
    all."""


@dataclass(frozen=True, slots=True)
class FallBack:
    """Take the state that the disk brings back, in the place of parts of a newer one that nobody has any more;
    `MoveFailed` if it brings back none. `before`: one of an earlier round than this; 0: the newest."""

    before: int = 0


@dataclass(frozen=True, slots=True)
class Renumber:
    """Give the state the number of the view's committed round, whose state it is, too: the rounds in between are
    void."""

    view: pb.View


# Reports


@dataclass(frozen=True, slots=True)
class ReportLayout:
    """Report the layout of the trainer's model."""

    layout: pb.LayoutReported


@dataclass(frozen=True, slots=True)
class ReportState:
    """Report that the node holds the state of `round` that has this digest; empty: it cannot make state 0."""

    round: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ReportReached:
    """Report that `round` has its inner steps here; more may follow."""

    round: int


@dataclass(frozen=True, slots=True)
class ReportReady:
    """Report that the node's delta of `round` can be reduced, and what it counts."""

    round: int
    contribution: pb.ContributionReady


@dataclass(frozen=True, slots=True)
class ReportEvaluated:
    """Report what a trainer has told of a state's validation loss."""

    evaluated: Evaluated


@dataclass(frozen=True, slots=True)
class Depart:
    """End this life of the node, as its owner wants: nothing that it has trained waits for a commit."""


@dataclass(frozen=True, slots=True)
class RunFinished:
    """End this life of the node: the run is finished."""


Effect = (
    OrderInitialisation
    | OrderTraining
    | OrderEvaluation
    | FinishTraining
    | HoldTraining
    | EndTrainer
    | LeaveRun
    | Encode
    | StartReduce
    | VerifySeals
    | StopReduce
    | Apply
    | Recover
    | StopRecovery
    | FallBack
    | Renumber
    | ReportLayout
    | ReportState
    | ReportReached
    | ReportReady
    | ReportEvaluated
    | Depart
    | RunFinished
)
