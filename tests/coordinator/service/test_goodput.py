"""The goodput meter's buckets are exclusive and add up to wall time."""

import random

from atoll.comm.ids import NodeId
from atoll.coordinator.service.goodput import GoodputMeter

A, B = NodeId("n1"), NodeId("n2")


def test_inner_time_counts_once_a_commit_used_it() -> None:
    meter = GoodputMeter()
    meter.record_phase(A, "starting", 0)
    meter.record_phase(A, "inner", 10)
    meter.record_phase(A, "sync", 30)
    meter.record_commit([A], 32)
    meter.record_phase(A, "inner", 32)
    expected = {
        "recovering": 10.0,
        "inner": 24.0,
        "sync": 2.0,
        "waiting": 0.0,
        "paused": 0.0,
        "down": 0.0,
        "lost": 0.0,
    }
    assert meter.seconds(36) == expected


def test_a_death_turns_open_inner_time_into_lost_and_then_the_node_is_down() -> None:
    meter = GoodputMeter()
    meter.record_phase(A, "inner", 0)
    meter.record_commit([A], 10)
    meter.record_departure(A, left=False, now=14)
    seconds = meter.seconds(20)
    assert (seconds["inner"], seconds["lost"], seconds["down"]) == (10, 4, 6)
    meter.record_return(A, 25)
    assert meter.seconds(30)["down"] == 11 and meter.seconds(30)["recovering"] == 5


def test_who_left_is_not_counted_as_down() -> None:
    meter = GoodputMeter()
    meter.record_phase(A, "inner", 0)
    meter.record_departure(A, left=True, now=5)
    assert sum(meter.seconds(100).values()) == 5


def test_work_that_a_commit_left_out_counts_in_a_later_one() -> None:
    meter = GoodputMeter()
    meter.record_phase(A, "inner", 0)
    meter.record_phase(B, "inner", 0)
    meter.record_commit([A], 10)
    meter.record_commit([A, B], 20)
    meter.record_departure(B, left=False, now=24)
    seconds = meter.seconds(24)
    assert (seconds["inner"], seconds["lost"]) == (24 + 20, 4)


def test_work_that_was_left_out_is_lost_when_the_state_turns_out_to_differ() -> None:
    meter = GoodputMeter()
    meter.record_phase(A, "inner", 0)
    meter.record_phase(B, "inner", 0)
    meter.record_commit([A], 10)
    meter.record_divergence(B, 12)
    seconds = meter.seconds(12)
    assert (seconds["inner"], seconds["lost"]) == (12, 12)


def test_a_forgotten_nodes_seconds_stay() -> None:
    meter = GoodputMeter()
    meter.record_phase(A, "inner", 0)
    meter.record_commit([A], 10)
    meter.record_departure(A, left=False, now=14)
    meter.forget(A, 20)
    assert not meter.accounts
    spent = {"inner": 10, "lost": 4, "down": 6, "sync": 0, "recovering": 0, "waiting": 0, "paused": 0}
    assert meter.seconds(100) == spent


def test_whatever_happens_the_buckets_add_up_to_the_wall_time() -> None:
    rng, meter, now = random.Random(0), GoodputMeter(), 0.0
    meter.record_phase(A, "starting", 0)
    for _ in range(500):
        now += rng.random()
        match rng.randrange(5):
            case 0:
                meter.record_phase(A, rng.choice(["inner", "sync", "waiting", "recovering", "starting"]), now)
            case 1:
                meter.record_commit([A], now)
            case 2:
                meter.record_departure(A, False, now)
            case 3:
                meter.record_divergence(A, now)
            case _:
                meter.record_return(A, now)
        assert abs(sum(meter.seconds(now).values()) - now) < 1e-6
    assert abs(sum(meter.shares(now).values()) - 1) < 1e-9


def test_a_paused_node_has_a_bucket_of_its_own_also_in_an_account_of_before() -> None:
    meter = GoodputMeter()
    meter.record_phase(A, "inner", 0)
    del meter.accounts[A].spent["paused"], meter.past["paused"]  # as an earlier version wrote it
    meter.record_phase(A, "paused", 10)
    meter.record_phase(A, "inner", 25)
    assert meter.seconds(30)["paused"] == 15 and sum(meter.seconds(30).values()) == 30
    meter.forget(A, 30)
    assert meter.seconds(40)["paused"] == 15
