"""What kills, stops or starves a run of real processes does not stop it: the coordinator's death at every point of
a round, half of the members gone at once, stopped nodes, wrong clocks, unequal machines.

ATOLL_CHAOS_TIMES=N dies N times at each point; with `-s` the delays are shown.
"""

import os
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import pytest
from e2e.harness import AN_HOUR_AHEAD, Run, until

pytestmark = pytest.mark.e2e

TIMES = int(os.environ.get("ATOLL_CHAOS_TIMES", "1"))
POINTS = (
    "round-start.told",
    "reached.before-write",
    "closing.told",
    "ready.written",
    "plan.before-write",
    "plan.written",
    "seal.told",
    "sealed-all.before-write",
    "complete.written",
    "commit.before-write",
    "commit.written",
    "commit.told",
    "state.written",
    "published.before-write",
)
IN_A_REDUCE = ("plan.written", "seal.told", "commit.before-write")  # in the middle of a reduce, and as it ends
OTHERS = [point for point in POINTS if point not in IN_A_REDUCE]


@pytest.mark.long
@pytest.mark.parametrize(
    "points",
    [pytest.param(IN_A_REDUCE, id="in a reduce"), pytest.param(OTHERS, id="elsewhere", marks=pytest.mark.chaos)],
)
def test_a_coordinator_that_dies_at_any_point_commits_every_round_once(points: Sequence[str], run: Run) -> None:
    deaths = [f"coordinator.{point}" for point in points for _ in range(TIMES)]
    run.start("rounds.inner_steps=40")
    url = run.invite(2)
    nodes = [run.join(url, "one"), run.join(url, "two")]
    moments = [run.commit_after(k) for k in range(4)]
    usual = median(b - a for a, b in pairwise(moments[1:]))
    run.coordinator.kill()
    for death in deaths:
        run.coordinator.wait()
        run.restart(f"{death}@2=crash")  # the second time, so that the nodes are back
        assert run.coordinator.wait(60) == -signal.SIGKILL, death
        died = time.monotonic()
        run.restart()
        late = run.commit_after(until("the coordinator", run.committed)) - died
        print(f"{death}: the next commit {late:.2f} s later; usual between two: {usual:.2f} s")
        run.coordinator.kill()
    run.coordinator.wait()
    run.restart()
    last = until("the coordinator", run.committed)
    until("two more commits", lambda: run.committed() >= last + 2)
    run.whole(last)
    assert all(node.poll() is None for node in nodes)
    assert {len(r["contributors"]) for r in run.rounds()[1:]} == {2}, "a node was left out"


@pytest.mark.chaos
@pytest.mark.long
def test_a_coordinator_that_is_told_to_stop_hands_the_round_over(run: Run) -> None:
    run.start()
    url = run.invite(2)
    one, two = run.join(url, "one"), run.join(url, "two")
    until("a commit", lambda: run.committed() >= 1)
    run.coordinator.terminate()
    assert run.coordinator.wait(60) == 0
    until(
        "the news to arrive",
        lambda: "stops for a while" in run.log("one") and "stops for a while" in run.log("two"),
    )
    run.restart()
    before = until("the coordinator", run.committed)
    until("two more commits", lambda: run.committed() >= before + 2)
    run.whole(before + 1)
    assert one.poll() is None and two.poll() is None
    assert {m["state"] for m in run.run()["members"]} == {"active"}
    assert "suspected" not in run.log("c")
    assert run.log("c").count("the run begins with") == run.log("c").count("the run goes on after round") == 1


@pytest.mark.long
def test_half_of_the_members_vanish_at_once_and_come_back(run: Run) -> None:
    run.start("members.start=4", "members.minimum=3", "rounds.inner_steps=20")
    url = run.invite(4)
    names = ("one", "two", "three", "four")
    for name in names:
        run.join(url, name)
    until("a commit", lambda: run.committed() >= 1, 180)
    run.kill("three", "four")
    until("the wait", lambda: "2 of the 3 members" in run.run().get("phase_reason", ""))
    waiting = run.committed()
    for name in ("three", "four"):
        run.join(url, name)
    until("all four", lambda: run.contributors(waiting) == 4, 180)
    run.whole(run.committed() - 1)


@pytest.mark.chaos
@pytest.mark.long
def test_a_stopped_node_with_a_wrong_clock_is_left_out_and_comes_back_by_itself(run: Run) -> None:
    run.start("members.lease=3", "rounds.inner_steps=20")
    url = run.invite(2)
    run.join(url, "one")
    run.join(url, "two", program=AN_HOUR_AHEAD)
    until("a commit of both", lambda: run.contributors() == 2)
    stopped = run.family("two")
    for process in stopped:
        process.suspend()
    until("it to be missed", lambda: run.member("two").get("state") == "evicted")
    assert "silent" in run.member("two")["reason"] or "connection" in run.member("two")["reason"]
    alone = until("a commit without it", lambda: run.contributors() == 1)
    assert alone
    for process in stopped:
        process.resume()
    until("a commit of both", lambda: run.contributors() == 2)
    assert run.member("two")["state"] == "active"
    run.whole(run.committed() - 1)


@pytest.mark.chaos
@pytest.mark.long
def test_a_slow_node_contributes_what_it_has(run: Run) -> None:
    run.start("rounds.inner_steps=30")
    url = run.invite(2)
    run.join(url, "fast", faults="trainer.step=stall:0.03")
    run.join(url, "slow", faults="trainer.step=stall:0.2")
    until("three commits", lambda: run.committed() >= 4)
    weights = run.rounds()[2]["contributors"]
    slow, fast = sorted(weights.values())
    assert 0.05 < slow / fast < 0.8, weights
    run.whole(3)
