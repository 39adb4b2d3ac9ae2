"""Runs of real processes: unequal nodes, a killed trainer, a killed daemon that comes back as the same node."""

import json
import re
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import pytest
from e2e.harness import PACED, Run, until

from atoll.node.outer.vector_folders import OWNER_FILE, SHM
from atoll.node.participant.optimizer_files import POSITION, ROUND, OptimizerFiles

pytestmark = [pytest.mark.e2e, pytest.mark.long]

TOKENS = 4 * 32  # of a step: batch_size, seq_len


def copies(run: Run, name: str) -> list[dict[str, Any]]:
    """Where a node's trainer is in its round, as it says beside the copies that it has in memory."""
    found = []
    for owner in SHM.glob(f"atoll-*/{OWNER_FILE}"):
        with suppress(OSError, UnicodeDecodeError):  # vectors of others come and go, and copies as well
            if owner.read_text().startswith(f"{(run.folder / name).resolve()}\n"):
                files = OptimizerFiles(owner.parent / "copies", prefix=ROUND)
                found += [json.loads((files.path(number) / POSITION).read_text()) for number in files.rounds]
    return found


def says(run: Run, name: str, words: str) -> bool:
    return words in run.log(name)


def kill(*processes: psutil.Process) -> None:
    for process in processes:
        process.kill()


def test_a_killed_trainer_returns_and_unequal_nodes_agree(run: Run) -> None:
    run.start("rounds.total=4", "rounds.inner_steps=60")
    url = run.invite(2)
    one, two = run.join(url, "one"), run.join(url, "two", "ranks=2")
    until("the first commit", lambda: run.committed() >= 1)  # the other three take 3.6 s at least
    kill(*psutil.Process(two.pid).children(recursive=True))  # launcher and ranks; the daemon lives on
    assert (
        psutil.Process(one.pid).memory_full_info().uss < 120e6
    )  # of its own: without torch, or a copy of the state
    assert one.wait(240) == 0 and two.wait(30) == 0
    records = run.get("/api/rounds?since=0")
    assert [r["round"] for r in records] == [1, 2, 3, 4]
    for record in records:
        assert record["digests_equal"] and len(record["contributors"]) == 2
    members = run.get("/api/run")["members"]
    assert [m["state"] for m in members] == ["left", "left"]  # nobody was ever evicted
    assert "it starts again in" in run.log("two")


@pytest.mark.chaos
def test_a_trainer_killed_late_in_a_round_goes_on_from_its_last_copy(run: Run) -> None:
    """Of the two rounds the first has one step, the second takes 6 s at least."""
    steps = 300
    run.start(
        "rounds.total=2",
        f"rounds.inner_steps={steps}",
        "rounds.ceiling=1",
        "members.start=1",
        "rounds.data_parallel=1",
    )
    one = run.join(run.invite(1), "one", "copy_interval=0.2")
    copied = until("a copy of the second round", lambda: [c for c in copies(run, "one") if c["steps"] > 20])[0]
    kill(*psutil.Process(one.pid).children(recursive=True))
    assert one.wait(240) == 0
    records = run.get("/api/rounds?since=0")
    assert [r["tokens"] for r in records] == [TOKENS, (1 + steps) * TOKENS]
    back = re.search(
        r"goes on with round (\d) behind inner step (\d+), which is in this node's memory", run.log("one")
    )
    assert back is not None and int(back[1]) == copied["round"] == 2 and int(back[2]) >= copied["steps"]


@pytest.mark.chaos
def test_nodes_of_one_machine_that_are_killed_together_have_their_state_in_its_memory(run: Run) -> None:
    """Nothing of it is on a disk: without either's memory the run could not go on."""
    run.start("rounds.inner_steps=100")
    url = run.invite(2)
    for name in ("one", "two"):
        run.join(url, name, "durable=false")
    until("a commit", lambda: run.committed() >= 1)
    run.kill("one", "two")
    at = run.committed()
    for name in ("one", "two"):
        run.nodes[name].wait()
        run.join(url, name, "durable=false")
        until("its state", partial(says, run, name, f"the state of round {at} is still in this node's memory"))
    until("a commit of both", lambda: run.contributors(at) == 2)
    run.whole(at + 1)


@pytest.mark.chaos
def test_trainers_that_run_out_of_memory_train_on_in_halves(run: Run) -> None:
    run.start()
    url = run.invite(2)
    run.join(url, "one", faults=f"{PACED},trainer.micro_batch.4=memory")
    run.join(url, "two", "ranks=2", faults=f"{PACED},trainer.micro_batch.2=memory")
    again = "computes 2 sequences a step in micro-batches of 1 sequence, as found earlier"
    until("its return", lambda: again in run.log("two"), 240)  # rounds do not wait for a first step
    back = run.committed()
    until("a commit of both", lambda: run.contributors(back) == 2)
    assert all(record["digests_equal"] for record in run.get("/api/rounds?since=0"))
    assert "evicted" not in run.log("c")  # nobody ever was
    assert "goes on with micro-batches of 2 sequences" in run.log("one")
    assert "the trainer died" not in run.log("one")
    assert "the trainer died" in run.log("two")


@pytest.mark.chaos
def test_a_hung_trainer_is_ended_and_its_node_goes_on(run: Run) -> None:
    run.start("rounds.total=3", "rounds.inner_steps=100", "members.stall=15")
    url = run.invite(2)
    one, two = run.join(url, "one"), run.join(url, "two")
    until("the first commit", lambda: run.committed() >= 1)  # the other two take 4 s at least
    for process in psutil.Process(two.pid).children(recursive=True):
        process.suspend()
    assert one.wait(240) == 0 and two.wait(30) == 0
    assert "made no progress" in run.log("two")
    assert run.committed() == 3 and all(r["digests_equal"] for r in run.get("/api/rounds"))


def test_a_killed_daemon_comes_back_as_the_same_node_without_a_new_token(run: Run) -> None:
    run.start("rounds.total=0")
    url = run.invite(2)
    run.join(url, "one")
    two = run.join(url, "two")
    until("the first commit", lambda: run.committed() >= 1)
    daemon = psutil.Process(two.pid)
    kill(daemon, *daemon.children(recursive=True))
    alone = until(
        "a commit without it", lambda: [r for r in run.get("/api/rounds") if len(r["contributors"]) == 1]
    )
    run.join(url, "two")
    since = f"/api/rounds?since={alone[-1]['round']}"
    until("a commit with it", lambda: [r for r in run.get(since) if len(r["contributors"]) == 2])
    assert "is on this node's disk" in run.log("two")
    assert {m["name"] for m in run.get("/api/run")["members"]} == {"one", "two"}
    assert len(run.get("/api/run")["members"]) == 2
    assert all(r["digests_equal"] for r in run.get("/api/rounds"))


@pytest.mark.chaos
def test_the_first_rounds_of_a_run_can_have_one_step_each(run: Run) -> None:
    start = "rounds.data_parallel=5", "rounds.total=7", "outer.momentum=0.5", "members.start=2"
    run.start(*start, "overlap.delay=3")
    url = run.invite(2)
    one, two = run.join(url, "one"), run.join(url, "two")
    assert one.wait(240) == 0 and two.wait(30) == 0
    records = run.get("/api/rounds?since=0")
    assert [r["round"] for r in records] == list(range(1, 8))
    for record in records[:5]:
        assert len(record["contributors"]) == 2 and record["digests_equal"]
        assert set(record["contributors"].values()) == {TOKENS}
    for record in records[5:]:
        assert min(record["contributors"].values()) > TOKENS and record["digests_equal"]
