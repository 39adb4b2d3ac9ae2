"""A run in which one node is two machines, one of which dies and comes back. Needs root for network namespaces."""

import subprocess
from pathlib import Path

import pytest
from e2e.harness import ATOLL, PACED, Run, until
from lan import HERE, two_machines

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.root, pytest.mark.chaos]


def test_a_node_of_two_machines_trains_in_a_run_and_survives_the_loss_of_one(tmp_path: Path) -> None:
    run = Run(tmp_path, HERE)
    with two_machines() as (first, second):
        host = f"{first.address}:29400"

        def worker() -> "subprocess.Popen[str]":
            settings = ("--state-dir", str(tmp_path / "worker"), "device=cpu", "ranks=1", "threads=1")
            return run.spawn("worker.log", [*second.through, *ATOLL, "node", "worker", host, *settings], PACED)

        try:
            run.start("rounds.inner_steps=20")
            url = run.invite(2)
            other = worker()
            several = ("machines=2", f"rendezvous={host}", "device=cpu", "ranks=1")
            run.join(url, "large", *several, host=first.address, through=first.through)
            run.join(url, "small", host=HERE)
            until("a commit of both", lambda: run.contributors() == 2)
            assert "on 2 local ranks" in run.log("large")
            other.kill()
            until("the loss to be seen", lambda: "the trainer died" in run.log("large"), 30)
            worker()
            lost = run.committed()
            until("both again", lambda: run.contributors(lost + 1) == 2, 120)
            assert run.log("large").count("on 2 local ranks") == 1  # the same node, with the same state
            run.whole(run.committed() - 1)
        finally:
            run.stop()
            for log in tmp_path.glob("*.log"):  # shown when the test fails
                print(f"--- {log.name}\n{log.read_text()[-3000:]}")
