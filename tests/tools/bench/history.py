"""A coordinator whose run has 50,000 rounds of 1,000 members behind it: what its state directory takes, how long
it takes to start, and how it serves members while the page and the API are read.

    PYTHONPATH=tests:tests/tools python -m bench.history [--members 1000] [--past 50000] [--keep DIR]

The past is made, not run: records as `long_runs` has them, in segments and rows as a coordinator keeps them. Then
a real coordinator takes it over and commits rounds of simulated members (`atoll bench coordinator`), while another
process reads the page, `/api/run`, records and curves without a pause. About 20 minutes for 50,000 rounds.
"""

import json
import multiprocessing
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
from long_runs import long_record

from atoll import configs
from atoll.comm.config.load import load_run
from atoll.comm.replace import replace
from atoll.coordinator.bench.command import measure
from atoll.coordinator.bench.load import digest
from atoll.coordinator.history import record_codec
from atoll.coordinator.history.record_archive import RecordArchive
from atoll.coordinator.history.record_store import LocalStore
from atoll.coordinator.history.segment import ROUNDS
from atoll.coordinator.history.series import series_row
from atoll.coordinator.server import page_url
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.journaled_machine import encode
from atoll.coordinator.service.run_records import FOLDER, ROWS_KEPT
from atoll.coordinator.state_machine.state import RoundState, State

QUESTIONS = ("/", "/api/run", "/api/rounds?since={since}&limit=20", "/api/contributions?limit=20", "/metrics")


@click.command()
@click.option("--members", default=1000, show_default=True)
@click.option("--past", default=50_000, show_default=True, help="Rounds that are committed before the start.")
@click.option("--rounds", default=3, show_default=True, help="Rounds that are measured.")
@click.option("--period", default=56.0, show_default=True, help="Seconds of a round's inner steps.")
@click.option("--keep", type=click.Path(path_type=Path), help="Make the past in this folder, and leave it there.")
def main(members: int, past: int, rounds: int, period: float, keep: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="atoll-history-") as scratch:
        folder = keep or Path(scratch)
        if not (folder / "journal.sqlite").exists():
            began = time.monotonic()
            make_past(folder, members, past)
            click.echo(f"made {past:,} rounds in {time.monotonic() - began:.0f} s", err=True)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        with reader(folder, past) as told:
            figures = measure(folder, members, rounds, period, 2, past)
            answers = dict(told)
    report = {"state_dir_gb": size / 1e9, **msgspec.to_builtins(figures), **answers}
    click.echo(json.dumps(report, indent=1))


def make_past(folder: Path, members: int, past: int) -> None:
    """A state directory as a coordinator leaves it after `past` rounds, with nobody there."""
    config = load_run(configs.DEMO)
    blocks = max((past - ROWS_KEPT) // ROUNDS, 0)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(make_segment, folder, members, block) for block in range(blocks)]
        for number, task in enumerate(tasks, 1):
            task.result()
            if number % 20 == 0:
                click.echo(f"{number} of {blocks} segments", err=True)
    records = [long_record(k, members) for k in range(blocks * ROUNDS + 1, past + 1)]
    state = replace(
        State(config),
        committed=past,
        digest=digest("state", past),
        tokens=records[-1].tokens,
        round=RoundState(number=past + 1, started_at=records[-1].committed_at),
    )
    with closing(Journal(folder)) as journal:
        for first in range(0, len(records), 50):
            journal.append([], records[first : first + 50])
        journal.snapshot(records[-1].committed_at, encode(state))


def make_segment(folder: Path, members: int, block: int) -> None:
    records = [long_record(k, members) for k in range(block * ROUNDS + 1, (block + 1) * ROUNDS + 1)]
    encoded = [record_codec.encode(record) for record in records]
    RecordArchive(LocalStore(folder / FOLDER)).add("demo", list(map(series_row, records)), encoded, [])


@contextmanager
def reader(folder: Path, past: int) -> Iterator[Any]:
    """A process that asks the coordinator for everything, without a pause; yields what it found, when it is
    over."""
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager:
        told = manager.dict()
        process = spawn.Process(target=read, args=(folder, past, told), daemon=True)
        process.start()
        try:
            yield told
        finally:
            process.kill()
            process.join()


def read(folder: Path, past: int, told: Any) -> None:
    began, url = time.monotonic(), ""
    log = folder / "log"
    while "page at" not in (log.read_text() if log.exists() else ""):
        time.sleep(0.05)
    told["start_s"] = time.monotonic() - began
    url = page_url(folder)
    seconds: dict[str, list[float]] = {question: [] for question in QUESTIONS}
    while True:
        for question in QUESTIONS:
            since = int(time.monotonic() * 1000) % past
            asked = time.monotonic()
            try:
                with urllib.request.urlopen(url + question.format(since=since), timeout=60) as answer:
                    answer.read()
            except urllib.error.HTTPError:
                raise
            except (urllib.error.URLError, ConnectionError):
                return  # the coordinator has stopped
            seconds[question].append(time.monotonic() - asked)
            told[f"{question} s, most"] = max(seconds[question])
            told[f"{question} times"] = len(seconds[question])
        time.sleep(0.2)


if __name__ == "__main__":
    main()
