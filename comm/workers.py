"""The threads that encode and merge, shared by all that a process reduces."""

import os
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache


@cache
def workers() -> Executor:
    """Threads for encoding and merging: half of the processor's cores, the trainer has the others."""
    return ThreadPoolExecutor(threads(), "codec")


def threads() -> int:
    """The number of those threads, 1 to 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))
