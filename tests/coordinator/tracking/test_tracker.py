"""The coordinator's side of its sinks: processes that hear of commits, are started again, and end with it."""

import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from watched_runs import WatchedRun

from atoll.comm.config.run import RunConfig, WandbMode
from atoll.coordinator.tracking import tracker
from atoll.coordinator.tracking.json_lines import FILE


@dataclass
class Long:
    title: str = "stall"
    sentence: str = "x" * 1000
    on: bool = True


def lines(folder: Path) -> list[int]:
    with suppress(FileNotFoundError):
        return [json.loads(line)["round"] for line in (folder / FILE).read_text().splitlines()]
    return []


def jsonl_run(folder: Path) -> WatchedRun:
    config = RunConfig(name="reef")
    config.wandb.mode, config.figures.jsonl = WandbMode.DISABLED, True
    return WatchedRun(folder, config)


def test_commits_are_written_by_a_process_that_ends_with_the_coordinator(tmp_path: Path) -> None:
    run, seen = jsonl_run(tmp_path), list[int]()

    async def look() -> None:
        seen.extend(run.tracker.process_ids)

    run.serve(3, lambda: len(lines(tmp_path)) == 3, look)
    assert lines(tmp_path) == [1, 2, 3]
    assert len(seen) == 1 and not psutil.pid_exists(seen[0])


def test_a_run_that_nobody_watches_has_no_process_and_no_file(tmp_path: Path) -> None:
    run = jsonl_run(tmp_path)
    run.config.figures.jsonl = False

    async def look() -> None:
        assert run.tracker.process_ids == ()

    run.serve(3, lambda: True, look)
    assert {path.name for path in tmp_path.iterdir()} <= {"journal.sqlite", "lock"}


@pytest.mark.long
def test_a_process_that_is_killed_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "MIN_PAUSE", 0.1)
    run = jsonl_run(tmp_path)

    async def kill() -> None:
        os.kill(run.tracker.process_ids[0], signal.SIGKILL)
        run.commit(3)
        await run.until(lambda: len(lines(tmp_path)) == 5)

    run.serve(2, lambda: len(lines(tmp_path)) == 2, kill)
    assert lines(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_a_process_that_is_stopped_is_told_no_more_than_fits_and_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "CLOSE_SECONDS", 1.0)
    run = jsonl_run(tmp_path)

    async def flood() -> None:
        os.kill(run.tracker.process_ids[0], signal.SIGSTOP)
        for _ in range(10_000):
            run.tracker.alert(Long())
        (sink,) = run.tracker._sinks
        assert sink.process is not None and sink.process.stdin is not None
        assert 0 < sink.process.stdin.transport.get_write_buffer_size() < 2 * tracker.MAX_UNREAD
        run.commit(1)

    run.serve(1, lambda: len(lines(tmp_path)) == 1, flood)
    run.serve(1, lambda: len(lines(tmp_path)) == 3)
    assert lines(tmp_path) == [1, 2, 3]
