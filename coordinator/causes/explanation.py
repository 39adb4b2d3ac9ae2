"""Kinds of what can be to blame for a round, explanations of one, and how the one to blame is chosen. Pure.

    breaks        something ended or was refused: a member, its trainer, a path, bytes, the state, the coordinator
    slowness      nothing broke, but the round waited: for a trainer, its data, a link
    conditions    something is wrong that the round shows no trace of: a full disk, a clock

A break outweighs slowness, which follows breaks as well; slowness outweighs a condition where it explains most of
what the round took too long, and somebody was slow. Of the same weight, what explains more seconds is the verdict.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from atoll.comm.ids import NodeId

MAX_FACTS, MAX_BESIDE = 8, 3
SLOWNESS_SHARE = (
    0.5  # of what the round took too long: a slowness that explains less is no better than a condition
)
# Of a round, so many and so much of what rounds usually take: what is less is no slowness to be explained.
MIN_EXCESS_SECONDS, MIN_EXCESS_SHARE = 0.75, 0.05


class Kind(StrEnum):
    """What can be to blame for a round."""

    DEAD = "dead"
    HUNG_TRAINER = "hung trainer"
    SLOW_COMPUTE = "slow compute"
    SLOW_LINK = "slow link"
    ONE_WAY_PARTITION = "one-way partition"
    PACKET_LOSS = "packet loss"
    DIVERGED_STATE = "diverged state"
    CORRUPT_BYTES = "corrupt bytes"
    DISK_FULL = "disk full"
    CLOCK = "clock"
    OUT_OF_MEMORY = "out of memory"
    SLOW_DATA_STORE = "slow data store"
    COORDINATOR_RESTARTED = "coordinator restarted"
    PARTITION = "partition"  # both ways, or nobody can tell which
    TRAINER_DIED = "trainer died"  # not of a lack of memory
    DISK_FAILED = "disk failed"
    PAUSED = "paused"  # as its owner wants
    LIMITED = "limited"  # no more of its link is for the exchange, as its owner wants
    LEFT = "left"
    PUT_OUT = "put out"
    UNKNOWN = "unknown"


class Confidence(StrEnum):
    """How a verdict is known."""

    SEEN = "seen"  # by the coordinator itself
    AGREED = "agreed"  # two members, or a member and the coordinator, saw the same
    TOLD = "told"  # by one member, of itself or of another
    GUESSED = "guessed"  # nothing that was seen contradicts it


class Weight(IntEnum):
    """How much an explanation counts beside others."""

    CONDITION = 1
    SLOWNESS = 2
    BREAK = 3


COORDINATOR, DATA_STORE = "coordinator", "data store"  # culprits that are no members


@dataclass(frozen=True, slots=True)
class Explanation:
    """One thing that may be to blame."""

    kind: Kind
    culprit: str  # a node's id, COORDINATOR or DATA_STORE; empty: nobody alone
    sentence: str  # what it is, with names
    weight: Weight
    seconds: float  # of the round that it explains
    confidence: Confidence
    peer: str = ""  # a node's id: the other end of a path
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was to blame for a round."""

    kind: Kind
    culprit: str  # a node's id, COORDINATOR or DATA_STORE; empty: nobody alone
    name: str  # the culprit's, for people
    peer: str  # a node's id: the other end of a path; empty: there is none, or it is all others
    peer_name: str
    sentence: str
    confidence: Confidence
    seconds: float = 0.0  # of the round that this explains
    slower: float = 0.0  # seconds that the round took longer than usual; 0 too where nothing is usual yet
    facts: tuple[tuple[str, str], ...] = ()  # (name, value)
    beside: tuple[str, ...] = ()  # sentences: what else was found


def choose(found: Iterable[Explanation], slower: float, usual: float) -> list[Explanation]:
    """The explanations of a round that took `slower` seconds longer than the `usual` ones, the one to blame
    first."""
    least = max(SLOWNESS_SHARE * slower, MIN_EXCESS_SECONDS, MIN_EXCESS_SHARE * usual)
    return sorted(
        found, key=lambda e: (-_weight(e, least), -e.seconds, list(Kind).index(e.kind), e.culprit, e.peer)
    )


def _weight(explanation: Explanation, least: float) -> float:
    if explanation.weight is not Weight.SLOWNESS:
        return explanation.weight
    if not explanation.culprit:
        return Weight.CONDITION - 0.25  # it names nobody
    return Weight.SLOWNESS if explanation.seconds >= least else Weight.CONDITION - 0.5


def verdict_of(chosen: Sequence[Explanation], slower: float, name_of: dict[NodeId, str]) -> Verdict:
    """The verdict that the first of the explanations is; there is at least one."""
    first, *rest = chosen

    def name(of: str) -> str:
        return name_of.get(NodeId(of), of)

    return Verdict(
        first.kind,
        first.culprit,
        name(first.culprit),
        first.peer,
        name(first.peer),
        first.sentence,
        first.confidence,
        min(first.seconds, slower or first.seconds),
        slower,
        first.facts[:MAX_FACTS],
        tuple(dict.fromkeys(e.sentence for e in rest))[:MAX_BESIDE],
    )
