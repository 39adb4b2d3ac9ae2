"""The scripts in examples/ train runs of several nodes; trainers and daemons are killed, others join later, and
the states stay equal, bit by bit."""

import os
import sys
from pathlib import Path

import psutil
import pytest
from e2e.harness import ROOT, Run, until

pytestmark = [pytest.mark.e2e, pytest.mark.long]

EXAMPLES = ROOT / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# A script of several ranks: the plain loop's model and samples, each rank with its share of a batch.
RANKS = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, sys.argv[1])
from plain_loop import Network, Progressions

from atoll.node.participant import participate

dist.init_process_group("gloo")
model = DistributedDataParallel(Network())
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
with participate(model, optimizer) as run:
    for batch in run.batches(Progressions()):
        assert len(batch) == run.config.inner.batch_size // run.ranks
        loss = model(batch)
        loss.backward()
        run.step(loss)
dist.destroy_process_group()
"""


def begin(run: Run, example: str, *overrides: str) -> str:
    """Start the coordinator of an example's run; a URL for four nodes."""
    shorter = ("rounds.inner_steps=10", "rounds.total=0", "members.start=2", "wandb.mode=disabled")
    run.start(*shorter, *overrides, config=str(EXAMPLES / f"{example}.yaml"))
    return run.invite(4)


def trainer(run: Run, name: str) -> psutil.Process:
    """The process of the node's script: none below it trains."""
    scripts = [p for p in run.family(name) if ".py" in " ".join(p.cmdline()) and p.pid != run.nodes[name].pid]
    return next(p for p in scripts if "launcher" not in " ".join(p.cmdline()))


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.parametrize("example", ["plain_loop", pytest.param("hf_trainer", marks=pytest.mark.chaos)])
def test_an_example_trains_a_run_through_kills_and_joins(example: str, run: Run) -> None:
    script = (sys.executable, str(EXAMPLES / f"{example}.py"))
    url = begin(run, example, "rounds.grace=1")
    run.join(url, "one", script=script)
    run.join(url, "two", script=script)
    until("two commits of both", lambda: run.contributors(1) == 2, 300)
    trainer(run, "one").kill()
    killed = run.committed()
    run.join(url, "three", script=script)
    until("the third", lambda: run.contributors() == 3, 300)
    assert "the trainer died" in run.log("one") and run.member("one")["state"] == "active"
    left = run.family("two")
    run.nodes["two"].kill()
    until("its end", lambda: gone(left), 90)
    run.join(url, "two", script=script)
    back = run.committed()
    until("all three again", lambda: run.contributors(back + 1) == 3, 300)
    last = run.committed()
    until("two more commits", lambda: run.committed() >= last + 2, 120)
    run.whole(last)
    records = run.rounds()
    measured = [r["round"] for r in records if r["val_loss"] is not None]
    assert bool(measured) == (example == "plain_loop"), "the Trainer's example cannot evaluate"
    losses = [r["train_loss"] for r in records]
    assert losses[-1] < losses[0], losses
    assert killed < last and all(node.poll() is None for name, node in run.nodes.items())


@pytest.mark.chaos
def test_ranks_of_torchrun_train_beside_a_single_one_and_leave_nothing_behind(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "ranks.py"
    file.write_text(RANKS)
    url = begin(run, "plain_loop", "rounds.grace=1")
    run.join(url, "one", script=(sys.executable, str(EXAMPLES / "plain_loop.py")))
    run.join(url, "two", script=("bash", "-c", f"{' '.join(TORCHRUN)} {file} {EXAMPLES}; true"))
    until("two commits of both", lambda: run.contributors(1) == 2, 300)
    family = run.family("two")
    assert len(family) >= 6  # daemon, launcher, shell, torchrun, two ranks
    run.nodes["two"].kill()
    until("their end", lambda: gone(family), 90)
    last = run.committed()
    until("a commit", lambda: run.committed() > last, 120)
    run.whole(last)


@pytest.mark.chaos
def test_two_models_in_one_run_are_refused_and_a_script_that_leaves_is_not_started_for_ever(
    run: Run, tmp_path: Path
) -> None:
    text = (EXAMPLES / "plain_loop.py").read_text()
    (tmp_path / "other.py").write_text(text.replace("64, 128", "64, 96").replace("(128,", "(96,"))
    (tmp_path / "leaves.py").write_text(text.replace("run.step(loss)", "run.step(loss)\n            break"))
    url = begin(run, "plain_loop", "members.start=1", "members.minimum=1")
    run.join(url, "one", script=(sys.executable, str(EXAMPLES / "plain_loop.py")))
    until("a commit", lambda: run.committed() >= 1, 300)
    other = run.join(url, "other", script=(sys.executable, str(tmp_path / "other.py")))
    until("its eviction", lambda: run.member("other").get("state") == "evicted", 300)
    assert "its model has" in run.member("other")["reason"]
    other.terminate()
    leaves = run.join(url, "leaves", "max_restarts=1", script=(sys.executable, str(tmp_path / "leaves.py")))
    assert leaves.wait(300) == 3
    log = run.log("leaves")
    assert log.count("left its training loop while the run goes on: it starts again") == 1
    assert "left its training loop while the run goes on, 2 times: let it loop over run.batches()" in log
    assert (
        os.path.getsize(run.folder / "one" / "trainer.log") == 0
        or "Traceback" not in (run.folder / "one" / "trainer.log").read_text()
    )
