"""The memory that a node takes of its machine: what its processes have for themselves, and the files in shared
memory. Pages of other files are not counted, for the system takes them back when it needs them.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from atoll.comm.child_process import LAUNCHER
from atoll.node.config import NodeConfig
from atoll.node.preflight import available

GIGABYTE = 1e9
BLOCK_BYTES = 512  # of `st_blocks`


def node_bytes(daemon: psutil.Process, folders: Sequence[Path] = ()) -> int:
    """The bytes that a daemon and all that it has started take, and the files of these folders in shared
    memory."""
    processes = [daemon]
    with suppress(psutil.Error):
        processes += daemon.children(recursive=True)
    return sum(map(_own_bytes, processes)) + sum(map(_files_bytes, folders))


def free_for_node(config: NodeConfig) -> int:
    """The bytes of memory that a process of this node, a rank of its trainer, may still take: what this machine
    has, and what `memory` leaves."""
    free = available()
    if not config.memory:
        return free
    launcher = int(os.environ.get(LAUNCHER, "0"))
    root = psutil.Process(launcher or None)
    with suppress(psutil.Error):
        root = (root.parent() if launcher else None) or root  # the daemon's
    return min(free, max(int(config.memory * GIGABYTE) - node_bytes(root), 0))


def _own_bytes(process: psutil.Process) -> int:
    """A process's private memory: its part of pages that it shares with a fork of it. Where the system does not
    tell that, its resident set."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Pss_Anon":
                return int(value.split()[0]) << 10
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def _files_bytes(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            found += path.lstat().st_blocks * BLOCK_BYTES
    return found
