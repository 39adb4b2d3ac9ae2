"""What the fleet remembers of its nodes and of the rounds under way."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum

import numpy as np
from numpy.typing import NDArray

from atoll.node.simulate.exchange import MemberDelta
from atoll.node.simulate.learner import SimulatedTrainer
from atoll.outer_opt.late import Staleness

F32 = NDArray[np.float32]


class FleetEvent(IntEnum):
    STEP = 0  # the inner step of a node ends
    COMMIT = 1  # the exchange of a fragment ends
    KILL = 2
    JOIN = 3


class NodePhase(Enum):
    OPEN = "open"
    CLOSING = "closing"
    TRAVELS = "travels"


@dataclass
class FragmentShare:
    """A node's part in one fragment."""

    since: int = 0  # inner steps since its last contribution: what a round waits for
    owed: int = 0  # inner steps in its local parameters that no commit has counted
    flying: int = 0  # of these, the ones in the contribution that travels
    sent: F32 | None = None  # its local parameters at that contribution
    offered: F32 | None = None  # what it encoded then, with error feedback
    decoded: F32 | None = None  # and what the others decoded
    after: int = 0  # inner steps since then
    gap: Staleness = field(default_factory=Staleness)  # to the anchor that what it owes was begun from
    residual: F32 | None = None
    pending: bool = False  # a commit counted its contribution, and it has not taken the new anchor yet


@dataclass
class SimulatedNode:
    number: int
    trainee: SimulatedTrainer
    joined: float
    speed: float  # inner steps a second
    shares: list[FragmentShare]
    started: float = 0.0  # when the step at hand began
    ticket: int = 0  # of the step at hand; another one's end means nothing
    busy: bool = False
    alive: bool = True
    stopped: float = 0.0  # since when it does not train
    idle: float = 0.0  # seconds that it did not train
    losses: list[float] = field(default_factory=list)


@dataclass
class FragmentRound:
    """The round of a fragment that is under way."""

    phase: NodePhase = NodePhase.OPEN
    opened: float = 0.0  # when the one before closed
    quorum: float | None = None  # when a quorum had its inner steps
    closed: float = 0.0
    due: int = 0  # inner steps that a node takes in it
    most: int = 0  # that one takes in it at most
    delay: int = 0  # inner steps after which its anchor is taken
    ahead: int = 0  # inner steps that a node takes at most while it travels
    together: bool = False  # one of those at the start that have one inner step
    waits: set[int] = field(default_factory=set)  # nodes that finish a step
    included: dict[int, MemberDelta] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundRecord:
    """One committed round, or the start."""

    fragment: int
    round: int
    time: float  # virtual seconds
    tokens: float  # committed
    members: int
    bytes_sent: float  # by a node on average, since the start
    train_loss: float | None
    val_loss: float | None
