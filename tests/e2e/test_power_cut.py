"""Everything dies at once, the coordinator too, and is started again with the same commands: the run goes on with
what is on the disks, and at most the newest round is lost.

ATOLL_POWER_CUTS=N cuts the power N times, at other moments with another ATOLL_CHAOS_SEED.
"""

import os
import random
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from e2e.harness import Run, no_sample_twice, until
from safetensors.numpy import load_file

from atoll.node.export.model_files import TensorNaming
from atoll.node.export.single_file import export

pytestmark = pytest.mark.e2e

TIMES = int(os.environ.get("ATOLL_POWER_CUTS", "3"))
PATIENCE = 600.0  # seconds; starting trainers takes what it takes
SEED = int(os.environ.get("ATOLL_CHAOS_SEED", "0"))


def storm(run: Run, names: tuple[str, ...], cuts: int, seed: int, *overrides: str) -> None:
    """Cut the power so many times, at drawn moments of a round."""
    rng = random.Random(seed)
    run.start(f"members.start={len(names)}", "checkpoint.patience=60", *overrides)
    url = run.invite(len(names))
    for name in names:
        run.join(url, name)
    until("the first commit", lambda: run.committed() >= 1, PATIENCE)
    moments = [run.commit_after(k) for k in range(1, 5)]
    usual = median(b - a for a, b in pairwise(moments[1:]))
    for cut in range(cuts):
        moment = rng.uniform(0, 2 * usual)
        time.sleep(moment)
        known = run.committed()
        before = {r["round"]: r for r in run.rounds()}
        run.cut_power()
        died = time.monotonic()
        run.restart()
        for name in names:
            run.join(url, name)
        until("the coordinator", run.run, PATIENCE)
        resumed = run.committed()
        assert resumed >= known, "the coordinator went back"
        until("the next commit", lambda at=resumed: run.committed() > at, PATIENCE)  # type: ignore[misc]
        late = time.monotonic() - died
        until("all of them", lambda at=resumed: all_are_back(run, at, len(names)), PATIENCE)  # type: ignore[misc]
        check(run, before, known, cut + 1)
        void = [r["round"] for r in run.rounds() if r["void"]]
        print(
            f"cut {moment:.2f} s after a commit, in round {resumed + 1}: {late:.1f} s later a commit; void {void}"
        )


def all_are_back(run: Run, since: int, nodes: int) -> bool:
    return any(len(r["contributors"]) == nodes for r in run.rounds(since))


def check(run: Run, before: dict[int, dict[str, Any]], known: int, cuts: int) -> None:
    """What was on record is what it was, but for the newest round; every round is there, and adds up."""
    run.whole(run.committed() - 1)
    records = {r["round"]: r for r in run.rounds()}
    changed = [k for k, r in before.items() if records[k] != r]
    lost = [(known, before[k], records[k]) for k in changed if not records[k]["void"] or k < known]
    assert not lost, "an older round was lost"
    assert sum(r["void"] for r in records.values()) <= cuts, "more than one round for a cut"
    assert run.log("c").count("initialised the model") == 1, "it began anew"
    no_sample_twice({**records, **{k: r for k, r in before.items() if records[k]["void"]}}.values())
    losses = [r["val_loss"] for r in records.values() if r["val_loss"] is not None]
    assert losses[-1] < losses[0] + 0.1, losses


@pytest.mark.long
def test_all_power_fails_and_the_run_goes_on(run: Run) -> None:
    storm(run, ("one", "two"), 1, SEED)
    assert "is on this node's disk" in run.log("one") + run.log("two")
    [newest, *_] = sorted((run.folder / "one" / "outer").glob("*/snapshot-*.safetensors"), reverse=True)
    assert {name.partition(".")[0] for name in load_file(Path(newest))} == {"anchor", "momentum"}
    done = export(
        run.folder / "one", run.folder / "model.safetensors", TensorNaming.LLAMA
    )  # while the daemon works
    recorded = until("its record", lambda: {r["round"]: r["state_digest"] for r in run.rounds()}.get(done.round))
    assert recorded == done.state_digest


@pytest.mark.chaos
@pytest.mark.long
def test_a_commit_that_no_disk_has_is_void_and_the_run_goes_on(run: Run) -> None:
    run.start(faults="coordinator.commit.written@3=crash")  # before any node hears of it
    url = run.invite(2)
    run.join(url, "one"), run.join(url, "two")
    run.coordinator.wait(PATIENCE)
    run.cut_power()
    run.restart()
    run.join(url, "one"), run.join(url, "two")
    until("rounds to commit", lambda: run.committed() >= 5, PATIENCE)
    run.whole(4)
    assert [r["round"] for r in run.rounds() if r["void"]] == [3]
    assert "goes on from the state of round 2" in run.log("c")
    assert "are void: goes on from the state of 2" in run.log("one")


@pytest.mark.chaos
@pytest.mark.long
def test_all_power_fails_again_and_again(run: Run) -> None:
    storm(run, ("one", "two", "three"), TIMES, SEED, "members.minimum=2")
