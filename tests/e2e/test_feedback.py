"""Error feedback on real nodes: what the wire lost outlives the node's process, and all stay alike."""

import pytest
from e2e.harness import Run, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.chaos]


def test_nodes_with_error_feedback_agree_and_a_killed_one_has_its_residual_again(run: Run) -> None:
    run.start("--method", "muloco", "rounds.inner_steps=10", "inner.lr=1e-3")
    url = run.invite(3)
    run.join(url, "one")
    run.join(url, "two")
    until("three commits", lambda: run.committed() >= 3)
    run.kill("two")
    until("a commit without it", lambda: run.contributors() == 1)
    run.join(url, "two")
    run.join(url, "three")
    until("a commit of all", lambda: run.contributors() == 3)
    assert "what the wire had left out after round" in run.log("two")
    assert "left out" not in run.log("three")
    last = until("two more", lambda: run.committed())
    until("two more", lambda: run.committed() >= last + 2)

    def learned() -> float:
        losses = [record["val_loss"] for record in run.rounds() if record["val_loss"] is not None]
        return float(losses[0] - losses[-1])

    until("what is learned", lambda: learned() > 0.3)  # how many rounds there were is the machine's
    run.whole(run.committed() - 1)
