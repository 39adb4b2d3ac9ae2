"""The real machines under seeded faults: `World` makes the faults, `invariants` says what must hold.

ATOLL_SIM_FIRST=K ATOLL_SIM_SEEDS=N runs the seeds K..K+N-1, with `-n logical` on all cores; ATOLL_SIM_TRACE=1
tells what happens. Unless told, 5 seeds are for `make test`, and 45 more for `make test-long`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sim.world import violations

FIRST, SEEDS = int(os.environ.get("ATOLL_SIM_FIRST", "0")), int(os.environ.get("ATOLL_SIM_SEEDS", "20"))
BLOCK, SHORT = 5, 5  # seeds
BLOCKS = [range(first, min(first + BLOCK, FIRST + SEEDS)) for first in range(FIRST, FIRST + SEEDS, BLOCK)]
ASKED = "ATOLL_SIM_SEEDS" in os.environ
STORIES = """
import logging, sys
from sim.world import World
logging.disable(logging.WARNING)
for seed in (3002, 3004, 3005):
    world = World(seed)
    try:
        world.run()
        print(seed, world.durable.committed, world.engine.now, world.rng.random())
    finally:
        world.close()
"""
PARAMETERS = [
    pytest.param(
        block,
        id=f"seeds {block.start}-{block.stop - 1}",
        marks=[pytest.mark.long] if block.start >= SHORT and not ASKED else [],
    )
    for block in BLOCKS
]


@pytest.mark.parametrize("block", PARAMETERS)
def test_whatever_fails_the_survivors_agree_and_go_on(block: range) -> None:
    found = violations(block)
    assert not found, "\n".join(found)


@pytest.mark.long
def test_a_seed_tells_the_same_story_however_strings_hash() -> None:
    """Else one that failed could not be looked at again."""

    def stories(hashes: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": hashes, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-c", STORIES]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert stories("0") == stories("7") != ""
