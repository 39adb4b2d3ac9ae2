"""A run of real processes with wandb online, at a server of ours: however its coordinator stops and starts, and
whether the server answers or not, there is one wandb run with every round once, and no round is slower.

A server that is away accepts connections and answers nothing, or swallows the packets that would begin one (a full
backlog, on Linux; nothing here needs root). ATOLL_AWAY=60 has it away for so many seconds, between as many before
and as many after; with `-s` the rounds' times are shown.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import wandb_server
from e2e.harness import Run, until
from wandb_server import WandbServer

pytestmark = [pytest.mark.e2e, pytest.mark.long]
AWAY = float(os.environ.get("ATOLL_AWAY", "10"))  # seconds
# What else the machine does changes a round's time, too: so many times as long it may take. One that waited for
# the server would take as long as that is away, and be told from a hiccup by LEAST_STALL (seconds).
MEDIAN_SLACK, LONGEST_SLACK, LEAST_STALL = 1.5, 3.0, 3.0
Away = Callable[[WandbServer], AbstractContextManager[None]]


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


@pytest.mark.chaos
@pytest.mark.parametrize("away", [WandbServer.hanging, WandbServer.swallowing])
def test_a_server_that_is_away_makes_no_round_slower(server: WandbServer, run: Run, away: Away) -> None:
    run.start("wandb.mode=online")
    url = run.invite(2)
    for name in ("one", "two"):
        run.join(url, name)
    until("rounds in wandb", lambda: sent(server) >= 5)
    began_at = time.time()
    time.sleep(AWAY)
    with away(server):
        gone_at = time.time()
        time.sleep(AWAY)
        arrived = sent(server)
        back_at = time.time()
    time.sleep(AWAY)
    records = run.rounds()
    until("all rounds in wandb", lambda: sent(server) >= len(records), seconds=120 + 2 * AWAY)
    moments = [record["committed_at"] for record in records if record["committed_at"] > began_at]
    without, there = list[float](), list[float]()
    for a, b in pairwise(moments):
        (without if b > gone_at and a < back_at else there).append(b - a)
    print(f"\nThe server is {away.__name__} for {AWAY:g} s; load average {os.getloadavg()[0]:.1f}")
    for what, of in (("with the server", there), ("without it", without)):
        print(f"  {len(of)} rounds {what}: median {median(of):.3f} s, longest {max(of):.3f} s")
    assert arrived < sum(record["committed_at"] < back_at for record in records), "rounds that had to wait"
    assert len(without) > 5, "rounds went on"
    assert median(without) < MEDIAN_SLACK * median(there)
    assert max(without) < max(LONGEST_SLACK * max(there), LEAST_STALL)
    assert server.run.rounds[: len(records)] == [record["round"] for record in records]
