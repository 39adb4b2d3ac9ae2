"""What members saw of each other's links in a round: the rates that plans go by. Pure.

What a node says of its own link it may have made up, and who is believed to have the fastest link would own every
chunk. So each member also tells what came to it from each of the others at best, and what each of them took. A
node's own word only lowers what these say together. `reduce` enters it at each commit.

The best half second of each pair adds up to at least the best half second of all together, so whoever tells the
truth is believed. Where there are three or more witnesses one counts at most as much as all others together: a
single one can at most double what it is said of.
"""

from collections.abc import Mapping
from math import fsum

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.placement.bandwidth_shares import blend
from atoll.coordinator.state_machine.events import ReduceComplete
from atoll.coordinator.state_machine.members import Member

Seen = dict[NodeId, tuple[float, float]]  # bytes a second up, and down
MIN_TRIMMED_WITNESSES = 3


def witnessed_rates(completions: Mapping[NodeId, ReduceComplete]) -> Seen:
    """The rates of each member, up and down, as the others saw them in a round; of who was seen by some only, as
    much more as there are others: each looks at a few of many."""
    up: dict[NodeId, list[float]] = {}
    down: dict[NodeId, list[float]] = {}
    for witness, told in completions.items():
        for node, came, took in dict((seen[0], seen) for seen in told.seen).values():
            if node != witness:
                up.setdefault(node, []).append(came)
                down.setdefault(node, []).append(took)

    def total(node: NodeId, rates: list[float]) -> float:
        others = len(completions) - (node in completions)
        return _trimmed_sum(rates) * others / len(rates)

    return {node: (total(node, up[node]), total(node, down[node])) for node in up}


def _trimmed_sum(rates: list[float]) -> float:
    """The sum, in which no rate is more than all the others together, where there are enough to tell."""
    largest, whole = max(rates), fsum(rates)
    if len(rates) < MIN_TRIMMED_WITNESSES:
        return whole
    return min(whole, 2 * (whole - largest))


def with_seen_rates(members: Mapping[NodeId, Member], seen: Seen) -> list[Member]:
    """The members of which something was seen, with what is known of them now."""
    return [
        replace(
            members[n],
            seen_up=blend(members[n].seen_up, up),
            seen_down=blend(members[n].seen_down, down),
        )
        for n, (up, down) in seen.items()
        if n in members
    ]
