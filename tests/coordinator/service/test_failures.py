"""What failures cost is told once they are committed, and again when they are over."""

from atoll.comm.ids import NodeId
from atoll.coordinator.service.failures import BACK_SECONDS, MAX_OPEN, FailureLog, ended_at, seconds, sentences
from atoll.coordinator.state_machine.events import Failure

A, B = NodeId("n1"), NodeId("n2")


def quiet(log: FailureLog, rounds: int, waited: float = 20.0) -> None:
    """So many rounds of ten members in which nothing fails."""
    for k in range(1, rounds + 1):
        assert log.committed(k, waited, 10, 1.0) == ()


def test_others_lost_what_they_waited_beyond_the_usual() -> None:
    log = FailureLog()
    quiet(log, 5)
    log.noticed(A, 6, "it is silent", 100.0, 104.0)
    log.lost(A, 30.0)
    (told,) = log.committed(6, 98.0, 9, 1.0)
    assert told == Failure(1, A, 6, "it is silent", 100.0, 4.0, None, 30.0, 80.0)
    assert log.committed(7, 18.0, 9, 1.0) == ()
    log.recovered(A, 150.0)
    (again,) = log.committed(8, 20.0, 10, 1.0)
    assert again == Failure(1, A, 6, "it is silent", 100.0, 4.0, 50.0, 30.0, 80.0)
    assert log.committed(9, 20.0, 10, 1.0) == ()


def test_failures_of_a_round_share_what_it_cost_and_without_a_usual_round_the_plan_says_what_is_usual() -> None:
    log = FailureLog()
    log.noticed(A, 1, "its connection broke", 10.0, 10.0)
    log.noticed(B, 1, "its trainer ended", 11.0, 11.0)
    log.recovered(B, 15.0)
    first, second = log.committed(1, 50.0, 8, 5.0)
    assert (first.number, first.waited, second.number, second.waited, second.recovered) == (1, 5.0, 2, 5.0, 4.0)
    assert log.committed(2, 1.0, 8, 5.0) == ()


def test_a_round_that_went_faster_than_usual_cost_nobody_anything() -> None:
    log = FailureLog()
    quiet(log, 3)
    log.noticed(A, 4, "it is silent", 100.0, 104.0)
    (told,) = log.committed(4, 5.0, 9, 1.0)
    assert told.waited == 0


def test_what_a_member_fails_of_until_it_trains_again_is_one_failure() -> None:
    log = FailureLog()
    log.noticed(A, 1, "its connection broke", 10.0, 11.0)
    log.noticed(A, 1, "it did not come back in time", 12.0, 13.0)
    for node, spent in ((A, 2.0), (A, 3.0), (B, 9.0)):
        log.lost(node, spent)
    (told,) = log.committed(1, 0.0, 1, 0.0)
    assert (told.reason, told.at, told.detected, told.lost) == ("it did not come back in time", 10.0, 1.0, 5.0)


def test_who_says_good_bye_is_not_waited_for_and_the_log_is_bounded() -> None:
    log = FailureLog()
    log.noticed(A, 1, "it is silent", 10.0, 11.0)
    log.closed(A)
    log.closed(A)
    log.recovered(A, 12.0)
    assert [f.recovered for f in log.committed(1, 0.0, 1, 0.0)] == [None]
    for k in range(2 * MAX_OPEN):
        log.noticed(NodeId(f"n{k}"), 2, "it is silent", 10.0, 11.0)
    assert len(log.open) == MAX_OPEN


def test_who_is_back_is_remembered_for_some_minutes_with_what_its_failure_cost() -> None:
    log = FailureLog()
    log.noticed(A, 1, "it is silent", 100.0, 104.0)
    assert [f.node for f in log.latest()] == [A]
    log.recovered(A, 140.0)
    log.committed(1, 50.0, 8, 5.0)
    [back] = log.latest()
    assert (back.node, back.recovered, back.waited, ended_at(back)) == (A, 40.0, 10.0, 140.0)
    log.noticed(B, 9, "its trainer ended", 300.0, 300.0)
    log.recovered(B, 140.0 + BACK_SECONDS)
    assert [f.node for f in log.latest()] == [B]


def test_a_failure_is_told_to_people_if_it_cost_something() -> None:
    names = {A: "ada"}
    brief = Failure(1, A, 6, "its connection broke", 100.0, 0.0, 0.5)
    assert list(sentences((brief,), names, 6)) == []
    dear = Failure(2, A, 6, "its connection broke", 100.0, 1.25, 40.0, 9.3, 12.0)
    assert list(sentences((dear,), names, 6)) == [
        (
            dear,
            "ada failed in round 6 (its connection broke): noticed 1.2 s after it was last well, it was back 40 s "
            "after that; 9.3 s of its inner steps are lost; the others waited 12 s of their time more than usual",
        )
    ]
    assert list(sentences((dear,), names, 9)) == [
        (dear, "ada is at work again, 40 s after it was last well in round 6; 9.3 s of its inner steps are lost")
    ]
    assert (seconds(0.04), seconds(3.14), seconds(99.6)) == ("0.04 s", "3.1 s", "100 s")
