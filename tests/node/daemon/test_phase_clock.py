"""A node knows how long it was in each phase, and tells a coordinator that did not answer what it missed."""

from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.service import validation
from atoll.coordinator.service.goodput import PHASES
from atoll.node.daemon.phase_clock import PhaseClock


def test_seconds_are_of_the_phase_in_which_they_passed() -> None:
    clock = PhaseClock(5.0, "starting")
    clock.enter("inner", 7.0)
    clock.enter("waiting", 17.0)
    clock.enter("inner", 18.0)
    assert clock.seconds(20.0) == {"starting": 2.0, "inner": 12.0, "waiting": 1.0}


def test_what_was_not_answered_is_told_until_it_is() -> None:
    clock = PhaseClock(0.0, "inner")
    assert clock.beat(3.0) == {}
    clock.heard(True)
    assert clock.beat(6.0) == {}
    clock.heard(False)
    clock.enter("waiting", 8.0)
    assert clock.beat(9.0) == {"inner": 5.0, "waiting": 1.0}
    clock.heard(False)
    assert clock.beat(12.0) == {"inner": 5.0, "waiting": 4.0}
    clock.enter("sync", 13.0)
    clock.heard(True)
    assert clock.beat(15.0) == {}


def test_every_phase_has_a_field_of_its_own_on_the_wire_and_nonsense_is_none() -> None:
    beat = pb.HeartbeatRequest(unanswered=pb.PhaseSeconds(**{phase: 1.5 for phase in PHASES}))
    assert validation.unanswered(beat) == dict.fromkeys(PHASES, 1.5)
    for odd in (-1.0, float("nan"), float("inf")):
        assert validation.unanswered(pb.HeartbeatRequest(unanswered=pb.PhaseSeconds(sync=odd, inner=1))) == {
            "inner": 1.0
        }
    assert validation.unanswered(pb.HeartbeatRequest()) == {}
