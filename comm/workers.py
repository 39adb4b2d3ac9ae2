"""The threads that encode and merge, shared by all that a process reduces."""

from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache

from atoll.comm.cores import core_share

MOST_THREADS = 8  # that a reduce gets faster with


@cache
def workers() -> Executor:
    """Threads for encoding and merging: half of this node's cores, the trainer has the others."""
    return ThreadPoolExecutor(threads(), "codec")


def threads() -> int:
    """The number of those threads, 1 to 8."""
    return max(1, min(MOST_THREADS, core_share().threads() // 2))
