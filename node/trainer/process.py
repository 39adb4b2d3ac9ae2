"""The built-in trainer, the process of one local rank: `python -m atoll.node.trainer.process --group FILE`,
started by `atoll.node.trainer.launcher`.

A training loop on the participant's door (`atoll.node.participant`), as anybody's is. What a restart would not
cure (a wrong config, too little memory) is told to the daemon as `Failed`; anything else is a crash, which the
daemon answers with a new trainer.
"""

import argparse
import logging
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous

from atoll.comm import log as logs
from atoll.comm.child_process import LAUNCHER, die_with_parent
from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.node.config import Checkpointing, Device, NodeConfig, TrainerSpec, threads_of
from atoll.node.devices import resolve, suits_mps
from atoll.node.participant.batches import RunTokens, Share
from atoll.node.participant.daemon_link import DaemonLink, agreed_spec, failures_reported, read_spec
from atoll.node.participant.participant import participate
from atoll.node.participant.rank_group import RankGroup
from atoll.node.trainer.accumulator import GradientAccumulator, MicroBatchTooLarge, compile_blocks
from atoll.node.trainer.micro_batch import MicroBatchStore
from atoll.node.trainer.model import blocks_of, build_for, init_parameters
from atoll.node.trainer.optimizer import make_optimizer
from atoll.node.trainer.writing import PassageWriter
from atoll.node.trainer_channel import FIRST_STEP_SECONDS, LogLine, MicroBatch

log = logging.getLogger("atoll.trainer")
COLLECTIVE_SHARE = 0.5  # of members.stall


@dataclass(frozen=True)
class LocalRank:
    """The place of this process among the node's ranks, as torch's elastic launcher has placed it."""

    rank: int  # among all ranks of the node
    size: int
    local: int = 0  # among those of this machine
    local_size: int = 1
    machine: int = 0
    machines: int = 1

    @classmethod
    def of_environment(cls) -> "LocalRank":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        return cls(*(int(os.environ.get(name, "01"[name.endswith("SIZE")])) for name in names))

    def beginning_with(self, machine: int) -> "LocalRank":
        """The place of this process, counted from that machine on, whose first rank is rank 0."""
        place = (self.machine - machine) % self.machines
        return replace(self, rank=place * self.local_size + self.local, machine=place)


def main(group: str) -> None:
    """Be local rank `RANK` of `WORLD_SIZE`, who meet in the file `group`; return when the daemon is gone."""
    run_rank(group, take_part)


def run_rank(group: str, take_part: Callable[[torch.device], None]) -> None:
    """Be a local rank, as `main`, of a trainer that takes part with its device in this way. What ends it is told
    to the daemon where a restart would not cure it, and is in the trainer's log."""
    die_with_parent(signal.SIGKILL, int(os.environ.get(LAUNCHER, "0")) or None)
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(sign, signal.SIG_DFL)  # a forked rank inherits the launcher's
    me = LocalRank.of_environment()
    spec = read_spec() or TrainerSpec()
    with logged_as(f"trainer rank {me.rank}", spec.log), ExitStack() as stack:
        with failures_reported(spec.channel):
            spec.node, _ = resolve(spec.node, spec.run.inner.batch_size)
            device = choose_device(spec.node, me)
            stack.enter_context(rank_process_group(spec, me, device, group))
        take_part(device)


@contextmanager
def logged_as(name: str, how: logs.LogSetup) -> Iterator[None]:
    """Have this rank's lines in the trainer's log, `how` its daemon wants it. End the process where what is in the
    context fails, and log what it was: a sentence, or the stack of a crash."""
    logs.setup(msgspec.structs.replace(how, process=name))
    try:
        yield
    except (AtollError, MicroBatchTooLarge) as error:
        log.error(f"{name}: {error}")
        sys.exit(error.exit_code if isinstance(error, AtollError) else 1)
    except Exception:  # a crash: here, because the launcher would print it with a prefix on each line
        log.critical(f"{name}: a fault of the program", exc_info=True)
        sys.exit(1)
    finally:
        logs.flush()


def take_part(device: torch.device) -> None:
    """Build data, model and optimizer, and train until the node leaves or the run is finished."""
    ranks = RankGroup.of_world()
    spec = agreed_spec(ranks)
    link = DaemonLink.opened(ranks, spec.channel)
    with failures_reported(spec.channel, link):
        Share(ranks.rank, ranks.size).of(spec.run.inner.batch_size)
        spec.node, _ = resolve(spec.node, spec.run.inner.batch_size)
        data = RunTokens.open(spec, ranks, link)
        model = build_model(spec, ranks, device)
        optimizer = make_optimizer(model, spec.run.inner)
        store = MicroBatchStore(Path(spec.cache), micro_batch_facts(spec, ranks, device))
        accumulator = GradientAccumulator(model, spec.run, spec.node, ranks, device, store)
        found = accumulator.choose()
        link.send(MicroBatch(accumulator.plan.size))
        compiled = bool(spec.node.compile)
        writer = PassageWriter(
            model, spec.run, data, ranks, device, compiled, lambda line: link.send(LogLine(line))
        )
    with participate(
        model,
        optimizer,
        evaluate=lambda: accumulator.validation_loss(data),
        write=writer.write,
        initialise=lambda seed: init_parameters(model, seed),
        before_round=partial(share_cores, spec.node),
    ) as run:
        accumulator.tell = run.tell
        accumulator.on_plan = lambda plan: link.send(MicroBatch(plan.size))
        if found:
            run.tell(found)
        for number, batch in enumerate(run.batches(data)):
            run.step(accumulator.add(batch))
            if not number:
                _set_pg_timeout(collective_timeout(spec))


def micro_batch_facts(spec: TrainerSpec, ranks: RankGroup, device: torch.device) -> Any:
    """Collect all that the size of a micro-batch depends on."""
    run, node = spec.run, spec.node
    machine: tuple[str, int]
    if device.type == "cuda":
        machine = (torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)
    else:
        machine = (f"{device.type} {processor_name()}", psutil.virtual_memory().total)
    settings = (node.bf16, node.compile, node.micro_batch, node.checkpointing, node.model, node.memory)
    share = run.inner.batch_size // ranks.size
    return machine, str(torch.__version__), run.model, run.inner.optimizer, settings, ranks.hosts, share


def processor_name() -> str:
    """The name of the processor, or its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def choose_device(node: NodeConfig, me: LocalRank) -> torch.device:
    """The device of this rank: one GPU a rank, or the CPU. Raises `ResourceError` if the machine lacks it."""
    if node.device is Device.CPU:
        return torch.device("cpu")
    if node.device is Device.MPS:
        return apples_gpu(me)
    if node.device is Device.AUTO and not torch.cuda.is_available():
        apples = me.size == 1 and suits_mps(node) and torch.backends.mps.is_available()
        return torch.device("mps" if apples else "cpu")
    count = torch.cuda.device_count()
    if not count:
        raise ResourceError(
            "device=cuda but this machine has no CUDA device: set device=cpu, or install a CUDA build of torch"
        )
    if me.local_size > count:
        devices = f"{count} CUDA device{'s' if count > 1 else ''}"
        raise ResourceError(f"ranks={me.local_size} but this machine has {devices}: set ranks={count}")
    torch.cuda.set_device(me.local)
    return torch.device("cuda", me.local)


def apples_gpu(me: LocalRank) -> torch.device:
    """Apple's GPU, of which a machine has one. Raises `ResourceError` where torch cannot use it."""
    if me.size > 1:
        raise ResourceError(f"device=mps is one GPU, and this node has {me.size} ranks: set device=cpu")
    if not torch.backends.mps.is_available():
        built = torch.backends.mps.is_built()
        why = "it takes macOS 14 or newer" if built else "it is built without: install torch for arm64"
        raise ResourceError(f"device=mps and torch finds no GPU of Apple's ({why}), or set device=cpu")
    return torch.device("mps")


@contextmanager
def rank_process_group(
    spec: TrainerSpec, me: LocalRank, device: torch.device, meeting_file: str
) -> Iterator[None]:
    """The process group of this node's ranks, who meet in a file; those of several machines in the store of the
    launcher's rendezvous. A collective of a training step that hangs is ended by its timeout, and told; the ranks
    wait for the daemon in a group of their own. Until the first step is taken the timeout is long: one rank may
    compile while others wait for it."""
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    if me.machines > 1:
        me, options["store"] = meet(me, at_daemon=bool(spec.channel))
    else:
        options["init_method"] = f"file://{meeting_file}"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        rank=me.rank,
        world_size=me.size,
        timeout=collective_timeout(spec) + timedelta(seconds=FIRST_STEP_SECONDS),
        **options,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def collective_timeout(spec: TrainerSpec) -> timedelta:
    """The time after which a collective of a step counts as hung: before the watchdog of the step ends the
    process, so that NCCL can write down what it knows."""
    return timedelta(seconds=COLLECTIVE_SHARE * spec.run.members.stall)


def meet(me: LocalRank, at_daemon: bool) -> tuple[LocalRank, Store]:
    """The rank that this is when the machine with the daemon has the first ones, and the store in which all meet.
    The launchers' rendezvous orders machines as it likes. Raises `ConfigError` where they have different numbers
    of ranks."""
    if me.size != me.machines * me.local_size:
        raise ConfigError(
            f"this node's {me.machines} machines have {me.size} ranks, {me.local_size} of them here: give each "
            "machine the same ranks="
        )
    store, _, _ = next(iter(rendezvous("env://", me.rank, me.size)))
    if at_daemon and me.local == 0:
        store.set("machine of the daemon", str(me.machine))
    first = int(store.get("machine of the daemon"))
    return me.beginning_with(first), PrefixStore("ranks", store)


def build_model(spec: TrainerSpec, ranks: RankGroup, device: torch.device) -> nn.Module:
    """The model on its device, without values; only the volunteer's own, or a plugin's, has those of its
    buffers."""
    named = spec.node.model or spec.run.model.plugin
    with nullcontext() if named else torch.device("meta"):
        model = build_for(spec.run, spec.node.model)
    blocks = blocks_of(model)
    if spec.node.checkpointing in (Checkpointing.SELECTIVE, Checkpointing.FULL) and not blocks:
        raise ConfigError(
            f"checkpointing={spec.node.checkpointing} is done block by block, and model={named} names "
            "none: give it an nn.ModuleList `blocks`, or set checkpointing=none"
        )
    if spec.node.compile:
        compile_blocks(model, dynamic=False)
    shard_model(model, blocks, ranks, device, bool(spec.node.bf16))
    return model.to(device) if named else model.to_empty(device=device)


def shard_model(
    model: nn.Module, blocks: list[nn.Module], ranks: RankGroup, device: torch.device, bf16: bool
) -> None:
    """Shard block by block, then the rest: one block's parameters at a time are gathered. Over several machines
    each has the whole model (HSDP): only gradients cross their links. One rank in fp32 has nothing to share out,
    and keeps plain parameters: FSDP's hooks take a sixth of a small model's step."""
    if ranks.size == 1 and not bf16:
        return
    machines = len(set(ranks.hosts))
    shape: tuple[int, ...] = (ranks.size,)
    names: tuple[str, ...] = ("shard",)
    if machines > 1:
        shape, names = (machines, ranks.size // machines), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32 if bf16 else None)
    for module in (*blocks, model):  # the root last
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if ranks.size > 1 and device.type == "cuda":
        prefetch(model, blocks)


def prefetch(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Have each sharded block ask for the next one's parameters before it computes, forward and backward; else
    they are asked for when the launches of its own kernels are through."""
    for one, following in pairwise((model, *blocks)):
        cast(FSDPModule, one).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
    for one, following in pairwise(reversed(blocks)):
        cast(FSDPModule, one).set_modules_to_backward_prefetch([cast(FSDPModule, following)])


def share_cores(node: NodeConfig) -> None:
    """Compute with this node's share of the machine's cores: other nodes come and go, and the owner may have
    changed how many threads there may be."""
    now = read_spec()
    threads, _ = threads_of(replace(node, threads=now.node.threads) if now is not None else node)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="One local rank of the built-in trainer; started by atoll.node.trainer.launcher."
    )
    parser.add_argument("--group", default="", help="file in which the local ranks meet")
    main(parser.parse_args().group)
