"""Who of the members is marked as slow."""

from typing import Any

from atoll.comm.ids import NodeId
from atoll.coordinator.monitor.members import mark_slow

ADA, BO, CY = (NodeId(n) for n in ("n1", "n2", "n3"))


def member(node: NodeId, pace: float, state: str = "active") -> dict[str, Any]:
    return {"node_id": node, "state": state, "tokens_per_s": pace, "data_wait": 0.0}


def slow(members: list[dict[str, Any]], at_work: dict[str, float], last: dict[NodeId, float]) -> dict[NodeId, str]:
    mark_slow(members, at_work, last)
    return {m["node_id"]: m["slow"] for m in members if m["slow"]}


def test_what_a_member_did_in_the_last_round_counts_for_more_than_its_latest_steps() -> None:
    members = [member(ADA, 1000.0), member(BO, 3000.0), member(CY, 3000.0)]
    found = slow(members, {}, {ADA: 3000.0, BO: 3000.0, CY: 900.0})
    assert found == {CY: "trains 3.3 times slower than the others (900 of 3,000 tokens/s)"}


def test_of_who_was_not_in_the_last_round_its_latest_steps_count() -> None:
    members = [member(ADA, 0.0), member(BO, 3000.0), member(CY, 1000.0)]
    assert list(slow(members, {ADA: 2900.0}, {BO: 3000.0})) == [CY]
    gone = [member(ADA, 3000.0), member(BO, 3000.0), member(CY, 100.0, "left")]
    assert not slow(gone, {}, {}), "who is gone slows nobody"
