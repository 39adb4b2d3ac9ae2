"""Who is to own the chunks of a reduce, by what is known of the members' links. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.comm.ids import NodeId
from atoll.coordinator.membership import MemberState
from atoll.coordinator.shares import NobodyReachable, Node, deal, plan_shares
from atoll.coordinator.state import State


@dataclass(frozen=True, slots=True)
class Owning:
    nodes: Sequence[NodeId]
    shares: tuple[float, ...]
    seconds: float  # predicted; 0: nothing is known of the links

    def deal(self, chunks: int) -> tuple[NodeId, ...]:
        """Owners for so many chunks."""
        return tuple(self.nodes[i] for i in deal(self.shares, chunks))


def reducers(state: State) -> tuple[NodeId, ...]:
    """Members that only own chunks; without those that somebody could not reach in this round."""
    here, lost = state.members.here, {n for pair in state.round.lost for n in pair}
    return tuple(n for n, m in here.items() if m.state is MemberState.REDUCER and n not in lost)


def reachable(state: State, members: Sequence[NodeId]) -> bool:
    """Whether somebody can own a chunk."""
    here = state.members.here
    return any(n in here and not here[n].leaf for n in (*members, *reducers(state)))


def owning(state: State, members: Sequence[NodeId], chunks: int) -> Owning:
    """For a reduce among `members`, of whom one at least is `reachable`, and the reducers."""
    nodes, here = (*members, *reducers(state)), state.members.here
    links = [Node(here[n].up, here[n].down, here[n].leaf, n in members) for n in nodes]
    payload = state.chunks.numel * state.config.reduce.bytes_per_element
    try:
        planned = plan_shares(links, payload, chunks=chunks)
    except NobodyReachable:  # who called has seen to it; a plan that no one can follow is refused by all
        return Owning(nodes, (1.0,) + (0.0,) * (len(nodes) - 1), 0.0)
    known = any(link.up for link in links)
    return Owning(nodes, planned.shares, planned.seconds if known else 0.0)
