"""What all tests share: how hypothesis draws, the threads of arithmetic, logging as it was, a server that speaks
S3, and what tests marked `root` need."""

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import settings

from atoll.comm import log

# Before torch is imported: the test processes share the cores, and threads that wait for each other burn them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same examples in every run: what fails is new in the code. `make chaos` draws other ones.
settings.register_profile("fixed", derandomize=True, deadline=None, database=None, max_examples=100)
settings.register_profile("search", deadline=None, max_examples=5000)
settings.load_profile("fixed")


@cache
def missing_for_networks() -> str:
    """Why this machine cannot emulate networks; empty: it can."""
    if os.geteuid() != 0:
        return "this user is not root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    namespace = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return namespace.stderr.strip() and f"no network namespace can be made ({namespace.stderr.strip()})"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and (why := missing_for_networks()):
        pytest.fail(f'it needs emulated networks, and {why}: run it as root, or leave it out with -m "not root"')


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """How a process logs is set up once in its life: what a test has changed in this one is put back."""
    root, ours = logging.getLogger(), logging.getLogger("atoll")
    handlers, levels, own = root.handlers[:], (root.level, ours.level), log._own
    hooks = sys.excepthook, threading.excepthook
    yield
    log.status_line.use(None)
    log._own = own
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    sys.excepthook, threading.excepthook = hooks


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a server. One for all tests of a process: fsspec keeps its clients with the first address."""
    from moto.server import ThreadedMotoServer  # 1 s, which most processes do without

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
