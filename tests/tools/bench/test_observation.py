"""Observing a run of 500 members has the room that it may take, and costs a trainer nothing that shows."""

import asyncio
from pathlib import Path
from statistics import median

import pytest
from bench.observation import measure
from bench.observed_steps import observed_steps

MAX_BYTES = 30e6
LEAST_RATIO = 0.5  # other processes may have the machine in one turn and not in the other


@pytest.mark.long
def test_observing_500_members_takes_less_than_30_mb_of_the_coordinator(tmp_path: Path) -> None:
    cost = measure(tmp_path, 500, 4, past=100_000)
    assert 100_000 < cost.kept_bytes < cost.kept_bytes + cost.page_bytes < cost.peak_bytes < MAX_BYTES


@pytest.mark.long
@pytest.mark.chaos
def test_a_trainer_is_as_fast_with_observation_beside_it() -> None:
    found = asyncio.run(observed_steps(turns=4, steps=30))
    assert len(found.ratios) == 4 and median(found.ratios) > LEAST_RATIO
    assert 0 < found.meter < 0.01 * found.step
