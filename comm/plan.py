"""The coordinator's plan for one attempt of one round: who contributes, with which weight, who owns what.

A later attempt of the round continues the one before it. Members keep their places: one that is lost is marked as
gone, one that comes (back) is put at the end. A chunk whose owner stays keeps its progress; `since` tells, so that
it is the same for members that never saw the attempts between.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from atoll.comm.certificates import NO_PIN, Pin
from atoll.comm.errors import AtollError
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round

NOBODY = 0xFFFF_FFFF  # owner of a chunk that was sealed by a member that is gone, until its holders are known


class BadPlan(AtollError):
    """A plan that no member can carry out; the coordinator's fault."""


class Fence(NamedTuple):
    """What every message of a reduce carries; a later attempt compares greater."""

    incarnation: Incarnation
    epoch: Epoch
    round: Round
    attempt: int


@dataclass(frozen=True)
class PlanMember:
    node: NodeId
    address: str  # "host:port" of its data plane
    weight: float  # relative: the mean divides by the sum of those that arrived; 0: owns chunks, brings no delta
    gone: bool = False  # takes part no more; what has arrived of it counts
    leaf: bool = False  # nobody can dial it
    down: float = 0.0  # bytes a second that its link was seen to carry down; 0: not known
    pin: Pin = NO_PIN  # of the certificate that it shows; empty: the run is not encrypted


@dataclass(frozen=True)
class Plan:
    incarnation: Incarnation
    epoch: Epoch
    round: Round
    attempt: int
    members: tuple[PlanMember, ...]  # in the order in which contributions are summed
    owners: tuple[int, ...]  # (chunks,) owners[c] is an index into members
    since: tuple[int, ...] = ()  # (chunks,) the attempt in which the chunk got its owner; empty: this one
    kept: frozenset[int] = frozenset()  # chunks sealed in earlier attempts; their owners hold the sealed bytes

    @property
    def fence(self) -> Fence:
        return Fence(self.incarnation, self.epoch, self.round, self.attempt)

    def index(self, node: NodeId) -> int:
        """Where `node` stands in `members`."""
        for i, member in enumerate(self.members):
            if member.node == node and not member.gone:
                return i
        raise BadPlan(f"{self}: {node} is not one of its members")

    def owned(self, index: int) -> list[int]:
        """The chunks that member `index` owns."""
        return [c for c, owner in enumerate(self.owners) if owner == index]

    def validate(self) -> None:
        """Raise `BadPlan` with a sentence unless every member can carry this plan out."""
        here = [member for member in self.members if not member.gone]
        if not here:
            raise BadPlan(f"{self}: it has no members")
        nodes = [member.node for member in here]
        for node in nodes:
            if nodes.count(node) > 1:
                raise BadPlan(f"{self}: {node} is in it {nodes.count(node)} times")
        for member in self.members:
            if not (math.isfinite(member.weight) and member.weight >= 0):
                raise BadPlan(
                    f"{self}: the weight of {member.node} is {member.weight}, it must be at least 0 and finite"
                )
        total = sum(member.weight for member in self.members)
        if not math.isfinite(total):
            raise BadPlan(f"{self}: the sum of the weights is not finite")
        if not any(member.weight for member in here):
            raise BadPlan(f"{self}: no member has a weight above 0")
        if len(self.since) not in (0, len(self.owners)):
            raise BadPlan(f"{self}: it has {len(self.owners)} owners and {len(self.since)} attempts of theirs")
        for c, owner in enumerate(self.owners):
            if owner == NOBODY and c in self.kept:
                continue
            if not 0 <= owner < len(self.members):
                raise BadPlan(f"{self}: the owner of chunk {c} is {owner}, there are {len(self.members)} members")
            if self.members[owner].gone:
                raise BadPlan(f"{self}: the owner of chunk {c} is {self.members[owner].node}, which is gone")

    def __str__(self) -> str:
        return f"plan of round {self.round}, attempt {self.attempt}"
