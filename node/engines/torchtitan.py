"""torchtitan as a node's trainer, the process of one local rank: `python -m atoll.node.engines.torchtitan --group
FILE`, started by `atoll.node.trainer.launcher` where the run's engine is torchtitan.

A training loop on the participant's door (`atoll.node.participant`), as anybody's is. Model, parallelism,
activation checkpointing, loss, precision and compilation are torchtitan's own, by its own configuration; the run
says what is trained on, how large a batch is, the optimizer and its learning rate, the bound of the gradient's
norm, and when it is measured. torchtitan is driven through its `Trainer`, and through components that its
configuration names (`atoll.node.engines.titan_components`); nothing of it is changed.
"""

import argparse
import io
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.config import TrainerSpec
from atoll.node.engines.step_guard import StepGuard
from atoll.node.participant.batches import RunTokens, Share
from atoll.node.participant.daemon_link import DaemonLink, agreed_spec, failures_reported, read_spec
from atoll.node.participant.participant import participate
from atoll.node.participant.rank_group import RankGroup
from atoll.node.trainer.process import LocalRank, choose_device, logged_as, rank_process_group

# What stands before the run's and the node's settings. The fully_shard of torch 2.13 knows DTensors only: of
# parameters with torchtitan's own annotations (spmd_types, its default) it says that they are plain tensors.
DEFAULTS = ("--parallelism.spmd_backend=partial_dtensor",)
ENDLESS_STEPS = 1 << 40  # no run takes as many: torchtitan's own count never ends it
REFUSALS = (AssertionError, ImportError, NotImplementedError, TypeError, ValueError)  # what torchtitan raises


def main(group: str) -> None:
    """Be local rank `RANK` of `WORLD_SIZE`, who meet in the file `group`; return when the daemon is gone."""
    me = LocalRank.of_environment()
    # As torchtitan has it where it makes the process group: its backward pass is of one thread.
    torch.autograd.set_multithreading_enabled(False)
    spec = read_spec() or TrainerSpec()
    with logged_as(f"trainer rank {me.rank}", spec.log):
        with failures_reported(spec.channel):
            device = choose_device(spec.node, me)
        with rank_process_group(spec, me, device, group):  # torchtitan takes one that is there
            take_part(device)


def take_part(device: torch.device) -> None:
    """Build torchtitan's trainer, and train until the node leaves or the run is finished."""
    ranks = RankGroup.of_world()
    spec = agreed_spec(ranks)
    own = msgspec.json.decode(ranks.broadcast(msgspec.json.encode(spec.node.titan)), type=list[str])
    link = DaemonLink.opened(ranks, spec.channel)
    with failures_reported(spec.channel, link):
        config = load_config(spec.run, own)
        check_device(device)
        if ranks.rank:  # torchtitan's own lines, its throughput and MFU among them, are rank 0's alone
            logging.getLogger().setLevel(logging.WARNING)
        data = RunTokens.open(spec, ranks, link)
        apply_run(config, spec, data, ranks.size)
        with refusals_told("its trainer cannot be built"):
            trainer = config.build()

    from atoll.node.engines.titan_components import micro_batches

    metrics, micro_batch = trainer.metrics_processor, trainer.config.training.local_batch_size
    try:
        with participate(
            trainer.model_parts,
            list(trainer.optimizers),
            evaluate=lambda: validation_loss(trainer),
            data_parallel=batch_share(trainer),
            token_flops=metrics.num_flops_per_token,
        ) as run:
            (optimizer,) = trainer.optimizers  # of all parameters
            guard = StepGuard(optimizer, ranks, run.before_step)
            for batch in run.batches(data):
                trainer.step += 1
                trainer.gc_handler.run(trainer.step)
                metrics.loss, metrics.gradient_norm, guard.left_out = math.nan, math.nan, False
                try:
                    trainer.train_step(trainer.batch_generator(micro_batches(batch, micro_batch)))
                except RuntimeError:  # torchtitan ends where a loss is not finite
                    if not guard.left_out:
                        raise
                run.stepped(metrics.loss, metrics.gradient_norm, skipped=guard.left_out)
    finally:
        trainer.close()


def load_config(run: RunConfig, own: Sequence[str]) -> Any:
    """torchtitan's configuration of the run's model, with the run's settings and then the node's own. Raises
    `ConfigError` for what torchtitan does not know."""
    from torchtitan.config import ConfigManager

    titan, said = run.titan, io.StringIO()
    model = [f"--module=torchtitan.models.{titan.module}", f"--config={titan.config}"]
    settings = in_order([*DEFAULTS, *titan.settings, *own])
    with refusals_told("its configuration cannot be read"):
        try:
            with redirect_stderr(said), redirect_stdout(said):
                config = ConfigManager().parse_args([*model, *settings])
        except SystemExit:
            raise ConfigError(
                f"torchtitan's {titan.config} does not take {' '.join(settings)} (of the run's titan.settings, of "
                f"this node's titan=): {words_in_box(said.getvalue())}"
            ) from None
    if not hasattr(config, "model_spec"):
        raise ConfigError(f"torchtitan's {titan.module} has no configuration of a trainer called {titan.config}")
    return config


def in_order(settings: Sequence[str]) -> list[str]:
    """Settings in the order that torchtitan's command line wants: what belongs to a choice, such as
    activation-checkpoint:full, comes behind it."""
    choices = [setting for setting in settings if not setting.startswith("-")]
    sections = tuple(f"--{choice.partition(':')[0].replace('_', '-')}." for choice in choices)
    behind = [setting for setting in settings if setting.replace("_", "-").startswith(sections)]
    return [*(s for s in settings if s not in choices and s not in behind), *choices, *behind]


def words_in_box(text: str) -> str:
    """The error that a command line's output tells: below its title, above the help, between drawn lines."""
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        bare = line.strip(" │")
        if bare.startswith("╭") or not bare.strip("─-╭╮╰╯"):
            blocks.append([])
        else:
            blocks[-1].append(bare)
    return " ".join(blocks[1] if len(blocks) > 1 else blocks[0])


def check_device(device: torch.device) -> None:
    """Raise `ResourceError` where torchtitan cannot train on the device: it takes an accelerator for granted."""
    from torchtitan.tools.utils import device_type

    if device.type != device_type:
        raise ResourceError(
            "this run's engine is torchtitan, which trains on an accelerator, and this machine has none that "
            "torch sees, or the node has device=cpu: join with another machine"
        )


def apply_run(config: Any, spec: TrainerSpec, data: RunTokens, size: int) -> None:
    """Write the run's settings into torchtitan's configuration. Raises `ConfigError` where the run's batch or its
    tokens do not fit the model and this node's ranks."""
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from atoll.node.engines.titan_components import RunTextLoader, RunValidator, StepMetrics, TokensOnly

    run, inner = spec.run, spec.run.inner
    check_vocabulary(config.model_spec.model, run)
    check_pipeline(config.parallelism.pipeline_parallel_degree)
    share = Share(0, batch_degree(config.parallelism, size)).of(inner.batch_size).stop
    training = config.training
    training.seq_len, training.max_norm, training.steps = run.model.seq_len, inner.clip, ENDLESS_STEPS
    training.global_batch_size = inner.batch_size
    training.local_batch_size = largest_divisor(share, max(training.local_batch_size, 1))  # the micro-batch
    adamw = default_adamw(
        inner.peak_lr, betas=(inner.beta1, inner.beta2), eps=inner.eps, weight_decay=inner.weight_decay
    )
    config.optimizer = replace(config.optimizer, param_groups=adamw.param_groups)
    # Constant: the participant sets the rate before each step.
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    config.debug.seed, config.dump_folder = run.seed, str(Path(spec.cache) / "torchtitan")
    config.checkpoint.enable = False
    config.tokenizer, config.dataloader = TokensOnly.Config(), RunTextLoader.Config()
    config.validator = RunValidator.Config(
        enable=True,
        steps=run.data.val_batches * share // training.local_batch_size,
        dataloader=RunTextLoader.Config(tokens=data, batches=run.data.val_batches, batch_size=inner.batch_size),
    )
    config.metrics = StepMetrics.Config(**{name: getattr(config.metrics, name) for name in StepMetrics.TAKEN})


def check_vocabulary(model: Any, run: RunConfig) -> None:
    """Raise `ConfigError` where the run's tokens may be more than the model has embeddings for."""
    if (size := getattr(model, "vocab_size", None)) is not None and run.model.vocab_size > size:
        raise ConfigError(
            f"model.vocab_size is {run.model.vocab_size}, and torchtitan's {run.titan.config} has embeddings for "
            f"{size} tokens: the run needs model.vocab_size={size} or less, or a model with more"
        )


def check_pipeline(degree: int) -> None:
    """Raise `ConfigError` for a pipeline: torch 2.13 has not the schedules that torchtitan 0.3 calls."""
    if degree > 1:
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree is {degree}, and torchtitan 0.3 calls pipeline schedules of a "
            f"torch later than {torch.__version__}: leave it at 1, and share the model among ranks by "
            "parallelism.data_parallel_shard_degree or tensor_parallel_degree"
        )


def batch_degree(parallelism: Any, ranks: int) -> int:
    """The number of parts of a batch: the ranks over the degrees in which they share the work on one part. Raises
    `ConfigError` where torchtitan's degrees of parallelism do not make up the ranks."""
    replicas, shards = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    among = parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    shards = ranks // (replicas * among) if shards < 0 else shards
    if replicas * shards * among != ranks:
        raise ConfigError(
            f"this node has ranks={ranks}, and torchtitan's degrees of parallelism (data {replicas} x {shards}, "
            f"context and tensor {among}) are of {replicas * max(shards, 1) * among} ranks: change ranks=, or the "
            "degrees by titan="
        )
    return int(replicas * shards)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of a number that is not above the limit."""
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)


def batch_share(trainer: Any) -> tuple[int, int]:
    """Index and number of this rank's part of a batch; ranks that share a model's layers take the same part."""
    if not trainer.parallel_dims.dp_enabled:
        return 0, 1
    mesh = trainer.parallel_dims.get_mesh("batch")
    return mesh.get_local_rank(), mesh.size()


def validation_loss(trainer: Any) -> float:
    """The mean loss over the run's validation batches, of all ranks: torchtitan's validator measures it."""
    trainer.validator.validate(trainer.model_parts, trainer.step)
    return float(trainer.metrics_processor.validation_loss)


@contextmanager
def refusals_told(what: str) -> Iterator[None]:
    """Turn what torchtitan raises for settings that it refuses into a `ConfigError`."""
    try:
        yield
    except REFUSALS as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"torchtitan refuses this run or this node's settings, {what}: {words}") from error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="One local rank of torchtitan as a trainer; started by atoll.node.trainer.launcher."
    )
    parser.add_argument("--group", default="", help="file in which the local ranks meet")
    with suppress(KeyboardInterrupt):
        main(parser.parse_args().group)
