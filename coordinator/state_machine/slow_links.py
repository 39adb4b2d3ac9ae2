"""Members whose links are so slow that all others would wait for them: they take part in some of the rounds. Pure.

A reduce takes as long as its slowest contributor needs to send its vector and to receive the result, whoever owns
what. A member may be that slow, or say so. What all would need if none were slower than the faster two thirds, and
a tenth of the round's inner time more, is what a reduce may take by its plan's prediction; who needs more is left
out of it, its work counts in a later one, and after k rounds it has the tenths of all of them: so it costs the
others a tenth of their time, whether its link is slow or it says so. Those that wait go in together, as the
slowest alone counts. Nothing is held against them.

`in_turn` is asked as a round's first attempt is about to open.
"""

from collections.abc import Sequence

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.changes import with_round
from atoll.coordinator.state_machine.chunk_owners import assign_owners, reachable, reducers
from atoll.coordinator.state_machine.events import Effect, Note
from atoll.coordinator.state_machine.members import Member
from atoll.coordinator.state_machine.state import State, order

EXTRA_SHARE = 0.1  # of the round's inner time
MIN_EXTRA_SECONDS = 15.0
MAX_SLOW_SHARE = 3  # at most a third of the members are slow: of more it is the usual speed


def in_turn(state: State, members: tuple[NodeId, ...], out: list[Effect]) -> tuple[State, tuple[NodeId, ...]]:
    """The members, of `members`, that the reduce goes on with; the state remembers the others."""
    if state.config.overlap.delay or not (slow := _too_slow(state, members, 1)):
        return state, members
    turns = 1 + max(state.members.here[n].turns for n in slow)
    slow = _too_slow(state, members, turns)
    left = tuple(n for n in members if n not in slow)
    if not slow or len(left) < max(state.config.members.minimum, 2) or not reachable(state, left):
        return state, members
    for node in sorted(slow, key=order):
        link = f"its link is slow ({min(state.members.here[node].rates):.3g} B/s)"
        work = "its work counts in a later one"
        out.append(Note(f"round {state.round.number}: {state.name(node)} is left out: {link}, {work}", node))
    return with_round(state, replace(state.round, slow=frozenset(slow))), left


def _too_slow(state: State, members: Sequence[NodeId], turns: int) -> list[NodeId]:
    """The members whose links make the reduce longer than it may be, where they had no part in it for so many
    rounds, this one included: the fewest of the slowest."""
    here = state.members.here
    by_speed = sorted((n for n in members if min(here[n].rates) > 0), key=lambda n: (min(here[n].rates), order(n)))
    may = turns * max(MIN_EXTRA_SECONDS, EXTRA_SHARE * state.inner_time)
    fewest, enough = 0, min(len(members) // MAX_SLOW_SHARE, len(by_speed) - 1)  # that are left out
    most = _seconds(state, members, by_speed, enough) + may if enough > 0 else 0.0
    while fewest < enough:
        middle = (fewest + enough) // 2
        if _seconds(state, members, by_speed, middle) <= most:
            enough = middle
        else:
            fewest = middle + 1
    return by_speed[: max(enough, 0)]


def _seconds(state: State, members: Sequence[NodeId], by_speed: Sequence[NodeId], slowest: int) -> float:
    """The predicted seconds of a reduce among the members, if so many of the slowest were as fast as the next one.
    (Without them it would be shorter, too, for being among fewer.)"""
    here = state.members.here
    least = min(here[by_speed[slowest]].rates)
    raised = {n: _at_least(here[n], least) for n in by_speed[:slowest]}
    state = replace(state, members=replace(state.members, here=here | raised))
    return assign_owners(state, members, reducers(state, members), state.chunks.count).seconds


def _at_least(member: Member, rate: float) -> Member:
    up, down = (max(rate, known) for known in member.rates)
    return replace(member, up=up, down=down, seen_up=up, seen_down=down)
