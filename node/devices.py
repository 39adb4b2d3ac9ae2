"""The GPUs of this machine as their driver tells of them, and what a node does with them where its settings leave
that open. Without torch: the daemon asks, too."""

import ctypes
import importlib.util
import os
import platform
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.node.config import Device, NodeConfig

COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang")
BF16_CAPABILITY = 8  # the first compute capability that multiplies bf16


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device that torch may use."""

    name: str
    memory: int  # bytes
    multiplies_bf16: bool = True


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that torch will find, as NVIDIA's driver describes them; none where its build is for CPUs only."""
    if not torch_has_gpus():
        return ()
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
        if driver.nvmlInit_v2():
            return ()
    except (OSError, AttributeError):
        return ()
    try:
        return tuple(_describe(driver, handle) for handle in _handles(driver, os.environ))
    finally:
        driver.nvmlShutdown()


def has_gpu_driver() -> bool:
    """Whether NVIDIA's driver is there, whatever torch was built for."""
    try:
        return not ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2()
    except (OSError, AttributeError):
        return False


def torch_has_gpus() -> bool:
    """Whether the torch that is installed was built for GPUs, CUDA's or ROCm's."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
        for folder in (spec and spec.submodule_search_locations) or ():
            if any(Path(folder, "lib", f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip")):
                return True
    return False


def may_be_apples() -> bool:
    """Whether this machine has a GPU of Apple's. Whether torch can use it only torch knows, whom the trainer
    asks."""
    return (platform.system(), platform.machine()) == ("Darwin", "arm64")


def suits_mps(node: NodeConfig) -> bool:
    """Whether a node with these settings can train on Apple's GPU: one rank, in fp32 (mixed precision is FSDP2's,
    which does not know that device), uncompiled."""
    alone = node.ranks in (0, 1) and node.machines == 1 and not node.rendezvous
    return alone and not node.bf16 and not node.compile


def visible(count: int, wanted: str | None) -> list[int | str]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, of `count`: numbers, or the names of what is known by one. As
    CUDA reads it: to the first that does not exist."""
    if wanted is None:
        return list(range(count))
    found: list[int | str] = []
    for word in (word.strip() for word in wanted.split(",")):
        if word.startswith(("GPU-", "MIG-")):
            found.append(word)
        elif word.isdigit() and int(word) < count:
            found.append(int(word))
        else:
            break
    return found


def _handles(driver: ctypes.CDLL, environment: "os._Environ[str]") -> list[ctypes.c_void_p]:
    count = ctypes.c_uint()
    driver.nvmlDeviceGetCount_v2(ctypes.byref(count))
    handles = []
    for which in visible(count.value, environment.get("CUDA_VISIBLE_DEVICES")):
        handle = ctypes.c_void_p()
        if isinstance(which, int):
            failed = driver.nvmlDeviceGetHandleByIndex_v2(which, ctypes.byref(handle))
        else:
            failed = driver.nvmlDeviceGetHandleByUUID(which.encode(), ctypes.byref(handle))
        if not failed:
            handles.append(handle)
    return handles


def _describe(driver: ctypes.CDLL, handle: ctypes.c_void_p) -> Gpu:
    name = ctypes.create_string_buffer(96)
    driver.nvmlDeviceGetName(handle, name, len(name))
    memory = (ctypes.c_ulonglong * 3)()  # total, free, used
    driver.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = driver.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(name.value.decode(errors="replace"), int(memory[0]), bool(failed) or major.value >= BF16_CAPABILITY)


def has_compiler() -> bool:
    """Whether this machine has what torch.compile builds kernels with."""
    return any(shutil.which(name) for name in COMPILERS)


def resolve(node: NodeConfig, batch_size: int, found: Sequence[Gpu] | None = None) -> tuple[NodeConfig, str]:
    """The settings with a value for each that was left open, and a sentence about them; empty on a CPU. Settings
    that leave nothing open stay as they are; on a Mac the device stays open, for torch to choose. `found`: the
    machine's GPUs; None: they are looked up.

    A node takes all GPUs, or as many of them as divide a batch of `batch_size` sequences; a machine of a node of
    several takes all."""
    if found is None:
        found = () if node.device is Device.CPU else gpus()
    if node.device is Device.MPS:
        settled = replace(node, ranks=node.ranks or 1, bf16=bool(node.bf16), compile=bool(node.compile))
        return settled, "trains in fp32 on Apple's GPU (mps)"
    if node.device is Device.AUTO and not found and may_be_apples() and suits_mps(node):
        settled = replace(node, ranks=1, bf16=False, compile=False)
        return settled, "trains in fp32 on Apple's GPU (mps) if torch can use it, else on the processor"
    if node.device is Device.AUTO and not found and torch_has_gpus():
        settled = replace(node, ranks=node.ranks or 1, bf16=bool(node.bf16), compile=bool(node.compile))
        return settled, "no driver describes this machine's GPUs: torch finds one or the CPU; say ranks= and bf16="
    if node.device is Device.CPU or (node.device is Device.AUTO and not found):
        settled = replace(
            node,
            device=Device.CPU,
            ranks=node.ranks or 1,
            bf16=bool(node.bf16),
            compile=bool(node.compile),
        )
        return settled, ""
    counts = [n for n in range(1, len(found) + 1) if node.rendezvous or batch_size % n == 0]
    ranks = node.ranks or max(counts, default=1)
    settled = replace(
        node,
        device=Device.CUDA,
        ranks=ranks,
        bf16=all(gpu.multiplies_bf16 for gpu in found) if node.bf16 is None else node.bf16,
        compile=has_compiler() if node.compile is None else node.compile,
    )
    blind = f"is to train on {ranks} GPU{'s' if ranks > 1 else ''} that no driver describes"
    how = [f"trains on {ranks} of {len(found)} GPUs" if found else blind]
    if not node.ranks and ranks < len(found):
        how.append(f"more do not divide inner.batch_size={batch_size}")
    how.append("in bf16" if settled.bf16 else "in fp32")
    if settled.compile:
        how.append("compiled")
    elif node.compile is None:
        how.append("not compiled, for want of a C++ compiler")
    return settled, ", ".join(how)
