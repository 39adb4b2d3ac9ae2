"""The threads that encode and merge, shared by all that a process reduces.

A node has half of its share of the machine's cores for them, its trainer the others; the share changes as nodes
come and go. A process that measures says the number itself (`fix_threads`).
"""

import time
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache, lru_cache

from atoll.comm.cores import core_share

MAX_THREADS = 8  # that a reduce gets faster with
RECOUNT_INTERVAL = 10.0  # seconds between two looks at who shares the machine
_fixed_threads = 0  # 0: as many as this node's share of the cores allows


def workers() -> Executor:
    """Threads for encoding and merging, as many as `threads` said within the last ten seconds."""
    return _pool(_recent_threads(int(time.monotonic() / RECOUNT_INTERVAL)))


def threads() -> int:
    """The number of those threads as things are now, 1 to 8 unless it is fixed."""
    return _fixed_threads or threads_of(core_share().threads())


def threads_of(cores: int) -> int:
    """The number of those threads, 1 to 8, of a node that has so many cores."""
    return max(1, min(MAX_THREADS, cores // 2))


def fix_threads(count: int) -> None:
    """Have so many threads in this process from now on, whoever shares the machine."""
    global _fixed_threads
    _fixed_threads = count
    _recent_threads.cache_clear()


@lru_cache(1)
def _recent_threads(interval: int) -> int:
    return threads()


@cache
def _pool(count: int) -> Executor:
    return ThreadPoolExecutor(count, "codec")  # what an earlier one was given it still does
