"""A node that its owner pauses, limits and takes out while the run goes on: real processes, the commands of the
command line."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from e2e.harness import ATOLL, Run, no_sample_twice, until

from atoll.node.daemon import control_socket

pytestmark = [pytest.mark.e2e, pytest.mark.long]
NOTING = Path(__file__).with_name("noting_trainer.py")


def tell(run: Run, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`atoll node WORDS` to the node's daemon."""
    command = [*ATOLL, "node", words[0], "--state-dir", str(run.folder / name), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def status(run: Run, name: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(tell(run, name, "status", "--json").stdout or "{}")
    return said


def paused(run: Run, name: str) -> bool:
    return bool(status(run, name).get("state") == "paused")


def last_order(run: Run, name: str) -> int:
    """The last round in which the node's trainer was told to take steps."""
    rounds = [int(found) for found in re.findall(r"round (\d+): \d+ inner steps", run.log(name))]
    return rounds[-1]


def test_a_paused_node_contributes_what_it_has_is_not_waited_for_and_leaves_after_its_commit(run: Run) -> None:
    run.start("rounds.inner_steps=30", "rounds.quorum=1.0")
    url = run.invite(3)
    run.join(url, "one"), run.join(url, "two")
    until("a commit of both", lambda: run.contributors() == 2)
    two = run.member("two")["node_id"]

    done = tell(run, "two", "pause", "--for", "2h")
    assert done.returncode == 0 and "its owner told it to" in done.stdout, done.stderr
    until("the pause", lambda: paused(run, "two"))
    at = run.committed()
    until("two commits without it", lambda: run.committed() >= at + 3)
    last = run.rounds()[-1]
    assert two not in last["contributors"], "it takes no steps"
    until("that the page says why", lambda: "its owner told it to" in run.member("two")["reason"])
    until("its state of then", lambda: status(run, "two")["round"] >= at + 3)
    assert run.run()["goodput_seconds"]["paused"] > 0

    assert tell(run, "two", "resume").returncode == 0
    until("a commit of both again", lambda: run.contributors() == 2)
    assert tell(run, "two", "finish").returncode == 0
    assert run.nodes["two"].wait(60) == 0, run.log("two")
    records = run.recorded(last_order(run, "two"))
    assert [r["round"] for r in records if two in r["contributors"]][-1] == last_order(run, "two")
    run.whole(len(records))
    no_sample_twice(records)


PAUSES = int(os.environ.get("ATOLL_PAUSES", "30"))
SEED = int(os.environ.get("ATOLL_CHAOS_SEED", "0"))


@pytest.mark.chaos
def test_pauses_and_resumes_at_any_moment_lose_no_step_and_no_node_gets_another_state(run: Run) -> None:
    rng, names = random.Random(SEED), ("one", "two")
    run.start("members.minimum=1")
    url = run.invite(2)
    for name in names:
        run.join(url, name, script=(sys.executable, "-P", str(NOTING), str(run.folder / f"{name}.steps")))
    until("a commit of both", lambda: run.contributors() == 2)
    moments = [run.commit_after(run.committed()) for _ in range(4)]
    usual = median(b - a for a, b in pairwise(moments))
    pausing, pauses = set[str](), 0
    while pauses < PAUSES or pausing:
        time.sleep(rng.choice([0.02, rng.uniform(0, usual), rng.uniform(0, 2 * usual)]))
        name = rng.choice(names if pauses < PAUSES else sorted(pausing))
        if name in pausing:
            control_socket.ask(run.folder / name, "resume")
            pausing.remove(name)
        else:
            control_socket.ask(run.folder / name, "pause")
            pausing.add(name)
            pauses += 1
    at = run.committed()
    until("commits of both again", lambda: run.contributors(at + 1) == 2)
    ids = {run.member(name)["node_id"]: name for name in names}
    for name in names:
        assert tell(run, name, "finish").returncode == 0
        assert run.nodes[name].wait(60) == 0, run.log(name)

    records = run.recorded(run.committed())
    print(f"{PAUSES} pauses over {len(records)} rounds of {usual:.2f} s")
    run.whole(len(records))
    of_both = [record for record in records if record["round"] <= at]
    assert all(
        record["digests_equal"] and record["contributors"].keys() <= record["digests"].keys() for record in of_both
    )
    compared = [record["round"] for record in of_both if record["digests"].keys() == ids.keys()]
    assert len(compared) > at / 2, "who is paused may follow after the next commit: then that one's are compared"
    assert "differs from the run's" not in run.log("c"), "nobody was brought back to the other's state"
    no_sample_twice(records)
    steps = {name: steps_of(run.folder / f"{name}.steps") for name in names}
    trained = [sample for name in names for sample in steps[name]]
    assert len(trained) == len(set(trained)), "a sample was trained on twice"
    for node, name in ids.items():
        ranges = [part for record in records for part in record["samples"].get(node, ())]
        counted = [sample for first, count in ranges for sample in range(first, first + count)]
        assert sorted(counted) == sorted(steps[name]), "what it trained on is what counted"
    assert run.offences("one") == run.offences("two") == []


def steps_of(file: Path) -> list[int]:
    """The samples of the steps that a trainer has noted."""
    return [int(sample) for line in file.read_text().splitlines() for sample in line.split()[1:]]


@pytest.mark.chaos
def test_a_node_that_is_told_to_end_has_what_it_trained_committed_first(run: Run) -> None:
    run.start("rounds.inner_steps=30")
    url = run.invite(2)
    run.join(url, "one"), run.join(url, "two")
    until("a commit of both", lambda: run.contributors() == 2)
    two = run.member("two")["node_id"]
    run.nodes["two"].send_signal(signal.SIGTERM)
    assert run.nodes["two"].wait(25) == 0, run.log("two")
    until("a commit after it", lambda: run.rounds()[-1]["round"] > last_order(run, "two"))
    records = run.rounds()
    assert [r["round"] for r in records if two in r["contributors"]][-1] == last_order(run, "two")
    run.whole(len(records))


@pytest.mark.chaos
def test_limits_are_told_to_a_running_node_and_kept_for_its_next_life(run: Run) -> None:
    run.start("members.start=1")
    url = run.invite(1)
    run.join(url, "one", "upload=30")
    until("a commit", lambda: run.committed() >= 1)
    for wrong in ("hours=7", "colour=red", "gpu_duty=0", "upload=fast"):
        refused = tell(run, "one", "limits", wrong)
        assert (
            refused.returncode == 2 and "Traceback" not in refused.stderr and wrong.split("=")[0] in refused.stderr
        )
    assert tell(run, "one", "limits", "upload=20", "gpu_duty=0.5", "hours=00:00-24:00").returncode == 0
    limits = status(run, "one")["limits"]
    assert (limits["upload"], limits["gpu_duty"], limits["hours"]) == (20.0, 0.5, "00:00-24:00")
    run.kill("one")
    run.nodes["one"].wait()
    run.join(url, "one", "upload=30")
    until("its next life", lambda: status(run, "one").get("limits", {}).get("upload") == 20.0)
    assert tell(run, "one", "limits", "upload=", "daily=0.000001").returncode == 0
    limits = status(run, "one")["limits"]
    assert (limits["upload"], limits["daily"]) == (30.0, 1e-6)


@pytest.mark.chaos
def test_a_node_whose_bytes_of_the_day_are_spent_pauses_and_exchanges_nothing_more(run: Run) -> None:
    run.start()
    url = run.invite(2)
    run.join(url, "one"), run.join(url, "two")
    until("commits of both", lambda: run.contributors(2) == 2)
    spent = status(run, "two")["bytes_this_day"]
    limit = spent + 400_000  # more than a round takes
    assert tell(run, "two", "limits", f"daily={limit / 1e9:.9f}").returncode == 0
    until("the pause", lambda: paused(run, "two"))
    said = status(run, "two")
    assert said["reason"] == said["paused"] == "the bytes of this day are spent"
    at = run.committed()
    until("commits without it", lambda: run.committed() >= at + 3)
    two = run.member("two")["node_id"]
    assert all(two not in record["contributors"] for record in run.rounds(at + 1))
    # What is left where a round would not fit goes into following the others; not a byte passes beyond that.
    until("the last byte", lambda: status(run, "two")["bytes_this_day"] >= limit)
    at = run.committed()
    until("more commits", lambda: run.committed() >= at + 3)
    said = status(run, "two")
    assert spent < said["bytes_this_day"] <= limit
    assert said["round"] <= at, "it fetches nothing"
    assert tell(run, "two", "limits", "daily=").returncode == 0
    until("a commit of both again", lambda: run.contributors() == 2)
    assert run.offences("two") == []
    run.whole(run.committed() - 1)


@pytest.mark.chaos
def test_a_node_whose_bytes_are_gone_in_the_middle_of_an_exchange_says_so_and_is_left_out(run: Run) -> None:
    """The limit is lowered while its vector travels: the others go on at once, not after a reduce's timeout."""
    run.start("members.minimum=1", "reduce.chunk=1024")
    url = run.invite(3)
    for name in ("one", "two", "three"):
        run.join(url, name)
    until("a commit of all", lambda: run.contributors() == 3)
    assert tell(run, "two", "limits", "upload=0.2", "download=0.2").returncode == 0
    until("its exchange", lambda: 0 < ((status(run, "two").get("exchange") or {}).get("chunks") or 0))
    spent = status(run, "two")["bytes_this_day"]
    assert tell(run, "two", "limits", f"daily={spent / 1e9:.9f}").returncode == 0
    at = run.committed()
    until("that it is told", lambda: "bytes of this day" in run.member("two")["reason"], 5.0)
    until("commits without it", lambda: run.committed() >= at + 3, 25.0)  # an attempt's timeout is 30 s at least
    assert status(run, "two")["bytes_this_day"] < spent + 100_000, "what had passed before it was told"
    assert run.offences("two") == run.offences("one") == run.offences("three") == []
    assert tell(run, "two", "limits", "daily=", "upload=", "download=").returncode == 0
    until("a commit of all again", lambda: run.contributors() == 3)
    run.whole(run.committed() - 1)


@pytest.mark.chaos
def test_of_two_the_one_with_bytes_goes_on_and_a_newcomer_gets_the_state_from_it(run: Run) -> None:
    run.start("members.minimum=1")
    url = run.invite(3)
    run.join(url, "one"), run.join(url, "two")
    until("a commit of both", lambda: run.contributors() == 2)
    assert tell(run, "one", "limits", "daily=0.000000001").returncode == 0
    until("the pause", lambda: paused(run, "one"))
    at = run.committed()
    until("commits of one alone", lambda: run.committed() >= at + 3)
    run.join(url, "three")
    until("a commit with the newcomer", lambda: run.contributors() == 2)
    one = status(run, "one")
    assert one["round"] <= at + 1 and f"recovering without {one['node_id']}" not in run.log("three")
    run.whole(run.committed() - 1)


@pytest.mark.chaos
def test_a_reducer_obeys_its_owner_and_refuses_what_it_cannot(run: Run) -> None:
    run.start("rounds.inner_steps=4")
    url = run.invite(4)
    refused = run.join(url, "wrong", "--role", "reducer", "gpu_duty=0.5")
    assert refused.wait(60) != 0 and "gpu_duty=0.5 is a limit on a trainer" in run.log("wrong")
    run.join(url, "one", "--leaf"), run.join(url, "two", "--leaf")
    run.join(url, "r", "--role", "reducer", "upload=40")
    until("commits", lambda: run.committed() >= 2)
    wrong = tell(run, "r", "limits", "threads=2")
    assert wrong.returncode == 2 and "threads is a limit on a trainer" in wrong.stderr
    assert tell(run, "r", "limits", "upload=20").returncode == 0 and status(run, "r")["limits"]["upload"] == 20.0

    def stands() -> None:
        until("the reason", lambda: "--role reducer" in run.run().get("phase_reason", ""))
        at = run.committed()
        until("the pause", lambda: paused(run, "r"))
        assert run.committed() == at

    assert tell(run, "r", "pause").returncode == 0
    stands()
    assert "its owner told it to" in run.member("r")["reason"]
    assert tell(run, "r", "resume").returncode == 0
    at = run.committed()
    until("commits again", lambda: run.committed() >= at + 2)
    spent = status(run, "r")["bytes_this_day"]
    limit = spent + 2_000_000  # some rounds more
    assert tell(run, "r", "limits", f"daily={limit / 1e9:.9f}").returncode == 0
    stands()
    assert spent < status(run, "r")["bytes_this_day"] <= limit
    assert tell(run, "r", "limits", "daily=").returncode == 0
    at = run.committed()
    until("commits once more", lambda: run.committed() >= at + 2)
    assert tell(run, "r", "finish").returncode == 0
    assert run.nodes["r"].wait(30) == 0, run.log("r")
    assert run.offences("r") == []
    run.whole(run.committed() - 1)  # the last one may lack its validation loss yet


@pytest.mark.chaos
def test_a_node_that_computes_for_a_twentieth_of_the_time_is_never_taken_for_hung(run: Run) -> None:
    """Its steps ask for rests that are longer than `members.stall`: it contributes, and stays a member."""
    large = ("model.dim=128", "model.ffn_dim=512", "model.seq_len=256", "inner.batch_size=16")
    run.start("rounds.inner_steps=4", "members.stall=6", "members.minimum=1", "reduce.chunk=65536", *large)
    url = run.invite(2)
    run.join(url, "one", faults=""), run.join(url, "two", "gpu_duty=0.05", faults="")
    until("a commit of both", lambda: run.contributors() == 2, 180.0)
    two = run.member("two")["node_id"]
    until("its rest", lambda: status(run, "two").get("paused") == "it rests after a step", 60.0)
    counted = len([r for r in run.rounds() if two in r["contributors"]])
    until("more of it", lambda: len([r for r in run.rounds() if two in r["contributors"]]) >= counted + 3, 180.0)
    assert "evicted" not in run.log("c") and "made no progress" not in run.log("two")
    assert run.offences("two") == []


@pytest.mark.chaos
def test_a_limit_on_memory_is_refused_where_the_model_does_not_fit_and_else_kept_to(run: Run) -> None:
    """A trainer that takes too much hands over what it has and starts again with half of it at once."""
    large = ("model.seq_len=1024", "inner.batch_size=32", "rounds.inner_steps=2", "model.dim=64")
    run.start("members.start=1", *large)
    url = run.invite(2)
    refused = run.join(url, "small", "memory=0.5")
    assert refused.wait(90) == 3 and "memory=0.5 GB" in run.log("small"), run.log("small")
    run.join(url, "one", "device=cpu", "micro_batch=32", "memory=8", faults="")
    until("a commit", lambda: run.committed() >= 1, 180.0)
    wrong = tell(run, "one", "limits", "memory=0.3")
    assert wrong.returncode == 3 and "needs about" in wrong.stderr and "Traceback" not in wrong.stderr
    assert status(run, "one")["limits"]["memory"] == 8.0
    used = until("a look", lambda: status(run, "one")["memory_bytes"])
    print(f"the node takes {used / 1e6:.0f} MB")
    assert tell(run, "one", "limits", "memory=0.65").returncode == 0  # with 32 sequences at once it takes more
    words = "memory=0.65 allows less: the trainer starts again with micro-batches of 16, after 32"
    until("that it is made smaller", lambda: words in run.log("one"), 180.0)
    at = run.committed()
    until("commits", lambda: run.committed() >= at + 2, 180.0)
    assert "the trainer died" not in run.log("one")
    run.whole(run.committed() - 1)  # the last one may lack its validation loss yet
