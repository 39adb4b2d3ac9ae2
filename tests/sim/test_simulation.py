"""The real machines under seeded faults: `World` makes the faults, `invariants` says what must hold.

ATOLL_SIM_FIRST=K ATOLL_SIM_SEEDS=N runs the seeds K..K+N-1, with `-n logical` on all cores; ATOLL_SIM_TRACE=1
tells what happens.
"""

import os

import pytest
from sim.world import violations

FIRST, SEEDS = int(os.environ.get("ATOLL_SIM_FIRST", "0")), int(os.environ.get("ATOLL_SIM_SEEDS", "80"))
BLOCK = 10
BLOCKS = [range(first, min(first + BLOCK, FIRST + SEEDS)) for first in range(FIRST, FIRST + SEEDS, BLOCK)]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"seeds {b.start}-{b.stop - 1}")
def test_whatever_fails_the_survivors_agree_and_go_on(block: range) -> None:
    found = violations(block)
    assert not found, "\n".join(found)
