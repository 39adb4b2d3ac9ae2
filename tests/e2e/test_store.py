"""A run sends checkpoints to a remote store, and another one begins with the newest."""

from pathlib import Path

import pytest
from e2e.harness import Run, until

from atoll.node.store import Store

pytestmark = pytest.mark.e2e


def test_a_run_begins_with_another_runs_checkpoint(run: Run, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    run.start(f"checkpoint.remote={url}", "checkpoint.remote_every=2", "checkpoint.every=1", "name=first")
    invite = run.invite(2)
    run.join(invite, "one"), run.join(invite, "two")
    until("a checkpoint", lambda: list((tmp_path / "store").glob("first-*/round-*/checkpoint.json")))
    run.cut_power()
    [folder] = (tmp_path / "store").iterdir()
    newest = Store(str(folder)).rounds()[0]
    manifest = Store(str(folder)).manifest(f"round-{newest:012d}")
    recorded = {}
    run.restart()
    recorded = until(
        "the coordinator", lambda: {r["round"]: r["state_digest"] for r in run.rounds()} if run.run() else {}
    )
    assert manifest is not None and recorded[newest] == manifest.state_digest
    losses = [r["val_loss"] for r in run.rounds() if r["val_loss"] is not None]

    (tmp_path / "next").mkdir()
    following = Run(tmp_path / "next")
    try:
        following.start(f"init_from={url}", "name=second")
        invite = following.invite(2)
        following.join(invite, "one"), following.join(invite, "two")
        until("the second commit", lambda: following.committed() >= 2)
        following.whole(1)
        logs = following.log("one") + following.log("two")
        assert logs.count(f"state 0 is the checkpoint of round {newest} of run first, with its momentum") == 1
        assert len(following.rounds()[0]["contributors"]) == 2
        assert following.rounds()[0]["val_loss"] < losses[0]
    finally:
        following.stop()


def test_a_node_that_cannot_read_what_the_run_begins_with_says_so(run: Run, tmp_path: Path) -> None:
    run.start(f"init_from={tmp_path}/absent", "members.start=1")
    node = run.join(run.invite(1), "one")
    assert node.wait(60) == 2
    assert "the run cannot begin with init_from=" in run.log("one") and "Traceback" not in run.log("one")
    until("the reason", lambda: "neither checkpoint.json, nor round-" in run.log("c"))
