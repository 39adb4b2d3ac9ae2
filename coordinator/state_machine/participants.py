"""Participants of a round that it does not wait for, and how many are left. Pure.

`rounds` asks as a round is under way, `late_work` when it closes.
"""

from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine.state import State


def out_of_reach(state: State) -> frozenset[NodeId]:
    """Participants that may be dead."""
    suspects = state.members.suspects
    return suspects.intersection(state.round.participants) if suspects else suspects


def saving_bytes(state: State) -> frozenset[NodeId]:
    """Participants that exchange nothing for now, whatever they have trained."""
    saving = state.members.saving
    return saving.intersection(state.round.participants) if saving else saving


def without_steps(state: State) -> frozenset[NodeId]:
    """Participants from whom nothing came, and nothing is waited for, since their trainers take no steps."""
    r, idle = state.round, state.members.idle
    if not idle:
        return idle
    return idle.intersection(r.participants) - r.reached - r.ledger.contributions.keys()


def absent(state: State) -> frozenset[NodeId]:
    """Participants that a round does not wait for."""
    return out_of_reach(state) | without_steps(state) | saving_bytes(state)


def counted(state: State) -> int:
    """The number of participants that count for `members.minimum`."""
    return len(state.round.participants) - len(without_steps(state) | saving_bytes(state))


def missing(state: State, away: frozenset[NodeId]) -> int:
    """Participants that can be waited for and have not contributed."""
    r = state.round
    there = r.ledger.contributions
    return len(r.participants) - len(away) - len(there) + sum(n in there for n in away)
