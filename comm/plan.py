"""The coordinator's plan for one attempt of one round: who contributes, with which weight, who owns what."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from atoll.comm.errors import AtollError
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round


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
    weight: float  # relative: the mean divides by the members' sum


@dataclass(frozen=True)
class Plan:
    incarnation: Incarnation
    epoch: Epoch
    round: Round
    attempt: int
    members: tuple[PlanMember, ...]  # in the order in which contributions are summed
    owners: tuple[int, ...]  # (chunks,) owners[c] is an index into members

    @property
    def fence(self) -> Fence:
        return Fence(self.incarnation, self.epoch, self.round, self.attempt)

    def index(self, node: NodeId) -> int:
        """Where `node` stands in `members`."""
        for i, member in enumerate(self.members):
            if member.node == node:
                return i
        raise BadPlan(f"{self}: {node} is not one of its members")

    def owned(self, index: int) -> list[int]:
        """The chunks that member `index` owns."""
        return [c for c, owner in enumerate(self.owners) if owner == index]

    def validate(self) -> None:
        """Raise `BadPlan` with a sentence unless every member can carry this plan out."""
        if not self.members:
            raise BadPlan(f"{self}: it has no members")
        nodes = [member.node for member in self.members]
        for node in nodes:
            if nodes.count(node) > 1:
                raise BadPlan(f"{self}: {node} is in it {nodes.count(node)} times")
        for member in self.members:
            if not (math.isfinite(member.weight) and member.weight > 0):
                raise BadPlan(
                    f"{self}: the weight of {member.node} is {member.weight}, it must be above 0 and finite"
                )
        if not math.isfinite(sum(member.weight for member in self.members)):
            raise BadPlan(f"{self}: the sum of the weights is not finite")
        for c, owner in enumerate(self.owners):
            if not 0 <= owner < len(self.members):
                raise BadPlan(f"{self}: the owner of chunk {c} is {owner}, there are {len(self.members)} members")

    def __str__(self) -> str:
        return f"plan of round {self.round}, attempt {self.attempt}"
