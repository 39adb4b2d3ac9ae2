"""The coordinator's plan for one attempt of one round: who contributes, with which weight, who owns what.

A later attempt of the round continues the one before it. Members keep their places: one that is lost is marked as
gone, one that comes (back) is put at the end. A chunk whose owner stays keeps its progress; `since` tells, so that
it is the same for members that never saw the attempts between.

Where links between regions are slow, chunks may be reduced in two levels. Each region has a relay for each of
them, in the owner's region the owner itself:

    members --contributions--> relay --the region's mean, and who is in it--> owner
    members <--sealed chunk--- relay <------------- sealed chunk ------------ owner

A round's regions are those of its first attempt; who comes later belongs to none, and deals with the owners. A
chunk that loses one of its relays is flat from then on: contributions are still at hand.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from atoll.comm.errors import AtollError
from atoll.comm.ids import NO_KEY, NO_PIN, Epoch, Incarnation, NodeId, Pin, PublicKey, Round

# The owner of a chunk that was sealed by a member that is gone, until its holders are known.
NOBODY = 0xFFFF_FFFF


class InvalidPlan(AtollError):
    """A plan that no member can carry out; the coordinator's fault."""


class Fence(NamedTuple):
    """The attempt that a message of a reduce belongs to. Every message carries one, and a later attempt compares
    greater: what is fenced by an older one is dropped."""

    incarnation: Incarnation
    epoch: Epoch
    round: Round
    attempt: int


@dataclass(frozen=True)
class PlanMember:
    """One member of an attempt, and what the others must know of it."""

    node: NodeId
    address: str  # "host:port" of its data plane
    weight: float  # relative: the mean divides by the sum of those that arrived; 0: owns chunks, brings no delta
    gone: bool = False  # takes part no more; what has arrived of it counts
    leaf: bool = False  # nobody can dial it
    down: float = 0.0  # bytes a second that its link was seen to carry down; 0: not known
    pin: Pin = NO_PIN  # of the certificate that it shows; empty: the run is not encrypted
    scale: float = 1.0  # of its delta: less where that is outsized
    norm: float = math.inf  # l2 of its delta, as it told; inf: nobody looks
    key: PublicKey = NO_KEY  # what it signs is verified with


@dataclass(frozen=True)
class Plan:
    """One attempt of a round. A member's place is its index in `members`, and stays in later attempts. Every
    member carries out only what `validate` has passed."""

    incarnation: Incarnation
    epoch: Epoch
    round: Round
    attempt: int
    members: tuple[PlanMember, ...]  # in the order in which contributions are summed
    owners: tuple[int, ...]  # (chunks,) owners[c] is an index into members
    since: tuple[int, ...] = ()  # (chunks,) the attempt in which the chunk got its owner; empty: this one
    kept: frozenset[int] = frozenset()  # chunks sealed in earlier attempts; their owners hold the sealed bytes
    regions: tuple[int, ...] = ()  # region of each of the first places; places behind them have none
    relays: tuple[tuple[int, ...], ...] = ()  # (regions, chunks) relays[g][c]: index into members
    # Chunks that are reduced in two levels; the relays of others mean nothing
    layered: frozenset[int] = frozenset()
    length: float = 1.0  # of the round, in usual rounds; the same in all attempts
    # Of the round, the same in all attempts: what contributions are signed with; empty: they are not signed.
    salt: bytes = b""
    verifiers: frozenset[NodeId] = frozenset()  # may ask for contributions and receipts, beside the members
    # Seconds for which the contributions of one member alone may hold up an owner in all; 0: as long as they take.
    patience: float = 0.0

    @property
    def fence(self) -> Fence:
        """The fence of this attempt's messages."""
        return Fence(self.incarnation, self.epoch, self.round, self.attempt)

    @property
    def looks_at_norms(self) -> bool:
        """Whether owners and relays tell the norm of each contribution, since the run clips."""
        return any(member.norm < math.inf for member in self.members)

    @property
    def longest(self) -> float:
        """The l2 norm of the longest delta, as the mean takes it; inf: not all are told."""
        return max((m.norm * m.scale for m in self.members if m.weight > 0), default=math.inf)

    def index(self, node: NodeId) -> int:
        """The place of `node` in `members`. Raises `InvalidPlan` unless it takes part."""
        for i, member in enumerate(self.members):
            if member.node == node and not member.gone:
                return i
        raise InvalidPlan(f"{self}: {node} is not one of its members")

    def owned(self, index: int) -> list[int]:
        """The chunks that member `index` owns."""
        return [c for c, owner in enumerate(self.owners) if owner == index]

    def region(self, place: int) -> int:
        """The region of the member at `place`; -1: it has none."""
        return self.regions[place] if place < len(self.regions) else -1

    def destination(self, c: int, place: int) -> int:
        """The place to which the member at `place` sends its contribution to chunk `c`, and which it has the
        sealed chunk from: the relay of its region, or the owner where it is that relay or the owner. `NOBODY` if
        nobody owns the chunk."""
        if c not in self.layered or place >= len(self.regions):
            return self.owners[c]
        relay = self.relays[self.regions[place]][c]
        return self.owners[c] if relay == place else relay

    def relays_for(self, c: int, place: int) -> bool:
        """Whether the member at `place` sums chunk `c` for its region, and is not the owner."""
        if c not in self.layered or place >= len(self.regions) or place == self.owners[c]:
            return False
        return self.relays[self.regions[place]][c] == place

    def receive_shares(self, place: int) -> list[float]:
        """The share in [0, 1] of all that each member receives which the member at `place` sends it, (members,):
        contributions to the chunks that it owns, and the others' sealed chunks."""
        if self.layered:  # the relays of a chunk, or one
            return [1 / max(len(self.relays) - 1, 1)] * len(self.members)
        contributors = sum(not m.gone and m.weight > 0 for m in self.members)
        owned, chunks = Counter(self.owners), len(self.owners)
        shares = []
        for i, member in enumerate(self.members):
            contributes = member.weight > 0
            total = (contributors - contributes) * owned[i] + contributes * (chunks - owned[i])
            from_place = (self.members[place].weight > 0) * owned[i] + contributes * owned[place]
            shares.append(from_place / total if total and i != place else 0.0)
        return shares

    def validate(self) -> None:
        """Raise `InvalidPlan` with a sentence unless every member can carry this plan out."""
        here = [member for member in self.members if not member.gone]
        if not here:
            raise InvalidPlan(f"{self}: it has no members")
        node, times = Counter(member.node for member in here).most_common(1)[0]
        if times > 1:
            raise InvalidPlan(f"{self}: {node} is in it {times} times")
        for member in self.members:
            if not (math.isfinite(member.weight) and member.weight >= 0):
                raise InvalidPlan(
                    f"{self}: the weight of {member.node} is {member.weight}, it must be at least 0 and finite"
                )
            if not 0 < member.scale <= 1:
                raise InvalidPlan(f"{self}: the scale of {member.node} is {member.scale}, it must be in (0, 1]")
        if not (math.isfinite(self.length) and self.length > 0):
            raise InvalidPlan(f"{self}: its length is {self.length}, it must be above 0 and finite")
        total = sum(member.weight for member in self.members)
        if not math.isfinite(total):
            raise InvalidPlan(f"{self}: the sum of the weights is not finite")
        if not any(member.weight for member in here):
            raise InvalidPlan(f"{self}: no member has a weight above 0")
        if len(self.since) not in (0, len(self.owners)):
            raise InvalidPlan(f"{self}: it has {len(self.owners)} owners and {len(self.since)} attempts of theirs")
        for c, owner in enumerate(self.owners):
            if owner == NOBODY and c in self.kept:
                continue
            if not 0 <= owner < len(self.members):
                raise InvalidPlan(
                    f"{self}: the owner of chunk {c} is {owner}, there are {len(self.members)} members"
                )
            if self.members[owner].gone:
                raise InvalidPlan(f"{self}: the owner of chunk {c} is {self.members[owner].node}, which is gone")
        self._validate_regions()

    def _validate_regions(self) -> None:
        n, chunks = len(self.relays), len(self.owners)
        if len(self.regions) > len(self.members) or min(self.regions, default=0) < 0:
            raise InvalidPlan(f"{self}: its regions are not those of its members")
        if any(len(row) != chunks for row in self.relays) or not all(0 <= c < chunks for c in self.layered):
            raise InvalidPlan(
                f"{self}: it does not have a relay for each of {chunks} chunks in each of {n} regions"
            )
        if self.layered and max(self.regions, default=-1) + 1 != n:
            raise InvalidPlan(
                f"{self}: it has relays for {n} regions and members in {max(self.regions, default=-1) + 1}"
            )
        for c in self.layered:
            if self.region(self.owners[c]) < 0:
                raise InvalidPlan(f"{self}: the owner of chunk {c} has no region")
            for g, row in enumerate(self.relays):
                relay = row[c]
                if not 0 <= relay < len(self.regions) or self.regions[relay] != g or self.members[relay].gone:
                    raise InvalidPlan(f"{self}: the relay of chunk {c} in region {g} is {relay}")
                if g == self.region(self.owners[c]) and relay != self.owners[c]:
                    raise InvalidPlan(f"{self}: the owner of chunk {c} is not its region's relay")

    def __str__(self) -> str:
        return f"plan of round {self.round}, attempt {self.attempt}"
