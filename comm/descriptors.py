"""The limit on the file descriptors of a process: most shells give 1,024, which a fleet's connections exceed.

Called once, at the start of a coordinator and of a node daemon.
"""

import resource
from contextlib import suppress

MAX_DESCRIPTORS = 65_536  # more than any run needs; a hard limit may be a billion, and some tables grow with it


def raise_limit() -> int:
    """Raise the limit on this process's open descriptors as far as it may, to MAX_DESCRIPTORS at most; returns
    what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    with suppress(OSError, ValueError):  # a sandbox may forbid it: then it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
