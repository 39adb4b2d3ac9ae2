"""Runs of real processes whose deltas are merged, weighed or sealed in other ways than the plain mean."""

import pytest
from e2e.harness import Run, until

pytestmark = [pytest.mark.e2e, pytest.mark.long]

DECOUPLED = (
    *("outer.weights=quality", "outer.merge=radial", "outer.clip=true", "outer.per_token=true"),
    *("rounds.quorum=0.0001", "rounds.grace=0.5", "reduce.codec=int4"),
)


def killed_joined_and_back(run: Run, url: str) -> int:
    """`three` is killed after two commits, `four` joins, `three` comes back, and both contribute; returns the
    round that was committed when it came."""
    until("two commits", lambda: run.committed() >= 2)
    run.kill("three")
    run.join(url, "four")
    killed = run.committed()
    four = until("the joiner", lambda: run.member("four").get("node_id"))
    until("a commit with the joiner", lambda: [r for r in run.rounds(killed) if four in r["contributors"]])
    run.join(url, "three")
    three, back = run.member("three")["node_id"], run.committed()
    until("a commit with who came back", lambda: [r for r in run.rounds(back) if three in r["contributors"]])
    return back


@pytest.mark.chaos
def test_deltas_are_merged_radially_by_a_quorum_of_one_through_a_kill_and_a_join(run: Run) -> None:
    run.start(*DECOUPLED, "members.start=3")
    url = run.invite(4)
    run.join(url, "one")
    run.join(url, "two", faults="trainer.step=stall:0.1")  # it has fewer steps when the others have theirs
    run.join(url, "three")
    back = killed_joined_and_back(run, url)
    assert "is on this node's disk" in run.log("three")
    run.whole(back)
    assert any("had less" in r["reason"] or "goes on without" in run.log("c") for r in run.rounds())


@pytest.mark.chaos
def test_sparse_deltas_are_gathered_through_a_kill_and_a_join(run: Run) -> None:
    run.start("--method", "sparse", "members.start=3")
    url = run.invite(4)
    for name in ("one", "two", "three"):
        run.join(url, name)
    run.whole(killed_joined_and_back(run, url))
    sent = [max(record["bytes_up"].values()) for record in run.rounds()]  # with what joiners were given
    assert min(sent) < 20_000, "a dense reduce of int8 sends more"


OTHERS = [pytest.param(method, marks=pytest.mark.chaos) for method in ("intellect-1", "local-sgd")]


@pytest.mark.chaos
@pytest.mark.parametrize("method", ["diloco", *OTHERS])
def test_a_method_without_overlap_goes_on_through_a_kill_and_a_join(method: str, run: Run) -> None:
    """The others have tests of what is their own."""
    run.start("--method", method)
    url = run.invite(3)
    run.join(url, "one")
    run.join(url, "two")
    until("two commits", lambda: run.committed() >= 2)
    run.kill("two")
    run.join(url, "three")
    three = until("the joiner", lambda: run.member("three").get("node_id"))
    joined = until("a commit with the joiner", lambda: [r for r in run.rounds() if three in r["contributors"]])
    until("one more", lambda: run.committed() > joined[0]["round"])
    run.whole(joined[0]["round"])


def test_a_reducer_is_not_let_into_a_run_that_merges_by_tensors(run: Run) -> None:
    run.start("outer.merge=radial")
    reducer = run.join(run.invite(1), "reducer", "--role", "reducer")
    assert reducer.wait(60) != 0
    assert "merges deltas tensor by tensor" in run.log("reducer")
