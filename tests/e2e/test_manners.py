"""A node that its owner pauses, limits and takes out while the run goes on: real processes, the commands of the
command line."""

import json
import re
import signal
import subprocess
from typing import Any

import pytest
from e2e.harness import ATOLL, Run, until

pytestmark = [pytest.mark.e2e, pytest.mark.long]
CHUNK_BYTES = 4096 * 4  # of the tiny run, whatever the codec


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
    records = run.rounds()
    assert [r["round"] for r in records if two in r["contributors"]][-1] == last_order(run, "two")
    run.whole(len(records))
    for node in {node for record in records for node in record["samples"]}:
        trained = [
            s for r in records for first, count in r["samples"].get(node, ()) for s in range(first, first + count)
        ]
        assert len(trained) == len(set(trained)), "a sample is committed twice"


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


def test_limits_are_told_to_a_running_node_and_kept_for_its_next_life(run: Run) -> None:
    run.start("members.start=1")
    url = run.invite(1)
    run.join(url, "one", "upload=30")
    until("a commit", lambda: run.committed() >= 1)
    for wrong in ("hours=7", "colour=red", "gpu_duty=0", "upload=fast"):
        refused = tell(run, "one", "limits", wrong)
        assert (
            refused.returncode != 0 and "Traceback" not in refused.stderr and wrong.split("=")[0] in refused.stderr
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


def test_a_node_whose_bytes_of_the_day_are_spent_pauses_and_exchanges_nothing_more(run: Run) -> None:
    run.start()
    url = run.invite(2)
    run.join(url, "one"), run.join(url, "two")
    until("commits of both", lambda: run.committed() >= 3 and run.contributors() == 2)
    spent = status(run, "two")["bytes_this_day"]
    limit = spent + 400_000  # more than a round takes
    assert tell(run, "two", "limits", f"daily={limit / 1e9:.9f}").returncode == 0
    until("the pause", lambda: paused(run, "two"))
    said = status(run, "two")
    assert said["reason"] == said["paused"] == "the bytes of this day are spent"
    assert spent < said["bytes_this_day"] <= limit + CHUNK_BYTES
    at = run.committed()
    until("commits without it", lambda: run.committed() >= at + 3)
    assert status(run, "two")["bytes_this_day"] <= limit + CHUNK_BYTES
    assert status(run, "two")["round"] <= at, "it fetches nothing"
    assert tell(run, "two", "limits", "daily=").returncode == 0
    until("a commit of both again", lambda: run.contributors() == 2)
    run.whole(run.committed() - 1)
