"""Nodes with one and two local ranks train together; a killed trainer comes back while its node stays a member."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
ATOLL = [sys.executable, "-P", "-m", "atoll.comm.cli"]
OVERRIDES = (
    *("rounds.total=4", "rounds.inner_steps=6", "members.start=2", "members.minimum=1", "wandb.mode=disabled"),
    *(
        "model.dim=32",
        "model.layers=2",
        "model.heads=2",
        "model.kv_heads=1",
        "model.ffn_dim=64",
        "model.seq_len=32",
    ),
    *("reduce.chunk=4096", "rounds.grace=60"),
)


def until(what: str, look: Callable[[], Any], seconds: float = 90.0) -> Any:
    """What `look` finds, once it finds something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds:g} s for {what}")


@pytest.mark.e2e
def test_a_killed_trainer_returns_and_unequal_nodes_agree(tmp_path: Path) -> None:
    started: list[subprocess.Popen[str]] = []

    def start(log: str, *args: str) -> subprocess.Popen[str]:
        with open(tmp_path / log, "w") as out:
            started.append(subprocess.Popen([*ATOLL, *args], stdout=out, stderr=out, text=True))
        return started[-1]

    try:
        _run(tmp_path, start)
    except BaseException:
        for log in tmp_path.glob("*.log"):
            print(f"--- {log.name}\n{log.read_text()[-3000:]}")
        raise
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            process.wait(30)


def _run(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    state = tmp_path / "c"
    ports = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    start(
        "c.log",
        "coordinator",
        "start",
        str(ROOT / "configs/demo.yaml"),
        *OVERRIDES,
        "--state-dir",
        str(state),
        *ports,
    )

    def page() -> str:
        return next((w for w in (tmp_path / "c.log").read_text().split() if w.startswith("http://")), "")

    api = until("the coordinator's page", page)
    invite = [*ATOLL, "invite", "--state-dir", str(state), "--uses", "2"]
    url = subprocess.run(invite, capture_output=True, text=True, check=True).stdout.strip()

    def join(name: str, *settings: str) -> subprocess.Popen[str]:
        folder = str(tmp_path / name)
        listen = ("--listen", "127.0.0.1:0", "--name", name)
        return start(f"{name}.log", "node", "join", url, "--state-dir", folder, *listen, "threads=1", *settings)

    def run() -> Any:
        with urllib.request.urlopen(f"{api}/api/run", timeout=5) as answer:
            return json.load(answer)

    one, two = join("one"), join("two", "ranks=2")
    until("the first commit", lambda: run()["committed"] >= 1)
    for process in psutil.Process(two.pid).children(recursive=True):
        process.kill()  # launcher and ranks; the daemon lives on
    assert psutil.Process(one.pid).memory_info().rss < 200e6
    until("the end of the run", lambda: run()["phase"] == "finished")
    assert one.wait(30) == 0 and two.wait(30) == 0

    with urllib.request.urlopen(f"{api}/api/rounds?since=0", timeout=5) as answer:
        records = json.load(answer)
    assert [r["round"] for r in records] == [1, 2, 3, 4]
    for record in records:
        assert record["digests_equal"] and len(record["contributors"]) == 2
    members = run()["members"]
    assert {m["state"] for m in members} == {"left"}  # nobody was ever evicted
    assert len(members) == 2
    assert "starts again from the anchor" in (tmp_path / "two.log").read_text()
