"""The goodput meter's buckets are exclusive and add up to wall time, whatever happens."""

import random

import msgspec
import pytest

from atoll.comm.ids import NodeId
from atoll.coordinator.service.goodput import (
    BUCKETS,
    MAX_DOWN_SECONDS,
    PHASES,
    GoodputMeter,
    compute_utilisation,
    fleet_goodput,
)

A, B = NodeId("n1"), NodeId("n2")


def spent(meter: GoodputMeter, now: float, node: NodeId = A) -> dict[str, float]:
    """Whole tenths of seconds of the node in each bucket."""
    return {bucket: round(s, 1) for bucket, s in meter.of_node(node, now).items() if round(s, 1)}


def beat(meter: GoodputMeter, now: float, phase: str, round_: int = 1, step: int = 0, node: NodeId = A) -> None:
    meter.record_phase(node, phase, now)
    meter.record_progress(node, round_, step)


def training(node: NodeId = A) -> GoodputMeter:
    """A meter of a node that takes the inner steps of round 1 since second 10."""
    meter = GoodputMeter()
    meter.enter(node, 0)
    beat(meter, 10, "inner", node=node)
    return meter


@pytest.mark.parametrize(("carried", "lost"), [(3.0, 9.0), (12.0, 0.0), (40.0, 0.0), (0.0, 12.0)])
def test_who_died_and_brings_the_steps_until_its_latest_copy_has_lost_those_behind_it(
    carried: float, lost: float
) -> None:
    meter = GoodputMeter()
    meter.enter(A, 0.0)
    meter.record_phase(A, "inner", 0.0)
    meter.record_progress(A, 1, 12)
    meter.record_phase(A, "inner", 12.0)
    assert meter.record_departure(A, left=False, now=12.0) == 12.0
    meter.enter(A, 20.0)
    meter.record_phase(A, "inner", 20.0)
    meter.record_progress(A, 2, 5)
    meter.record_phase(A, "inner", 25.0)
    meter.record_contribution(A, 2, carried > 0, carried=carried)
    meter.record_commit(2, {A: 1.0}, 26.0)
    found = meter.of_node(A, 25.0)
    assert found.get("lost", 0.0) == pytest.approx(lost)
    assert found["inner"] == pytest.approx(5.0 + 12.0 - lost) and found["down"] == 8.0


def test_inner_time_is_open_until_a_commit_has_it() -> None:
    meter = training()
    assert spent(meter, 30) == {"starting": 10, "open": 20}
    meter.record_sign(A, 10)
    beat(meter, 30, "waiting", 1, 40)
    meter.record_contribution(A, 1, carries=False)
    beat(meter, 33, "sync", 1, 40)
    assert spent(meter, 35) == {"starting": 10, "open": 20, "waiting": 3, "sync": 2}
    meter.record_commit(1, {A: 1.0}, 35)
    assert spent(meter, 35) == {"starting": 10, "inner": 20, "waiting": 3, "sync": 2}


def test_steps_after_the_contribution_are_the_next_rounds() -> None:
    meter = training()
    beat(meter, 30, "inner", 1, 40)
    meter.record_contribution(A, 1, carries=False, goes_on=True)
    beat(meter, 35, "inner", 2, 10)
    meter.record_commit(1, {A: 1.0}, 35)
    assert spent(meter, 35) == {"starting": 10, "inner": 20, "open": 5}
    meter.record_departure(A, left=False, now=35)
    assert spent(meter, 35) == {"starting": 10, "inner": 20, "lost": 5}


def test_a_heartbeat_that_overtakes_the_contribution_takes_nothing_from_it() -> None:
    meter = training()
    beat(meter, 30, "inner", 1, 40)
    beat(meter, 31, "inner", 2, 2)
    meter.record_contribution(A, 1, carries=False)
    meter.record_commit(1, {A: 1.0}, 32)
    assert spent(meter, 31) == {"starting": 10, "inner": 20, "open": 1}


def test_work_that_a_commit_leaves_out_counts_in_a_later_one_if_it_is_brought() -> None:
    for carries in (True, False):
        meter = training()
        beat(meter, 30, "waiting", 1, 40)
        meter.record_contribution(A, 1, carries=False)
        meter.record_commit(1, {B: 1.0}, 31)
        assert spent(meter, 30)["open"] == 20
        beat(meter, 40, "inner", 2)
        beat(meter, 55, "waiting", 2, 30)
        meter.record_contribution(A, 2, carries)
        meter.record_commit(2, {A: 1.0}, 55)
        found = spent(meter, 55)
        assert (found["inner"], found.get("lost", 0)) == ((35, 0) if carries else (15, 20))


def test_a_part_of_a_contribution_is_a_part_of_its_seconds() -> None:
    meter = training()
    beat(meter, 30, "waiting", 1, 40)
    meter.record_contribution(A, 1, carries=False)
    meter.record_commit(1, {A: 0.75}, 30)
    assert spent(meter, 30) == {"starting": 10, "inner": 15, "lost": 5}


def test_who_dies_loses_what_is_open_and_was_down_since_it_was_last_heard() -> None:
    meter = training()
    beat(meter, 40, "inner", 1, 60)
    meter.record_departure(A, left=False, now=55)
    assert spent(meter, 70) == {"starting": 10, "lost": 30, "down": 30}
    meter.enter(A, 75)
    assert spent(meter, 80) == {"starting": 15, "lost": 30, "down": 35}


def test_who_dies_in_the_exchange_loses_nothing_that_the_commit_has() -> None:
    meter = training()
    beat(meter, 40, "sync", 1, 60)
    meter.record_contribution(A, 1, carries=False)
    meter.record_departure(A, left=False, now=41)
    meter.record_commit(1, {A: 1.0}, 45)
    assert spent(meter, 45) == {"starting": 10, "inner": 30, "down": 5}
    gone = training()
    beat(gone, 40, "sync", 1, 60)
    gone.record_contribution(A, 1, carries=False)
    gone.record_departure(A, left=False, now=41)
    gone.record_commit(1, {}, 45)
    assert spent(gone, 45) == {"starting": 10, "lost": 30, "down": 5}


def test_who_is_restarted_before_it_is_missed_was_down_meanwhile_and_takes_its_steps_again() -> None:
    meter = training()
    beat(meter, 50, "inner", 1, 40)
    meter.enter(A, 55)
    beat(meter, 60, "inner", 1)
    beat(meter, 61, "inner", 1, 1)
    assert spent(meter, 61) == {"starting": 15, "lost": 40, "down": 5, "open": 1}


def test_a_trainer_that_goes_on_from_a_copy_loses_the_steps_since() -> None:
    meter = training()
    beat(meter, 50, "inner", 1, 40)
    beat(meter, 50, "starting", 1, 40)
    beat(meter, 58, "inner", 1)
    beat(meter, 59, "inner", 1, 31)
    assert spent(meter, 59) == {"starting": 18, "lost": 10, "open": 31}


def test_a_trainer_that_stands_still_is_waited_for() -> None:
    meter = training()
    for k in range(1, 11):
        beat(meter, 10 + k, "inner", 1, k)
    for now in range(21, 51):
        beat(meter, now, "inner", 1, 10)
    beat(meter, 51, "inner", 1, 11)
    assert spent(meter, 51) == {"starting": 10, "open": 11, "waiting": 30}


def stopping(step: int = 30) -> GoodputMeter:
    """The meter of a node that takes a step a second and is heard each three, as it was heard last: at this step,
    a multiple of three, of round 1."""
    meter = training()
    for k in range(3, step + 1, 3):
        beat(meter, 10 + k, "inner", 1, k)
    return meter


def test_a_stop_begins_with_the_latest_step_and_not_with_the_heartbeat_after_it() -> None:
    meter = stopping()
    for now in range(43, 80, 3):
        beat(meter, now, "inner", 1, 31)
    beat(meter, 79, "inner", 1, 32)
    assert spent(meter, 79) == {"starting": 10, "open": 32, "waiting": 37}
    beat(meter, 82, "inner", 1, 35)
    assert spent(meter, 82) == {"starting": 10, "open": 35, "waiting": 37}


def test_a_trainer_that_stands_still_is_waited_for_while_it_does() -> None:
    meter = stopping()
    for now in range(43, 70, 3):
        beat(meter, now, "inner", 1, 30)
    assert spent(meter, 67) == {"starting": 10, "open": 31, "waiting": 26}


@pytest.mark.parametrize(("told", "inner"), [(True, 36), (False, 37)])  # the last second may have been a step
def test_a_round_that_closes_while_a_trainer_stands_still_has_its_steps_alone(told: bool, inner: int) -> None:
    meter = stopping()
    for now in range(43, 80, 3):
        beat(meter, now, "inner", 1, 30)
    beat(meter, 80, "sync", *((1, 31) if told else (3, 0)))
    beat(meter, 80, "inner", 3, 0)
    beat(meter, 85, "waiting", 3, 5)
    meter.record_contribution(A, 3, carries=True, steps=5, carried=31)
    meter.record_commit(3, {A: 1.0}, 85)
    assert spent(meter, 85) == {"starting": 10, "inner": inner, "waiting": 75 - inner}


def test_a_contribution_tells_how_many_steps_a_silence_had() -> None:
    for steps, inner in ((90, 90), (32, 32)):
        meter = stopping()
        meter.record_phase(A, "waiting", 100)
        meter.record_contribution(A, 1, carries=False, steps=steps)
        meter.record_commit(1, {A: 1.0}, 100)
        assert spent(meter, 100).get("inner") == inner


def test_a_trainer_that_stands_still_before_the_first_step_is_waited_for() -> None:
    meter = stopping()
    meter.record_phase(A, "waiting", 40)
    meter.record_contribution(A, 1, carries=False, steps=30)
    meter.record_commit(1, {A: 1.0}, 40)
    for now in range(40, 80, 3):
        beat(meter, now, "inner", 1, 30)  # a node tells of a round once it has taken a step of it
    assert spent(meter, 79) == {"starting": 10, "inner": 30, "open": 1, "waiting": 38}


def test_a_first_step_is_of_the_round_that_is_told_with_it() -> None:
    meter = GoodputMeter()
    meter.enter(A, 0)
    for now in range(10, 70, 3):
        beat(meter, now, "inner", 0, 0)  # it compiles
    beat(meter, 70, "inner", 5, 1)
    beat(meter, 100, "waiting", 5, 31)
    meter.record_contribution(A, 5, carries=False, steps=31)
    meter.record_commit(5, {A: 1.0}, 100)
    assert spent(meter, 100) == {"starting": 10, "inner": 90}


@pytest.mark.parametrize("process", [True, False])
@pytest.mark.parametrize("later", [0, 2])  # rounds
def test_a_trainer_that_is_back_may_compile(process: bool, later: int) -> None:
    meter = stopping()
    if process:
        meter.enter(A, 40)
    beat(meter, 40, "starting", 0, 0)
    for now in range(50, 110, 3):
        beat(meter, now, "inner", 0, 0)
    beat(meter, 110, "inner", 1 + later, 1)
    meter.record_phase(A, "waiting", 120)
    meter.record_contribution(A, 1 + later, carries=False, steps=11)
    assert spent(meter, 120) == {"starting": 20, "lost": 30, "open": 70}


def test_steps_that_are_slow_from_some_time_on_are_steps() -> None:
    meter = stopping()
    for now in range(43, 343, 3):
        beat(meter, now, "inner", 1, 30 + (now - 40) // 30)
    assert spent(meter, 340)["waiting"] < 60


def test_steps_of_which_each_tenth_is_thirty_times_as_long_are_steps() -> None:
    meter, booked = stopping(), 0.0
    for now in range(43, 1240, 3):
        tens, seconds = divmod(now - 40, 39)
        beat(meter, now, "inner", 1, 30 + 10 * tens + min(seconds, 9))
        if now < 400:
            booked = spent(meter, now).get("waiting", 0.0)
    assert spent(meter, 1240)["waiting"] == booked < 120


def test_a_contribution_that_is_heard_before_the_heartbeat_after_a_silence_has_its_steps() -> None:
    meter = stopping()
    meter.record_sign(A, 120)
    meter.record_contribution(A, 1, carries=False, steps=90)
    meter.record_phase(A, "waiting", 121, {"inner": 60.0, "waiting": 21.0})
    meter.record_progress(A, 1, 90)
    meter.record_commit(1, {A: 1.0}, 122)
    beat(meter, 122, "inner", 1, 90)
    beat(meter, 123, "inner", 2, 1)
    assert spent(meter, 123) == {"starting": 10, "inner": 90, "waiting": 22, "open": 1}


def left_out() -> GoodputMeter:
    """The meter of a node whose 20 steps in 20 seconds of round 1 no commit has yet, at second 30."""
    meter = training()
    beat(meter, 30, "waiting", 1, 20)
    meter.record_contribution(A, 1, carries=False, steps=20)
    return meter


def bring(meter: GoodputMeter, now: float, carried: float) -> None:
    """The node comes back, and has the steps of its copy in the commit of round 3."""
    meter.enter(A, now)
    beat(meter, now, "inner", 0, 0)
    beat(meter, now + 10, "waiting", 3, 10)
    meter.record_contribution(A, 3, carries=True, carried=carried, steps=10)
    meter.record_commit(3, {A: 1.0}, now + 10)


def test_who_died_with_steps_of_two_rounds_and_brings_those_of_the_first_has_lost_the_others() -> None:
    meter = left_out()
    meter.record_commit(1, {B: 1.0}, 30)
    beat(meter, 30, "inner", 2)
    beat(meter, 40, "inner", 2, 10)
    meter.record_departure(A, left=False, now=40)
    bring(meter, 50, carried=20)
    assert spent(meter, 60) == {"starting": 10, "down": 10, "inner": 30, "lost": 10}


def test_who_dies_twice_may_bring_what_it_had_before_the_first_time() -> None:
    meter = training()
    beat(meter, 30, "inner", 1, 20)
    meter.record_departure(A, left=False, now=30)
    meter.enter(A, 35)
    beat(meter, 35, "inner", 0, 0)
    meter.record_departure(A, left=False, now=35)
    bring(meter, 40, carried=20)
    assert spent(meter, 50) == {"starting": 10, "down": 10, "inner": 30}


def test_who_dies_in_an_exchange_that_leaves_it_out_may_bring_its_steps_to_a_later_one() -> None:
    meter = left_out()
    meter.record_departure(A, left=False, now=31)
    meter.record_commit(1, {B: 1.0}, 35)
    assert spent(meter, 35) == {"starting": 10, "lost": 20, "down": 5}
    bring(meter, 40, carried=20)
    assert spent(meter, 50) == {"starting": 10, "down": 10, "inner": 30}


def test_slow_steps_are_steps() -> None:
    meter = training()
    for k in range(1, 6):
        for seconds in range(0, 60, 3):
            beat(meter, 10 + 60 * k + seconds, "inner", 1, k)
    assert set(spent(meter, 370)) == {"starting", "open"}


def test_time_in_which_nobody_answered_is_divided_as_the_node_says_and_is_no_longer_for_that() -> None:
    meter = training()
    shares = {"inner": 300.0, "waiting": 100.0}
    meter.record_phase(A, "waiting", 50, shares)
    assert spent(meter, 50) == {"starting": 10, "open": 30, "waiting": 10}
    assert spent(meter, 52)["waiting"] == 12


def test_a_sign_of_life_after_a_long_silence_says_nothing_of_that() -> None:
    meter = training()
    meter.record_sign(A, 30)
    meter.record_phase(A, "waiting", 30.5, {"waiting": 1.0})
    assert spent(meter, 30.5) == {"starting": 10, "waiting": 20.5}
    meter.record_sign(A, 33)
    meter.record_departure(A, left=False, now=40)
    assert spent(meter, 40) == {"starting": 10, "waiting": 23, "down": 7}


def test_who_left_is_not_down() -> None:
    meter = training()
    meter.record_departure(A, left=True, now=30)
    assert spent(meter, 100) == {"starting": 10, "lost": 20}
    meter.enter(A, 200)
    assert spent(meter, 205) == {"starting": 15, "lost": 20}


def test_who_does_not_come_back_for_a_day_is_not_down_for_ever() -> None:
    meter = training()
    meter.record_departure(A, left=False, now=10)
    assert spent(meter, 10 + 3 * MAX_DOWN_SECONDS) == {"starting": 10, "down": MAX_DOWN_SECONDS}
    meter.record_commit(1, {}, 10 + 2 * MAX_DOWN_SECONDS)
    meter.enter(A, 10 + 3 * MAX_DOWN_SECONDS)
    assert spent(meter, 15 + 3 * MAX_DOWN_SECONDS) == {"starting": 15, "down": MAX_DOWN_SECONDS}


def test_who_is_back_in_time_may_bring_what_seemed_lost() -> None:
    meter = training()
    beat(meter, 30, "inner", 1, 40)
    meter.record_departure(A, left=False, now=40)
    meter.enter(A, 45)
    beat(meter, 45, "inner", 2)
    beat(meter, 55, "waiting", 2, 20)
    meter.record_contribution(A, 2, carries=True)
    meter.record_commit(2, {A: 1.0}, 55)
    assert spent(meter, 55) == {"starting": 10, "down": 15, "inner": 30}


def test_a_state_that_differs_costs_what_is_open() -> None:
    meter = training()
    meter.record_phase(A, "inner", 30)
    assert meter.record_divergence(A) == 20
    assert spent(meter, 30) == {"starting": 10, "lost": 20}


def test_what_a_void_round_took_is_lost() -> None:
    meter = training()
    beat(meter, 30, "waiting", 1, 40)
    meter.record_contribution(A, 1, carries=False)
    meter.record_commit(1, {A: 1.0}, 30)
    meter.record_void({1})
    assert spent(meter, 30) == {"starting": 10, "lost": 20}


def test_a_forgotten_nodes_seconds_stay() -> None:
    meter = training()
    beat(meter, 30, "sync", 1, 40)
    meter.record_contribution(A, 1, carries=False)
    meter.record_departure(A, left=False, now=34)
    meter.forget(A, 40)
    assert not meter.accounts
    assert {k: s for k, s in meter.seconds(100).items() if s} == {"starting": 10, "lost": 20, "down": 10}


def test_cuts_come_to_the_account_and_are_of_bounded_precision() -> None:
    meter, rng, now, sums = training(), random.Random(1), 10.0, dict.fromkeys(BUCKETS, 0.0)
    for round_ in range(1, 200):
        for phase in ("inner", "waiting", "sync"):
            beat(meter, now, phase, round_)
            now += rng.random() * (1000 if round_ > 100 else 10)
            if phase == "inner":
                meter.record_phase(A, "waiting", now)
                meter.record_contribution(A, round_, carries=False)
        meter.record_phase(A, "waiting", now)
        meter.record_commit(round_, {A: 1.0} if rng.random() < 0.9 else {}, now)
        for bucket, seconds in meter.cut().get(A, {}).items():
            sums[bucket] += seconds
            assert seconds == round(seconds, 3)
    account = meter.of_node(A, now)
    assert sum(account.values()) == pytest.approx(now)
    for bucket in BUCKETS:
        assert sums[bucket] == pytest.approx(account.get(bucket, 0.0), abs=0.06), bucket
    assert all(abs(left) <= 0.06 for left in meter.cut().get(A, {}).values())


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_buckets_add_up_to_the_wall_time_and_none_is_below_nothing(seed: int) -> None:
    rng, meter, now, round_ = random.Random(seed), GoodputMeter(), 0.0, 1
    meter.enter(A, 0)
    for _ in range(500):
        now += rng.random() * 10
        match rng.randrange(9):
            case 0 | 1 | 2:
                shares = {rng.choice(PHASES): rng.random() for _ in range(rng.randrange(3))}
                meter.record_phase(A, rng.choice([*PHASES, "nonsense"]), now, shares)
                meter.record_progress(A, rng.randrange(max(round_ - 1, 0), round_ + 2), rng.randrange(50))
            case 3:
                offered, carries = rng.randrange(round_ - 1, round_ + 1), rng.random() < 0.5
                meter.record_contribution(A, offered, carries, steps=rng.randrange(60))
            case 4:
                meter.record_commit(round_, {A: rng.random()} if rng.random() < 0.7 else {}, now)
                round_ += 1
            case 5:
                meter.record_departure(A, False, now)
            case 6:
                meter.record_divergence(A)
            case 7:
                meter.enter(A, now)
            case _:
                meter.record_void({round_ - 1})
        meter.record_sign(A, now)
        seconds = meter.seconds(now)
        assert sum(seconds.values()) == pytest.approx(now) and min(seconds.values()) > -1e-6, seconds
        if rng.random() < 0.1:
            meter = msgspec.json.decode(msgspec.json.encode(meter), type=GoodputMeter)
    assert sum(meter.shares(now).values()) == pytest.approx(1)


def test_goodput_and_utilisation_are_not_the_same() -> None:
    seconds = {"inner": 60.0, "lost": 10.0, "open": 10.0, "sync": 20.0, "waiting": 50.0, "down": 50.0}
    assert fleet_goodput(seconds) == 0.3 and compute_utilisation(seconds) == 0.8
    assert fleet_goodput({}) == compute_utilisation({}) == 0.0


def test_an_account_of_before_goes_on() -> None:
    old = b'{"accounts":{"n1":{"since":5.0,"bucket":"inner","spent":{"inner":2.0,"open":3.0},"closed":false}},'
    meter = msgspec.json.decode(old + b'"past":{"down":7.0}}', type=GoodputMeter)
    meter.record_phase(A, "waiting", 10)
    assert spent(meter, 10) == {"inner": 2, "open": 8} and meter.seconds(10)["down"] == 7
