"""Who is to own the chunks of a reduce, by what is known of the members' links. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from atoll.comm.ids import NodeId
from atoll.comm.transport.stream_policy import LONG_PATH_RTT
from atoll.coordinator.placement.bandwidth_shares import NobodyReachable, PlanNode, deal, plan_shares
from atoll.coordinator.state_machine.members import Member, MemberState
from atoll.coordinator.state_machine.state import State

# Times that links' rates differ from the usual one at most, to be taken for the same:
NEAR = 2.0  # of near links: their machines were busy
NEW = 1.6  # of links in their first FEW reduces: how soon TCP found out what they carry was chance
FEW = 4
USUAL = 1.2  # of others: losses, and what else their machines did


@dataclass(frozen=True, slots=True)
class ChunkOwners:
    nodes: Sequence[NodeId]
    shares: tuple[float, ...]
    seconds: float  # predicted; 0: nothing is known of the links

    def deal(self, chunks: int) -> tuple[NodeId, ...]:
        """Owners for so many chunks."""
        return tuple(self.nodes[i] for i in deal(self.shares, chunks))


def reducers(state: State, members: Sequence[NodeId] = ()) -> tuple[NodeId, ...]:
    """Members that only own chunks; without those that somebody could not reach in this round, or that were late
    in any, unless these members, or all participants, have nobody else to dial."""
    here, lost = state.members.here, {n for pair in state.round.lost for n in pair}
    all_ = tuple(n for n, m in here.items() if m.state is MemberState.REDUCER)
    sound = tuple(n for n in all_ if n not in lost and not here[n].late)
    needed = not sound and all(n not in here or here[n].leaf for n in members or state.round.participants)
    return all_ if needed else sound


def reachable(state: State, members: Sequence[NodeId]) -> bool:
    """Whether somebody can own a chunk."""
    here = state.members.here
    if any(n in here and not here[n].leaf for n in members):
        return True
    return any(not here[n].leaf for n in reducers(state, members))


def owning(state: State, members: Sequence[NodeId], helpers: Sequence[NodeId], chunks: int) -> ChunkOwners:
    """For a reduce among `members` and these reducers, of whom the others can dial one at least."""
    nodes, here = (*members, *helpers), state.members.here
    links = [PlanNode(here[n].up, here[n].down, here[n].leaf, n in members) for n in nodes]
    links = alike(links, [noise(here[n]) for n in nodes])
    payload = state.chunks.numel * state.config.reduce.bytes_per_element
    try:
        planned = plan_shares(links, payload, chunks=chunks)
    except NobodyReachable:  # who called has seen to it; a plan that no one can follow is refused by all
        return ChunkOwners(nodes, (1.0,) + (0.0,) * (len(nodes) - 1), 0.0)
    known = any(link.up for link in links)
    return ChunkOwners(nodes, planned.shares, planned.seconds if known else 0.0)


def noise(member: Member) -> float:
    """How many times the rates may differ that its link was seen to carry in one reduce and another."""
    if member.rtts and max(member.rtts.values()) < LONG_PATH_RTT:  # it is faster than its machine
        return NEAR
    return NEW if member.measured < FEW else USUAL


def alike(links: Sequence[PlanNode], noise: Sequence[float]) -> list[PlanNode]:
    """The links, with rates that do not differ by more than their noise taken for the same: else chance would give
    another owner most of the chunks every few rounds."""
    known = [link for link, times in zip(links, noise, strict=True) if times > 1 and link.up and link.down]
    if not known:
        return list(links)
    up, down = median(link.up for link in known), median(link.down for link in known)

    def usual(link: PlanNode, times: float) -> bool:
        return all(most / times < rate < most * times for rate, most in ((link.up, up), (link.down, down)))

    return [
        replace(link, up=up, down=down) if usual(link, times) else link
        for link, times in zip(links, noise, strict=True)
    ]
