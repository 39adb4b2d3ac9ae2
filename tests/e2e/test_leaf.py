"""Nodes that nobody can dial."""

import pytest
from e2e.harness import Run, until

pytestmark = pytest.mark.e2e


def test_leaves_take_part_fully_with_one_member_that_can_be_dialled(run: Run) -> None:
    run.start("members.start=3")
    url = run.invite(3)
    for name, how in (("b", ("--leaf",)), ("a", ()), ("c", ("--leaf",))):
        run.join(url, name, *how)
    until("three rounds on record", lambda: len(run.rounds()) >= 3 and run.contributors() == 3)
    run.whole(3)
    assert run.rounds()[2]["shares"] == {run.member("a")["node_id"]: 1.0}


def test_leaves_alone_wait_with_the_remedy_and_go_on_with_a_reducer(run: Run) -> None:
    run.start("members.start=2")
    url = run.invite(3)
    for name in ("a", "b"):
        run.join(url, name, "--leaf")
    until("the reason", lambda: "--role reducer" in run.run().get("phase_reason", ""))
    assert run.committed() == 0
    run.join(url, "r", "--role", "reducer")
    until("three rounds on record", lambda: len(run.rounds()) >= 3 and run.contributors() == 2)
    run.whole(3)
    assert run.member("r")["role"] == "reducer"
    run.kill("r")
    until("its end", lambda: run.member("r").get("state") not in ("reducer", "suspect"))
    committed = run.committed()
    run.join(url, "r", "--role", "reducer")
    run.commit_after(committed + 1)
