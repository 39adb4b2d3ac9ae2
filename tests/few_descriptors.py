"""As most shells start a process: few descriptors, and a harder limit above them."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

FEW = 256


@contextmanager
def few_descriptors() -> Iterator[None]:
    """What is started meanwhile may open few descriptors, until it raises its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
