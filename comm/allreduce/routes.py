"""The routes of one plan: who deals with whom about a chunk, as one of the plan's members sees it. Pure, and
without a memory."""

from collections.abc import Collection

from atoll.comm.ids import NodeId
from atoll.comm.peer_names import is_peer_host
from atoll.comm.plan import Plan, PlanMember


class Routes:
    """The plan's answers for the member `me`. A place is an index into the plan's members."""

    def __init__(self, plan: Plan, me: NodeId) -> None:
        """`InvalidPlan` if `me` is not one of its members."""
        self.plan, self.place = plan, plan.index(me)
        self.places = {m.node: i for i, m in enumerate(plan.members) if not m.gone}  # of those that are not gone
        # Places of those members that are not gone and bring a delta.
        self.contributors = {place for place in self.places.values() if self.contributes(place)}
        # Places of members that are gone and have come back since, at another one.
        self.former = {i for i, m in enumerate(plan.members) if m.gone and m.node in self.places}

    def contributes(self, place: int) -> bool:
        """Whether the member at `place` brings a delta, or brought one before it was gone."""
        return self.plan.members[place].weight > 0

    def contributes_here(self, c: int, place: int) -> bool:
        """Whether contributions of the member at `place` to chunk `c` come to this member."""
        if c not in self.plan.layered:  # this is asked often
            return self.plan.owners[c] == self.place
        return self.plan.destination(c, place) == self.place and not self.plan.relays_for(c, place)

    def serves(self, c: int, place: int) -> bool:
        """Whether the member at `place` has the sealed chunk `c` from this member."""
        receives = self.contributes(place) or self.plan.relays_for(c, place)
        return receives and self.plan.destination(c, place) == self.place

    def source(self, c: int) -> NodeId:
        """The member to which this one sends what it has of chunk `c`, and from which it has the sealed chunk: the
        owner, or a relay. The chunk has an owner."""
        return self.plan.members[self.plan.destination(c, self.place)].node

    def donor(self, c: int, besides: Collection[NodeId | None]) -> NodeId | None:
        """A member to ask for sealed chunk `c`: no leaf, nobody that is gone, none of `besides`; which one differs
        from member to member. For a chunk that is reduced in two levels it is one of this member's region, if that
        has one: the chunk enters a region once. None: nobody is left."""
        members, plan = self.plan.members, self.plan
        able = [n for n, i in self.places.items() if i != self.place and n not in besides and not members[i].leaf]
        if c in plan.layered and (region := plan.region(self.place)) >= 0:
            able = [n for n in able if plan.region(self.places[n]) == region]
        return able[(c + self.place) % len(able)] if able else None


def links(plan: Plan, me: NodeId) -> list[tuple[PlanMember, bool]]:
    """The members to which `me` has links under the plan, and whether it dials each first: who is harder to dial
    does, and of two alike the one that came into the round before. Two leaves have no link."""
    place = plan.index(me)
    own = plan.members[place]
    others = [
        (i, m) for i, m in enumerate(plan.members) if not m.gone and i != place and not (m.leaf and own.leaf)
    ]
    return [(m, (_openness(own), place) < (_openness(m), i)) for i, m in others]


def _openness(member: PlanMember) -> int:
    """How easily a member is dialled: a leaf not at all, who is behind a gateway only by those that have one."""
    return 0 if member.leaf else 1 if is_peer_host(member.address.rpartition(":")[0]) else 2
