"""Checks whether this machine can take part, before anything is started; what it lacks is raised as a sentence."""

import platform
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from atoll.comm.config.run import OptimizerName, RunConfig
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.invite import split_host_port
from atoll.node.config import Device, NodeConfig
from atoll.node.devices import Gpu, has_compiler, suits_mps, torch_has_gpus

BYTES_FLAT = 12  # three flat vectors
BYTES_TRAINED = 8  # parameters and gradients
# The inner optimizer's moments, of a parameter.
MOMENT_BYTES = {OptimizerName.ADAMW: 8, OptimizerName.MUON: 8, OptimizerName.SGD: 0}
ENCODED = 2  # vectors, encoded, that a reduce has in memory at most
BATCHES, TOKEN_BYTES = 10, 24  # in a trainer's memory at most, those made ahead among them; of a sample's token
PROCESS_BYTES = 600 << 20  # bytes of a trainer and a daemon that hold no model yet


def check_memory(
    run: RunConfig, node: NodeConfig, found: Sequence[Gpu], n_params: int = 0, taken: int = 0
) -> None:
    """Raise `ResourceError` if the model cannot fit into this machine's memory, or into that of its GPUs. `node`:
    with all settings resolved; `found`: the machine's GPUs; `n_params`: of a model that is not the run's, and in
    the memory of a trainer already, beside which the flat vectors must fit; `taken`: bytes of memory that an
    earlier life of the node has left for it."""
    on_gpu = node.device is Device.CUDA or n_params > 0
    if on_gpu and found:
        check_gpu_memory(run, node.ranks, min(found[: node.ranks], key=lambda gpu: gpu.memory))
    batch = run.inner.batch_size * run.model.seq_len // node.machines
    demand_memory(
        BATCHES * TOKEN_BYTES * batch, f"a batch of {batch:,} tokens", "free some, or use a larger machine"
    )
    demand_memory(
        max(0, memory_need(run, node, n_params) - taken),
        f"the run's model of {n_params or run.model.n_params:,} parameters",
        "free some, or use a larger machine",
    )
    demand_allowed_memory(run, node, n_params)


def demand_allowed_memory(run: RunConfig, node: NodeConfig, n_params: int = 0) -> None:
    """Raise `ResourceError` if the model cannot fit into the memory that the owner allows; arguments as
    `check_memory` has them."""
    need = memory_need(run, node, n_params)
    if 0 < node.memory * 1e9 < need:
        raise ResourceError(
            f"memory={node.memory:g} GB, and the run's model of {n_params or run.model.n_params:,} parameters "
            f"needs about {need / 1e9:.1f} GB on this machine: allow more, or "
            "take part in a run with a smaller model"
        )


def memory_need(run: RunConfig, node: NodeConfig, n_params: int = 0) -> int:
    """Bytes of memory, beside GPUs', that a node takes; arguments as `check_memory` has them."""
    params, moments = n_params or run.model.n_params, MOMENT_BYTES[run.inner.optimizer]
    on_gpu = node.device is Device.CUDA or n_params > 0
    encoded, kept = run.reduce.bytes_per_element, bool(run.outer.feedback)
    each = BYTES_FLAT + (ENCODED + kept) * encoded + (0 if on_gpu else BYTES_TRAINED + moments)
    # Copies on their way to the disk: of the moments, and of the parameters with them.
    each += moments + 4 * (node.copy_interval > 0) if node.durable else 0
    # With overlap: what was handed over, once more; and what is trained, while the anchor is evaluated.
    each += 8 if run.overlap.delay else 0
    each += 8 if kept else 0  # what was not sent, and a copy of it on its way to the disk
    return int(params * each) + PROCESS_BYTES


def check_gpu_memory(run: RunConfig, ranks: int, gpu: Gpu) -> None:
    """Raise `ResourceError` if a rank's part of parameters, gradients and moments does not fit into its GPU."""
    params = run.model.n_params
    need = params * (BYTES_TRAINED + MOMENT_BYTES[run.inner.optimizer]) // ranks
    if need > gpu.memory:
        each = f"each of this node's {ranks} GPUs has" if ranks > 1 else "this node's GPU has"
        raise ResourceError(
            f"the run's model of {params:,} parameters needs {need / 1e9:.1f} GB of GPU memory a rank, "
            f"{each} {gpu.memory / 1e9:.1f} GB: use more of them (ranks=), or device=cpu"
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


def beginning_out_of_reach(run: RunConfig, node: NodeConfig) -> str:
    """What keeps this node from reading what the run begins with, if it is the first member, in a sentence; empty:
    nothing that shows at the join."""
    place = run.init_from
    scheme, separator, rest = place.partition("://")
    if not place or (separator and scheme not in ("file", "local")):
        try:
            node.demand_store("init_from", place)
        except ResourceError as error:
            return f"{error}; it cannot be the run's first"
        return ""
    if not node.files:
        return (
            f"init_from={place} is among this machine's own files, which a run may read only where the node has "
            "files=true: without it this node cannot be the run's first"
        )
    path = Path(rest if separator else place).expanduser()
    if not path.exists():
        return f"init_from={place}: this machine has no {path.absolute()}, and this node cannot be the run's first"
    return ""


def check_stores(run: RunConfig, node: NodeConfig) -> None:
    """Raise `ResourceError` where the run keeps checkpoints in a store that the node's owner does not allow, or
    has its frozen weights in one, and this node would use it. `check_source` looks at data sets."""
    if node.durable:
        node.demand_store("checkpoint.remote", run.checkpoint.remote)
    if not node.base:
        node.demand_store("hf.base", run.hf.base)


def check_network(node: NodeConfig) -> None:
    """Check that this machine has the congestion control that is asked for, and can listen where the others of its
    node come. Raises `ConfigError`."""
    check_congestion(node.congestion)
    if node.machines < 2:
        return
    host, port = split_host_port(node.rendezvous, "rendezvous")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ConfigError(
            f"rendezvous={node.rendezvous}: this machine cannot listen there ({error.strerror}): give an address "
            "of its own, and a free port"
        ) from None


def check_ranks(batch_size: int, ranks: int) -> None:
    """Check that a batch of so many sequences can be divided among the ranks. Raises `ConfigError`."""
    if batch_size % ranks:
        raise ConfigError(
            f"inner.batch_size={batch_size} cannot be divided among ranks={ranks}: "
            f"start this node with a number of ranks that divides {batch_size}"
        )


def check_device(node: NodeConfig) -> None:
    """Check that this machine and its torch can have the GPU that the settings ask for, and that the other
    settings suit it. Raises `ConfigError`."""
    if node.device is Device.CUDA and not torch_has_gpus():
        raise ConfigError("device=cuda and this machine's torch is built for CPUs: install a CUDA build of it")
    if node.device is Device.MPS and platform.system() != "Darwin":
        raise ConfigError(
            f"device=mps is a Mac's GPU, and this machine runs {platform.system()}: leave device= out"
        )
    if node.device is Device.MPS and not suits_mps(node):
        raise ConfigError(
            "device=mps trains in fp32, uncompiled and in one rank of one machine: leave out bf16=, compile=, "
            "ranks= and machines=, or give device=cpu"
        )


def _offered() -> str:
    with suppress(OSError):
        return ", ".join(Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split())
    return "others"


def check_compiler() -> None:
    """torch.compile builds kernels with the machine's own compiler; raise `ResourceError` if there is none."""
    if not has_compiler():
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
