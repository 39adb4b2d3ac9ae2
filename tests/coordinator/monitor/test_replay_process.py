"""`atoll replay` as a process: its page over a socket, its terminal with somebody who types."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import past_runs
import pytest

COMMAND = [sys.executable, "-P", "-m", "atoll.comm.cli", "replay"]
pytestmark = pytest.mark.long
SOON = 60.0  # seconds
ROUNDS = 12


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    past_runs.write(folder, past_runs.Story(rounds=ROUNDS, total=50))
    return folder


def test_the_page_of_a_past_run_is_served_until_it_is_told_to_end(state_dir: Path) -> None:
    words = [str(state_dir), "--http", "127.0.0.1:0", "--round", "7"]
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = re.fullmatch(
                r"run reef, 12 rounds: (http://127\.0\.0\.1:\d+/)#/at/7\n", process.stdout.readline()
            )
            assert said
            with urlopen(said[1], timeout=SOON) as page:
                assert page.headers["Content-Type"].startswith("text/html") and b"<html" in page.read()
            for asked, round_ in (("api/run", ROUNDS), ("api/run?round=7", 7)):
                with urlopen(said[1] + asked, timeout=SOON) as answer:
                    run = json.load(answer)
                assert (run["run_id"], run["round"], run["live"]) == ("reef", round_, False)
        finally:
            process.send_signal(signal.SIGTERM)
        process.wait(SOON)
    assert process.returncode in (0, -signal.SIGTERM)


class Screen:
    """A terminal with a process in it: what it has shown, and keys."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._shown = descriptor, ""

    def shows(self, words: str) -> None:
        """Wait until it has shown these words since the last time."""
        deadline = time.monotonic() + SOON
        while words not in self._shown:
            ready, _, _ = select.select([self._descriptor], [], [], max(deadline - time.monotonic(), 0.0))
            assert ready, f"no {words!r} in {self._shown!r}"
            self._shown += os.read(self._descriptor, 65536).decode(errors="replace")
        self._shown = self._shown.split(words, 1)[1]

    def press(self, key: str) -> None:
        os.write(self._descriptor, key.encode())


@contextmanager
def screen(*words: str) -> Iterator[tuple[Screen, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*COMMAND, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"COLUMNS": "150"}
        )
        os.close(theirs)
        try:
            yield Screen(ours), process
        finally:
            process.kill()
            process.wait(SOON)
    finally:
        os.close(ours)


def test_keys_move_through_a_past_run_in_a_terminal(state_dir: Path) -> None:
    with screen(str(state_dir), "--terminal") as (terminal, process):
        terminal.shows("gus (n7)")
        terminal.shows("round 12 of 12: left, right")
        terminal.press("\x1b[D")
        terminal.shows("round 11 of 12: left, right")
        terminal.press("\x1b[H")
        terminal.shows("run reef: round 1 of 50 committed")
        terminal.shows("round 1 of 12: left, right")
        terminal.press("\x1b[C")
        terminal.shows("round 2 of 12: left, right")
        terminal.press(" ")  # plays
        for at in (3, 4, 5):
            terminal.shows(f"round {at} of 12: left, right")
        terminal.press("q")
        assert process.wait(SOON) == 0
