"""Choice of the owners of a reduce's chunks, by what is known of the members' links. Pure.

`reduce.open_attempt` and `reduce_levels.choose_levels` call it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.comm.transport.stream_policy import LONG_PATH_RTT
from atoll.coordinator.placement.bandwidth_shares import NobodyReachable, PlanNode, deal, plan_shares
from atoll.coordinator.state_machine.broken_paths import without_paths
from atoll.coordinator.state_machine.conduct import may_own, owes_time
from atoll.coordinator.state_machine.members import Member, MemberState
from atoll.coordinator.state_machine.newcomers import newcomers
from atoll.coordinator.state_machine.state import State

SHARE_LIMIT = 2.0  # equal shares that a member owns at most, whatever is said of its links
# Times that links' rates differ from the usual one at most, to be taken for the same:
SHORT_PATH_NOISE = 2.0  # of near links: their machines were busy
NEW_LINK_NOISE = (
    1.6  # of links in their first NEW_LINK_REDUCES reduces: how soon TCP found out what they carry was chance
)
NEW_LINK_REDUCES = 4
LONG_PATH_NOISE = 1.2  # of others: losses, and what else their machines did


@dataclass(frozen=True, slots=True)
class ChunkOwners:
    """The members that own chunks in a reduce, with their shares of them."""

    nodes: Sequence[NodeId]
    shares: tuple[float, ...]
    seconds: float  # predicted; 0: nothing is known of the links

    def deal(self, chunks: int) -> tuple[NodeId, ...]:
        """Owners for so many chunks."""
        return tuple(self.nodes[i] for i in deal(self.shares, chunks))


def reducers(state: State, members: Collection[NodeId] = ()) -> tuple[NodeId, ...]:
    """Members that only own chunks, and are not paused; without those that somebody could not reach in this round,
    or that were late in any, or began anew in this one. Where these members, or all participants, have nobody else
    to dial, one of all in turn: together they could be kept from the round's end by one of them."""
    here, lost = state.members.here, {n for pair in state.round.lost for n in pair}
    lost |= {e.node for e in state.round.ledger.entries if e.gone and e.contribution is None}
    all_ = tuple(n for n, m in here.items() if m.trusted_as(MemberState.REDUCER) and not (m.paused or m.leaf))
    sound = tuple(n for n in all_ if n not in lost and not here[n].late)
    needed = not sound and all(n not in here or here[n].leaf for n in members or state.round.participants)
    turn = state.round.ledger.attempt % len(all_) if all_ else 0
    return all_[turn : turn + 1] if needed else sound


def reachable(state: State, members: Collection[NodeId]) -> bool:
    """Whether one of the members, or a reducer, can own a chunk."""
    here = state.members.here
    if any(n in here and not here[n].leaf and not here[n].saves_bytes for n in members):
        return True
    return any(not here[n].leaf for n in reducers(state, members))


def assign_owners(state: State, members: Sequence[NodeId], helpers: Sequence[NodeId], chunks: int) -> ChunkOwners:
    """Plan the owners of a reduce among `members` and the reducers `helpers`.

    Where nobody can be dialled the first owns everything: a plan that all refuse.
    """
    nodes, here = (*members, *helpers), state.members.here
    contributors, able = frozenset(members), able_owners(state, nodes)
    links = [PlanNode(*here[n].rates, n not in able, n in contributors) for n in nodes]
    links = smooth_rates(links, [rate_noise(here[n]) for n in nodes])
    payload = state.chunks.numel * state.config.reduce.bytes_per_element
    try:
        planned = plan_shares(links, payload, chunks=chunks, limit=SHARE_LIMIT)
    except NobodyReachable:  # who called has seen to it; a plan that no one can follow is refused by all
        return ChunkOwners(nodes, (1.0,) + (0.0,) * (len(nodes) - 1), 0.0)
    known = any(link.up for link in links)
    return ChunkOwners(nodes, planned.shares, planned.seconds if known else 0.0)


def able_owners(state: State, nodes: Sequence[NodeId]) -> frozenset[NodeId]:
    """The nodes, of `nodes`, that can be dialled and may own chunks, by the audits of this round, by their conduct
    and by their paths to each other; where that would be nobody, paths do not count, then conduct, then audits.
    Who owes the others time, or was in no exchange yet, owns nothing, unless that is so of most."""
    reachable_ = [n for n in nodes if not state.members.here[n].leaf]
    dialled = [n for n in reachable_ if n not in state.round.distrusted] or reachable_
    sound = frozenset(n for n in dialled if may_own(state, n))
    relied_on = frozenset(n for n in sound - newcomers(state, nodes) if not owes_time(state, n))
    sound = relied_on if 2 * len(relied_on) >= len(sound) else sound
    return sound - without_paths(state, nodes) or sound or frozenset(dialled)


def rate_noise(member: Member) -> float:
    """The factor by which measurements of a member's rates may differ from one reduce to another by chance."""
    if member.rtts and max(member.rtts.values()) < LONG_PATH_RTT:  # it is faster than its machine
        return SHORT_PATH_NOISE
    return NEW_LINK_NOISE if member.measured < NEW_LINK_REDUCES else LONG_PATH_NOISE


def smooth_rates(links: Sequence[PlanNode], noise: Sequence[float]) -> list[PlanNode]:
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
