"""Micro-batches of a model that FSDP2 shards: real ranks, and gloo."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_processes import on_ranks
from token_batches import batch_of
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from trainers import small

from atoll.comm import faults
from atoll.comm.config.run import InnerConfig
from atoll.node.config import Checkpointing, NodeConfig
from atoll.node.data.samples import UNLEARNED, Sample, one_document
from atoll.node.participant.batches import RunTokens, Share, collated
from atoll.node.participant.rank_group import RankGroup
from atoll.node.trainer import accumulator as module
from atoll.node.trainer import chunked_loss
from atoll.node.trainer.accumulator import GradientAccumulator, MicroBatchTooLarge
from atoll.node.trainer.loss import accumulate, validation_loss
from atoll.node.trainer.micro_batch import MicroBatchStore, Record, StepPlan
from atoll.node.trainer.model import blocks_of, build, init_parameters
from atoll.node.trainer.process import prefetch, shard_model

CPU = torch.device("cpu")


def sharded(ranks: RankGroup, folder: Path, batch: int, bf16: bool = False) -> GradientAccumulator:
    run = small(inner=InnerConfig(batch_size=batch))
    model = build(run.model)
    shard_model(model, blocks_of(model), ranks, CPU, bf16)
    init_parameters(model, 0)
    return GradientAccumulator(model, run, NodeConfig(), ranks, CPU, MicroBatchStore(folder, batch))


def gradient(made: GradientAccumulator) -> Tensor:
    """The whole gradient of 8 sequences of this rank, which then is dropped."""
    seed = torch.Generator().manual_seed(dist.get_rank())
    made.add(batch_of(torch.randint(256, (8, 33), generator=seed)))
    found = [p.grad.full_tensor() for p in made._model.parameters() if isinstance(p.grad, DTensor)]
    assert len(found) == len(list(made._model.parameters()))
    made._model.zero_grad()
    return torch.cat([part.flatten() for part in found])


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def every_way(folder: Path) -> None:
    ranks = RankGroup.of_world()
    made = sharded(ranks, folder, 16)
    made.choose()
    prefetch(made._model, blocks_of(made._model))  # it is for CUDA, and changes nothing
    right = gradient(made)
    assert made.plan == StepPlan(8)
    for reduce_each in (False, True):
        made._reduce_each = reduce_each
        for level in (Checkpointing.NONE, Checkpointing.SELECTIVE, Checkpointing.FULL):
            made._take(StepPlan(2, level))
            assert apart(gradient(made), right) < 1e-6
    chunked_loss.PLAIN_BYTES, chunked_loss.MIN_ROWS = 1000, 5
    assert apart(gradient(made), right) < 1e-6


def test_no_way_to_compute_a_gradient_changes_it(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, every_way)


class Unevenly:
    """A source whose sample i has i % 7 learned tokens."""

    def validation(self, index: int) -> Sample:
        tokens = np.random.default_rng(index).integers(256, size=33)
        learned = np.arange(32) < index % 7
        return replace(one_document(tokens), labels=np.where(learned, tokens[1:], UNLEARNED))

    train = validation

    def expect(self, indices: Iterator[int]) -> None:
        pass


def weighted(folder: Path) -> None:
    """Two ranks' gradients and losses are those of one process."""
    ranks = RankGroup.of_world()
    data, batch = RunTokens(Unevenly()), range(12)
    made, alone = sharded(ranks, folder, 12), build(small().model)
    init_parameters(alone, 0)
    right = accumulate(alone, collated([data[index] for index in batch]), 5)
    made.choose()
    loss = made.add(collated([data[index] for index in batch[Share(ranks.rank, 2).of(12)]]))
    assert abs(ranks.total(float(loss) / 2)[0] - float(right)) < 1e-5
    found = [p.grad.full_tensor() for p in made._model.parameters() if isinstance(p.grad, DTensor)]
    wanted = [p.grad for p in alone.parameters() if p.grad is not None]
    assert all(apart(one, other) < 1e-5 for one, other in zip(found, wanted, strict=True))
    one_rank = validation_loss(alone, made._run, data, RankGroup(0, 1), CPU)
    assert abs(made.validation_loss(data) - one_rank) < 1e-5


def test_every_learned_token_of_a_batch_weighs_the_same_whichever_rank_has_it(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, weighted)


def gathered(folder: Path) -> None:
    ranks = RankGroup.of_world()
    for have, reduce_each in ((1 << 40, False), (1 << 10, True)):
        setattr(module, "available", lambda have=have: have)  # noqa: B010
        assert sharded(ranks, folder, 16)._reduce_each == reduce_each


@pytest.mark.long
def test_gradients_are_reduced_for_each_micro_batch_where_a_rank_cannot_hold_those_of_the_whole_model(
    tmp_path: Path,
) -> None:
    on_ranks(2, tmp_path, gathered)


def agreed(folder: Path) -> None:
    ranks = RankGroup.of_world()
    made = sharded(ranks, folder, 1200)
    said = made.choose()
    assert len({repr(found) for found in ranks.gather([said, made.plan.size], list)}) == 1
    assert "computes 600 sequences a step in micro-batches of" in said
    right = StepPlan(2)
    if ranks.rank == 1:  # its machine has seen less memory
        MicroBatchStore(folder / "other", 1200).write(Record(right, "ran out of memory"))
    made = sharded(ranks, folder / ("other" if ranks.rank else "one"), 1200)
    assert "ran out of memory" in made.choose() and made.plan == right


@pytest.mark.long
def test_ranks_agree_on_a_micro_batch(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, agreed)


def ended(folder: Path) -> None:
    ranks = RankGroup.of_world()
    faults.FAULTS = faults.parse("trainer.micro_batch.2=memory")
    made = sharded(ranks, folder, 1200)
    with pytest.raises(MicroBatchTooLarge, match="2 sequences did not fit into memory: starts again with"):
        made.choose()


def begun_again(folder: Path) -> None:
    ranks = RankGroup.of_world()
    made = sharded(ranks, folder, 1200)
    assert "as found earlier: micro-batches of 2 sequences did not fit" in made.choose()
    assert made.plan == StepPlan(1)


@pytest.mark.long
def test_ranks_that_run_out_of_memory_while_they_measure_begin_again_with_half(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, ended)
    on_ranks(2, tmp_path, begun_again)


def ended_alone(folder: Path) -> None:
    """Of a torch that cannot reset what FSDP2 keeps of a step that broke off."""
    ranks = RankGroup.of_world()
    if hasattr(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state
    made = sharded(ranks, folder, 1200, bf16=True)
    assert "1200 sequences a step in micro-batches of" in made.choose()
    made._take(StepPlan(8))
    faults.FAULTS = faults.parse("trainer.micro_batch.8=memory")
    with pytest.raises(
        MicroBatchTooLarge, match="micro-batches of 8 sequences .* starts again with micro-batches of 4"
    ):
        gradient(made)
    faults.FAULTS = faults.parse("trainer.micro_batch.2=memory")
    made = sharded(ranks, folder / "unmeasured", 1200, bf16=True)
    with pytest.raises(MicroBatchTooLarge, match="2 sequences did not fit into memory: starts again with"):
        made.choose()
    made = sharded(ranks, folder / "unmeasured", 1200, bf16=True)
    made.choose()
    assert made.plan == StepPlan(1)


@pytest.mark.long
def test_one_rank_begins_again_where_torch_cannot_forget_a_step(tmp_path: Path) -> None:
    on_ranks(1, tmp_path, ended_alone)


def recovered(folder: Path) -> None:
    ranks = RankGroup.of_world()
    made = sharded(ranks, folder, 8, bf16=True)
    model = made._model
    assert isinstance(model, FSDPModule)
    made.choose()
    right = gradient(made)
    for size, point in ((8, "norm"), (4, "blocks.1.ffn"), (2, "blocks.0.attention.query")):
        assert made.plan == StepPlan(size)
        passes = 0

        def broken(*_: object, size: int = size) -> None:
            nonlocal passes
            passes += 1
            if made.plan.size == size and passes == min(2, 8 // size):  # of two micro-batches in the second
                raise MemoryError("in the middle of a backward pass")

        handle = model.get_submodule(point).register_full_backward_pre_hook(broken)
        assert apart(gradient(made), right) < 1e-2
        handle.remove()
    assert made.plan == StepPlan(1)
    assert apart(gradient(made), right) < 1e-2


def test_fsdp_goes_on_after_it_ran_out_of_memory_in_a_backward_pass(tmp_path: Path) -> None:
    on_ranks(1, tmp_path, recovered)
