"""Bounds on how many samples a contribution counts for, by the time that there was to train on them. Pure.

Nobody sees a node train. But it cannot have trained before its last work was counted, or it had joined; nor, by
more than a margin, faster than it was found to be, or than the fastest of the others is in this round. What it
claims beyond that counts for nothing in weights, tokens and the loss; its lease goes on behind it all the same.

    samples <= batch * max(ceiling, margin * pace * seconds)

The ceiling: what everybody may take in a round (`rounds.ceiling`), so a claim of one round's work is never
bounded. The margin is the same in rounds, and 1.5 at least: the pace of those who made the round close times its
seconds is a round's steps, so neither is work of several rounds that a node was left out of, if it trained in all
of them. `reduce.open_attempt` calls this.

Nobody is blamed: a node may have become faster. How much a claim may weigh is bounded besides
(`security.weight_bound`): where there was time enough, that is what holds.
"""

from collections.abc import Iterable, Mapping
from heapq import nlargest
from math import inf
from typing import NamedTuple

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.changes import with_round
from atoll.coordinator.state_machine.events import Contribution, Effect, Note
from atoll.coordinator.state_machine.members import Member
from atoll.coordinator.state_machine.state import RoundState, State

MIN_PACE_MARGIN = 1.5  # times a measured pace that a node may be faster
PACE_MEMORY = 0.9  # of the pace that a node was once found to have, which counts in the next round
MAX_PACE_GROWTH = 2.0  # times what it or anybody was found to have: a first step that took no time proves nothing


class TopPaces(NamedTuple):
    """The highest pace in a round and the highest of all others, inner steps a second; 0: not measured."""

    fastest: NodeId | None
    first: float
    second: float

    @classmethod
    def of(cls, here: Mapping[NodeId, Member], round_: RoundState) -> "TopPaces":
        """Those of the round's participants that are here."""
        paces = nlargest(2, ((here[n].pace, n) for n in round_.participants if n in here))
        return cls(paces[0][1] if paces else None, *[pace for pace, _ in paces], *[0.0] * (2 - len(paces)))

    def others(self, node: NodeId) -> float:
        """The highest pace of all but this one."""
        return self.second if node == self.fastest else self.first


def with_timely_claims(state: State, now: float, out: list[Effect]) -> State:
    """The contributions that no attempt has yet, each bounded by the time that its node had."""
    ledger, entered = state.round.ledger, {e.node for e in state.round.ledger.entries}
    bounded, paces = dict[NodeId, Contribution](), TopPaces.of(state.members.here, state.round)
    least = state.most_steps  # that a node may have taken: what it is told to
    for node, work in ledger.contributions.items():
        if node in entered or node not in state.members.here:
            continue
        most = state.config.inner.batch_size * max(least, _possible_steps(state, node, paces, now))
        if work.claimed > most:
            bounded[node] = replace(work, untimely=work.claimed - max(int(most), 1))
            sentence = f"{state.name(node)} claims {work.claimed} samples, and had the time for {int(most)}"
            out.append(Note(f"round {state.round.number}: {sentence}: so many count", node))
    if not bounded:
        return state
    ledger = replace(ledger, contributions=ledger.contributions | bounded)
    return with_round(state, replace(state.round, ledger=ledger))


def _possible_steps(state: State, node: NodeId, paces: TopPaces, now: float) -> float:
    """Inner steps that the node may have taken since its work was last counted, by what was measured; infinite
    where nothing was: nobody has a pace yet, or the coordinator was away."""
    me = state.members.here[node]
    pace = max(me.fastest, paces.others(node))
    if not pace or state.round.patient_until:
        return inf
    margin = max(MIN_PACE_MARGIN, state.config.rounds.ceiling)
    return margin * pace * (now - me.counted_at)


def with_counted_work(
    here: Mapping[NodeId, Member], round_: RoundState, counted: Iterable[NodeId]
) -> list[Member]:
    """The members whose work the round counted: what they train on next they have not begun before it began for
    them, and their pace in it is one that they were found to have."""
    there, paces = [n for n in counted if n in here and n in round_.participants], TopPaces.of(here, round_)
    return [
        replace(
            here[n],
            counted_at=max(here[n].counted_at, round_.participants[n]),
            fastest=_found_pace(here[n], paces.others(n)),
        )
        for n in there
    ]


def _found_pace(member: Member, others: float) -> float:
    """The pace that a member is believed to be able to have, after a round that counted its work."""
    known = max(member.fastest, others)
    pace = min(member.pace, MAX_PACE_GROWTH * known) if known else member.pace
    return max(pace, PACE_MEMORY * member.fastest)
