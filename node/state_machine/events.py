"""The events that the node's machine hears: views, its trainer's words (`atoll.node.trainer_channel`), and what
came of its effects."""

from dataclasses import dataclass

from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.state_machine.state import Attempt, Work
from atoll.node.trainer_channel import BadArithmetic, Evaluated, Reached, Ready, Waits


@dataclass(frozen=True, slots=True)
class ViewArrived:
    """The coordinator's latest word; an older one changes nothing."""

    view: pb.View


@dataclass(frozen=True, slots=True)
class TrainerUp:
    """The trainer said hello and has its vectors."""

    layout: pb.LayoutReported  # of its model


@dataclass(frozen=True, slots=True)
class TrainerDown:
    """The trainer is gone; another is started."""


@dataclass(frozen=True, slots=True)
class TrainerSilent:
    """The trainer has made no progress for so long, nor been given an order."""

    seconds: float


@dataclass(frozen=True, slots=True)
class EncodingBegun:
    """The outcome of `Encode`: the delta of this work is encoded, or is being, and the disk has caught up."""

    work: Work
    norm: float  # l2, of the delta
    damping: float  # what the work counts: 1 unless the anchor moved under it


@dataclass(frozen=True, slots=True)
class EncodingFailed:
    """The delta of this work holds NaN or infinity: nothing of it can be used."""

    work: Work
    sentence: str  # what was wrong


@dataclass(frozen=True, slots=True)
class AttemptComplete:
    """Every sealed chunk of the attempt is here."""

    attempt: Attempt
    root: bytes  # over the sealed chunks' digests


@dataclass(frozen=True, slots=True)
class StateMoved:
    """The outer state stands still at `round`."""

    round: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """The outer state could not be moved; `round` is where it stands, -1: nowhere."""

    round: int


@dataclass(frozen=True, slots=True)
class Rejoined:
    """A new session with the coordinator: it knows nothing of this node yet."""


@dataclass(frozen=True, slots=True)
class PauseChanged:
    """The node may take no inner steps from now on, or may again. `saves_bytes`: nor exchange anything with its
    peers, as long as that lasts."""

    paused: bool
    saves_bytes: bool = False


@dataclass(frozen=True, slots=True)
class PartingAsked:
    """The node's owner wants it to leave once what it has trained is committed."""


Event = (
    ViewArrived
    | TrainerUp
    | TrainerDown
    | TrainerSilent
    | Reached
    | Ready
    | BadArithmetic
    | Waits
    | Evaluated
    | EncodingBegun
    | EncodingFailed
    | AttemptComplete
    | StateMoved
    | MoveFailed
    | Rejoined
    | PauseChanged
    | PartingAsked
)
