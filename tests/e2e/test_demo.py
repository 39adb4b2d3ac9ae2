"""`atoll demo` for real: a coordinator, daemons and trainers over loopback, a SIGKILL and a late join."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb_log

from atoll.node.outer.vector_folders import own_folders

pytestmark = pytest.mark.e2e

ROUNDS = 18
TINY = (
    "model.dim=64 model.layers=2 model.heads=2 model.kv_heads=2 model.ffn_dim=128 model.seq_len=64 "
    "inner.optimizer=adamw inner.batch_size=4 rounds.inner_steps=40 reduce.chunk=4096"
).split()
DEADLINE = 240.0  # seconds
MARK = "ATOLL_TEST_DEMO"


class Demo:
    """One `atoll demo`; `mark` is in the environment of every process that comes of it."""

    def __init__(self, out: Path, *arguments: str) -> None:
        self.out, self.mark = out, str(out)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
        environment |= {"HOME": str(out.parent), MARK: self.mark}
        command = [sys.executable, "-P", "-m", "atoll.comm.cli", "demo", "--out", str(out), *arguments, *TINY]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for(self, words: str) -> None:
        """Read standard output up to the line that holds `words`."""
        assert self.process.stdout is not None
        assert any(words in line for line in self.process.stdout), self.process.communicate()[1]

    def end(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, stdout, stderr

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def find(self, *words: str) -> psutil.Process:
        """The one process with these words in its command line."""
        (found,) = [p for p in self.processes() if set(words) <= set(p.cmdline())]
        return found


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    """Whatever a failed test leaves running is ended."""
    started: list[Demo] = []
    yield started
    for demo in started:
        for process in demo.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()


def test_a_run_survives_the_death_of_a_node_and_takes_in_another(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path / "out", "--nodes", "3", "--rounds", str(ROUNDS), "--json")
    demos.append(demo)
    code, stdout, stderr = demo.end()
    assert code == 0, stdout + stderr
    assert demo.processes() == []
    assert not [folder for node in demo.out.iterdir() for folder in own_folders(node)], "nothing is left in memory"

    report = json.loads((demo.out / "report.json").read_text())
    assert json.loads(stdout.splitlines()[-1]) == report
    assert report["rounds_committed"] >= ROUNDS  # they may be over before a node has started
    assert (report["nodes_started"], report["nodes_killed"], report["nodes_recovered"]) == (4, 1, 1)
    assert report["digests_equal"]
    assert report["val_loss_last"] < report["val_loss_first"] - 1.0
    assert 0 < report["goodput"] < 1
    assert sum(report["goodput_buckets"].values()) == pytest.approx(1.0)
    assert 0 < report["bytes_per_node_per_round"] < report["fp32_allreduce_bytes_per_step_equivalent"] / 100

    records = [json.loads(line) for line in (demo.out / "rounds.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == list(range(1, report["rounds_committed"] + 1))
    assert report["tokens"] == records[-1]["tokens"] == sum(sum(r["contributors"].values()) for r in records)
    assert all(set(r["digests"].values()) == {r["state_digest"]} for r in records)
    assert set(records[0]["contributors"]) == {"n1", "n2", "n3"}
    # The survivors went on by themselves; who is killed came first, second or third.
    assert any(r["contributors"].keys() < records[0]["contributors"].keys() for r in records)
    assert any("n4" in record["contributors"] for record in records)

    assert (demo.out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert logged_losses(demo.out) == [(r["round"], r["val_loss"]) for r in records]


def logged_losses(out: Path) -> list[tuple[int, float]]:
    """Round and validation loss of every round that the offline wandb run holds."""
    (rows,) = wandb_log.rows(out / "wandb")
    rounds: list[dict[str, Any]] = [row for row in rows if "loss/train" in row]
    return [(row["round"], row["loss/val"]) for row in rounds]


@pytest.mark.long
def test_a_demo_that_is_stopped_leaves_no_process_behind(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path / "out", "--nodes", "2", "--no-chaos", "--rounds", "1000")
    demos.append(demo)
    demo.wait_for("round 1 committed")
    demo.process.send_signal(signal.SIGTERM)
    code, _, stderr = demo.end()

    assert (code, stderr.strip()) == (130, "atoll: interrupted")
    assert demo.processes() == []


@pytest.mark.chaos
@pytest.mark.long
def test_a_daemon_that_dies_unasked_fails_the_demo_with_its_log(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path / "out", "--nodes", "2", "--no-chaos", "--rounds", "1000")
    demos.append(demo)
    demo.wait_for("round 1 committed")
    demo.find("node", "join", "bo").kill()
    code, _, stderr = demo.end()

    assert code == 1
    assert "the demo failed: bo ended with exit code -9 in the middle of the run. The end of" in stderr
    assert str(demo.out / "bo.log") in stderr
    assert demo.processes() == []
