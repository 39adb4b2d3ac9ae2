"""The benchmark commits real rounds and measures them."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner

from atoll.coordinator.bench.command import coordinator, percentile


def test_the_percentile_is_a_value_that_was_measured() -> None:
    values = [float(v) for v in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 99) == 7.0


@pytest.mark.chaos
@pytest.mark.long
def test_a_few_members_commit_rounds_and_are_measured() -> None:
    command = [sys.executable, "-P", "-m", "atoll.comm.cli", "bench", "coordinator"]
    size = ["--members", "6", "--rounds", "2", "--period", "0.5", "--json"]
    done = subprocess.run([*command, *size], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["members"], figures["rounds"]) == (6, 2)
    assert figures["heartbeats_per_s"] > 0 and figures["reports_per_s"] > 0
    assert 0 < figures["cpu_share"] < 1 and 10 < figures["rss_mb"] < 300
    assert 0 < figures["control_ms_p50"] <= figures["control_ms_p99"]


@pytest.mark.long
def test_ctrl_c_ends_it_with_one_sentence() -> None:
    command = [sys.executable, "-P", "-m", "atoll.comm.cli", "bench", "coordinator", "--members", "4"]
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored here, it would be ignored there
    try:
        bench = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
        )
    finally:
        signal.signal(signal.SIGINT, usual)
    started, deadline = psutil.Process(bench.pid), time.monotonic() + 240
    while time.monotonic() < deadline and bench.poll() is None:
        if sum("spawn_main" in " ".join(child.cmdline()) for child in started.children()) == 2:
            break
        time.sleep(0.02)
    os.killpg(bench.pid, signal.SIGINT)
    _, said = bench.communicate(timeout=240)
    assert (bench.returncode, said.split("\n")) == (130, ["", "atoll: interrupted", ""])


@pytest.mark.parametrize("period", ["-3", "0", "inf"])
def test_a_round_whose_inner_steps_take_no_time_is_refused(period: str) -> None:
    done = CliRunner().invoke(coordinator, ["--members", "1", "--period", period])
    assert done.exit_code == 2 and "--period" in done.output
