"""The points at which the coordinator can be made to crash follow what happened."""

from scenario import CONFIG

from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import Fence
from atoll.comm.replace import replace
from atoll.coordinator.service.crash_points import crash_points
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.events import CommitRecord
from atoll.coordinator.state_machine.ledger import Ledger, Seal
from atoll.coordinator.state_machine.state import AttemptState, Phase, RoundState, State

ADA = NodeId("n1")
WAITING = State(CONFIG)
FENCE = Fence(Incarnation(1), Epoch(1), Round(1), 1)
OPEN = Ledger(attempt=1, members=(ADA,), owners=(ADA,))
RECORD = CommitRecord(1, 1, 1, (), {}, 1, 1.0, {}, {}, {}, "", "")


def at(phase: Phase, number: int = 1, ledger: Ledger = OPEN, planned: bool = False, committed: int = 0) -> State:
    plan = AttemptState(FENCE._replace(attempt=ledger.attempt), 0.0) if planned else None
    return replace(WAITING, committed=committed, round=RoundState(number, phase, ledger=ledger, plan=plan))


INNER = at(Phase.INNER, ledger=Ledger())
COLLECTING = at(Phase.COLLECTING, ledger=Ledger())
REDUCING = at(Phase.REDUCING, planned=True)
SEALED = at(Phase.REDUCING, ledger=replace(OPEN, sealed={0: Seal(b"d", b"\x01")}), planned=True)
AGAIN = at(Phase.REDUCING, ledger=replace(OPEN, attempt=2), planned=True)
NEXT = replace(at(Phase.INNER, 2, Ledger(), committed=1), pending=RECORD)


def test_every_step_of_a_round_has_its_point() -> None:
    assert crash_points(WAITING, INNER, []) == ["round-start"]
    assert crash_points(INNER, COLLECTING, []) == ["closing"]
    assert crash_points(COLLECTING, REDUCING, []) == ["plan"]
    assert crash_points(REDUCING, SEALED, []) == ["sealed-all"]
    assert set(crash_points(REDUCING, AGAIN, [])) == {"plan", "retry"}
    assert crash_points(REDUCING, COLLECTING, []) == ["retry"]
    assert set(crash_points(SEALED, NEXT, [])) == {"commit", "round-start"}
    assert crash_points(NEXT, replace(NEXT, pending=None), []) == ["published"]
    assert crash_points(INNER, INNER, []) == []


def test_what_members_said_has_its_point() -> None:
    said: list[ev.Event] = [
        ev.Joined(ADA, 1, "ada", "ada:1", "s"),
        ev.StateReported(ADA, 1, 0, b"d"),
        ev.StepsReached(ADA, 1, 1),
        ev.ContributionReady(ADA, 1, 1, ev.Contribution(1, 1, 1.0, 1.0)),
        ev.ChunksSealed(ADA, 1, FENCE, ()),
        ev.ReduceComplete(ADA, 1, FENCE, b"d", 0, 0),
        ev.Tick(),
    ]
    assert set(crash_points(INNER, INNER, said)) == {"join", "state", "reached", "ready", "seal", "complete"}
