"""A training loop without Atoll around it, for `atoll bench trainer`: `python -m atoll.node.trainer.bare_loop`,
which the launcher starts under torchrun as it would a trainer of anybody's.

The run's model, sharded with FSDP2 block by block wherever ranks share it or compute in bf16, torch's fused AdamW
and clipping: what a script of one page does. Only between two orders does it talk to whoever started it; while the
clock runs it does nothing but train, on batches that are in memory before.
"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from atoll.comm.accelerators import peak_flops
from atoll.comm.config.round_time import flops_per_token, tokens_per_step
from atoll.comm.config.run import RunConfig
from atoll.comm.leases import samples
from atoll.node.config import TrainerSpec
from atoll.node.participant.batches import Batch, RunTokens, Share, collated
from atoll.node.participant.daemon_link import DaemonLink, failures_reported, read_spec
from atoll.node.participant.rank_group import RankGroup
from atoll.node.trainer.loss import placed
from atoll.node.trainer.model import blocks_of, build, init_parameters
from atoll.node.trainer.process import LocalRank, choose_device, logged_as
from atoll.node.trainer_channel import Hello, Initialise, Initialised, Progress, Ready, Stop, Train


def main() -> None:
    """Serve orders until the other side is gone."""
    spec, me = read_spec() or TrainerSpec(), LocalRank.of_environment()
    with logged_as(f"bare rank {me.rank}", spec.log), failures_reported(spec.channel):
        device = choose_device(spec.node, me)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        serve(spec, me, device)
        dist.destroy_process_group()


def serve(spec: TrainerSpec, me: LocalRank, device: torch.device) -> None:
    """Build the model, and train as often as it is told."""
    run, ranks = spec.run, RankGroup.of_world()
    data, share = RunTokens.open(spec, ranks), Share(me.rank, me.size)
    model = build_model(run, me, device, bool(spec.node.bf16), bool(spec.node.compile))
    inner = run.inner
    decayed: list[Tensor] = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    undecayed: list[Tensor] = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": inner.weight_decay}, {"params": undecayed, "weight_decay": 0.0}],
        lr=inner.peak_lr,
        betas=(inner.beta1, inner.beta2),
        eps=inner.eps,
        fused=True,
    )
    link = DaemonLink(ranks, spec.channel)
    numel = sum(parameter.numel() for parameter in model.parameters())
    link.send(Hello(os.getpid(), me.size, numel, (), evaluates=False))
    while not isinstance(command := link.next_command(), Stop):
        match command:
            case Initialise(seed=seed):
                init_parameters(model, seed)
                link.send(Initialised())
            case Train():
                batches = load(run, data, share, command, device)
                train(run, model, optimizer, batches, link, command.round)


def build_model(run: RunConfig, me: LocalRank, device: torch.device, bf16: bool, compile_: bool) -> nn.Module:
    """The run's own model, sharded where there is something to share out."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with torch.device("meta"):
        model = build(run.model)
    blocks = blocks_of(model)
    for block in blocks if compile_ else ():
        block.compile()
    if me.size > 1 or bf16:
        mesh = init_device_mesh(device.type, (me.size,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return model.to_empty(device=device)


def load(run: RunConfig, data: RunTokens, share: Share, order: Train, device: torch.device) -> list[Batch]:
    """Load this rank's batches of all the order's steps onto the device."""
    size = run.inner.batch_size
    steps = (samples(order.lease, k * size, size)[share.of(size)] for k in range(order.ceiling))
    return [placed(collated([data[index] for index in indices]), device) for indices in steps]


def train(
    run: RunConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    link: DaemonLink,
    round_: int,
) -> None:
    """A step for each batch. Tells when the first is taken and when the last is: in between is what counts."""
    model.train()
    device = batches[0]["input_ids"].device
    total, begun = torch.zeros((), device=device), 0.0
    for number, batch in enumerate(batches, 1):
        logits = model(batch["input_ids"], positions=batch.get("position_ids"))
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), run.inner.clip)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if number == 1:
            begun = settled(device)
            link.send(Progress(round_, number, 0.0))
    seconds = settled(device) - begun
    dist.all_reduce(total)
    mean = float(total) / len(batches) / dist.get_world_size()
    pace = (len(batches) - 1) * tokens_per_step(run) / max(seconds, 1e-9)
    on_gpu = device.type == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(device)) if on_gpu else None
    mfu = pace * flops_per_token(run.model) / (peak * dist.get_world_size()) if peak else 0.0
    memory = torch.cuda.max_memory_allocated(device) * dist.get_world_size() if on_gpu else 0
    link.send(Progress(round_, len(batches), mean, pace, mfu, device_bytes=memory))
    link.send(Ready(round_, len(batches), mean, len(batches) * run.inner.batch_size))


def settled(device: torch.device) -> float:
    """The time, in seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


if __name__ == "__main__":
    main()
