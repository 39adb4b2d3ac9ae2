"""Observing a run of 500 members has the room that it may take."""

from pathlib import Path

import pytest
from bench.observation import measure

MAX_BYTES = 30e6


@pytest.mark.long
def test_observing_500_members_takes_less_than_30_mb_of_the_coordinator(tmp_path: Path) -> None:
    cost = measure(tmp_path, 500, 4)
    assert 100_000 < cost.kept_bytes < cost.peak_bytes < MAX_BYTES
