"""Checks whether this machine can take part, before anything is started; what it lacks is raised as a sentence."""

import shutil
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError, ResourceError

BYTES_TRAINED, BYTES_FLAT = 16, 12  # parameters, gradients, two Adam moments; three flat vectors
ENCODED = 2  # vectors, encoded, that a reduce has in memory at most
PROCESS_BYTES = 600 << 20  # bytes of a trainer and a daemon that hold no model yet


def check_memory(run: RunConfig, on_gpu: bool, n_params: int = 0) -> None:
    """Raise `ResourceError` if the model cannot fit into this machine's memory. `n_params`: of a model that is not
    the run's; what trains it has its memory already where `on_gpu` is set."""
    params = n_params or run.model.n_params
    encoded, kept = run.reduce.bytes_per_element, bool(run.outer.feedback)
    each = BYTES_FLAT + (ENCODED + kept) * encoded + (0 if on_gpu else BYTES_TRAINED)
    each += 4 if run.overlap.delay else 0  # what was handed over, once more
    each += 8 if kept else 0  # what was not sent, and a copy of it on its way to the disk
    demand_memory(
        int(params * each) + PROCESS_BYTES,
        f"the run's model of {params:,} parameters",
        "free some, or use a larger machine",
    )


def demand_memory(need: int, who: str, otherwise: str) -> None:
    """Raise `ResourceError` unless `need` bytes are available; `otherwise`: what to do then."""
    if need > (have := available()):
        raise ResourceError(
            f"{who} needs about {need / 1e9:.1f} GB of memory on this machine, "
            f"{have / 1e9:.1f} GB are available: {otherwise}"
        )


def check_congestion(name: str) -> None:
    """Check that the kernel offers this TCP congestion control; empty: none is asked for. Raises `ConfigError`."""
    if not name or not hasattr(socket, "TCP_CONGESTION"):
        return
    with socket.socket() as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:
            raise ConfigError(f"congestion={name}: this machine's kernel offers {_offered()}") from None


def _offered() -> str:
    with suppress(OSError):
        return ", ".join(Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split())
    return "others"


def check_compiler() -> None:
    """torch.compile builds kernels with the machine's own compiler; raise `ResourceError` if there is none."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++", "cc", "gcc", "clang")):
        raise ResourceError("compile=true needs a C++ compiler and this machine has none: install g++")


def available() -> int:
    """Bytes of memory this process may still take, within its cgroup's limit."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, int(limit) - used) if limit.isdigit() else free
