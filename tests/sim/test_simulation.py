"""The real machines under seeded faults: `World` makes the faults, `invariants` says what must hold.

ATOLL_SIM_FIRST=K ATOLL_SIM_SEEDS=N runs the seeds K..K+N-1, on all cores; ATOLL_SIM_TRACE=1 prints what happens.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from sim.world import violations

FIRST, SEEDS = int(os.environ.get("ATOLL_SIM_FIRST", "0")), int(os.environ.get("ATOLL_SIM_SEEDS", "80"))
BLOCK = 25
BLOCKS = [range(first, min(first + BLOCK, FIRST + SEEDS)) for first in range(FIRST, FIRST + SEEDS, BLOCK)]


@pytest.fixture(scope="module")
def blocks() -> Iterator[dict[range, Future[list[str]]]]:
    """Every block of seeds, under way on all cores; a single seed runs in this process, to be debugged."""
    if SEEDS == 1:
        here = Future[list[str]]()
        here.set_result(violations(BLOCKS[0]))
        yield {BLOCKS[0]: here}
        return
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        yield {block: pool.submit(violations, block) for block in BLOCKS}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"seeds {b.start}-{b.stop - 1}")
def test_whatever_fails_the_survivors_agree_and_go_on(
    block: range, blocks: dict[range, Future[list[str]]]
) -> None:
    found = blocks[block].result()
    assert not found, "\n".join(found)
