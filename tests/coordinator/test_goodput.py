"""The goodput meter's buckets are exclusive and add up to wall time."""

import random

from atoll.comm.ids import NodeId
from atoll.coordinator.goodput import Meter

A, B = NodeId("n1"), NodeId("n2")


def test_inner_time_counts_once_a_commit_used_it() -> None:
    meter = Meter()
    meter.phase(A, "starting", 0)
    meter.phase(A, "inner", 10)
    meter.phase(A, "sync", 30)
    meter.committed([A], 32)
    meter.phase(A, "inner", 32)
    expected = {"recovering": 10.0, "inner": 24.0, "sync": 2.0, "waiting": 0.0, "down": 0.0, "lost": 0.0}
    assert meter.seconds(36) == expected


def test_a_death_turns_open_inner_time_into_lost_and_then_the_node_is_down() -> None:
    meter = Meter()
    meter.phase(A, "inner", 0)
    meter.committed([A], 10)
    meter.gone(A, left=False, now=14)
    seconds = meter.seconds(20)
    assert (seconds["inner"], seconds["lost"], seconds["down"]) == (10, 4, 6)
    meter.returned(A, 25)
    assert meter.seconds(30)["down"] == 11 and meter.seconds(30)["recovering"] == 5


def test_who_left_is_not_counted_as_down() -> None:
    meter = Meter()
    meter.phase(A, "inner", 0)
    meter.gone(A, left=True, now=5)
    assert sum(meter.seconds(100).values()) == 5


def test_work_left_out_of_a_commit_is_lost() -> None:
    meter = Meter()
    meter.phase(A, "inner", 0)
    meter.phase(B, "inner", 0)
    meter.phase(B, "waiting", 8)
    meter.committed([A], 10)
    seconds = meter.seconds(10)
    assert (seconds["inner"], seconds["lost"], seconds["waiting"]) == (10, 8, 2)


def test_whatever_happens_the_buckets_add_up_to_the_wall_time() -> None:
    rng, meter, now = random.Random(0), Meter(), 0.0
    meter.phase(A, "starting", 0)
    for _ in range(500):
        now += rng.random()
        match rng.randrange(4):
            case 0:
                meter.phase(A, rng.choice(["inner", "sync", "waiting", "recovering", "starting"]), now)
            case 1:
                meter.committed([A], now)
            case 2:
                meter.gone(A, False, now)
            case _:
                meter.returned(A, now)
        assert abs(sum(meter.seconds(now).values()) - now) < 1e-6
    assert abs(sum(meter.shares(now).values()) - 1) < 1e-9
