"""By whose pace a claim is bounded."""

import pytest
from scenario import Run

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.claims import TopPaces


@pytest.mark.parametrize("paces", [[], [2.0], [2.0, 3.0], [3.0, 3.0, 1.0], [0.0, 0.0], [1.0, 5.0, 4.0, 5.0]])
def test_each_is_held_to_the_highest_pace_of_the_others(paces: list[float]) -> None:
    run, nodes = Run(), [NodeId(f"n{i}") for i in range(1, len(paces) + 1)]
    run.do("join", [f"m{i}" for i in range(len(paces) + 2)])
    members = run.state.members.here
    here = members | {n: replace(members[n], pace=pace) for n, pace in zip(nodes, paces, strict=True)}
    gone, stranger = NodeId("n99"), NodeId(f"n{len(paces) + 1}")
    here[stranger] = replace(here[stranger], pace=100.0)  # it takes no part in the round
    round_ = replace(run.state.round, participants=dict.fromkeys([*nodes, gone], 0.0))
    top = TopPaces.of(here, round_)
    for node in (*nodes, stranger):
        others = [pace for n, pace in zip(nodes, paces, strict=True) if n != node]
        assert top.others(node) == max(others, default=0.0)
