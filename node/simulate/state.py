"""State of a simulated fleet: its nodes, their parts in each fragment, and the rounds under way. `fleet` moves
it."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum

import numpy as np
from numpy.typing import NDArray

from atoll.node.simulate.exchange import MemberDelta
from atoll.node.simulate.learner import SimulatedTrainer
from atoll.outer_opt.damping import AnchorGap

F32 = NDArray[np.float32]


class FleetEvent(IntEnum):
    """The events on the virtual clock."""

    STEP = 0  # the inner step of a node ends
    COMMIT = 1  # the exchange of a fragment ends
    KILL = 2
    JOIN = 3


class RoundPhase(Enum):
    """The phase of a fragment's round, as `fleet` draws them."""

    OPEN = "open"
    CLOSING = "closing"
    EXCHANGING = "exchanging"


@dataclass
class FragmentShare:
    """A node's part in one fragment."""

    steps_since: int = 0  # inner steps since its last contribution: what a round waits for
    owed: int = 0  # inner steps in its local parameters that no commit has counted
    in_flight: int = 0  # of these, the ones in the contribution that is being exchanged
    sent: F32 | None = None  # (numel,) its local parameters at that contribution
    offered: F32 | None = None  # (numel,) what it encoded then, with error feedback
    decoded: F32 | None = None  # (numel,) what the others decoded of that
    steps_after: int = 0  # inner steps since that contribution, while `sent` is there
    gap: AnchorGap = field(default_factory=AnchorGap)  # since the anchor that the owed steps were begun from
    residual: F32 | None = None  # (numel,) of error feedback
    pending: bool = False  # a commit counted its contribution, and it has not taken the new anchor yet


@dataclass
class SimulatedNode:
    """One node, alive or killed. Invariant: `busy` means that a step ends at `started + 1 / speed`."""

    number: int
    trainer: SimulatedTrainer
    joined: float
    speed: float  # inner steps a second
    shares: list[FragmentShare]
    started: float = 0.0  # when the step at hand began
    ticket: int = 0  # of the step at hand; the end of a step with another ticket means nothing
    busy: bool = False
    alive: bool = True
    stopped: float = 0.0  # since when it does not train
    idle: float = 0.0  # seconds that it did not train
    losses: list[float] = field(default_factory=list)


@dataclass
class FragmentRound:
    """The round of a fragment that is under way."""

    phase: RoundPhase = RoundPhase.OPEN
    opened: float = 0.0  # when the one before closed
    quorum: float | None = None  # when a quorum had its inner steps
    closed: float = 0.0
    due: int = 0  # inner steps that a node takes in it
    max_steps: int = 0  # inner steps that a node takes in it at most
    delay: int = 0  # inner steps after which its anchor is taken
    max_ahead: int = 0  # inner steps that a node takes at most while it is exchanged
    data_parallel: bool = False  # one of the rounds at the start of the run that have one inner step
    finishing: set[int] = field(default_factory=set)  # nodes that finish a step before they contribute
    included: dict[int, MemberDelta] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundRecord:
    """One committed round of a fragment, or the start of the run."""

    fragment: int
    round: int
    time: float  # virtual seconds
    tokens: float  # committed
    members: int
    bytes_sent: float  # by a node on average, since the start
    train_loss: float | None
    val_loss: float | None
