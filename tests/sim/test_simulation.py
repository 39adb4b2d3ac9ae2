"""The real machines under seeded faults: `World` makes the faults, `invariants` says what must hold.

ATOLL_SIM_FIRST=K ATOLL_SIM_SEEDS=N runs the seeds K..K+N-1, with `-n logical` on all cores; ATOLL_SIM_TRACE=1
tells what happens. Unless told, 20 seeds are for `make test`, and 60 more for `make test-long`.
"""

import os

import pytest
from sim.world import violations

FIRST, SEEDS = int(os.environ.get("ATOLL_SIM_FIRST", "0")), int(os.environ.get("ATOLL_SIM_SEEDS", "80"))
BLOCK, SHORT = 5, 20  # seeds
BLOCKS = [range(first, min(first + BLOCK, FIRST + SEEDS)) for first in range(FIRST, FIRST + SEEDS, BLOCK)]
ASKED = "ATOLL_SIM_SEEDS" in os.environ
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
