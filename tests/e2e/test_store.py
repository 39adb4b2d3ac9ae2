"""A run sends checkpoints to a remote store, and another one begins with the newest."""

from pathlib import Path

import pytest
from e2e.harness import Run, until

from atoll.node.checkpoint.remote_store import RemoteStore

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.chaos]


def test_a_run_begins_with_another_runs_checkpoint(run: Run, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    run.start(f"checkpoint.remote={url}", "checkpoint.remote_every=2", "checkpoint.every=1", "name=first")
    invite = run.invite(2)
    run.join(invite, "one", "files=true"), run.join(invite, "two", "files=true")
    until("a checkpoint", lambda: list((tmp_path / "store").glob("first-*/round-*/checkpoint.json")))
    [folder] = (tmp_path / "store").iterdir()
    newest = RemoteStore(str(folder)).rounds()[0]
    manifest = RemoteStore(str(folder)).manifest(f"round-{newest:012d}")
    until("the commit's record", lambda: run.rounds() and run.rounds()[-1]["round"] >= newest)
    records = {r["round"]: r for r in run.rounds()}
    assert manifest is not None and records[newest]["state_digest"] == manifest.state_digest
    run.cut_power()

    (tmp_path / "next").mkdir()
    following = Run(tmp_path / "next")
    try:
        following.start(f"init_from={url}", "name=second")
        invite = following.invite(2)
        following.join(invite, "one", "files=true"), following.join(invite, "two", "files=true")
        until("the second commit", lambda: following.committed() >= 2)
        following.whole(1)
        logs = following.log("one") + following.log("two")
        assert (
            logs.count(f"state 0 is the checkpoint of round {newest} of run first, with its momentum") == 2
        )  # each makes state 0
        assert len(following.rounds()[0]["contributors"]) == 2
        assert following.rounds()[0]["val_loss"] < records[1]["val_loss"]
    finally:
        following.stop()


@pytest.mark.chaos
def test_a_node_that_cannot_read_what_the_run_begins_with_says_so(run: Run, tmp_path: Path) -> None:
    run.start(f"init_from={tmp_path}/absent", "members.start=1")
    url = run.invite(2)
    assert run.join(url, "one").wait(90) == 3
    until(
        "the reason", lambda: "which a run may read and write only where the node has files=true" in run.log("c")
    )
    assert run.join(url, "two", "files=true").wait(90) == 2
    until("the reason", lambda: "neither checkpoint.json, nor round-" in run.log("c"))
    assert "the run cannot begin with init_from=" in run.log("two") and "Traceback" not in run.log("two")
