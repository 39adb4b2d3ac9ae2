"""A run of real processes with wandb online, at a server of ours: however its coordinator stops and starts, and
whether the server answers or not, there is one wandb run with every round once, and no round is slower.

ATOLL_AWAY=60 has the server away for so many seconds; with `-s` the rounds' times are shown.
"""

import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import wandb_server
from e2e.harness import Run, until
from wandb_server import WandbServer

pytestmark = [pytest.mark.e2e, pytest.mark.long]
AWAY = float(os.environ.get("ATOLL_AWAY", "10"))  # seconds


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    with wandb_server.serving() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


def sent(server: WandbServer) -> int:
    """Rounds that the server has."""
    return len(server.run.lines.get(wandb_server.HISTORY, {})) if server.runs else 0


def test_three_restarts_of_the_coordinator_one_by_sigkill_are_one_run_with_every_round_once(
    server: WandbServer, run: Run
) -> None:
    run.start("wandb.mode=online", "figures.jsonl=true")
    url = run.invite(2)
    for name in ("one", "two"):
        run.join(url, name)
    until("rounds in wandb", lambda: sent(server) >= 3)
    for ending in ("SIGTERM", "SIGKILL", "SIGTERM"):
        run.coordinator.terminate() if ending == "SIGTERM" else run.coordinator.kill()
        run.coordinator.wait(60)
        before = sent(server)
        run.restart()
        last = until("the coordinator", run.committed)
        until("more rounds in wandb", lambda: sent(server) > max(last, before) + 2)  # noqa: B023
    records = {record["round"]: record for record in run.rounds()}
    run.coordinator.terminate()
    assert run.coordinator.wait(60) == 0

    rows = server.run.history
    assert [row["round"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= len(records)
    assert [row["_step"] for row in rows] == [row["round"] for row in rows]
    for row in rows[: len(records)]:
        record = records[row["round"]]
        assert row["loss/train"] == record["train_loss"] and row["tokens"] == record["tokens"]
        told = [row[f"node/{record['names'][node]}/exchange_s"] for node in record["contributors"]]
        assert told == list(record["exchange"].values()) and all(seconds > 0 for seconds in told)
    lines = (run.folder / "c" / "figures.jsonl").read_text().count("\n")
    assert lines == len(rows)


def test_a_server_that_does_not_answer_makes_no_round_slower(server: WandbServer, run: Run) -> None:
    run.start("wandb.mode=online")
    url = run.invite(2)
    for name in ("one", "two"):
        run.join(url, name)
    until("rounds in wandb", lambda: sent(server) >= 5)
    began_at = time.time()
    time.sleep(AWAY)
    server.answering.clear()
    gone_at = time.time()
    time.sleep(AWAY)
    back_at = time.time()
    server.answering.set()
    time.sleep(AWAY)
    records = run.rounds()
    until("all rounds in wandb", lambda: sent(server) >= len(records))
    moments = [record["committed_at"] for record in records if record["committed_at"] > began_at]
    away, there = list[float](), list[float]()
    for a, b in pairwise(moments):
        (away if gone_at < a and b < back_at else there).append(b - a)
    print(
        f"{len(there)} rounds while the server answered: median {median(there):.3f} s, longest {max(there):.3f} s"
    )
    print(f"{len(away)} rounds while it did not: median {median(away):.3f} s, longest {max(away):.3f} s")
    assert len(away) > len(there) / 4, "rounds went on"
    assert server.run.rounds[: len(records)] == [record["round"] for record in records]
