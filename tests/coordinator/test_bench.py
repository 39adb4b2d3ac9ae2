"""The benchmark commits real rounds and measures them."""

import json
import subprocess
import sys

from atoll.coordinator.bench import percentile


def test_the_percentile_is_a_value_that_was_measured() -> None:
    values = [float(v) for v in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 99) == 7.0


def test_a_few_members_commit_rounds_and_are_measured() -> None:
    command = [sys.executable, "-P", "-m", "atoll.comm.cli", "bench", "coordinator"]
    size = ["--members", "6", "--rounds", "2", "--period", "0.5", "--json"]
    done = subprocess.run([*command, *size], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["members"], figures["rounds"]) == (6, 2)
    assert figures["heartbeats_per_s"] > 0 and figures["reports_per_s"] > 0
    assert 0 < figures["cpu_share"] < 1 and 10 < figures["rss_mb"] < 300
    assert 0 < figures["control_ms_p50"] <= figures["control_ms_p99"]
