"""Runs of real processes: unequal nodes, a killed trainer, a killed daemon that comes back as the same node."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
ATOLL = [sys.executable, "-P", "-m", "atoll.comm.cli"]
TINY = (
    *("rounds.inner_steps=6", "rounds.grace=60", "members.start=2", "members.minimum=1", "wandb.mode=disabled"),
    *(
        "model.dim=32",
        "model.layers=2",
        "model.heads=2",
        "model.kv_heads=1",
        "model.ffn_dim=64",
        "model.seq_len=32",
    ),
    "reduce.chunk=4096",
)


def until(what: str, look: Callable[[], Any], seconds: float = 90.0) -> Any:
    """What `look` finds, once it finds something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds:g} s for {what}")


class Run:
    """A coordinator and its nodes, each a real process with its log in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def spawn(self, log: str, *args: str) -> subprocess.Popen[str]:
        with open(self.folder / log, "a") as out:
            self.processes.append(subprocess.Popen([*ATOLL, *args], stdout=out, stderr=out, text=True))
        return self.processes[-1]

    def start(self, *overrides: str) -> None:
        state, config = str(self.folder / "c"), str(ROOT / "configs/demo.yaml")
        ports = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
        self.spawn("c.log", "coordinator", "start", config, *TINY, *overrides, "--state-dir", state, *ports)
        self.page = until("the coordinator's page", self._page)

    def _page(self) -> str:
        return next((w for w in self.log("c").split() if w.startswith("http://")), "")

    def invite(self, uses: int) -> str:
        command = [*ATOLL, "invite", "--state-dir", str(self.folder / "c"), "--uses", str(uses)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def join(self, url: str, name: str, *settings: str) -> subprocess.Popen[str]:
        where = ("--state-dir", str(self.folder / name), "--listen", "127.0.0.1:0", "--name", name)
        return self.spawn(f"{name}.log", "node", "join", url, *where, "threads=1", *settings)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.page + path, timeout=5) as answer:
            return json.load(answer)

    def committed(self) -> int:
        return int(self.get("/api/run")["committed"])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            process.wait(30)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    try:
        yield run
    finally:
        run.stop()
        for log in tmp_path.glob("*.log"):  # shown when the test fails
            print(f"--- {log.name}\n{log.read_text()[-3000:]}")


def kill(*processes: psutil.Process) -> None:
    for process in processes:
        process.kill()


def test_a_killed_trainer_returns_and_unequal_nodes_agree(run: Run) -> None:
    run.start("rounds.total=4")
    url = run.invite(2)
    one, two = run.join(url, "one"), run.join(url, "two", "ranks=2")
    until("the first commit", lambda: run.committed() >= 1)
    kill(*psutil.Process(two.pid).children(recursive=True))  # launcher and ranks; the daemon lives on
    assert psutil.Process(one.pid).memory_info().rss < 200e6
    assert one.wait(90) == 0 and two.wait(30) == 0
    records = run.get("/api/rounds?since=0")
    assert [r["round"] for r in records] == [1, 2, 3, 4]
    for record in records:
        assert record["digests_equal"] and len(record["contributors"]) == 2
    members = run.get("/api/run")["members"]
    assert [m["state"] for m in members] == ["left", "left"]  # nobody was ever evicted
    assert "starts again from the anchor" in run.log("two")


def test_a_hung_trainer_is_ended_and_its_node_goes_on(run: Run) -> None:
    run.start("rounds.total=3", "members.stall=15")
    url = run.invite(2)
    one, two = run.join(url, "one"), run.join(url, "two")
    until("the first commit", lambda: run.committed() >= 1)
    for process in psutil.Process(two.pid).children(recursive=True):
        process.suspend()
    assert one.wait(90) == 0 and two.wait(30) == 0
    assert "made no progress" in run.log("two")
    assert run.committed() == 3 and all(r["digests_equal"] for r in run.get("/api/rounds"))


def test_a_killed_daemon_comes_back_as_the_same_node_without_a_new_token(run: Run) -> None:
    run.start("rounds.total=0")
    url = run.invite(2)
    run.join(url, "one")
    two = run.join(url, "two")
    until("the first commit", lambda: run.committed() >= 1)
    daemon = psutil.Process(two.pid)
    kill(daemon, *daemon.children(recursive=True))
    alone = until(
        "a commit without it", lambda: [r for r in run.get("/api/rounds") if len(r["contributors"]) == 1]
    )
    run.join(url, "two")
    since = f"/api/rounds?since={alone[-1]['round']}"
    until("a commit with it", lambda: [r for r in run.get(since) if len(r["contributors"]) == 2])
    assert {m["name"] for m in run.get("/api/run")["members"]} == {"one", "two"}
    assert len(run.get("/api/run")["members"]) == 2
    assert all(r["digests_equal"] for r in run.get("/api/rounds"))
