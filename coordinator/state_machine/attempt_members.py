"""The members of a round's next attempt: who contributed and is not known to hold it up. Pure."""

from collections import Counter
from collections.abc import Collection
from math import ceil

from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine import broken_paths
from atoll.coordinator.state_machine.chunk_owners import reachable, reducers
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.state import State, order

MAX_BROKEN_OFF = 2  # attempts of a round that one may end so, whoever is needed


def attempt_members(state: State, now: float) -> tuple[NodeId, ...]:
    """Members for another attempt; none: the run waits. Where enough remain, a quorum of those who contributed and
    are not out yet, it leaves out who could not reach others, who may be dead, and who broke an attempt off: what
    has its part in it can be audited by nobody meanwhile. Else a few could be alone in an attempt which the others
    cannot be in for a moment."""
    r, least = state.round, max(state.config.members.minimum, 1)
    saving, trusted = state.members.saving, state.members.trusted
    ready = tuple(n for n in r.participants if n in r.ledger.contributions and n not in saving)
    fast = tuple(n for n in ready if n not in r.slow)
    need = max(least, ceil(state.config.rounds.quorum * len(fast)), min(2, len(fast)))
    rest = tuple(n for n in fast if r.broke_off.get(n, 0) < MAX_BROKEN_OFF)
    back = tuple(n for n in rest if trusted(n))
    sound = tuple(n for n in back if n not in r.broke_off)
    tiers = (sound, back, rest if len(rest) >= least else ready)
    connected = [_connected(state, some, least) for some in tiers]
    members = next((some for some in connected if len(some) >= need), connected[-1])
    return members if len(members) >= least and reachable(state, members) and now >= r.paused_until else ()


def _connected(state: State, members: tuple[NodeId, ...], need: int) -> tuple[NodeId, ...]:
    """Leave out whoever broke with one other member twice, or with two: worst first, of two alike the one that was
    not left out the last time, or joined last; but not who alone can be dialled. If fewer than `need` would
    remain, nobody is."""
    left = members
    while worst := worst_of(state, left, _alone(state, left)):
        left = tuple(n for n in left if n != worst)
    return left if len(left) >= need else members


def _alone(state: State, members: tuple[NodeId, ...]) -> set[NodeId]:
    """Whom the others have to reach: the one that can be dialled, and reducers. Who says that it cannot reach a
    reducer is not the only one."""
    here = state.members.here
    able = {n for n, m in here.items() if m.trusted_as(MemberState.REDUCER) and not (m.paused or m.leaf)}
    dialled = able.union(n for n in members if not here[n].leaf)
    return dialled if len(dialled) == 1 else set(reducers(state))


def worst_of(state: State, members: tuple[NodeId, ...], spared: Collection[NodeId] = ()) -> NodeId | None:
    """Whoever broke with one other member twice in the round, or with two, and with most of all; None: nobody but
    those `spared`."""
    known = {*members, *reducers(state)}
    times = Counter(pair for pair in state.round.lost if known.issuperset(pair))
    partners = Counter(n for pair in times for n in pair)
    bad = {n for pair, k in times.items() for n in pair if k > 1 or partners[n] > 1}
    if not (suspects := bad.difference(spared)):
        return None
    here, culprits = state.members.here, broken_paths.culprits(state)
    return max(suspects, key=lambda n: (partners[n], n in culprits, -here[n].missed, order(n)))
