"""Who of the members is marked as slow."""

from typing import Any

from atoll.comm.ids import NodeId
from atoll.coordinator.monitor.members import AtWork, mark_slow, returned
from atoll.coordinator.state_machine.events import Failure

ADA, BO, CY = (NodeId(n) for n in ("n1", "n2", "n3"))


def member(node: NodeId, pace: float, state: str = "active") -> dict[str, Any]:
    return {"node_id": node, "state": state, "tokens_per_s": pace, "data_wait": 0.0}


def slow(members: list[dict[str, Any]], told: dict[str, float], last: dict[NodeId, float]) -> dict[NodeId, str]:
    mark_slow(members, {node: AtWork(pace) for node, pace in told.items()}, last)
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


def test_the_pace_of_a_member_is_the_number_that_it_is_judged_by() -> None:
    members = [member(ADA, 2596.0), member(BO, 0.0), member(CY, 2996.0)]
    found = slow(members, {BO: 2000.0}, {ADA: 3065.0, CY: 1259.0})
    assert [m["pace"] for m in members] == [3065.0, 2000.0, 1259.0]
    assert "(1,259 of 2,000 tokens/s)" in found[CY]
    gone = member(ADA, 10.0, "left")
    mark_slow([gone], {}, {})
    assert gone["pace"] is None


def test_who_waited_for_data_in_its_steps_is_told_so_between_two_rounds_too() -> None:
    waits = member(ADA, 0.0)
    mark_slow([waits], {ADA: AtWork(900.0, 0.35)}, {})
    assert waits["slow"] == "waits for data 35% of the time"
    better = member(ADA, 1000.0)
    mark_slow([better], {ADA: AtWork(900.0, 0.35)}, {})
    assert better["slow"] is None


def test_who_was_away_and_is_back_is_told_of_for_ten_minutes() -> None:
    away = Failure(1, ADA, 3, "silent for 5 s", 1000.0, 5.0, 42.0)
    again = Failure(2, ADA, 4, "its trainer ended", 1100.0, 0.0, 9.0)
    brief = Failure(3, BO, 4, "its connection broke", 1100.0, 0.0, 0.4)
    gone = Failure(4, CY, 4, "silent for 5 s", 1100.0, 5.0)
    [told] = returned([away, brief, gone], 1600.0, {ADA: "ada"})
    assert (told["name"], told["since"], told["until"], told["reason"]) == (
        "ada",
        1000.0,
        1042.0,
        "silent for 5 s",
    )
    assert [m["since"] for m in returned([away, again], 1600.0, {})] == [1100.0], "each once"
    assert returned([away], 1643.0, {}) == []
