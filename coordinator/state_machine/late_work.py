"""Lateness with a round's work: who is not waited for as the round closes, and what the late owe. Pure.

When a round closes its members finish the step at hand. For whom the others wait then for longer than that takes,
who stand still meanwhile, owes them the time (`conduct.lend_time`): be it that its work comes in the end, that the
round goes on without it, or that it goes before. While it owes some, no round waits for its work for longer than
for a moment.

`rounds` and `step` call it; `lateness` does as much for those who are late in a reduce.
"""

from statistics import median

from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine.conduct import (
    MIN_OWED_SECONDS,
    WHOLE_STRIKE_SHARE,
    lend_time,
    owes_time,
)
from atoll.coordinator.state_machine.lateness import brief
from atoll.coordinator.state_machine.participants import absent, missing
from atoll.coordinator.state_machine.state import Phase, State, order


def spared(state: State, now: float) -> frozenset[NodeId]:
    """COLLECTING: those for whose work nobody waits: they owe the others time, and are behind them."""
    r = state.round
    if not state.conduct.strikes:
        return frozenset()
    usual, there = median(r.answers or (0.0,)), r.ledger.contributions
    least = brief(state, usual)
    owing = (n for n in r.participants if n not in there and owes_time(state, n))
    return frozenset(n for n in owing if now >= r.asked_at + max(least, usual + _steps(state, n, 1)))


def lend_to_the_late(state: State, now: float) -> State:
    """Have those for whose work the others waited until `now`, in seconds, owe them the time."""
    for node, seconds in _waited_for_work(state, now).items():
        state = lend_time(state, node, seconds)
    return state


def lend_to_who_goes(state: State, node: NodeId, now: float) -> State:
    """Have a participant that is about to go, or may be dead, owe the time for which the others waited for its
    work until `now`, in seconds. Where all go at once, no look at each is worth it."""
    r = state.round
    waits = r.phase is Phase.COLLECTING and r.planned_at is None and now - r.asked_at >= MIN_OWED_SECONDS
    if not waits or node not in r.participants or node in r.ledger.contributions:
        return state
    away = absent(state)
    if node in away or 2 * missing(state, away) > len(r.participants) - len(away):
        return state
    return lend_time(state, node, _waited_for_work(state, now).get(node, 0.0))


def _waited_for_work(state: State, now: float) -> dict[NodeId, float]:
    """Those for whose work the others waited until `now`, in seconds, for longer than it takes to finish a step,
    and for how long; nobody, where most are late. Who fetches the state may lack it for the others' sake."""
    r, here = state.round, state.members.here
    if r.patient_until:
        return {}  # the coordinator was away
    able = [n for n in r.participants.keys() - absent(state) if here[n].state_round == state.committed]
    usual, least = median(r.answers or (0.0,)), WHOLE_STRIKE_SHARE * state.inner_time
    told = {n: r.moments[n].contributed for n in able if n in r.moments}
    took = {n: (told.get(n) or now) - r.asked_at - usual for n in sorted(able, key=order)}
    late = [n for n, seconds in took.items() if seconds > usual + _steps(state, n, 2) + least]
    return {n: took[n] for n in late} if 2 * len(late) <= len(able) else {}


def _steps(state: State, node: NodeId, steps: int) -> float:
    """Seconds that so many inner steps take the node; 0: not known."""
    pace = state.members.here[node].pace
    return steps / pace if pace else 0.0
