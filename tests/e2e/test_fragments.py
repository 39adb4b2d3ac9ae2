"""Fragments of the model that take turns, on real nodes that train on meanwhile."""

import pytest
from e2e.harness import Run, until
from e2e.test_methods import killed_joined_and_back

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.chaos]

OVERLAPPED = pytest.param(("overlapped", "fragments.count=4"), marks=pytest.mark.chaos)


@pytest.mark.parametrize("method", [("streaming",), OVERLAPPED], ids=" ".join)
def test_fragments_take_turns_through_a_kill_and_a_join(method: tuple[str, ...], run: Run) -> None:
    run.start("--method", *method, "rounds.inner_steps=40", "members.start=3", "inner.lr=1e-3")
    url = run.invite(4)
    for name in ("one", "two", "three"):
        run.join(url, name, faults="trainer.step=stall:0.02")
    back = killed_joined_and_back(run, url)
    run.whole(back)
    records = run.rounds()
    assert [r["fragment"] for r in records[:6]] == [0, 1, 2, 3, 0, 1]
    losses = {r["round"]: r["val_loss"] for r in records if r["val_loss"] is not None}
    assert all(round_ % 4 == 0 for round_ in losses), "it is measured once a turn"
    assert losses[max(losses)] < losses[min(losses)] - 0.05, losses


def test_fragments_of_a_step_or_two_go_on_with_one_node_through_a_kill_and_a_join(run: Run) -> None:
    run.start("--method", "decoupled", "rounds.inner_steps=24", "members.start=3", "inner.lr=1e-3")
    url = run.invite(4)
    run.join(url, "one", faults="trainer.step=stall:0.1")
    run.join(url, "two", faults="trainer.step=stall:0.3")  # slower than a round
    run.join(url, "three", faults="trainer.step=stall:0.1")
    back = killed_joined_and_back(run, url)
    until("a turn of each of 20 fragments", lambda: len(run.rounds()) >= 20)
    run.whole(back)
    records = run.rounds()
    assert max(r["fragment"] for r in records) == 19, "as many as the model has tensors"
    assert any(len(r["contributors"]) < len(r["members"]) for r in records)
