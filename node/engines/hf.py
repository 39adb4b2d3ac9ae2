"""transformers as a node's trainer, the process of one local rank: `python -m atoll.node.engines.hf --group FILE`,
started by `atoll.node.trainer.launcher` where the run's engine is hf.

A training loop on the participant's door (`atoll.node.participant`), as the built-in trainer's, with a model that
transformers builds from the run's config. With `hf.lora` the model is frozen, each node reads its weights by
itself (`atoll.node.engines.hf_weights`), and the adapters, which alone require gradients, are what is trained,
exchanged and kept.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError
from atoll.node.config import TrainerSpec
from atoll.node.devices import resolve
from atoll.node.engines.hf_model import (
    build,
    flops_per_token,
    frozen,
    initialise,
    initialise_adapters,
    layers_of,
    materialise,
    tied_names,
)
from atoll.node.engines.hf_steps import HfSteps
from atoll.node.engines.hf_weights import BaseWeights, largest_size, locate
from atoll.node.engines.hub_weights import REPORT_SECONDS
from atoll.node.participant.batches import RunTokens, Share
from atoll.node.participant.daemon_link import DaemonLink, agreed_spec, failures_reported
from atoll.node.participant.participant import participate
from atoll.node.participant.rank_group import RankGroup
from atoll.node.trainer.optimizer import make_optimizer
from atoll.node.trainer.process import (
    collective_timeout,
    run_rank,
    shard_model,
    share_cores,
)
from atoll.node.trainer.writing import PassageWriter
from atoll.node.trainer_channel import LogLine, Preparing


def take_part(device: torch.device) -> None:
    """Build data, model and optimizer, and train until the node leaves or the run is finished."""
    ranks = RankGroup.of_world()
    spec = agreed_spec(ranks)
    run = spec.run
    link = DaemonLink.opened(ranks, spec.channel)
    with failures_reported(spec.channel, link):
        Share(ranks.rank, ranks.size).of(run.inner.batch_size)
        spec.node, _ = resolve(spec.node, run.inner.batch_size)
        data = RunTokens.open(spec, ranks, link)
        model = build_model(spec, ranks, device, link)
        optimizer = make_optimizer(model, run.inner)
        steps = HfSteps(model, run, spec.node, ranks, device)
        compiled = bool(spec.node.compile)
        writer = PassageWriter(
            *(lambda x: model(input_ids=x).logits, run, data, ranks, device, compiled),
            lambda line: link.send(LogLine(line)),
        )
    torch.seed()  # adapters' dropout: torch begins with the same numbers on every rank of every node
    fill = initialise_adapters if run.hf.lora.rank else initialise
    with participate(
        model,
        optimizer,
        evaluate=lambda: steps.validation_loss(data),
        write=writer.write,
        initialise=partial(fill, model),
        before_round=partial(share_cores, spec.node),
        token_flops=flops_per_token(model, run.model.seq_len),
    ) as taking:
        steps.tell = taking.tell
        for number, batch in enumerate(taking.batches(data)):
            taking.step(steps.add(batch))
            if not number:
                _set_pg_timeout(collective_timeout(spec))


def build_model(spec: TrainerSpec, ranks: RankGroup, device: torch.device, link: DaemonLink) -> nn.Module:
    """The model on its device, sharded over the ranks; with adapters its frozen weights are read, all else has no
    values yet. Raises `ConfigError`, `ResourceError`."""
    hf = spec.run.hf
    model = build(hf, lambda sentence: link.send(LogLine(sentence)))
    check_vocabulary(model, spec.run)
    weights = open_base(spec, ranks, link, largest_size(model)) if hf.lora.rank else None
    layers = layers_of(model)
    if spec.node.compile:
        for layer in layers:
            layer.compile(dynamic=False)
    shard_model(model, layers, ranks, device, bool(spec.node.bf16))
    materialise(model, device)
    if weights is not None:
        weights.read(frozen(model), tied_names(model))
    return model


def open_base(spec: TrainerSpec, ranks: RankGroup, link: DaemonLink, largest: int) -> BaseWeights:
    """The run's frozen weights on this machine, whose first rank fetches, `largest` bytes at most, and compares
    them; `link` is told how far it is. Raises `AtollError`."""

    def tell(sentence: str) -> None:
        link.send(Preparing(sentence))

    folder = ""
    if ranks.is_first_on_host:
        link.send(LogLine(f"gets and compares the run's frozen weights, {spec.node.base or spec.run.hf.base}"))
        folder = str(locate(spec.run.hf, spec.node, largest, tell))
        tell("compares the frozen weights that it has with the run's")
        BaseWeights.open(Path(folder)).check(spec.run.hf.digest)
    ranks.meet(lambda: tell("waits until the node's other machines have the run's frozen weights"), REPORT_SECONDS)
    folders = ranks.gather(folder, str)
    tell("reads the run's frozen weights")
    return BaseWeights.open(Path(folders[ranks.hosts.index(ranks.hosts[ranks.rank])]))


def check_vocabulary(model: nn.Module, run: RunConfig) -> None:
    """Raise `ConfigError` where the run's tokens may be more than the model has embeddings for."""
    size = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    if run.model.vocab_size > size:
        raise ConfigError(
            f"model.vocab_size is {run.model.vocab_size}, and hf.config's {run.hf.architecture} has embeddings "
            f"for {size} tokens: the run needs model.vocab_size={size} or less"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="One local rank of transformers as a trainer; started by atoll.node.trainer.launcher."
    )
    parser.add_argument("--group", default="", help="file in which the local ranks meet")
    run_rank(parser.parse_args().group, take_part)
    # A process group that a sharded model still refers to has threads, which abort a process whose memory is torn
    # down in order. Everything is written: it is left as it is, as by a rank that was forked.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
