"""Nodes that train on while their deltas travel: they do not wait for a slow network, and what fails costs no more
than it does where they wait."""

import pytest
from e2e.harness import Run, until

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEP = "trainer.step=stall:0.03"
SLOW = "upload=0.28"  # Mbit/s: an exchange takes half a second, about half of a round


def test_nodes_that_overlap_do_not_wait_and_agree_through_a_death_and_a_return(run: Run) -> None:
    run.start("--method", "overlapped", "rounds.inner_steps=30", "overlap.delay=24", "inner.lr=1e-3")
    url = run.invite(3)
    run.join(url, "one", faults=STEP)
    run.join(url, "two", SLOW, faults=STEP)
    until("two commits", lambda: run.committed() >= 2)
    before = run.run()["goodput_seconds"]
    until("three more", lambda: run.committed() >= 5)
    spent = {bucket: seconds - before[bucket] for bucket, seconds in run.run()["goodput_seconds"].items()}
    for record in run.rounds()[2:5]:
        seconds = record["seconds"]
        assert len(record["contributors"]) == 2
        assert seconds["reduce"] + seconds["commit"] > 0.15 * sum(seconds.values()), seconds
    assert spent["sync"] < 0.05 * spent["inner"], spent
    run.kill("two")
    until("a commit without it", lambda: run.contributors() == 1)
    run.join(url, "two", SLOW, faults=STEP)
    run.join(url, "three", SLOW, faults=STEP)
    until("a commit of all", lambda: run.contributors() == 3)
    run.whole(run.committed() - 1)
