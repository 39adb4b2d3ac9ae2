"""A child process that ends with the thread that started it, also when that is killed."""

import ctypes
import os
import signal
import sys

# Environment variable: the process id of the launcher that started a trainer's ranks.
LAUNCHER = "ATOLL_LAUNCHER"
# Seconds that a training script of a volunteer's own has to end, once its daemon has closed the channel to it.
GRACE_SECONDS = 60.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(sign: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send `sign` when the thread that started this process ends; exit if `parent` has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(sign), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        sys.exit(f"launcher {parent} ended before its rank started")
