"""Where the time of real nodes goes: whatever happens to them, the buckets add up, and what is done to one is
found in the bucket that it belongs to."""

import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from e2e.harness import ATOLL, Run, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.alone]
PACE = 0.15  # seconds that a step takes at least
STEPS = 80
NAMES = ("ada", "bo", "cy")


def tell(run: Run, name: str, *words: str) -> None:
    command = [*ATOLL, "node", *words, "--state-dir", str(run.folder / name)]
    subprocess.run(command, capture_output=True, check=True, timeout=60)


def seconds(run: Run, name: str) -> dict[str, float]:
    found: dict[str, float] = run.member(name).get("seconds", {})
    return found


def spent(run: Run, name: str, bucket: str, before: dict[str, float]) -> float:
    return seconds(run, name).get(bucket, 0.0) - before.get(bucket, 0.0)


def dated(run: Run, holds: Callable[[str], bool]) -> float:
    """When the coordinator last noted something, seconds since 1970; 0: not yet."""
    events: list[dict[str, Any]] = run.run()["events"]
    return max((float(e["at"]) for e in events if holds(e["sentence"])), default=0.0)


def at_step(run: Run, name: str, step: int) -> dict[str, Any]:
    """The member, once it takes the inner steps of a round and has so many."""
    return dict(
        until(
            f"step {step} of {name}",
            lambda: (m := run.member(name)) and m["phase"] == "inner" and m["inner_step"] >= step and m,
        )
    )


def ranks(run: Run, name: str) -> list[psutil.Process]:
    """The processes of the node's trainer."""
    return run.family(name)[1:]


def test_buckets_add_up_and_each_injected_loss_is_in_its_own(run: Run) -> None:
    run.start(f"rounds.inner_steps={STEPS}", "members.start=3", "members.stall=90", "members.lease=20")
    url = run.invite(9)
    for name in NAMES:
        run.join(url, name, faults=f"trainer.step=stall:{PACE}")
    until("a commit of all three", lambda: run.contributors() == 3)

    # A node is killed: its steps are lost, and it is down until it is back.
    killed = at_step(run, "cy", STEPS // 2)
    run.kill("cy")
    at, before = time.time(), killed["seconds"]
    run.nodes["cy"].wait()
    since = run.rounds()[-1]["committed_at"]
    time.sleep(12)
    run.join(url, "cy", faults=f"trainer.step=stall:{PACE}")
    back = until("cy's return", lambda: dated(run, lambda s: s.startswith("cy is back")))
    until("that it trains", lambda: run.member("cy")["phase"] == "inner")
    assert 0.95 <= spent(run, "cy", "down", before) / (back - at) <= 1.05
    lost = spent(run, "cy", "lost", before)
    assert 0.95 * PACE * killed["inner_step"] <= lost <= 1.05 * (at - since)

    # The coordinator is killed, and away for a while: nodes train on.
    before = {name: seconds(run, name) for name in NAMES}
    run.coordinator.kill()
    run.coordinator.wait()
    time.sleep(8)
    run.restart()
    until("the coordinator", lambda: run.run())
    until("that all are heard again", lambda: all(run.member(n).get("state") == "active" for n in NAMES))
    committed = run.committed()
    until("a commit", lambda: run.committed() > committed)
    for name in NAMES:  # what was seen in the last second before the end may be booked otherwise
        for bucket in ("down", "starting", "recovering"):
            assert abs(spent(run, name, bucket, before[name])) <= 1.5, (name, bucket)

    # A node is paused.
    before_pause = seconds(run, "bo")
    tell(run, "bo", "pause")
    until("the pause", lambda: run.member("bo")["phase"] == "paused")
    at, seen = time.monotonic(), spent(run, "bo", "paused", before_pause)
    time.sleep(15)
    tell(run, "bo", "resume")
    took = time.monotonic() - at
    until("that it trains", lambda: run.member("bo")["phase"] == "inner")
    # While it is paused it takes part in exchanges.
    exchanged = spent(run, "bo", "sync", before_pause)
    assert 0.95 <= (spent(run, "bo", "paused", before_pause) - seen + exchanged) / took <= 1.3

    # A trainer stands still.
    at_step(run, "ada", 5)
    before_stop = seconds(run, "ada")
    at = time.monotonic()
    for process in ranks(run, "ada"):
        process.send_signal(signal.SIGSTOP)
    time.sleep(40)  # the steps' pace on a busy machine is known to a second or two
    for process in ranks(run, "ada"):
        process.send_signal(signal.SIGCONT)
    took = time.monotonic() - at
    committed = run.committed()
    until("a commit", lambda: run.committed() > committed)
    stood = spent(run, "ada", "waiting", before_stop)
    print(f"of {took:.1f} s for which a trainer stood still {stood:.1f} s are waiting")
    assert 0.95 * took <= stood

    # A trainer is killed: its node is not down.
    trained = at_step(run, "bo", STEPS // 2)
    for process in ranks(run, "bo"):
        process.kill()
    until("the trainer's end", lambda: run.member("bo")["phase"] == "starting")
    committed = until("that it trains", lambda: run.member("bo")["phase"] == "inner" and run.committed())
    until("a commit", lambda: run.committed() > committed)
    assert spent(run, "bo", "lost", trained["seconds"]) >= 0.95 * PACE * trained["inner_step"]
    assert spent(run, "bo", "down", trained["seconds"]) == 0

    # All of it adds up, by the meter and by the records, which no restart has cut short.
    now = run.run()
    for member in now["members"]:
        joined = next(
            r for r in now["events"] if r["sentence"] == f"{member['name']} joins as {member['node_id']}"
        )
        wall = now["at"] - joined["at"]
        assert sum(member["seconds"].values()) == pytest.approx(wall, rel=0.01), member
    assert sum(now["goodput"].values()) == pytest.approx(1)
    assert now["fleet_goodput"] < now["compute_utilisation"] <= 1
    records = run.rounds()
    for member in now["members"]:
        told = [r["spent"].get(member["node_id"], {}) for r in records]
        joined = next(
            r for r in now["events"] if r["sentence"] == f"{member['name']} joins as {member['node_id']}"
        )
        wall = records[-1]["committed_at"] - joined["at"]
        heard = 3.0  # seconds that a heartbeat may be old
        assert sum(sum(of.values()) for of in told) == pytest.approx(wall, abs=0.01 * wall + heard), member

    # Each failure was noticed, has its price, and was over in the end.
    def failures(name: str, reason: str = "") -> list[dict[str, Any]]:
        """What the records say of the node's failures, the latest record the last word."""
        nodes = {m["node_id"]: m["name"] for m in now["members"]}
        found = {f["number"]: f for record in run.rounds() for f in record["failures"]}
        return [f for f in found.values() if nodes[f["node"]] == name and reason in f["reason"]]

    of_cy = failures("cy")[0]
    assert of_cy["detected"] < 6 and of_cy["recovered"] > 12 and of_cy["lost"] > 0
    until("the record of bo's trainer", lambda: failures("bo", "its trainer ended"))
