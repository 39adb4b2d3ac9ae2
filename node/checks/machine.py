"""What a node needs of its machine, whatever the run: looked at without starting or changing anything.

`atoll doctor` shows all of it, `atoll node join` logs it in a line.
"""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from atoll.comm.cores import core_share
from atoll.comm.descriptors import raise_limit
from atoll.comm.errors import AtollError
from atoll.comm.extras import lacking
from atoll.node.checks.check import Check, failed
from atoll.node.checks.wsl import wsl_checks
from atoll.node.config import Device, NodeConfig
from atoll.node.devices import gpus, has_compiler, has_gpu_driver, may_be_apples, torch_has_gpus
from atoll.node.preflight import PROCESS_BYTES, available, check_device

MIN_DISK = 1 << 30  # bytes that a node of the smallest model takes, with its logs
MIN_DESCRIPTORS = 1024  # a few for each member of a fleet


def machine_checks(config: NodeConfig, state_dir: Path, leaf: bool = False) -> Iterator[Check]:
    """What a node with these settings needs of this machine, whatever the run. `leaf`: nobody is to dial it."""
    yield Check("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from wsl_checks(state_dir, leaf)
    yield _packages()
    yield Check("cores", True, str(core_share()))
    yield _memory()
    yield _gpu(config)
    yield _compiler(config)
    yield _disk(state_dir)
    yield _descriptors()


def _packages() -> Check:
    if sentence := lacking("a node", "torch", "numba"):
        needs, _, install = sentence.partition(": ")
        return Check("packages", False, needs, install)
    return Check("packages", True, f"atoll {version('atoll')}, torch {version('torch')}")


def _memory() -> Check:
    have = available()
    found = f"{have / 1e9:.1f} GB available"
    if have < PROCESS_BYTES:
        return Check(
            "memory", False, found, f"a node takes {PROCESS_BYTES / 1e9:.1f} GB beside its model: free some"
        )
    return Check("memory", True, found)


def _gpu(config: NodeConfig) -> Check:
    if config.device is Device.CPU:
        return Check("gpu", True, "not asked for (device=cpu)")
    if config.device is Device.MPS:
        return _apples(config)
    if found := gpus():
        names = ", ".join(f"{gpu.name} ({gpu.memory / 1e9:.0f} GB)" for gpu in found)
        return Check("gpu", True, names)
    if not torch_has_gpus() and (has_gpu_driver() or config.device is Device.CUDA):
        here = "an NVIDIA driver is here" if has_gpu_driver() else "device=cuda"
        remedy = "install a CUDA build of torch (pytorch.org says how), or give device=cpu"
        return Check("gpu", False, f"{here}, and torch is built for CPUs", remedy)
    if config.device is Device.CUDA:
        return Check(
            "gpu", False, "device=cuda, and no driver tells of a GPU", "install the driver, or give device=cpu"
        )
    if may_be_apples():
        words = "Apple's: the trainer takes it if torch can use it, else the CPU"
        return Check("gpu", True, words, "not tested on real hardware; device=cpu leaves it alone")
    return Check("gpu", True, "none: the trainer takes the CPU")


def _apples(config: NodeConfig) -> Check:
    try:
        check_device(config)
    except AtollError as error:
        return failed("gpu", error)
    return Check("gpu", True, "Apple's (device=mps)", "not tested on real hardware")


def _compiler(config: NodeConfig) -> Check:
    if has_compiler():
        return Check("compiler", True, "there is one, for compile=true")
    wanted = bool(config.compile)
    return Check("compiler", not wanted, "none, which compile=true needs", "install g++" if wanted else "")


def _disk(state_dir: Path) -> Check:
    folder = next(p for p in (state_dir, *state_dir.parents) if p.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return Check("disk", False, f"nothing can be written to {folder}", "give another --state-dir")
    free = shutil.disk_usage(folder).free
    found = f"{free / 1e9:.1f} GB free for {state_dir}"
    if free < MIN_DISK:
        return Check("disk", False, found, "a node takes 1 GB and about 80 bytes a parameter: free some")
    return Check("disk", True, found, "a durable node takes about 80 bytes a parameter of the run's model")


def _descriptors() -> Check:
    limit = raise_limit()
    ok = limit >= MIN_DESCRIPTORS
    return Check("descriptors", ok, f"{limit:,} at most", "" if ok else f"ulimit -n {MIN_DESCRIPTORS} or more")
