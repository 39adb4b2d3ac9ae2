"""Nodes that nobody can dial."""

import pytest
from e2e.harness import Run, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.chaos]


def test_leaves_take_part_fully_with_one_member_that_can_be_dialled(run: Run) -> None:
    run.start("members.start=3")
    url = run.invite(3)
    for name, how in (("b", ("--leaf",)), ("a", ()), ("e", ("--leaf",))):
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


def test_who_joins_where_only_leaves_have_the_state_gets_it_from_them(run: Run) -> None:
    """A leaf through the reducer, which the others dial; a node that can be dialled from those who dial it."""
    run.start("members.start=2")
    url = run.invite(5)
    run.join(url, "r", "--role", "reducer")
    for name in ("a", "b"):
        run.join(url, name, "--leaf")
    until("a round on record", lambda: len(run.rounds()) >= 1)
    run.join(url, "e", "--leaf")
    until("a round with it", lambda: run.contributors() == 3)
    run.kill("r")
    until("its end", lambda: run.member("r").get("state") not in ("reducer", "suspect"))
    run.join(url, "d")
    until("its state", lambda: run.member("d").get("state") in ("synced", "active"))
    run.join(url, "r", "--role", "reducer")
    until("a round with all", lambda: run.contributors() == 4)
    run.whole(4)
