"""The built-in trainer, the process of one local rank: `python -m atoll.node.trainer.process --group FILE`,
started by `atoll.node.trainer.launcher`.

A training loop on the participant's door (`atoll.node.participant`), as anybody's is. What a restart would not
cure (a wrong config, too little memory) is told to the daemon as `Failed`; anything else is a crash, which the
daemon answers with a new trainer.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from atoll.comm.child_process import LAUNCHER, die_with_parent
from atoll.comm.errors import AtollError, ResourceError
from atoll.node.config import Device, NodeConfig, TrainerSpec, threads_of
from atoll.node.participant.batches import RunTokens, Share
from atoll.node.participant.daemon_link import failures_reported, read_spec
from atoll.node.participant.participant import participate
from atoll.node.participant.rank_group import RankGroup
from atoll.node.trainer.loss import accumulate, validation_loss
from atoll.node.trainer.model import blocks_of, build, build_custom, init_parameters
from atoll.node.trainer.optimizer import make_optimizer


@dataclass(frozen=True)
class LocalRank:
    """Which of the node's ranks this process is."""

    rank: int
    size: int

    @classmethod
    def of_environment(cls) -> "LocalRank":
        """As the launcher says."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def main(group: str) -> None:
    """Be local rank `RANK` of `WORLD_SIZE`, who meet in the file `group`; return when the daemon is gone."""
    die_with_parent(signal.SIGKILL, int(os.environ.get(LAUNCHER, "0")) or None)
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(sign, signal.SIG_DFL)  # a forked rank inherits the launcher's
    me = LocalRank.of_environment()
    try:
        spec = read_spec()
        with failures_reported(spec.channel):
            device = choose_device(spec.node, me)
        with rank_process_group(spec, me, device, group):
            take_part(spec, me, device)
    except AtollError as error:
        print(f"trainer rank {me.rank}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception:  # a crash: here, because the launcher would print it with a prefix on each line
        print(f"trainer rank {me.rank}: {traceback.format_exc()}", file=sys.stderr)
        sys.exit(1)


def take_part(spec: TrainerSpec, me: LocalRank, device: torch.device) -> None:
    """Build data, model and optimizer, and train until the node leaves or the run is finished."""
    share = Share(me.rank, me.size)
    with failures_reported(spec.channel):
        share.of(spec.run.inner.batch_size)
        data = RunTokens.open(spec, RankGroup.of_world())
        model = build_model(spec, me, device)
        optimizer = make_optimizer(model, spec.run.inner)
    with participate(
        model,
        optimizer,
        evaluate=lambda: validation_loss(model, spec.run, data, share, device),
        initialise=lambda seed: init_parameters(model, seed),
        before_round=partial(share_cores, spec.node),
    ) as run:
        for batch in run.batches(data):
            run.step(accumulate(model, batch.to(device)))


def choose_device(node: NodeConfig, me: LocalRank) -> torch.device:
    """The device of this rank: one GPU a rank, or the CPU. Raises `ResourceError` if the machine lacks it."""
    if node.device is Device.CPU or (node.device is Device.AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise ResourceError(
            "device=cuda but this machine has no CUDA device: set device=cpu, or install a CUDA build of torch"
        )
    if me.size > count:
        devices = f"{count} CUDA device{'s' if count > 1 else ''}"
        raise ResourceError(f"ranks={me.size} but this machine has {devices}: set ranks={count}")
    torch.cuda.set_device(me.rank)
    return torch.device("cuda", me.rank)


@contextmanager
def rank_process_group(
    spec: TrainerSpec, me: LocalRank, device: torch.device, meeting_file: str
) -> Iterator[None]:
    """The process group of this node's ranks, who meet in a file. A collective of a training step that hangs is
    ended by its timeout, and told; the ranks wait for the daemon in a group of their own."""
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{meeting_file}",
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=spec.run.members.stall),
        **options,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_model(spec: TrainerSpec, me: LocalRank, device: torch.device) -> nn.Module:
    """The model on its device, without values; only the volunteer's own has those of its buffers."""
    if spec.node.model:
        model = build_custom(spec.node.model, spec.run.model)
    else:
        with torch.device("meta"):
            model = build(spec.run.model)
    blocks = blocks_of(model)
    if spec.node.compile:
        for block in blocks or [model]:
            block.compile()
    shard_model(model, blocks, me, device, spec.node.bf16)
    return model.to(device) if spec.node.model else model.to_empty(device=device)


def shard_model(
    model: nn.Module, blocks: list[nn.Module], me: LocalRank, device: torch.device, bf16: bool
) -> None:
    """Shard block by block, then the rest: one block's parameters at a time are gathered. One rank in fp32 has
    nothing to share out, and keeps plain parameters: FSDP's hooks take a sixth of a small model's step."""
    if me.size == 1 and not bf16:
        return
    mesh = init_device_mesh(device.type, (me.size,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32 if bf16 else None)
    for module in (*blocks, model):  # the root last
        fully_shard(module, mesh=mesh, mp_policy=policy)


def share_cores(node: NodeConfig) -> None:
    """Compute with this node's share of the machine's cores: other nodes come and go."""
    threads, _ = threads_of(node)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="One local rank of the built-in trainer; started by atoll.node.trainer.launcher."
    )
    parser.add_argument("--group", default="", help="file in which the local ranks meet")
    main(parser.parse_args().group)
