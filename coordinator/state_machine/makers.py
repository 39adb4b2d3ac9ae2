"""The makers of the last commit's state that are here, and what they say that it is. Pure.

Of those that made it up to a quarter may lie, or be broken. While most of them are here the majority of these
tells which state is right (`state_sync`); when half are gone, or more, it takes more than that quarter, and the
run waits for it (`rollback`): who stays while the others' connections are broken is no majority.
"""

from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine.members import Member, MemberState
from atoll.coordinator.state_machine.state import State, order


def makers_here(state: State) -> list[Member]:
    """Those of the members that made state_committed, and did not lose it, heard lately or not."""
    makers = sorted(state.makers, key=order) if state.pending is not None else []
    return [m for n in makers if (m := state.members.here.get(n)) is not None and _made(state, m)]


def _made(state: State, member: Member) -> bool:
    """Whether it made state_committed, and did not lose it. One that came back without its state waits for its
    digest."""
    able = member.state is MemberState.ACTIVE or member.state_round == state.committed
    return able and member.node in state.makers


def votes(state: State, member: Member) -> bool:
    """Whether it is a maker of state_committed that names its digest."""
    return _made(state, member) and member.suspected is None


def voters(state: State) -> tuple[NodeId, ...]:
    """Who names the digest of state_committed: those that made it, live and did not lose it, or whoever else
    holds it."""
    return tuple(m.node for m in makers_here(state) if m.suspected is None) or state.holders


def told_digests(state: State) -> dict[NodeId, bytes]:
    """What they said that it is."""
    here = state.members.here
    return {n: m.state_digest for n in voters(state) if (m := here[n]).state_round == state.committed}


def are_too_few(state: State, votes: int) -> bool:
    """Whether all who have so many votes on the last commit's state may lie, and too few are here to tell: half of
    those that made it, or more, are gone."""
    if state.pending is None or 4 * votes > len(state.makers):
        return False
    return 2 * len(makers_here(state)) <= len(state.makers)
